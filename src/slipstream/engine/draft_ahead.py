"""Drafts that are begun before their round is planned: the device guesses while the host still thinks.

Where drafters on the host guess as well (`eagle3+suffix`), the host must hear what the last round said before it can
plan the next, and the device would wait. But drafters on the device need nothing from the host: a draft is a function
of the lanes and of the drafter's own cache. So it is queued behind the round that is under way, in the size that is
the last two plans had. A plan that wants just that for the same requests takes it; any other makes its
draft as if nothing had been. To guess twice, or for a request that turns out to have ended, harms nobody: what is
written is written again by the next draft, the lane holds the pages when it is queued, and whoever gets them writes to
them later in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.draft import Tree
from slipstream.drafters.base import DeviceDrafter
from slipstream.engine.counters import Counters
from slipstream.engine.draft_loops import DraftFailed, DraftLoop, Drafts
from slipstream.engine.drafting import Drafting
from slipstream.engine.lanes import Lanes
from slipstream.engine.requests import MemoryPlan
from slipstream.engine.rounds import Round
from slipstream.engine.state import Answer

_PURSE, _PRICE = 8, 2
"""A draft in vain costs what about two others save: what of it is longer than the wait. So many may be saved up."""
_REST = 32
"""Rounds without, when the purse is empty. Then a single draft shows whether it is any better."""


@dataclass(slots=True)
class Ahead:
    """A draft that was begun for a round before it was planned."""

    loop: DraftLoop | None  # where its guesses are; None: they are of no use to the round
    whose: list[tuple[Answer, int]]  # the requests in their order, and their epochs
    marks: tuple[Any, ...]  # events: begun, done; () without a clock
    taken: bool = False  # the round has its guesses

    @property
    def seconds(self) -> float:
        """What it took, where that was part of the round's own draft."""
        return self.marks[0].elapsed_time(self.marks[1]) / 1e3 if self.taken and self.marks else 0.0

    def idle_until(self, mark: Any) -> float:
        """Seconds in which the device did nothing of use before `mark`, where the rest of the round begins."""
        return float(self.marks[1 if self.taken else 0].elapsed_time(mark)) / 1e3


class DraftAhead:
    """At most one draft that is ahead of its round, and whether it is worth while.

    reserve: as `Scheduler.reserve_draft`. mark: records an event; None without a clock.
    """

    def __init__(
        self,
        drafting: Drafting,
        lanes: Lanes,
        reserve: Callable[[Answer, int], int],
        mark: Callable[[], Any],
        plan: MemoryPlan,
        counters: Counters,
    ) -> None:
        self._drafting, self._lanes, self._reserve, self._mark = drafting, lanes, reserve, mark
        self._plan, self._counters = plan, counters
        self._planned: tuple[Drafts, Drafts] = ((), ())  # what device drafters did in the last rounds
        self._trees: Sequence[Tree] = ()  # what the host guessed in the last one
        self._begun: Ahead | None = None
        self._purse = _PURSE
        self._rests = 0  # rounds that go without

    def begin(self, run: Round, answers: Sequence[Answer]) -> None:
        """Queue a draft behind this round for the requests in it, where the next plan will most likely want it:
        where the last two had the same."""
        before, last = self._planned
        drafts = last if last == before else ()
        if self._rests or not drafts:
            return
        following = self._drafting.following
        if following.may_lag(answers, drafts):
            return  # it must read first what it missed
        if self._may_be_left_behind(drafts) or not self._has_room(answers, drafts):
            return
        keys = run.shape.keys_behind(max([answer.reach for answer in answers]), self._plan.most_keys)
        loop = run.loop_behind(drafts, keys, following.recent(answers, drafts))
        if loop is None:  # to record one takes longer than can be won
            return
        self._lanes.send_pages(answers)
        begun = self._mark()
        try:
            loop.run(run.lanes)
        except DraftFailed as failed:
            self._drafting.fail(answers, failed)
            return
        marks = () if begun is None else (begun, self._mark())
        self._begun = Ahead(loop, [(answer, answer.epoch) for answer in answers], marks)

    def _may_be_left_behind(self, drafts: Drafts) -> bool:
        """May others' guesses in the round under way take a head further than it reads again? (`falls_behind`)"""
        for size in drafts:
            drafter = self._drafting.drafters[size.drafter]
            if isinstance(drafter, DeviceDrafter) and drafter.needs.own_cache and drafter.taps:
                others = [other.levels or other.nodes for other in drafts if other is not size]
                if max([*others, *[tree.depth for tree in self._trees]], default=0) >= drafter.rereads:
                    return True
        return False

    def _has_room(self, answers: Sequence[Answer], drafts: Drafts) -> bool:
        """Chains are written behind the text, wherever it will end by then; trees have places of their own."""
        nodes = max((size.nodes for size in drafts if not size.levels), default=0)
        if not nodes:
            return True
        return all(a.reach + nodes <= self._plan.max_model_len and self._reserve(a, nodes) == nodes for a in answers)

    def loop_for(self, decodes: Sequence[Answer]) -> DraftLoop | None:
        """Where the guesses for just these requests are; None: there are none, or for others."""
        if self._begun is None:
            return None
        if self._begun.whose != [(answer, answer.epoch) for answer in decodes]:
            self._begun.loop = None
        return self._begun.loop

    def settle(self, loop: DraftLoop | None, trees: Sequence[Tree]) -> Ahead | None:
        """A round has guesses of the device from `loop` (None: none), of the host `trees`; what was begun for it?"""
        self._trees = trees
        self._planned = (self._planned[1], () if loop is None else loop.shape.drafts)
        self._rests = max(0, self._rests - 1)
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.taken = loop is not None and loop is begun.loop
            self._count(begun.taken)
        return begun

    def drop(self) -> tuple[Any, ...]:
        """What was begun and not settled has no round to be in. Gives back its events."""
        begun, self._begun = self._begun, None
        if begun is None:
            return ()
        self._count(False)
        return begun.marks

    def _count(self, taken: bool) -> None:
        self._counters.ahead_taken += taken
        self._counters.ahead_wasted += not taken
        self._purse = min(_PURSE, self._purse + 1) if taken else self._purse - _PRICE
        if self._purse < 0:
            self._purse, self._rests = 0, _REST
