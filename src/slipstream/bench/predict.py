"""The speed of a batch by simulation: what `slipstream tune` says beside what it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slipstream.bench.outcome import Outcome, Targets
from slipstream.bench.recording import Recording
from slipstream.bench.replica import Setting
from slipstream.bench.simulate import drafters_of, simulate, traces_of
from slipstream.bench.traffic import Coming
from slipstream.bench.tune import Tuned
from slipstream.drafters import merged_name, names_of, parse_merged


def predicted(
    recording: Recording, rows: Sequence[Tuned], auto: Sequence[str] = (), min_gain: float = 1.0
) -> list[Tuned]:
    """Each with the tokens a second that a simulation of as many requests at once gives. auto: whom `auto` means."""
    if not recording.traces:
        return list(rows)
    known = drafters_of(recording)
    found: list[Tuned] = []
    for row in rows:
        drafter = None
        if row.drafter is not None:
            drafter = "+".join(names_of(merged_name(parse_merged(row.drafter)), auto))
        if drafter is not None and drafter not in known:
            found.append(row)
            continue
        traces = traces_of(recording, "" if drafter is None else drafter)
        setting = Setting("off" if drafter is None else "planned", drafter, row.draft_tokens, min_gain)
        tokens = seconds = 0.0
        for first in range(0, max(row.prompts, 1), row.concurrency):  # in the batches that were measured
            turns = [i % len(traces) for i in range(first, first + row.concurrency)]
            coming = [Coming(0.0, traces[i].prompt_tokens, traces[i].output_tokens, i) for i in turns]
            outcome = Outcome.of(simulate(recording, setting, coming, traces), Targets())
            given = sum(one.output_tokens for one in coming)
            tokens, seconds = tokens + given, seconds + given / outcome.tokens_per_s
        found.append(replace(row, predicted=tokens / seconds))
    return found
