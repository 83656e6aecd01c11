"""Stages of an audit and what they share: prompts, the engine, passes without history.

A stage runs step by step, which lets progress be shown, and can report at any time what it has found so far: an
interrupted audit loses nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from slipstream.audit.probe import Probe
from slipstream.audit.report import Check, Token
from slipstream.audit.rounding import Rounding
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams, SpeculationParams
from slipstream.engine.memory import available_bytes
from slipstream.kv.cache import KVCache
from slipstream.models.batch import PassBatch
from slipstream.models.load import load_weights, quiet_transformers
from slipstream.models.parity import TOLERANCE

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.engine.step import Engine


UNLIKELY = 1e-5
"""Smallest p-value that passes: one audit of a correct engine in 100,000 has less."""

MAX_FINDINGS = 20
"""Differences of one check that are analysed; each costs a pass."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A named set of sampling parameters."""

    name: str
    params: SamplingParams


@dataclass(slots=True)
class AuditState:
    """Shared state of the stages: the engine, the prompts, and the plain answers so far."""

    llm: LLM
    prompts: Sequence[AuditPrompt]
    at_once: int
    probe: Probe
    fresh: FreshPrompt = field(init=False)
    rounding: Rounding = field(init=False)
    plain: dict[str, list[CompletionOutput]] = field(default_factory=dict)  # by setting
    drafted: dict[str, Counter[int]] = field(default_factory=dict)  # by mode: drafted tokens by prompt
    errors: dict[str, float] = field(default_factory=dict)  # by mode: largest error of a log probability

    def __post_init__(self) -> None:
        self.fresh = FreshPrompt(self.llm)
        self.rounding = Rounding.of(self.llm.engine.target)
        self.probe.vocab_size = self.llm.engine.target.vocab_size

    def token(self, token: int) -> Token:
        return Token(token, str(self.llm.tokenizer.decode([token], skip_special_tokens=False)))

    def most_drafted(self, mode: Mode) -> int:
        """The shortest prompt with at least half of the most tokens that this mode drafted for any prompt."""
        drafted = self.drafted.get(mode.name, Counter())
        enough = max(drafted.values(), default=0) / 2
        indices = [i for i in range(len(self.prompts)) if drafted[i] >= enough]
        return min(indices, key=lambda i: len(self.prompts[i].token_ids))

    def company(self, at_once: int) -> str:
        return "alone" if at_once == 1 else f"{at_once} at once"


class Stage(ABC):
    """A stage: `steps` runs it, `check` reports it."""

    title: str
    size: int  # steps

    @abstractmethod
    def steps(self) -> Iterator[int]:
        """Do the work. Yields the steps done since the last value."""

    @abstractmethod
    def check(self, *, complete: bool, seconds: float) -> Check | None:
        """The result so far; None if there is nothing to report."""


class LeftOut(Stage):
    """A check that is not made, and why. declined: left out by an option."""

    size = 0

    def __init__(self, title: str, why: str, *, declined: bool) -> None:
        self.title, self._why, self._declined = title, why, declined

    def steps(self) -> Iterator[int]:
        return iter(())

    def check(self, *, complete: bool, seconds: float) -> Check:
        return Check("left out", self.title, None, 0, 0, missing=self._why, declined=self._declined)


@dataclass(slots=True)
class Tally:
    """Counters of one stage."""

    compared: int = 0
    same: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    failures: int = 0

    def add(self, answer: CompletionOutput) -> None:
        self.compared += 1
        self.tokens += len(answer.token_ids)
        stats = answer.speculation
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.failures += sum(drafter.failures for drafter in stats.by_drafter.values())

    def check(self, kind: str, stage: Stage, drafter: str | None, compared: int, same: int, **more: Any) -> Check:
        """A check with these counts. more: further fields of `Check`."""
        counts: dict[str, Any] = {n: getattr(self, n) for n in ("tokens", "drafted", "accepted", "failures")}
        return Check(kind, stage.title, drafter, compared, same, **counts, **more)


@dataclass(frozen=True, slots=True)
class AuditPrompt:
    """A prompt as tokens, with its name in reports."""

    id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mode:
    """Plain decoding, or one drafter."""

    drafter: str | None = None  # its name in the engine; None: plain
    draft_tokens: int | None = None

    @property
    def name(self) -> str:
        return self.drafter or "plain"

    @property
    def speculation(self) -> SpeculationParams:
        if self.drafter is None:
            return SpeculationParams(enabled=False)
        return SpeculationParams(drafter=self.drafter, draft_tokens=self.draft_tokens)


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer, with the prompt's index and the parameters."""

    index: int
    params: SamplingParams
    answer: CompletionOutput


