"""A step in flight: launched, and not read by the host yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.core.verdict import Authors, Verdict
from slipstream.engine.draft_loops import Drafts
from slipstream.engine.state import Answer, Phase


@dataclass(slots=True)  # not frozen: a frozen one takes longer to make
class Member:
    """One request's part in a step that was launched. It does not change."""

    answer: Answer
    epoch: int
    authors: Authors
    drafted: int  # at most: merged drafts may turn out smaller
    bound: int  # most tokens that it may get
    decodes: bool  # False: the step computed the end of its prompt
    context: int  # tokens that it had at launch, as far as the host knew

    @staticmethod
    def of(answer: Answer, authors: Authors, drafted: int, *, decodes: bool) -> Member:
        """Enter the answer into a step."""
        answer.queued += 1
        answer.coming += 1 + drafted
        return Member(answer, answer.epoch, authors, drafted, 1 + drafted, decodes, len(answer.tokens))

    @property
    def listens(self) -> bool:
        """False if the answer ended or was preempted since: the result is of an earlier epoch."""
        return self.answer.epoch == self.epoch and self.answer.phase is not Phase.ENDED


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, and what they depend on."""

    host: float  # all that is neither draft nor verify
    draft: float
    verify: float  # the target pass, sampling and commit
    rows: int = 0  # of the target pass, without those of prompts
    read_rows: int = 0  # of prompts
    expected_gain: float = 1.0  # speed over plain decoding, as planned
    waited: float = 0.0  # the device was idle while host drafters guessed, without those that the planner times itself
    read: float | None = None  # part of verify: prompts that had passes of their own; None: not timed by themselves

    @property
    def total(self) -> float:
        return self.host + self.draft + self.verify


@dataclass(slots=True, kw_only=True)
class Flight(ABC):
    """A step that was launched: its members, and where its result will be."""

    members: tuple[Member, ...]  # decodes, then those whose prompt it completes
    decodes: int
    drafts: Drafts = ()
    hosts: tuple[str, ...] = ()  # host drafters that were asked
    rows: int = 0  # of the decodes, padding included
    read_rows: int = 0  # of prompts
    expected_gain: float = 1.0
    steady: bool = True  # its times are typical: nothing was captured, compiled or caught up on
    is_new: bool = False  # something was captured or compiled for it
    is_tree: bool = False  # device drafters made trees
    reads_logits: bool = False  # some member asked for log probabilities

    @property
    def levels(self) -> Mapping[str, int]:
        """Levels of the trees of device drafters."""
        return {size.drafter: size.levels for size in self.drafts if size.levels}

    def wait(self) -> None:  # noqa: B027
        """Wait until the result is on the host."""

    @abstractmethod
    def verdicts(self) -> list[Verdict]:
        """The verdict on each member, after `wait`."""

    @abstractmethod
    def logits(self) -> Tensor | None:
        """[R, V] of all members' rows; None if no member asked for log probabilities."""

    @abstractmethod
    def row_of(self, members: Sequence[Member]) -> Tensor:  # [E, K + 1]
        """The row of `logits` of each member's root (column 0) and nodes."""
