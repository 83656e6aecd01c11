"""Drafters on the device, whose guesses take time: who guesses, goes on though that does not pay, or is probed.

A drafter that has not guessed for some rounds must read first what it missed, and the round waits for it: for 64
requests as long as several passes take. So it is probed for a few of many, and for some rounds once it has read them:
what guesses cost beyond that is a fraction of it, and each tells as much.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.plan.cost import PassCost
from slipstream.plan.extras import crowd_of
from slipstream.plan.free import FreeGuesses
from slipstream.plan.patience import Patience
from slipstream.plan.rest import PlanRest
from slipstream.plan.rivals import RUN, Rivals, is_by_sample
from slipstream.plan.sizes import MARGIN, CapturedSizes
from slipstream.plan.trees import TreeChoices

_MANY, _SAMPLE = 16, 8
"""Where it has to catch up on so many requests, a drafter is probed for no more than so many of them, and for some
rounds (`RUN`), …"""
_GAP = 4
"""… unless nobody plans for so many: who was read has to be read again by then."""
PROBED = 2
"""Nodes of a probe of what does not pay; of a rival that makes chains, as many as it would guess had it the turn: two
would not tell."""


class Chosen(NamedTuple):
    """How many nodes, of trees in how many levels, and for whom."""

    nodes: int
    levels: int
    members: NDArray[np.int64]  # requests
    lost_s: float = 0.0  # what a round with them is expected to lose against rounds without
    trials: tuple[Chosen, ...] = ()  # where nothing was chosen: what could be, the largest last
    is_sample: bool = False  # it is for a few of many, and not what pays
    has_turn: bool = True  # nobody else on the device has it
    wanted: int = 0  # where another has it: nodes of a chain that would have been chosen
    is_tried: bool = False  # … and it is to guess for some of many all the same


class _Run(NamedTuple):
    """A probe of a few that lasts for some rounds."""

    request_ids: frozenset[str]
    crowd: int
    round: int  # the last of them so far
    left: int  # rounds beyond that


class ProbingPlanner(FreeGuesses):
    """The part of a planner that says who guesses, and probes what does not pay."""

    def __init__(self, cost: PassCost, min_gain: float = 1.0) -> None:
        super().__init__(cost, min_gain)
        self._rest = PlanRest()
        self._rivals = Rivals()
        self._patience = Patience()
        self._sizes = CapturedSizes()
        self._begun: set[str] = set()  # drafters that were asked for guesses that take time
        self._busy: set[str] = set()  # … in the last plan that let them guess, too
        self._granting: set[str] = set()  # … in this plan
        self._last_granted: dict[str, int] = {}  # … and when each was last
        self._sampling: set[str] = set()  # drafters that are probed in this round for a few requests
        self._runs: dict[str, _Run] = {}  # by drafter: its last probe of a few
        self._sampled = 0  # such probes so far
        self._lagging: dict[str, frozenset[str]] = {}  # by drafter: requests of which it would have to read first

    def pad_passes(self) -> None:
        self._catch_ups.assumes = True

    def silence(self, drafter: str, request_ids: Sequence[str], rows: int) -> None:
        if not any(self.allows(request_id, (drafter,)) for request_id in request_ids):  # else it is for this round only
            self._rivals.leave(drafter, rows)

    def lag(self, drafter: str, request_ids: Collection[str]) -> None:
        self._lagging[drafter] = frozenset(request_ids)

    def _behind(self, drafter: str, request_ids: Sequence[str]) -> NDArray[np.bool_]:  # [B]
        """Which of these it would have to catch up on."""
        lagging = self._lagging.get(drafter)
        if not lagging:
            return np.zeros(len(request_ids), dtype=np.bool_)
        return np.array([request_id in lagging for request_id in request_ids])

    def _trial_loses(self, drafter: str, rows: int, late: int, guess_s: float, pass_s: float) -> float:
        """Rounds that a trial of a rival costs: what it has to read before, of so many; and among many, where it
        guesses for a sample beside whose turn it is, its guesses."""
        is_sample = is_by_sample(rows)
        late = min(late, _SAMPLE) if is_sample else late
        lost_s = self._catch_ups.seconds(drafter, late, pass_s) if late else 0.0
        return (lost_s + RUN * guess_s * is_sample) / pass_s

    def _asked(self, drafter: str, rows: int, margin: float) -> float:
        """How many times as fast as none its guesses must be. margin: what is asked for catching up."""
        is_tried = self._rivals.tries(self._usually(rows), self._rounds) == drafter
        begins = self._cost.padded and not is_tried and drafter in self._begun - self._busy
        return self._margin * (max(MARGIN, margin) if begins else 1.0) * self._gains.doubt(self._with(drafter))

    def _or_patient(
        self,
        drafter: str,
        rows: int,
        size: int,
        won_s: NDArray[np.float64],  # [K + 1]: beyond what is asked
        behind: NDArray[np.int64],  # [K + 1]: requests that it would have to catch up on
        trees: TreeChoices | None,
    ) -> int:
        """The size that pays, or if that is 0, for a while the captured one that loses least. Not of a drafter that
        never has to catch up."""
        if size:
            self._patience.pays(drafter, float(won_s[size]), self._rounds)
        if size or drafter not in self._lagging:
            return size
        if trees is None:
            known = self._sizes.known(drafter, len(won_s) - 1)
        else:
            known = self._sizes.known_trees(drafter, trees.nodes, trees.levels)
        best = max(known, key=lambda one: (one > 0, won_s[one]))
        if not best or behind[best]:
            return 0
        back_s = self._catch_ups.seconds(drafter, rows, self._cost.seconds(rows))
        return best if self._patience.lasts(drafter, -float(won_s[best]), back_s, self._rounds) else 0

    def _of_rival(self, drafter: str, rows: int, members: NDArray[np.int64], wanted: int) -> Chosen:
        """It is another's turn: had it been its own, so many nodes would have been chosen."""
        is_tried = self._rivals.tries(rows, self._rounds, is_sample=True) == drafter
        return Chosen(0, 0, members, has_turn=False, wanted=wanted, is_tried=is_tried)

    def _or_probe(
        self,
        drafter: str,
        request_ids: Sequence[str],
        caps: Sequence[int],
        rows: int,
        chosen: Chosen,
        small: Chosen,  # lost_s: what the guesses take
        draft_s: NDArray[np.float64],  # [K + 1]: by nodes of a chain or levels of a tree
    ) -> Chosen:
        """What was chosen, or if that is nothing, now and then a probe: small, or among many as much for all of
        them as loses no more by what is expected of it: that tells far more."""
        passed = self._rest.plan(drafter)
        if chosen.nodes:
            self._probes.drafts(drafter)
            return chosen
        if (run := self._goes_on(drafter, rows)) is not None:
            members = [i for i, name in enumerate(request_ids) if name in run.request_ids and caps[i]]
            if members:
                self._sampling.add(drafter)
                return small._replace(members=np.array(members), is_sample=True)
        behind = self._behind(drafter, request_ids)  # [B]
        if chosen.is_tried:
            return self._begin_run(drafter, request_ids, rows, self._sample(rows, small, caps, behind))
        pass_s, rounds = self._cost.seconds(rows), 1
        if behind.sum() >= _MANY:
            probe, rounds = self._sample(rows, small, caps, behind), RUN
        else:
            probe = self._small(rows, small, () if behind.any() else chosen.trials)
        late = int(behind[probe.members].sum())
        lost = rounds * max(probe.lost_s, 0.0)
        lost += self._catch_ups.seconds(drafter, late, pass_s) if late else 0.0
        hopes = partial(self._hopes.any, drafter, rows, draft_s, self._rounds)
        could_pay = hopes if self.costs.measured_for(drafter) else lambda: True
        if not self._probes.due(drafter, lost / pass_s, could_pay, passed, now=self._rounds):
            return chosen
        return self._begin_run(drafter, request_ids, rows, probe) if probe.is_sample else probe

    def _granted(self, drafter: str, chosen: Chosen, caps: Sequence[int]) -> list[int]:
        """Nodes for each request: as many as were chosen for those for whom they were."""
        granted = [0] * len(caps)
        if not chosen.nodes:
            return granted
        self._begun.add(drafter)
        if not chosen.is_sample:
            self._granting.add(drafter)
            self._last_granted[drafter] = self._rounds
        self._rest.guess(drafter)
        self._sizes.use(drafter, chosen.nodes, chosen.levels)
        for i in chosen.members.tolist():
            granted[i] = min(chosen.nodes, caps[i])
        return granted

    def _begin_run(self, drafter: str, request_ids: Sequence[str], rows: int, probe: Chosen) -> Chosen:
        self._probes.probed(drafter)
        self._sampling.add(drafter)
        self._sampled += 1
        ids = frozenset([request_ids[i] for i in probe.members.tolist()])
        self._runs[drafter] = _Run(ids, crowd_of(rows), self._rounds, RUN - 1)
        return probe

    def _goes_on(self, drafter: str, rows: int) -> _Run | None:
        """Its probe that has rounds left, this one being one of them; the same where a round is planned again."""
        run = self._runs.get(drafter)
        if run is None or run.round == self._rounds:
            return run
        if not run.left or run.crowd != crowd_of(rows) or self._rounds - run.round > _GAP:
            del self._runs[drafter]
            return None
        run = self._runs[drafter] = run._replace(round=self._rounds, left=run.left - 1)
        return run

    def _small(self, rows: int, small: Chosen, trials: tuple[Chosen, ...]) -> Chosen:
        """For all of them, unless that makes the pass much dearer; somebody else's turn each time."""
        count = self._probes.requests(rows, small.nodes, len(small.members))
        turn = np.sort(np.roll(small.members, -self._rounds)[:count])
        probe = self._losing(rows, small._replace(members=turn))
        if count < len(small.members):
            probe = next((one for one in reversed(trials) if one.lost_s < probe.lost_s), probe)
        return probe

    def _sample(self, rows: int, small: Chosen, caps: Sequence[int], behind: NDArray[np.bool_]) -> Chosen:
        """For some of whom there is nothing to read, if there are enough of them. From all parts of the line, and
        others each time: neighbours came together, and are alike."""
        able = np.array([i for i in np.sort(small.members).tolist() if caps[i]])
        ready = able[~behind[able]]
        able = ready if len(ready) >= _SAMPLE // 2 else able
        chosen = able[np.unique((self._sampled + np.arange(_SAMPLE) * len(able) // _SAMPLE) % len(able))]
        return self._losing(rows, small._replace(members=chosen, is_sample=True))

    def _losing(self, rows: int, probe: Chosen) -> Chosen:
        more_s = self._cost.seconds(rows + len(probe.members) * probe.nodes) - self._cost.seconds(rows)
        return probe._replace(lost_s=probe.lost_s + more_s)
