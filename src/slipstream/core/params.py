"""What a caller may ask of one request: how to sample, when to stop, how to speculate.

Everything here only changes the target's probabilities or where the answer ends, so nothing needs a special case
in the verifier (see `docs/exactness.md`). Field names and meanings follow vLLM's `SamplingParams` where it has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal, get_args

from slipstream.core.errors import InvalidRequest
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
"""Logits are divided by it, in 32 bits: far below, they are infinite; long before, nothing else counts."""
TO_THE_END = 2**30
"""What `max_tokens=None` becomes: more than any context holds, so that the context's end is the limit."""

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
    origins: say of each token who guessed it (`CompletionOutput.origins`).
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
        if wanted is not None and not (_whole(wanted) and 0 <= wanted <= 63):
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

    seed: same seed, same prompt, same parameters: same tokens, with or without speculation, alone or in a batch; with
        the verifier "rejection" only while the drafts are the same, too. None draws a fresh one.
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
    timeout_s: seconds from its arrival after which it ends, with what it has by then and the reason "timeout".
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
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
        timed = self.timeout_s is None or (_number(self.timeout_s) and self.timeout_s > 0)
        self._check("timeout_s", timed, "seconds, above 0, or None for no end")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        object.__setattr__(self, "bad_words", words)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        if self.top_k == -1:  # vLLM's other spelling of "off"
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", TO_THE_END)
        for key in ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs"):
            optional = key in ("seed", "logprobs") and getattr(self, key) is None
            self._check(key, optional or _whole(getattr(self, key)), "a whole number")
        for key in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            self._check(key, _number(getattr(self, key)), "a number")
        for key in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            self._check(key, isinstance(getattr(self, key), bool), "True or False")
        self._check(
            "output_kind", self.output_kind in get_args(OutputKind), f"one of {', '.join(get_args(OutputKind))}"
        )
        self._check("n", 1 <= self.n <= MAX_N, f"1 to {MAX_N}")
        self._check("temperature", 0 <= self.temperature <= MAX_TEMPERATURE, f"0 (greedy) to {MAX_TEMPERATURE:g}")
        self._check("top_p", 0 < self.top_p <= 1, "above 0, at most 1")
        self._check("top_k", self.top_k >= 0, "0 (off) or more")
        self._check("min_p", 0 <= self.min_p <= 1, "0 to 1")
        self._check("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2")
        self._check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2")
        self._check(
            "repetition_penalty",
            MIN_REPETITION <= self.repetition_penalty <= MAX_REPETITION,
            f"{MIN_REPETITION:g} to {MAX_REPETITION:g} (1 is off)",
        )
        self._check("min_tokens", self.min_tokens >= 0, "0 or more")
        self._check("max_tokens", self.max_tokens >= 1, "1 or more")
        self._check("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens={self.max_tokens}")
        self._check("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, "0 to 2^64 - 1, or None for a fresh one")
        self._check("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        self._check("stop", len(stops) <= MAX_STOPS, f"at most {MAX_STOPS} strings")
        self._check("stop", all(isinstance(s, str) and s for s in stops), "non-empty strings")
        self._check("bad_words", all(isinstance(s, str) and s for s in self.bad_words), "non-empty strings")
        self._check_form()
        if self.allowed_token_ids is not None:
            ids = tuple(self.allowed_token_ids) if isinstance(self.allowed_token_ids, Iterable) else ()
            right = bool(ids) and all(map(_whole, ids))
            self._check("allowed_token_ids", right, "a list of token ids, one at least, or None")
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(ids)))
        biases = all(_moderate(b) for b in self.logit_bias.values())
        self._check("logit_bias", biases, f"numbers from {-MAX_BIAS:g} to {MAX_BIAS:g} by token id")

    def _check_form(self) -> None:
        """A form says itself where the answer may end, and then it must."""
        form = self.structured_outputs
        if isinstance(form, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(form))
        elif form is None:
            return
        self._check("structured_outputs", isinstance(self.structured_outputs, StructuredOutputsParams), "a mapping")
        self._check("ignore_eos", not self.ignore_eos, "False with structured_outputs, which say where the answer ends")
        self._check("min_tokens", not self.min_tokens, "0 with structured_outputs, which say where the answer ends")

    def _check(self, key: str, right: bool, remedy: str) -> None:
        if not right:
            raise InvalidRequest(f"{key}={getattr(self, key)!r}: must be {remedy}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def rejects(self) -> bool:
        """Is its draft judged by rejection sampling? At temperature 0 that is the exact verifier, with more work."""
        return self.speculation.enabled and self.speculation.verifier == "rejection" and not self.greedy

    @property
    def penalized(self) -> bool:
        """Does the next token's probability depend on how often tokens came before?"""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


# a dataclass has its constructor only now
SamplingParams.__init__ = takes_vllm_names(SAMPLING, InvalidRequest)(SamplingParams.__init__)  # type: ignore[method-assign]


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: object) -> bool:
    """True and False are numbers to Python; here they are an argument in the wrong place."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _moderate(value: object) -> bool:
    return isinstance(value, Real) and _number(value) and abs(float(value)) <= MAX_BIAS
