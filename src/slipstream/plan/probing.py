"""Probes of drafters on the device, whose guesses take time: how large they are, and for whom.

A drafter that has not guessed for some rounds must read first what it missed, and the round waits for it: for 64
requests as long as several passes take. So it is probed for a few of many, and for some rounds once it has read them:
what guesses cost beyond that is a fraction of it, and each tells as much.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.plan.cost import PassCost
from slipstream.plan.free import FreeGuesses
from slipstream.plan.rest import PlanRest

_MANY, _FEW = 16, 8
"""From so many requests on, a drafter that has to catch up is probed for no more than so many of them …"""
_RUN = 4
"""… and for so many rounds."""


class Chosen(NamedTuple):
    """How many nodes, of trees in how many levels, and for whom."""

    nodes: int
    levels: int
    members: NDArray[np.int64]  # requests
    lost_s: float = 0.0  # what a round with them is expected to lose against rounds without
    trials: tuple[Chosen, ...] = ()  # where nothing was chosen: what could be, the largest last
    is_sample: bool = False  # the others have to catch up still


class ProbingPlanner(FreeGuesses):
    """The part of a planner that probes what does not pay."""

    def __init__(self, cost: PassCost, min_gain: float = 1.0) -> None:
        super().__init__(cost, min_gain)
        self._rest = PlanRest()
        self._busy: set[str] = set()  # drafters on the device that guessed in the last plan that let them
        self._sampling: set[str] = set()  # … and those that are probed in this one for a few requests
        self._lagging: dict[str, int] = {}  # by drafter: requests of which it would have to read what it missed

    def pad_passes(self) -> None:
        self._catch_ups.assumes = True

    def lag(self, drafter: str, requests: int) -> None:
        self._lagging[drafter] = requests

    def _catch_up_s(self, drafter: str, pass_s: float, most: int | None = None) -> float:
        """What it would take until it has read what it missed, of `most` requests. pass_s: of a plain pass."""
        lagging = self._lagging.get(drafter, 0)
        requests = lagging if most is None else min(lagging, most)
        return self._catch_ups.seconds(drafter, requests, pass_s) if requests else 0.0

    def _or_probe(
        self,
        drafter: str,
        rows: int,
        chosen: Chosen,
        small: Chosen,  # lost_s: what the guesses take
        draft_s: NDArray[np.float64],  # [K + 1]: by nodes of a chain or levels of a tree
    ) -> Chosen:
        """What was chosen, or if that is nothing, now and then a probe: small, or among many as much for all of
        them as loses no more by what is expected of it: that tells far more."""
        pass_s = self._cost.seconds(rows)
        lagging = self._lagging.get(drafter, 0)
        if lagging >= _MANY:
            probe, rounds = self._sample(rows, small), _RUN
        else:
            probe, rounds = self._small(rows, small, () if lagging else chosen.trials), 1
        lost = rounds * max(probe.lost_s, 0.0) + self._catch_up_s(drafter, pass_s, len(probe.members))
        hopes = partial(self._hopes.any, drafter, rows, draft_s, self._rounds)
        could_pay = hopes if self.costs.measured_for(drafter) else lambda: True
        passed = self._rest.plan(drafter)
        due = self._probes.due(
            drafter, chosen.nodes > 0, lost / pass_s, could_pay, passed, now=self._rounds, rounds=rounds
        )
        if not due:
            return chosen
        if probe.is_sample:
            self._sampling.add(drafter)
        return probe

    def _small(self, rows: int, small: Chosen, trials: tuple[Chosen, ...]) -> Chosen:
        """For all of them, unless that makes the pass much dearer; somebody else's turn each time."""
        count = self._probes.requests(rows, small.nodes, len(small.members))
        turn = np.sort(np.roll(small.members, -self._rounds)[:count])
        probe = self._losing(rows, small._replace(members=turn))
        if count < len(small.members):
            probe = next((one for one in reversed(trials) if one.lost_s < probe.lost_s), probe)
        return probe

    def _sample(self, rows: int, small: Chosen) -> Chosen:
        """For those who came last: there is least to read of them, and they stay the same for some rounds."""
        return self._losing(rows, small._replace(members=np.sort(small.members)[-_FEW:], is_sample=True))

    def _losing(self, rows: int, probe: Chosen) -> Chosen:
        more_s = self._cost.seconds(rows + len(probe.members) * probe.nodes) - self._cost.seconds(rows)
        return probe._replace(lost_s=probe.lost_s + more_s)
