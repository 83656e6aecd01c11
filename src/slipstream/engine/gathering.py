"""Whom a drafter may guess for in a round, and how far it is to go: as far as pays, and as there is room."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slipstream.core.snapshot import Undrafted
from slipstream.drafters.base import Drafter
from slipstream.engine.caps import NodeCaps
from slipstream.engine.fates import COMPARED, UNASKED
from slipstream.engine.following import Following
from slipstream.engine.foresight import Budgeted, Foreseen
from slipstream.engine.levels import levels_of, no_deeper
from slipstream.engine.plans import Gathered, Group, HostGuess
from slipstream.engine.room import DraftRoom
from slipstream.engine.state import Answer
from slipstream.plan.planner import Planner, TreeBudget


class Found(NamedTuple):
    """The requests of a round that a drafter may guess for, by their numbers."""

    requests: list[int]
    group: Group


class Gathering:
    """Of one engine. undrafted: counts who goes without, and why."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        caps: NodeCaps,
        room: DraftRoom,
        following: Following,
        undrafted: dict[Undrafted, int],
    ) -> None:
        self._caps, self._room, self._following, self._undrafted = caps, room, following, undrafted
        self.levels = {name: levels_of(drafter) for name, drafter in drafters.items()}

    def ordered(self, groups: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
        """Those whose guesses are free come first."""
        return sorted(groups.items(), key=lambda group: self._caps.turns[group[0]])

    def group(
        self,
        planner: Planner,
        name: str,
        theirs: list[int],
        decodes: Sequence[Answer],
        gathered: Gathered,
        *,
        asked: bool | None = None,
        counts: bool = True,
    ) -> Found | None:
        """None: it has nobody to guess for. asked: is it to guess in this round? None: the planner says."""
        undrafted = self._undrafted if counts else dict.fromkeys(self._undrafted, 0)
        mine = theirs
        if planner.silences:
            mine = [i for i in theirs if planner.speculates(decodes[i].id, (*gathered.company[i], name))]
        if counts and len(mine) < len(theirs):
            _note(name, [decodes[i] for i in set(theirs).difference(mine)], COMPARED)
        undrafted["plain"] += len(theirs) - len(mine)
        if not mine:
            planner.silence(name, [decodes[i].id for i in theirs], len(decodes))
        if not mine or not (planner.asks(name, len(decodes)) if asked is None else asked):
            undrafted["declined"] += len(mine)
            if counts:
                _note(name, [decodes[i] for i in mine], UNASKED)
            return None
        answers = [decodes[i] for i in mine]
        exclusive, (used, granted) = planner.exclusive, gathered.used_by(mine)
        rivals = granted if exclusive else [0] * len(mine)
        left = [nodes - others for nodes, others in zip(used, rivals, strict=True)]
        caps = self._caps.of(name, answers, left, len(decodes), exclusive=exclusive)
        undrafted["limited"] += caps.count(0)
        if counts and 0 in caps:
            for answer, most in zip(answers, caps, strict=True):
                if not most and name not in answer.decided:
                    answer.decided[name] = self._caps.why_none(name, answer, len(decodes))
        if not any(caps):
            return None
        room = self._caps.of(name, answers, used, len(decodes), exclusive=exclusive) if any(rivals) else caps
        return Found(mine, Group(name, answers, caps, used, room, gathered.beside(mine), len(decodes)))

    def wanted(self, planner: Planner, group: Group) -> TreeBudget:
        """How far the planner would have a drafter go whose guesses take time; levels: 0 where it makes no trees.

        To reckon that takes time as well, and is done less often where nothing comes of it.
        """
        started, name = time.perf_counter(), group.drafter
        ids, choices = [answer.id for answer in group.answers], self.levels[name]
        if self._following.keeps(name):
            planner.lag(name, self._following.lags(name, group.answers, group.rows))
        if choices:
            budget = planner.budget_trees(name, ids, group.caps, group.rows, group.beside, levels=choices)
        else:
            budget = TreeBudget(planner.budget(name, ids, group.caps, group.rows, group.beside), 0)
        planner.observe_asked(name, any(budget.nodes), time.perf_counter() - started, costly=True)
        return budget

    def granted(self, group: Group, budget: TreeBudget, gathered: Gathered, requests: Sequence[int]) -> list[int]:
        """As much of that as there are pages for. Notes it, and how many levels its trees are to have."""
        fitting = _fitting(group, budget)
        nodes = [self._room.nodes(*parts) for parts in zip(group.answers, group.used, fitting, strict=True)]
        self._grant(group.drafter, requests, nodes, budget.levels, gathered)
        return nodes

    def foreseen(
        self,
        planner: Planner,
        groups: Sequence[tuple[str, list[int]]],
        decodes: Sequence[Answer],
        supposed: list[HostGuess],
    ) -> Foreseen:
        """What these device drafters are to do, if the host guesses so."""
        gathered, budgets = Gathered(supposed), dict[str, Budgeted]()
        planner.suppose(tuple(dict.fromkeys([name for guess in supposed for name in guess.company])))
        for name, theirs in groups:
            found = self.group(planner, name, theirs, decodes, gathered, counts=False)
            if found is not None:
                budget = self.wanted(planner, found.group)
                budgets[name] = Budgeted(found.requests, budget)
                self._grant(name, found.requests, _fitting(found.group, budget), budget.levels, gathered)
        planner.put_aside()
        return Foreseen(list(decodes), supposed, budgets, gathered.plan().drafts)

    def _grant(self, name: str, requests: Sequence[int], nodes: Sequence[int], levels: int, gathered: Gathered) -> None:
        for i, count in zip(requests, nodes, strict=True):
            gathered.grant(i, name, count)
        if levels and any(nodes):
            gathered.levels[name] = no_deeper(self.levels[name], levels, max(nodes))


def _note(name: str, answers: Sequence[Answer], why: str) -> None:
    """This drafter has no part in a round of theirs. What was decided before stands."""
    for answer in answers:
        answer.decided.setdefault(name, why)


def _fitting(group: Group, budget: TreeBudget) -> list[int]:
    return [min(nodes, room) for nodes, room in zip(budget.nodes, group.room, strict=True)]
