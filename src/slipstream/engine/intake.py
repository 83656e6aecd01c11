"""From what a caller gives to a job that the engine can run: tokens, parameters, ids of stop and bad words."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from slipstream.constrain.compiler import Grammars
from slipstream.constrain.limits import CompileLimits
from slipstream.core.errors import InvalidRequest
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams
from slipstream.drafters import AUTO, chosen_for, loaded_as, names_of
from slipstream.drafters.base import Drafter
from slipstream.engine.memory import MemoryPlan
from slipstream.engine.state import Answer, Job, Sink
from slipstream.engine.text import Remembered, TextStream

Prompt = str | Sequence[int] | Mapping[str, Any]


class Intake:
    """Turns prompts into jobs. Everything that can be refused is refused here, before a job takes any room."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_ids: Collection[int],
        drafters: Mapping[str, Drafter],
        plan: MemoryPlan | None = None,
        default: str | None = None,  # who drafts where a request names nobody
        auto: Sequence[str] = (),  # who is meant by this name
    ) -> None:
        self._plan = plan
        self.grammars = Grammars(tokenizer, vocab_size, eos_ids)
        self._tokenizer, self._decoder = tokenizer, Remembered(tokenizer)
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._drafters = drafters
        self._default = default
        self._auto = auto

    def job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        *,
        streaming: bool,
        request_id: str | None = None,
        compiling: CompileLimits | None = None,
    ) -> Job:
        text, ids = self._prompt(prompt)
        if self._plan is not None:
            self._plan.check_prompt(len(ids))
        params = self._named(params)
        self._check(params)
        job = Job(request_id or f"req-{uuid.uuid4().hex[:16]}", text, ids, params, sink, streaming)
        seed = secrets.randbits(64) if params.seed is None else int(params.seed)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        prediction = tuple(self._encode(params.prediction)) if params.prediction else ()
        material = tuple(tuple(self._encode(text)) for text in params.speculation.material)
        bad_words = self._bad_words(params.bad_words)
        self._check_ids("bad_words", (token for word in bad_words for token in word))
        form = params.structured_outputs
        stops, tenant = params.stop_token_ids, params.speculation.tenant
        constraint = None if form is None else self.grammars.constraint(form, stops, compiling, tenant)
        for sample in range(params.n):
            answer = Answer(
                job=job,
                sample=sample,
                seed=seed,
                tokens=list(ids),
                text=TextStream(
                    self._decoder,
                    ids,
                    stops=params.stop_strings,
                    keep_stop=params.include_stop_str_in_output,
                    skip_special_tokens=params.skip_special_tokens,
                ),
                output=CompletionOutput(
                    sample,
                    logprobs=None if params.logprobs is None else [],
                    origins=[] if params.speculation.origins else None,
                ),
                prediction=prediction,
                material=material,
                bad_words=bad_words,
                end_ids=ends,
                constraint=constraint.fresh() if constraint is not None and sample else constraint,
                leader=job.answers[0] if sample else None,
            )
            job.answers.append(answer)
        return job

    def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or len(prompt) != 1:
                raise InvalidRequest(f"prompt has the keys {sorted(prompt)}: give one of prompt, prompt_token_ids")
            prompt = next(iter(prompt.values()))
        if isinstance(prompt, str):
            text, ids = prompt, self._encode(prompt, special=True)
        elif isinstance(prompt, Iterable) and not isinstance(prompt, Mapping):
            text, ids = None, list(prompt)
        else:
            raise InvalidRequest(f"prompt={prompt!r}: must be a text, or a sequence of token ids")
        if not ids:
            raise InvalidRequest("the prompt is empty: it must have at least one token")
        self._check_ids("prompt_token_ids", ids)
        return text, [int(token) for token in ids]

    def _named(self, params: SamplingParams) -> SamplingParams:
        """With the drafter by the name under which it was loaded, where the request has another name for it."""
        wanted = params.speculation.drafter
        own = wanted if wanted is None else loaded_as(wanted, self._drafters)
        return params if own == wanted else replace(params, speculation=replace(params.speculation, drafter=own))

    def _check(self, params: SamplingParams) -> None:
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        wanted = params.speculation.drafter
        if params.speculation.enabled:
            self._check_material(params)
        if not params.speculation.enabled or wanted is None:
            return
        names = wanted.split("+")
        if not set(names_of(wanted, self._auto)) <= set(self._drafters):
            loaded = ", ".join([*[AUTO] * bool(self._auto), *self._drafters]) or "none"
            several = ", or several, as A+B" if len(self._drafters) > 1 else ""
            plainly = "; for plain decoding give enabled=False" if wanted == "none" else ""
            raise InvalidRequest(
                f"speculation.drafter={wanted!r} is not loaded: must be one of {loaded}{several}{plainly}"
            )
        if len(set(names)) < len(names):
            raise InvalidRequest(f"speculation.drafter={wanted!r}: must name each drafter once")

    def _check_material(self, params: SamplingParams) -> None:
        """Material that nobody drafts from would be of no use, and nobody would know."""
        named = params.speculation.drafter or chosen_for(self._default, params.prediction is not None) or ""
        names = [name for name in names_of(named, self._auto) if name in self._drafters]
        if params.speculation.material and not any(self._drafters[name].needs.material for name in names):
            taking = [name for name, drafter in self._drafters.items() if drafter.needs.material]
            remedy = f"name one that does: {', '.join(taking)}" if taking else "load one that does, such as suffix"
            who = f"{named} does not draft from it" if named else "there is no drafter to draft from it"
            raise InvalidRequest(f"speculation.material: {who}; {remedy}, or leave it out")

    def _check_ids(self, key: str, ids: Iterable[object]) -> None:
        for token in ids:
            is_number = type(token) is int or (isinstance(token, Integral) and not isinstance(token, bool))
            if not (is_number and 0 <= int(token) < self._vocab_size):  # type: ignore[call-overload]
                raise InvalidRequest(f"{key}: token id {token!r} must be a whole number, 0 to {self._vocab_size - 1}")

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each as it is tokenized at the beginning of a text and behind a space: both are the same word."""
        found = dict.fromkeys(tuple(self._encode(form)) for word in words for form in (word, " " + word.lstrip()))
        return tuple(ids for ids in found if ids)

    def _encode(self, text: str, special: bool = False) -> list[int]:
        check_text(text)
        return list(self._tokenizer.encode(text, add_special_tokens=special))


def check_text(text: str) -> None:
    """Refuse text that holds bytes of no character, as Python reads them from a file of another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not UTF-8 at character {error.start}: mend its encoding") from None
