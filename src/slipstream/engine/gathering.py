"""Which requests a drafter may guess for in a step, how many nodes each may have, and what the planner makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slipstream.core.outputs import Undrafted
from slipstream.drafters.base import DeviceDrafter, Drafter
from slipstream.engine.caps import NodeCaps
from slipstream.engine.following import Following
from slipstream.engine.plans import Gathered, Group
from slipstream.engine.room import DraftRoom
from slipstream.engine.state import Answer
from slipstream.plan.choose import level_choices
from slipstream.plan.planner import Planner
from slipstream.plan.types import Budget, Levels, Load, Offer


class Found(NamedTuple):
    """The requests of a step that a drafter may guess for, by their numbers."""

    requests: list[int]
    group: Group


class Gathering:
    """Of one engine. undrafted: counts the requests that go without, and why."""

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
        """Drafters whose guesses are free come first."""
        return sorted(groups.items(), key=lambda group: self._caps.turns[group[0]])

    def group(
        self, planner: Planner, name: str, mine: list[int], decodes: Sequence[Answer], gathered: Gathered
    ) -> Found | None:
        """None: it may not guess for any of them."""
        answers, used = [decodes[i] for i in mine], gathered.used_by(mine)
        caps = self._caps.of(name, answers, used, len(decodes), exclusive=planner.exclusive)
        self._undrafted["limited"] += caps.count(0)
        if 0 in caps:
            for answer, most in zip(answers, caps, strict=True):
                if not most and name not in answer.decided:
                    answer.decided[name] = self._caps.why_none(name, answer, len(decodes))
        return Found(mine, Group(name, answers, caps, used, len(decodes))) if any(caps) else None

    def budgets(
        self,
        planner: Planner,
        groups: Sequence[tuple[str, list[int]]],
        decodes: Sequence[Answer],
        gathered: Gathered,
        load: Load,
    ) -> Iterator[tuple[Found, Budget]]:
        """How far the planner has each drafter go whose guesses take time. Consume it before `gathered` is used."""
        if planner.exclusive:
            found = [one for group in groups if (one := self.group(planner, *group, decodes, gathered)) is not None]
            yield from zip(found, planner.plan([self._offer(one.group) for one in found], load), strict=True)
            return
        for group in groups:  # what one is granted is not there for the next
            one = self.group(planner, *group, decodes, gathered)
            if one is not None:
                yield one, planner.plan([self._offer(one.group)], load)[0]

    def _offer(self, group: Group) -> Offer:
        name, follows = group.drafter, self._following
        lagging = follows.lags(name, group.answers, group.rows) if follows.keeps(name) else ()
        ids = [answer.id for answer in group.answers]
        return Offer(name, ids, group.caps, self.levels[name], frozenset(lagging))

    def granted(self, found: Found, budget: Budget, gathered: Gathered) -> list[int]:
        """As much of that as there are pages for. Notes it, and how many levels its trees are to have."""
        requests, group = found
        parts = zip(group.answers, group.used, budget.nodes, strict=True)
        nodes = [self._room.nodes(*part) for part in parts]
        for i, count in zip(requests, nodes, strict=True):
            gathered.grant(i, group.drafter, count)
        if budget.levels and any(nodes):
            gathered.levels[group.drafter] = no_deeper(self.levels[group.drafter], budget.levels, max(nodes))
        return nodes


def levels_of(drafter: Drafter) -> tuple[Levels, ...]:
    """The levels that a drafter's trees may have, the most last; () where it makes none on the device."""
    if not (isinstance(drafter, DeviceDrafter) and drafter.makes_trees):
        return ()
    counts = level_choices(drafter.depth) if drafter.grows else (drafter.depth,)
    return tuple(Levels(count, drafter.most_at(count)) for count in counts)


def no_deeper(choices: Sequence[Levels], levels: int, nodes: int) -> int:
    """As many levels, but no more than trees of so many nodes can have: the first of the choices that is enough."""
    return next(one.deep for one in choices if one.deep >= min(levels, nodes))
