"""From the fields of a request to `SamplingParams`, within the limits of this server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.core.params import SamplingParams, SpeculationParams
from slipstream.serve.config import Limits
from slipstream.serve.errors import refused
from slipstream.serve.forms import form_of
from slipstream.serve.schemas import (
    AnswerContent,
    ChatRequest,
    CompletionRequest,
    Content,
    Prediction,
    SamplingFields,
    SpeculationFields,
)
from slipstream.serve.tools import HermesParser, ToolParser

_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
"""Fields that mean in `SamplingParams` what they mean here; None takes its default."""


def completion_params(asked: CompletionRequest, limits: Limits, tenant: str, *, drafts: bool) -> SamplingParams:
    return _params(asked, limits, tenant, drafts, max_tokens=asked.max_tokens, logprobs=asked.logprobs)


def chat_params(
    asked: ChatRequest, limits: Limits, tenant: str, *, drafts: bool, parser: type[ToolParser] = HermesParser
) -> SamplingParams:
    if len({asked.max_tokens, asked.max_completion_tokens} - {None}) > 1:
        raise refused("max_tokens", "give either it or max_completion_tokens, which is its new name")
    if asked.top_logprobs and not asked.logprobs:
        raise refused("top_logprobs", "needs logprobs: true")
    return _params(
        asked,
        limits,
        tenant,
        drafts,
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        parser=parser,
    )


def _params(
    asked: CompletionRequest | ChatRequest,
    limits: Limits,
    tenant: str,
    drafts: bool,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    parser: type[ToolParser] = HermesParser,
) -> SamplingParams:
    if asked.best_of not in (None, asked.n or 1):
        raise refused("best_of", "answers are not ranked; ask for n, and choose")
    if asked.stream_options is not None and not asked.stream:
        raise refused("stream_options", "needs stream: true")
    if logprobs is not None and logprobs > limits.top_logprobs:
        raise refused("top_logprobs", f"must be at most {limits.top_logprobs} on this server")
    if asked.prediction is not None and not drafts:
        raise refused("prediction", "nothing drafts on this server, so nothing would come of it; leave it out")
    if any(len(word) > limits.stop_chars for word in asked.bad_words or ()):
        raise refused("bad_words", f"must be strings of at most {limits.stop_chars} characters on this server")
    same: dict[str, Any] = {key: value for key in _SAME if (value := getattr(asked, key)) is not None}
    return SamplingParams(
        **same,
        logit_bias=_bias(asked.logit_bias or {}),
        stop=_stops(asked.stop, limits),
        seed=None if asked.seed is None else asked.seed % 2**64,  # a negative one is as good as any
        max_tokens=max_tokens,  # type: ignore[arg-type]  # None: to the context's end
        logprobs=logprobs,
        prediction=_predicted(asked.prediction),
        speculation=_speculation(asked, tenant),
        structured_outputs=form_of(asked, limits.nesting, parser),
        cache_salt=asked.cache_salt or "",
        output_kind="delta" if asked.stream else "cumulative",
    )


def _bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise refused("logit_bias", f"{key[:20]!r} must be a token id")
    return {int(key): value for key, value in given.items()}


def _stops(given: str | Sequence[str] | None, limits: Limits) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > limits.stops:
        raise refused("stop", f"must be at most {limits.stops} strings on this server")
    if any(len(stop) > limits.stop_chars for stop in stops):
        raise refused("stop", f"must be strings of at most {limits.stop_chars} characters on this server")
    return stops


def _predicted(prediction: Prediction | None) -> str | None:
    return None if prediction is None else text_of(prediction.content)


def _speculation(asked: SamplingFields, tenant: str) -> SpeculationParams:
    if asked.speculation == "off":
        return SpeculationParams(enabled=False, tenant=tenant)
    fields = asked.speculation or SpeculationFields.model_validate({})
    assert isinstance(fields, SpeculationFields)
    return SpeculationParams(
        enabled=fields.enabled,
        drafter=fields.drafter,
        draft_tokens=fields.draft_tokens,
        verifier=fields.verifier,
        tenant=tenant,
        material=fields.material,
        origins=fields.origins,
    )


def wants_report(asked: SamplingFields) -> bool:
    """Does the client want to know what speculation did?"""
    return isinstance(asked.speculation, SpeculationFields) and asked.speculation.report


def text_of(content: Content | AnswerContent) -> str:
    """A message's text; its parts stand one after the other."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
