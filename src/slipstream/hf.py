"""Speculation inside transformers' `model.generate`.

    model.generate(**inputs, max_new_tokens=200, custom_generate=slipstream.hf.generate, drafter="ngram")

The model, its cache, the logits processors and the stopping criteria are transformers' own. The tokens are those of
plain `generate`, sampled ones too, since each token draws exactly one random number, in order. Slipstream adds the
drafts: each pass verifies a host drafter's chain, as long as the planner expects it to pay. It runs one prompt at a
time; the engine (`slipstream.LLM`) is faster, runs batches, and has all drafters.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.core.draft import Tree
from slipstream.core.errors import ConfigError, InvalidRequest
from slipstream.core.params import SamplingParams
from slipstream.core.verdict import Verdict, author
from slipstream.drafters import AUTO, drafter_factory, drafter_names, kind_of
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.drafters.guard import DrafterGuard
from slipstream.plan.planner import AdaptivePlanner
from slipstream.plan.types import Load, StepSeen, Turn

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
    from transformers.generation.utils import GenerateDecoderOnlyOutput

_ID = "hf"
_NAMED = ("ngram", "suffix", "prediction")
_INPUTS = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
"""Model inputs that `generate` prepares for every model and that this loop supports."""
_ROW_SLOPE = {"cpu": 0.15}
_GPU_SLOPE = 0.01
MAX_DRAFT_TOKENS = 64
"""Most draft tokens of a pass. Rejected ones stay in the cache until it is cropped."""


@dataclass(slots=True)
class _Answer:
    """The answer to one prompt so far."""

    ids: Tensor  # [1, T]: prompt and answer
    tokens: list[int]  # the same without padding; the last one is not in the cache
    done: bool = False
    scores: list[Tensor] = field(default_factory=list)  # [1, V] each, if requested
    logits: list[Tensor] = field(default_factory=list)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,  # [1, T]
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: str | HostDrafter = "ngram",
    draft_tokens: int | None = None,
    prediction: Sequence[int] | Tensor | None = None,
    stream_to: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The loop that `generate` runs instead of its own.

    drafter: `ngram`, `suffix`, `prediction`, or a `HostDrafter` of your own.
    draft_tokens: most draft tokens of a pass; None: the drafter's default.
    prediction: the expected answer, as token ids.
    stream_to: a streamer. `generate` does not pass its own argument `streamer` to a custom loop.
    """
    _check(model, input_ids, generation_config)
    _check_inputs(input_ids, model_kwargs)
    ids = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    past = model_kwargs.get("past_key_values")
    _check_cache(model, past, generation_config)
    drafting = _PlannedDrafter(drafter, draft_tokens, prediction, model, ids[0].tolist())
    loop = _Loop(model, past, logits_processor, stopping_criteria, generation_config, stream_to)
    try:
        answer = loop.run(input_ids, ids, drafting)
    finally:
        drafting.close()
    if not generation_config.return_dict_in_generate:
        return answer.ids
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    made: Any = GenerateDecoderOnlyOutput  # its annotations are narrower than its arguments
    output: GenerateDecoderOnlyOutput = made(
        sequences=answer.ids,
        scores=tuple(answer.scores) if generation_config.output_scores else None,
        logits=tuple(answer.logits) if generation_config.output_logits else None,
        past_key_values=loop.past,
    )
    return output


