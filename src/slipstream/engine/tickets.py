"""A queued round on the host: who is in it, where its result will lie, and what was heard of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.draft import MAX_NODES
from slipstream.core.verdict import Authors, Verdict
from slipstream.engine.draft_ahead import Ahead
from slipstream.engine.draft_loops import Drafts
from slipstream.engine.plans import Plan, resolved
from slipstream.engine.rounds import Round
from slipstream.engine.state import Answer, Phase

_PATHS = tuple(tuple(range(nodes)) for nodes in range(MAX_NODES + 1))
"""The accepted nodes of chains."""


class CaughtUp(NamedTuple):
    """A drafter on the device that had to read first what it had missed, and of how many requests."""

    drafter: str
    requests: int


class Guessed(NamedTuple):
    """A round whose drafts are there, or on their way on the device."""

    plan: Plan
    run: Round
    caught_up: tuple[CaughtUp, ...]
    begun: Any  # a mark where the device begins with it: what the host guesses is not its work
    ahead: Ahead | None  # what it had begun before


@dataclass(slots=True)  # not frozen: that would take longer to make than all else of it
class Member:
    """One request's part in a queued round. It does not change."""

    answer: Answer
    epoch: int
    authors: Authors
    drafted: int  # at most: merged drafts may turn out smaller
    bound: int  # tokens that it may get at most
    decodes: bool  # else the round computed its prompt
    context: int  # tokens that it had when the round was queued, as far as the host knew

    @staticmethod
    def of(answer: Answer, authors: Authors, drafted: int, *, decodes: bool) -> Member:
        """The answer joins a round."""
        answer.queued += 1
        answer.coming += 1 + drafted
        return Member(answer, answer.epoch, authors, drafted, 1 + drafted, decodes, len(answer.tokens))

    @property
    def listens(self) -> bool:
        """Does it still want to hear? Not if it ended, or was preempted and perhaps is back."""
        return self.answer.epoch == self.epoch and self.answer.phase is not Phase.ENDED


