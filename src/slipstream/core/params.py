"""The parameters of one request: how to sample, when to stop, how to speculate.

Each only changes the target's probabilities or where the answer ends, so the verifier has no special case for any
of them (`docs/exactness.md`). Names and meanings follow vLLM's `SamplingParams` where it has them.

A number or switch is declared once, by `setting` in `SamplingParams` (`core/settings.py`); its option and HTTP field
are derived. `sampling/table.py` says where its effect goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from slipstream.core.errors import InvalidRequest
from slipstream.core.settings import Setting, check_settings, is_number, is_whole, setting, settings_of
from slipstream.core.structured import StructuredOutputsParams
from slipstream.core.vllm_names import SAMPLING, takes_vllm_names

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOPS = 64
MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 1e6
MAX_BIAS = 1e6
MIN_REPETITION = 0.01
MAX_REPETITION = 10.0
"""Logits are divided by the repetition penalty in fp32: a much smaller one makes them infinite."""
TO_THE_END = 2**30
"""The value of `max_tokens=None`: above any context length, so that the context is the limit."""

OutputKind = Literal["cumulative", "delta", "final_only"]
VerifierName = Literal["exact", "rejection"]


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How one request speculates. With the exact verifier it changes the speed, never the tokens.

    enabled: False decodes this request plainly.
    drafter: name of a drafter that the engine has loaded, or of several, "ngram+model", whose drafts are merged; None
        takes the engine's own choice.
    draft_tokens: most nodes a draft of this request may have; None takes the drafter's default.
    verifier: "exact" gives the tokens of plain decoding; "rejection" tokens of the same distribution, and a few more
        guesses accepted of a drafter that tells its probabilities. At temperature 0 they are the same.
    tenant: whose request it is. Drafters that remember answers draft from those of the same tenant only.
    material: texts that the answer may quote without their being in the prompt: what a tool gave back, retrieved files.
        Drafted from by drafters that take it (`suffix`), never trusted, and forgotten with the request.
    origins: report the drafter that guessed each token (`CompletionOutput.origins`).
    """

    enabled: bool = True
    drafter: str | None = None
    draft_tokens: int | None = None
    verifier: VerifierName = "exact"
    tenant: str = ""
    material: str | Sequence[str] = ()
    origins: bool = False

    def __post_init__(self) -> None:
        wanted = self.draft_tokens
        if wanted is not None and not (is_whole(wanted) and 0 <= wanted <= 63):
            raise InvalidRequest(f"draft_tokens={wanted!r}: must be 0 to 63 (a pass checks at most 64 rows)")
        if self.drafter is not None and not isinstance(self.drafter, str):
            raise InvalidRequest(f"drafter={self.drafter!r}: must be the name of a drafter that is loaded, or None")
        for key in ("enabled", "origins"):
            if not isinstance(getattr(self, key), bool):
                raise InvalidRequest(f"{key}={getattr(self, key)!r}: must be True or False")
        if self.verifier not in get_args(VerifierName):
            raise InvalidRequest(f"verifier={self.verifier!r}: must be one of {', '.join(get_args(VerifierName))}")
        if not isinstance(self.tenant, str):
            raise InvalidRequest(f"tenant={self.tenant!r}: must be a text, the same for all requests of a tenant")
        given = (self.material,) if isinstance(self.material, str) else self.material
        texts = tuple(given) if isinstance(given, Iterable) else (given,)
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"material={self.material!r}: must be a text or a list of texts")
        object.__setattr__(self, "material", texts)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends. Temperature 0 is greedy.

    seed: the same seed, prompt and parameters give the same tokens, with or without speculation, alone or in a batch;
        with the verifier "rejection" only while the drafts are the same, too. None draws a fresh one.
    allowed_token_ids: the only tokens that may be chosen, ends of the text included; None: all.
    logprobs: return the log probability of each token and of this many alternatives, from the raw model
        (before temperature, penalties and masks).
    max_tokens: longest answer; None goes on up to the context's end.
    prediction: text that the answer is likely to repeat; it is drafted from, never trusted.
    structured_outputs: the form that the answer must have (JSON of a schema, a regular expression, …), or a mapping
        with the fields of `StructuredOutputsParams`. None: any text.
    output_kind: what each output of a stream holds: "cumulative" everything so far, "delta" only what is new since the
        one before, "final_only" everything, once, at the end. Times and counts are always those so far.
    cache_salt: prompts share cached pages only with those of the same salt and the same `speculation.tenant`.
    timeout_s: seconds from arrival after which the request ends with its tokens so far and the reason "timeout".
    """

    n: int = setting(int, 1, low=1, high=MAX_N, help="Answers to return.")
    temperature: float = setting(
        float,
        1.0,
        low=0,
        high=MAX_TEMPERATURE,
        note="0 is greedy",
        metavar="T",
        short="-t",
        help="0 always takes the likeliest token; 0.7 is usual for varied answers, 1 is the model as trained.",
    )
    top_p: float = setting(
        float,
        1.0,
        low=0,
        high=1,
        above=True,
        metavar="P",
        help="Sample only from the likeliest tokens that together hold this much probability, such as 0.9; 1 is off.",
    )
    top_k: int = setting(
        int,
        0,
        low=-1,
        note="0 and -1 are off",
        metavar="K",
        help="Sample only from the K likeliest tokens, such as 40; 0 is off.",
    )
    min_p: float = setting(
        float,
        0.0,
        low=0,
        high=1,
        metavar="P",
        help="Leave out tokens less likely than this share of the likeliest, such as 0.05; 0 is off.",
    )
    presence_penalty: float = setting(
        float,
        0.0,
        low=-2,
        high=2,
        metavar="X",
        help="Subtracted from the logit of each token that the answer has already; 0 is off.",
    )
    frequency_penalty: float = setting(
        float,
        0.0,
        low=-2,
        high=2,
        metavar="X",
        help="Subtracted for each time that the answer has the token already; 0 is off.",
    )
    repetition_penalty: float = setting(
        float,
        1.0,
        low=MIN_REPETITION,
        high=MAX_REPETITION,
        note="1 is off",
        metavar="X",
        help="Divides the logits of tokens of the prompt and the answer, or multiplies negative ones; 1 is off.",
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = setting(int, 0, low=0, help="No end of the text before this many tokens.")
    max_tokens: int = setting(int, 256, low=1, metavar="N", http=False, help="Longest answer in tokens, such as 1000.")
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = setting(bool, False, help="Keep the stop string at the end of the text.")
    ignore_eos: bool = setting(bool, False, help="Go on behind the end of the text, up to max_tokens.")
    seed: int | None = setting(
        int,
        None,
        low=0,
        high=MAX_SEED,
        note="None draws a fresh one",
        metavar="N",
        http=False,
        help="Same seed, same tokens, with or without speculation, such as 7.",
    )
    logprobs: int | None = setting(int, None, low=0, high=MAX_LOGPROBS, http=False)
    skip_special_tokens: bool = setting(bool, True, help="Leave special tokens out of the text.")
    prediction: str | None = None
    speculation: SpeculationParams = SpeculationParams()
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: OutputKind = "cumulative"
    cache_salt: str = ""
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for key in ("stop", "stop_token_ids", "bad_words"):
            self._check(key, getattr(self, key) is None or isinstance(getattr(self, key), Iterable), "a list")
        self._check("prediction", self.prediction is None or isinstance(self.prediction, str), "a text")
        wanted = "SpeculationParams(), or SpeculationParams(enabled=False) for plain decoding"
        self._check("speculation", isinstance(self.speculation, SpeculationParams), wanted)
        self._check("cache_salt", isinstance(self.cache_salt, str), "a text")
        timed = self.timeout_s is None or (is_number(self.timeout_s) and self.timeout_s > 0)
        self._check("timeout_s", timed, "seconds, above 0, or None for no end")
        self._check(
            "output_kind", self.output_kind in get_args(OutputKind), f"one of {', '.join(get_args(OutputKind))}"
        )
        if self.max_tokens is None:
            self._set("max_tokens", TO_THE_END)
        check_settings(self, InvalidRequest)
        self._check("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens={self.max_tokens}")
        self._set("top_k", max(0, self.top_k))
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        self._check("stop", len(stops) <= MAX_STOPS, f"at most {MAX_STOPS} strings")
        self._check("stop", all(isinstance(s, str) and s for s in stops), "non-empty strings")
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        self._check("bad_words", all(isinstance(s, str) and s for s in words), "non-empty strings")
        self._set("stop", stops)
        self._set("stop_token_ids", tuple(self.stop_token_ids or ()))
        self._set("bad_words", words)
        self._set("logit_bias", dict(self.logit_bias or {}))
        biases = all(is_number(b) and abs(float(b)) <= MAX_BIAS for b in self.logit_bias.values())
        self._check("logit_bias", biases, f"numbers from {-MAX_BIAS:g} to {MAX_BIAS:g} by token id")
        if self.allowed_token_ids is not None:
            ids = tuple(self.allowed_token_ids) if isinstance(self.allowed_token_ids, Iterable) else ()
            listed = bool(ids) and all(map(is_whole, ids))
            self._check("allowed_token_ids", listed, "a list of token ids, one at least, or None")
            self._set("allowed_token_ids", tuple(dict.fromkeys(ids)))
        self._check_form()

    def _check_form(self) -> None:
        """A form says itself where the answer may end, and then it must."""
        form = self.structured_outputs
        if isinstance(form, Mapping):
            self._set("structured_outputs", StructuredOutputsParams.of(form))
        elif form is None:
            return
        self._check("structured_outputs", isinstance(self.structured_outputs, StructuredOutputsParams), "a mapping")
        self._check("ignore_eos", not self.ignore_eos, "False with structured_outputs, which say where the answer ends")
        self._check("min_tokens", not self.min_tokens, "0 with structured_outputs, which say where the answer ends")

    def _check(self, key: str, right: bool, remedy: str) -> None:
        if not right:
            raise InvalidRequest(f"{key}={getattr(self, key)!r}: must be {remedy}")

    def _set(self, key: str, value: object) -> None:
        object.__setattr__(self, key, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def rejects(self) -> bool:
        """Its drafts are judged by rejection sampling; at temperature 0 by the exact verifier, which is the same."""
        return self.speculation.enabled and self.speculation.verifier == "rejection" and not self.greedy

    @property
    def penalized(self) -> bool:
        """The next token's probability depends on how often tokens came before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


SETTINGS: Mapping[str, Setting] = settings_of(SamplingParams)
"""By name: the numbers and switches of `SamplingParams`, from which flags and HTTP fields are derived."""

# a dataclass has its constructor only now
SamplingParams.__init__ = takes_vllm_names(SAMPLING, InvalidRequest)(SamplingParams.__init__)  # type: ignore[method-assign]