class _Loop:
    """Steps of draft, target pass, and verification."""

    def __init__(
        self, model: Any, past: Any, processors: Any, criteria: Any, config: GenerationConfig, streamer: Any
    ) -> None:
        self.past = past
        self._model = model
        self._processors = processors
        self._criteria = criteria
        self._config = config
        self._streamer = streamer
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def run(self, padded: Tensor, ids: Tensor, drafting: _PlannedDrafter) -> _Answer:
        """padded: the prompt as given by the caller, which processors and criteria expect."""
        answer = _Answer(padded, drafting.tokens)
        if self._streamer is not None:
            self._streamer.put(padded.cpu())
        logits = self._forward(ids[:, _length(self.past) :], 1)  # the prompt, without its cached part
        self._take(answer, logits, ())
        while not answer.done:
            chain = drafting.chain()
            rows = torch.tensor([[answer.tokens[-1], *chain]], device=ids.device)
            begun = time.perf_counter()
            logits = self._forward(rows, 1 + len(chain))
            accepted = self._take(answer, logits, chain)
            if accepted < len(chain):
                self.past.crop(accepted - len(chain))  # a negative length removes that number of tokens
            drafting.observe(chain, accepted, time.perf_counter() - begun)
        if self._streamer is not None:
            self._streamer.end()
        return answer

    def _forward(self, rows: Tensor, keep: int) -> Tensor:  # [1, keep, V]
        kept = {"logits_to_keep": keep} if self._keeps else {}
        out = self._model(input_ids=rows, past_key_values=self.past, use_cache=True, return_dict=True, **kept)
        self.past = out.past_key_values
        logits: Tensor = out.logits[:, -keep:]
        return logits

    def _take(self, answer: _Answer, logits: Tensor, chain: Sequence[int]) -> int:
        """Choose tokens one by one while they equal the draft's. Returns the number of accepted draft tokens."""
        for place in range(logits.shape[1]):
            raw = logits[:, place].to(dtype=torch.float32, copy=True)  # [1, V]
            scores = self._processors(answer.ids, raw)
            token = self._choose(scores)
            answer.ids = torch.cat([answer.ids, token[:, None]], dim=1)
            answer.tokens.append(int(token))
            if self._config.output_scores:
                answer.scores.append(scores)
            if self._config.output_logits:
                answer.logits.append(logits[:, place].to(dtype=torch.float32, copy=True))
            if self._streamer is not None:
                self._streamer.put(token.cpu())
            answer.done = bool(torch.as_tensor(self._criteria(answer.ids, answer.scores or None)).all())
            if answer.done or place == len(chain) or int(token) != chain[place]:
                return place
        return len(chain)

    def _choose(self, scores: Tensor) -> Tensor:  # [1, V] -> [1]
        if not self._config.do_sample:
            return scores.argmax(dim=-1)
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)


class _PlannedDrafter:
    """One drafter for one prompt. The planner cuts its drafts to the length that pays."""

    def __init__(
        self,
        drafter: str | HostDrafter,
        draft_tokens: int | None,
        prediction: Sequence[int] | Tensor | None,
        model: PreTrainedModel,
        tokens: list[int],
    ) -> None:
        self.tokens = tokens
        guessed = prediction.flatten().tolist() if isinstance(prediction, Tensor) else list(prediction or ())
        if guessed and drafter == "ngram":
            drafter = "prediction"
        made = _made(drafter)
        if draft_tokens is not None and not (isinstance(draft_tokens, int) and 0 <= draft_tokens <= MAX_DRAFT_TOKENS):
            raise ConfigError(f"draft_tokens={draft_tokens!r}: must be 0 to {MAX_DRAFT_TOKENS}, or None")
        params = SamplingParams(prediction=None)
        self._guard = DrafterGuard(made, int(model.get_output_embeddings().weight.shape[0]))
        self._request = DraftRequest(_ID, tokens, len(tokens), params, 0, tuple(guessed))
        self._most = min(MAX_DRAFT_TOKENS, made.default_draft_tokens) if draft_tokens is None else draft_tokens
        self._planner = AdaptivePlanner(_ROW_SLOPE.get(model.device.type, _GPU_SLOPE))
        self._name = made.name
        self._round_s = 0.0
        self._guard.start(self._request)

    def chain(self) -> tuple[int, ...]:
        """The draft of this step."""
        proposed = self._guard.propose([self._request], [self._most], self._round_s)
        (tree,) = self._planner.trim(self._name, [_ID], proposed.trees, proposed.promises, 1)
        self._planner.plan([], Load(1, len(self.tokens)))
        return _first_path(tree)

    def observe(self, chain: Sequence[int], accepted: int, seconds: float) -> None:
        self._round_s = seconds
        turn = Turn(_ID, len(chain), 1 + accepted, (self._name,))
        load = Load(1, len(self.tokens))
        self._planner.observe_step(StepSeen(load, [turn], seconds, 1 + len(chain), seconds))
        if chain:
            self._planner.observe(self._name, _ID, len(chain), accepted)
        emitted = tuple(self.tokens[-1 - accepted :])
        verdict = Verdict(_ID, emitted, len(chain), accepted, tuple(range(accepted)), authors=author(self._name))
        self._guard.observe([verdict])

    def close(self) -> None:
        self._guard.stop(_ID)
        self._guard.close()


def _first_path(tree: Tree) -> tuple[int, ...]:
    """The chain of first children from the root: transformers' caches hold no branches."""
    chain: list[int] = []
    parent = -1
    for node, (token, above) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if above == parent:
            chain.append(token)
            parent = node
    return tuple(chain)


