"""Checks and tokenizes requests. Needs no engine and no torch: a server checks requests in one process and runs them
in another.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal

from slipstream.core.errors import InvalidRequest
from slipstream.core.params import SamplingParams
from slipstream.drafters import AUTO, chosen_for, loaded_as, names_of

Limit = Literal["model", "max_model_len", "memory"]
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Request:
    """A checked request, in tokens.

    seed: given or drawn. number: its id between a server and its engine's process.
    unenforced: rules of its schema that its compiled grammar cannot enforce.
    """

    id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    streaming: bool
    seed: int
    prediction: tuple[int, ...] = ()
    material: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    arrived: float = field(default_factory=time.perf_counter)  # all processes share this clock
    number: int = 0
    unenforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The engine's memory by purpose, and the limits that follow from it."""

    weights_bytes: int
    draft_weights_bytes: int
    cache_bytes: int  # target and draft caches, hidden states included
    workspace_bytes: int  # logits of the largest pass, and workspace of drafters
    num_pages: int
    max_model_len: int
    limit: Limit = "model"  # the reason for `max_model_len`
    draft_cache_bytes: int = 0  # the part of the cache that drafters keep
    draft_places: int | None = None  # most draft nodes in the cache at a time; None: no limit
    max_positions: int = 0  # the target's own limit

    @property
    def most_keys(self) -> int:
        """Most keys that a row of a pass sees: the longest text, its next token, and a draft."""
        from slipstream.core.draft import MAX_NODES  # imports torch, which a server's process does without

        return self.max_model_len + 1 + MAX_NODES

    def check_prompt(self, length: int) -> None:
        """Raise `InvalidRequest` if a prompt of this length leaves no room for an answer."""
        if length < self.max_model_len:
            return
        longer = {
            "model": "; the model itself reads no more",
            "max_model_len": f", or raise max_model_len (the model has {self.max_positions} positions)",
            "memory": f", or give more memory (the model has {self.max_positions} positions)",
        }
        raise InvalidRequest(
            f"the prompt has {length} tokens and the context {self.max_model_len}: shorten the prompt to at most "
            f"{self.max_model_len - 1} tokens{longer[self.limit]}"
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """Properties of a loaded engine that requests are checked against.

    drafters: whether each uses the material of a request. default: the drafter of requests that name none.
    auto: the drafters behind the name `auto`.
    """

    vocab_size: int
    plan: MemoryPlan
    drafters: Mapping[str, bool] = field(default_factory=dict)
    default: str | None = None
    auto: tuple[str, ...] = ()


class Requests:
    """Checks and tokenizes prompts and their parameters. Any thread may call it."""

    def __init__(self, tokenizer: Any, loaded: Loaded) -> None:
        self._tokenizer = tokenizer
        self._loaded = loaded

    def make(
        self, prompt: Prompt, params: SamplingParams, *, streaming: bool, request_id: str | None = None
    ) -> Request:
        """Make a request. Raises `InvalidRequest`, with the key, the value and the remedy."""
        text, ids = self._prompt(prompt)
        self._loaded.plan.check_prompt(len(ids))
        params = self._named(params)
        self._check(params)
        bad_words = self._bad_words(params.bad_words)
        self._check_ids("bad_words", (token for word in bad_words for token in word))
        return Request(
            request_id or f"req-{uuid.uuid4().hex[:16]}",
            text,
            ids,
            params,
            streaming,
            secrets.randbits(64) if params.seed is None else int(params.seed),
            tuple(self._encode(params.prediction)) if params.prediction else (),
            tuple(tuple(self._encode(text)) for text in params.speculation.material),
            bad_words,
        )

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
        """Replace a drafter's alias by the name under which it is loaded, such as `eagle` by `eagle3`."""
        wanted = params.speculation.drafter
        own = wanted if wanted is None else loaded_as(wanted, self._loaded.drafters)
        return params if own == wanted else replace(params, speculation=replace(params.speculation, drafter=own))

    def _check(self, params: SamplingParams) -> None:
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        if not params.speculation.enabled:
            return
        self._check_material(params)
        if (wanted := params.speculation.drafter) is None:
            return
        names, auto, drafters = wanted.split("+"), self._loaded.auto, self._loaded.drafters
        if not set(names_of(wanted, auto)) <= set(drafters):
            loaded = ", ".join([*[AUTO] * bool(auto), *drafters]) or "none"
            several = ", or several, as A+B" if len(drafters) > 1 else ""
            plainly = "; for plain decoding give enabled=False" if wanted == "none" else ""
            raise InvalidRequest(
                f"speculation.drafter={wanted!r} is not loaded: must be one of {loaded}{several}{plainly}; others are "
                "loaded with the model (drafter=[…], --drafter)"
            )
        if len(set(names)) < len(names):
            raise InvalidRequest(f"speculation.drafter={wanted!r}: must name each drafter once")

    def _check_material(self, params: SamplingParams) -> None:
        """Refuse material that no drafter of the request uses."""
        if not params.speculation.material:
            return
        loaded = self._loaded
        named = params.speculation.drafter or chosen_for(loaded.default, params.prediction is not None) or ""
        names = [name for name in names_of(named, loaded.auto) if name in loaded.drafters]
        if not any(loaded.drafters[name] for name in names):
            taking = [name for name, takes in loaded.drafters.items() if takes]
            remedy = f"name one that does: {', '.join(taking)}" if taking else "load one that does, such as suffix"
            reason = f"{named} does not draft from it" if named else "there is no drafter to draft from it"
            raise InvalidRequest(f"speculation.material: {reason}; {remedy}, or leave it out")

    def _check_ids(self, key: str, ids: Iterable[object]) -> None:
        size = self._loaded.vocab_size
        for token in ids:
            is_number = type(token) is int or (isinstance(token, Integral) and not isinstance(token, bool))
            if not (is_number and 0 <= int(token) < size):  # type: ignore[call-overload]
                raise InvalidRequest(f"{key}: token id {token!r} must be a whole number, 0 to {size - 1}")

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Encode each word as at the beginning of a text and as after a space."""
        found = dict.fromkeys(tuple(self._encode(form)) for word in words for form in (word, " " + word.lstrip()))
        return tuple(ids for ids in found if ids)

    def _encode(self, text: str, special: bool = False) -> list[int]:
        check_text(text)
        return list(self._tokenizer.encode(text, add_special_tokens=special))


def check_text(text: str) -> None:
    """Refuse text with lone surrogates, which Python makes of files in another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not UTF-8 at character {error.start}: correct its encoding") from None