def with_seeds(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Parameters for each prompt. Sampled prompts get seeds of their own, the same in every mode."""
    if params.greedy:
        return [params] * count
    return [replace(params, seed=(params.seed or 0) + index) for index in range(count)]


def ask(
    llm: LLM, prompts: Sequence[AuditPrompt], params: Sequence[SamplingParams], at_once: int
) -> Iterator[list[Asked]]:
    """Answer all prompts in order, `at_once` at a time. Yields each group."""
    for start in range(0, len(prompts), at_once):
        indices = range(start, min(start + at_once, len(prompts)))
        tagged = [{"prompt_token_ids": list(prompts[i].token_ids)} for i in indices]
        outputs = llm.generate(tagged, [params[i] for i in indices])
        yield [Asked(i, params[i], output.outputs[0]) for i, output in zip(indices, outputs, strict=True)]


_CHUNK = 512  # rows of a pass, which bounds attention's memory
_SPARE = 1.3  # memory for a second copy of the model, relative to its weights


class Source(Protocol):
    """Computes a model's logits from tokens alone. Answers that differ are judged by these rows."""

    name: str

    def stray(self, logits: Tensor) -> float:
        """Largest error of a row's logits [V] that comes on top of rounding."""
        ...

    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Logits after these positions of `tokens`, which must ascend."""  # [R, V] fp32, on the CPU
        ...


class FreshPrompt:
    """The engine's own model, over a cache that was never used."""

    name = "a fresh prompt"

    def stray(self, logits: Tensor) -> float:
        return 0.0

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:  # [R, V] fp32, on the CPU
        return self._llm.between_rounds(lambda engine: _prefill(engine, tokens, rows))


@torch.inference_mode()
def _prefill(engine: Engine, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:
    size = engine.config.page_size
    pages = -(-len(tokens) // size)
    cache = engine.target.new_cache(pages, size)
    parts = [_chunk(engine, cache, tokens, start, rows) for start in range(0, len(tokens), _CHUNK)]
    return torch.cat(parts)


def _chunk(engine: Engine, cache: KVCache, tokens: Sequence[int], start: int, rows: Sequence[int]) -> Tensor:
    device, end = engine.target.device, min(start + _CHUNK, len(tokens))
    places = torch.arange(start, end, device=device)  # positions, and slots too: the pages are in order
    wanted = [row - start for row in rows if start <= row < end]
    batch = PassBatch(
        input_ids=torch.tensor(tokens[start:end], device=device),
        positions=places,
        slots=places,
        row_starts=(0, end - start),
        prefix_lengths=(start,),
        pages=(tuple(range(cache.num_pages)),),
        is_tree=(False,),
        masks=None,
        logit_rows=torch.tensor([*wanted, end - start - 1], device=device),  # never empty
    )
    return engine.target.forward(batch, cache)[: len(wanted)].cpu()


class Transformers:
    """transformers' own model and attention: nothing of ours between checkpoint and logits. Loaded on first use."""

    name = "transformers"

    def stray(self, logits: Tensor) -> float:
        """Its kernels round differently: allow what the check at load allows."""
        return TOLERANCE[self._llm.engine.target.dtype] * float(logits.square().mean().sqrt())

    def __init__(self, llm: LLM, trust_remote_code: bool = False) -> None:
        self._llm = llm
        self._trust_remote_code = trust_remote_code
        self._model: torch.nn.Module | None = None

    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:  # [R, V] fp32, on the CPU
        @torch.inference_mode()
        def run(engine: Engine) -> Tensor:
            if self._model is None:
                self._model = self._load(engine)
            ids = torch.tensor([list(tokens)], device=engine.target.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
            return logits[0, list(rows)].float().cpu()

        return self._llm.between_rounds(run)

    def _load(self, engine: Engine) -> torch.nn.Module:
        with quiet_transformers():
            return load_weights(
                self._llm.model_path,
                dtype=engine.target.dtype,
                device=engine.target.device,
                attention="eager",
                trust_remote_code=self._trust_remote_code,
            )


def fits_twice(llm: LLM) -> bool:
    """True if there is memory for a second copy of the weights."""
    return available_bytes(llm.engine.target.device) > _SPARE * llm.memory_plan.weights_bytes