def _made(drafter: str | HostDrafter) -> HostDrafter:
    if isinstance(drafter, str):
        if drafter not in _NAMED:
            known = drafter == AUTO or kind_of(drafter.partition(":")[0]) in drafter_names()
            there = f"; slipstream.LLM(drafter={drafter!r}) has it" if known else ""
            raise ConfigError(f"drafter={drafter!r}: must be {', '.join(_NAMED)} or a HostDrafter here{there}")
        made: object = drafter_factory(drafter)()
    else:
        made = drafter
    if not isinstance(made, HostDrafter):
        raise ConfigError(f"drafter={made!r}: must be {', '.join(_NAMED)}, or an object (no class) of a HostDrafter")
    if made.needs.choices or made.whole:
        raise ConfigError(
            f"drafter={type(made).__name__}: needs the choice at every node, which is not available here; must be "
            f"{', '.join(_NAMED)} or another HostDrafter"
        )
    return made


def _check(model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig) -> None:
    if (config.num_beams or 1) > 1:
        raise InvalidRequest(f"num_beams={config.num_beams}: must be 1")
    if (config.num_return_sequences or 1) > 1:
        raise InvalidRequest(f"num_return_sequences={config.num_return_sequences}: must be 1")
    if input_ids.shape[0] != 1:
        raise InvalidRequest(f"{input_ids.shape[0]} prompts: give one at a time, or use slipstream.LLM, which batches")
    if model.config.is_encoder_decoder:
        raise InvalidRequest(f"{type(model).__name__}: has an encoder; must be a decoder-only model")
    for key in ("output_attentions", "output_hidden_states"):
        if getattr(config, key, False):
            raise InvalidRequest(f"{key}=True: not kept here; leave it out")
    if (looked_up := getattr(config, "prompt_lookup_num_tokens", None)) is not None:
        raise InvalidRequest(
            f"prompt_lookup_num_tokens={looked_up}: has no effect here; give drafter='ngram', draft_tokens={looked_up}"
        )


def _check_inputs(input_ids: Tensor, given: Mapping[str, Any]) -> None:
    """Refuse inputs that plain `generate` would pass to the model and this loop does not: the tokens would differ."""
    for key, value in given.items():
        if value is not None and key not in _INPUTS:
            raise InvalidRequest(
                f"{key}={_shown(value)}: the model is given token ids alone here; leave it out, or use plain generate"
            )
    if given.get("use_cache") is False:
        raise InvalidRequest("use_cache=False: guesses are checked with a cache; leave it out")
    places: Tensor | None = given.get("position_ids")
    if places is not None:  # `generate` derives them from the mask; others come from the caller
        mask = given.get("attention_mask")
        seen = torch.ones_like(input_ids) if mask is None else mask[:, -input_ids.shape[1] :]  # [1, T]
        last = min(places.shape[-1], seen.shape[-1])
        usual = (seen.cumsum(-1) - 1)[0, -last:]  # [last]
        kept = seen[0, -last:].bool()
        if not torch.equal(places.reshape(-1)[-last:][kept].to(usual.dtype), usual[kept]):
            raise InvalidRequest(
                f"position_ids={_shown(places)}: must be 0, 1, 2, … of the prompt's tokens; leave it out"
            )


def _shown(value: object) -> str:
    """A tensor as its shape, other values shortened."""
    return f"<{list(value.shape)}>" if isinstance(value, Tensor) else repr(value)[:80]


def _check_cache(model: PreTrainedModel, past: Any, config: GenerationConfig) -> None:
    """Refuse caches that cannot remove rejected draft tokens."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    remedy = "guesses cannot be taken back there; use slipstream.LLM, or plain generate"
    layers = past.layers if isinstance(past, DynamicCache) else ()
    if getattr(model, "_is_stateful", False) or not all(isinstance(layer, DynamicLayer) for layer in layers):
        raise InvalidRequest(f"{type(model).__name__}: has recurrent state, {remedy}")
    if past is not None and not isinstance(past, DynamicCache):
        raise InvalidRequest(f"a cache of the kind {type(past).__name__}: {remedy}; leave cache_implementation out")
    longest = (config.max_length or 0) + MAX_DRAFT_TOKENS
    for layer in layers:
        window = getattr(layer, "sliding_window", None)
        if window is not None and longest > int(window):
            raise InvalidRequest(
                f"{type(model).__name__}: attends to a window of {int(window)} tokens, and prompt and answer may have "
                f"{longest - MAX_DRAFT_TOKENS}: {remedy}"
            )


def _unpadded(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    return input_ids if mask is None else input_ids[:, mask[0].bool()]


def _length(past: Any) -> int:
    return 0 if past is None else int(past.get_seq_length())
