"""One stage of an audit, and what all stages work with.

A stage goes step by step, so that progress can be shown, and can say at any time what it has found so far: an audit
that is interrupted loses nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.audit.answers import AuditPrompt, Mode
from slipstream.audit.fresh import FreshPrompt
from slipstream.audit.probe import Probe
from slipstream.audit.results import Check, Token
from slipstream.audit.rounding import Rounding
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

UNLIKELY = 1e-5
"""A p-value below it is no chance: of a hundred thousand audits of a right engine one would say so."""

MAX_FINDINGS = 20
"""Bugs of one check that are looked into; more would tell nothing new, and each costs a pass."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to sample, by name."""

    name: str
    params: SamplingParams


@dataclass(slots=True)
class Bench:
    """What the stages share: the engine, the prompts, and the plain answers so far."""

    llm: LLM
    prompts: Sequence[AuditPrompt]
    at_once: int
    probe: Probe
    fresh: FreshPrompt = field(init=False)
    rounding: Rounding = field(init=False)
    plain: dict[str, list[CompletionOutput]] = field(default_factory=dict)  # by setting
    drafted: dict[str, Counter[int]] = field(default_factory=dict)  # by mode: guesses for each prompt
    errors: dict[str, float] = field(default_factory=dict)  # by mode: how far log probabilities are from fresh ones

    def __post_init__(self) -> None:
        self.fresh = FreshPrompt(self.llm)
        self.rounding = Rounding.of(self.llm.engine.target)
        self.probe.vocab_size = self.llm.engine.target.vocab_size

    def token(self, token: int) -> Token:
        return Token(token, str(self.llm.tokenizer.decode([token], skip_special_tokens=False)))

    def lively(self, mode: Mode) -> int:
        """The shortest prompt for which this mode guessed at least half as much as for any."""
        drafted = self.drafted.get(mode.name, Counter())
        enough = max(drafted.values(), default=0) / 2
        indices = [i for i in range(len(self.prompts)) if drafted[i] >= enough]
        return min(indices, key=lambda i: len(self.prompts[i].token_ids))

    def company(self, at_once: int) -> str:
        return "alone" if at_once == 1 else f"{at_once} at once"


class Stage(ABC):
    """Runs by `steps`; `check` is what it found so far."""

    title: str
    size: int  # steps

    @abstractmethod
    def steps(self) -> Iterator[int]:
        """Do the work; each value is how many steps were done since the last."""

    @abstractmethod
    def check(self, *, complete: bool, seconds: float) -> Check | None:
        """What it found; None where there is nothing to tell."""


class LeftOut(Stage):
    """A check that is not made, and why. declined: by an option."""

    size = 0

    def __init__(self, title: str, why: str, *, declined: bool) -> None:
        self.title, self._why, self._declined = title, why, declined

    def steps(self) -> Iterator[int]:
        return iter(())

    def check(self, *, complete: bool, seconds: float) -> Check:
        return Check("left out", self.title, None, 0, 0, missing=self._why, declined=self._declined)


@dataclass(slots=True)
class Tally:
    """Counts of one stage."""

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