@dataclass(slots=True)
class Ticket:
    """A queued round: who is in it, and where its result will lie."""

    members: tuple[Member, ...]  # decodes, then those whose prompt it completes
    decodes: int
    told: NDArray[np.int64] | None  # [D, …] of the decodes, as in `VerdictTable`
    first: Tensor | None  # [C] on the host: first tokens of the others
    round: Round | None
    rows: int
    logits: Tensor | None  # of the others' last rows
    marks: tuple[Any, ...]  # events: begun, drafted, verified, prompts read
    reads_logits: bool  # some of them asked for log probabilities
    steady: bool  # a step as they come: its times are known, and nothing was captured, compiled or caught up on
    drafts: Drafts
    hosts: tuple[str, ...]  # host drafters that were asked
    waited_s: float | None  # how long the device had nothing to do before it; None: it was queued in time
    chosen: NDArray[np.int64] | None = None  # [N]: what was chosen at every row of the decodes, where it is wanted
    owners: NDArray[np.int64] | None = None  # [D, K]: who proposed each node, where drafts were merged on the device
    guessed_s: float = 0.0  # what guesses on the host took that the planner counts by themselves
    read_rows: int = 0  # of prompts that were computed beside
    along: bool = False  # drafters on the device read them, too
    newcomers: int = 0  # how many requests started before it was planned
    ahead: Ahead | None = None  # the draft that was begun before it was planned
    caught_up: tuple[CaughtUp, ...] = ()  # before it, where nothing else was unusual
    is_new: bool = False  # something was captured or compiled for it
    hoped: float = 1.0  # how many times as fast as plain decoding it is to be

    def wait(self) -> None:
        if self.marks:
            self.marks[-1].synchronize()

    def all_logits(self) -> Tensor | None:
        """[R, V]: of the decodes' rows, then of the others'; None where nobody asked for log probabilities."""
        if not self.reads_logits:
            return None
        decoded = None if self.round is None else self.round.logits
        return torch.cat([part for part in (decoded, self.logits) if part is not None])

    def verdicts(self) -> list[Verdict]:
        """What became of each member, once the device is done."""
        verdicts: list[Verdict] = []
        if self.told is not None and self.round is not None:
            is_tree, behind = self.round.shape.is_tree, 3 + self.round.shape.width
            chosen = [] if self.chosen is None else self.chosen.tolist()
            counts = self.counts()
            most = max(counts[: self.decodes])  # a round may be made for far larger drafts
            paths = self.told[:, behind : behind + most].tolist() if is_tree else []
            row = 0
            for i, (member, line) in enumerate(zip(self.members, self.told[:, : 3 + most].tolist(), strict=False)):
                emitted, accepted = line[0], line[1]
                path = tuple(paths[i][:accepted]) if is_tree else _PATHS[accepted]
                begin, row = row, row + 1 + counts[i]
                choices = tuple(chosen[begin:row]) if emitted else ()
                tokens = tuple(line[2 : 2 + emitted])
                authors = self._authors(i, counts[i])
                verdicts.append(Verdict(member.answer.id, tokens, counts[i], accepted, path, choices, authors))
        if self.first is not None:
            for member, token in zip(self.members[self.decodes :], self.first.tolist(), strict=True):
                verdicts.append(Verdict(member.answer.id, (token,), 0, 0, ()))
        return verdicts

    def counts(self) -> list[int]:
        """Nodes of each member's draft, once the device is done."""
        if self.owners is None:
            return [member.drafted for member in self.members]
        decoded = np.count_nonzero(self.owners[: self.decodes], axis=1).tolist()
        return [*decoded, *[member.drafted for member in self.members[self.decodes :]]]

    def _authors(self, member: int, nodes: int) -> Authors:
        authors = self.members[member].authors
        if self.owners is None or self.round is None or len(authors.names) < 2:
            return authors
        return resolved(authors, self.owners[member, :nodes].tolist(), self.round.numbers, self.round.makes_trees)

    @property
    def begun(self) -> Any:
        """The event before its own draft."""
        return self.marks[0]

    @property
    def ended(self) -> Any:
        """The event behind all of it."""
        return self.marks[-1]

    def seconds(self, part: int) -> float:
        return self.marks[part].elapsed_time(self.marks[part + 1]) / 1e3 if self.marks else 0.0

    @property
    def draft_s(self) -> float:
        """What guesses on the device took, those included that were begun before."""
        return self.seconds(0) + (self.ahead.seconds if self.ahead is not None else 0.0)

    @property
    def read_s(self) -> float:
        """What prompts took that were read beside."""
        return self.seconds(2) if self.read_rows else 0.0

    @property
    def idle_s(self) -> float | None:
        """How long the device did nothing of use before the round; None: it was queued in time."""
        if self.waited_s is None or self.ahead is None or not self.marks:
            return self.waited_s
        return self.ahead.idle_until(self.marks[0])

    def free_marks(self) -> list[Any]:
        """Its events, of which nobody asks it any more."""
        marks, self.marks = (*self.marks, *(self.ahead.marks if self.ahead is not None else ())), ()
        return list({id(mark): mark for mark in marks}.values())


@dataclass(frozen=True, slots=True)
class Heard:
    """A round whose result the host has read: those who still wanted to hear, and what."""

    ticket: Ticket
    members: tuple[Member, ...]
    verdicts: tuple[Verdict, ...]
    lasted_s: float  # since the host heard of the one before it, or the engine was idle: for devices without a clock

    def row_of(self) -> Tensor:  # [E, K + 1]
        """Where in `Ticket.all_logits` each request's rows lie."""
        ticket, starts, before = self.ticket, [], 0
        counts = ticket.counts()
        for index, member in enumerate(ticket.members):
            if ticket.round is not None and index == ticket.decodes:
                # what is behind the last of the decodes is padding; where none of them asked, theirs are not kept
                before = ticket.round.shape.rows if ticket.round.logits is not None else 0
            if member in self.members:
                starts.append(before)
            before += 1 + counts[index]
        width = max(counts, default=0)
        return torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(width + 1)


@dataclass(frozen=True, slots=True)
class EmittedRows:
    """Where the rows of a finished round lie, for those who read its logits."""

    emitting: tuple[Answer, ...]
    row_of: Tensor  # [E, K + 1]
