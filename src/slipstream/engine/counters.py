"""The engine's counters, and `take_snapshot`, which reports them with its state. A step only adds to numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from slipstream.core.draft import MAX_NODES
from slipstream.core.outputs import GAP_BOUNDS_S, DrafterStats, Snapshot, SpeculationStats
from slipstream.core.verdict import Verdict
from slipstream.engine.caps import SHORT
from slipstream.engine.drafting import Drafting
from slipstream.engine.flight import StepTimes
from slipstream.engine.line import Admission
from slipstream.engine.reasons import SWITCHED_OFF
from slipstream.engine.schedule import Scheduler


class Counters:
    """Sums over the engine's life. Only the engine's thread writes; any thread may read, since numbers are atomic."""

    def __init__(self) -> None:
        self.finished: dict[str, int] = {}
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.rounds = 0
        self.turns = 0
        self.draft_s = 0.0
        self.verify_s = 0.0
        self.host_s = 0.0
        self.draft_tokens = 0
        self.unrecorded: dict[str, int] = {}  # by device drafter: its loops that run without a graph
        self.gaps, self.gaps_s = [0] * (len(GAP_BOUNDS_S) + 1), 0.0  # as in `Snapshot.token_gaps`
        self._accepted = [0] * (MAX_NODES + 1)  # drafts by their number of accepted nodes

    def tokens(self, count: int, waited_s: float | None) -> None:
        """Count new tokens of an answer. waited_s: time since its previous ones; None: these are the first."""
        if waited_s is not None:
            self.gaps[bisect_left(GAP_BOUNDS_S, waited_s)] += 1
            self.gaps_s += waited_s
        self.gaps[0] += count - 1

    def step(self, requests: int, times: StepTimes) -> None:
        """Count a step."""
        self.rounds += 1
        self.turns += requests
        self.draft_s += times.draft
        self.verify_s += times.verify
        self.host_s += times.host

    def member(
        self,
        stats: SpeculationStats,
        verdict: Verdict,
        kept: int,
        share: tuple[float, float, float],
        totals: Mapping[str, DrafterStats],
    ) -> None:
        """Count one request's part of a step, also in its own statistics and those of its drafters.

        kept: tokens that it got before its end. share: its seconds of draft, verify and host.
        """
        self.generated_tokens += kept
        stats.rounds += 1
        stats.emitted += kept
        stats.draft_s += share[0]
        stats.verify_s += share[1]
        stats.host_s += share[2]
        if not verdict.drafted:
            return
        accepted = min(verdict.accepted, kept)  # the end of the answer cut off the rest
        stats.drafted += verdict.drafted
        stats.accepted += accepted
        self.draft_tokens += verdict.drafted
        self._accepted[accepted] += 1
        for name in verdict.authors.names:
            drafted, right = verdict.counts(name)
            if drafted:
                for theirs in (stats.of(name), totals[name]):
                    theirs.drafts += 1
                    theirs.drafted += drafted
                    theirs.accepted += min(right, kept)

    def end(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    @property
    def accepted(self) -> tuple[int, ...]:
        """The number of drafts, and of drafts with at least 1, 2, … accepted nodes."""
        at_least = list(accumulate(reversed(self._accepted)))[::-1]
        while len(at_least) > 1 and not at_least[-1]:
            at_least.pop()
        return tuple(at_least)


def take_snapshot(
    scheduler: Scheduler,
    drafting: Drafting,
    counters: Counters,
    admission: Admission,
    drafter_bytes: Mapping[str, int],
) -> Snapshot:
    """The state and counters of an engine. drafter_bytes: planned memory, by drafter."""
    pool, prefixes = scheduler.pool, scheduler.prefixes
    running, waiting = Counter([answer.tenant for answer in list(scheduler.running)]), scheduler.waiting.lengths()
    drafts, *by_position = counters.accepted
    return Snapshot(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        pages=pool.num_pages,
        pages_used=pool.num_pages - pool.free_pages,
        pages_cached=pool.kept_pages,
        prefix_queries=0 if prefixes is None else prefixes.queries,
        prefix_hits=0 if prefixes is None else prefixes.hits,
        preemptions=scheduler.preemptions,
        refused=admission.refused,
        finished=dict(counters.finished),
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        rounds=counters.rounds,
        turns=counters.turns,
        draft_s=counters.draft_s,
        verify_s=counters.verify_s,
        host_s=counters.host_s,
        drafts=drafts,
        draft_tokens=counters.draft_tokens,
        accepted_tokens=sum(by_position),
        accepted_by_position=tuple(by_position),
        drafters={name: replace(total) for name, total in drafting.totals.items()},
        late={name: guard.late for name, guard in drafting.guards.items()},
        unrecorded=dict(counters.unrecorded),
        dropped={name: guard.dropped.why for name, guard in drafting.guards.items() if guard.dropped is not None},
        drops={name: dict(reasons) for name, reasons in drafting.drops.items() if reasons},
        token_gaps=tuple(counters.gaps),
        token_gaps_s=counters.gaps_s,
        drafter_bytes={name: planned + drafting.drafters[name].held_bytes() for name, planned in drafter_bytes.items()},
        tenants={name: (running[name], waiting.get(name, 0)) for name in {*running, *waiting}},
        plan=_plan(drafting),
        gains=drafting.planner.gains(),
        decisions={
            "drafted": sum(total.drafts for total in drafting.totals.values()),
            **drafting.undrafted,
            "no_pages": drafting.room.refused,
        },
    )


def _plan(drafting: Drafting) -> dict[str, str]:
    """The last decision, by drafter. Drafting that is off, and a full cache, come before the planner's reasons."""
    if not drafting.enabled:
        return dict.fromkeys(drafting.drafters, SWITCHED_OFF)
    reasons = drafting.planner.reasons()
    return dict.fromkeys(reasons, SHORT) if drafting.room.is_full else reasons
