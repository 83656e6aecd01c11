"""From an engine's parts to the `Snapshot` that watchers read, on any thread: nothing waits, and nothing changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from slipstream.core.outputs import Snapshot
from slipstream.engine.admission import Admission
from slipstream.engine.counters import Counters
from slipstream.engine.drafting import Drafting
from slipstream.engine.reasons import SWITCHED_OFF
from slipstream.engine.room import SHORT
from slipstream.engine.scheduler import Scheduler


def take_snapshot(
    scheduler: Scheduler,
    drafting: Drafting,
    counters: Counters,
    admission: Admission,
    drafter_bytes: Mapping[str, int],
) -> Snapshot:
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
        ahead_taken=counters.ahead_taken,
        ahead_wasted=counters.ahead_wasted,
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
    """What was decided last; where nobody's draft found room, or nobody may have one, just that."""
    reasons = drafting.planner.reasons()
    if not drafting.enabled:
        return dict.fromkeys(drafting.drafters, SWITCHED_OFF)
    return dict.fromkeys(reasons, SHORT) if drafting.room.nobody else reasons
