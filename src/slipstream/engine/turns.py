"""What a round took and brought each of its requests: told to the planner, which compares it with plain rounds."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.verdict import Verdict
from slipstream.engine.drafting import Drafting
from slipstream.engine.listening import RoundTimes
from slipstream.engine.state import Answer
from slipstream.plan.gains import NO_WAIT, Turn, Waited
from slipstream.plan.measured import Load


def observe_round(
    drafting: Drafting,
    answers: Sequence[Answer],
    verdicts: Sequence[Verdict],
    times: RoundTimes,
    load: Load,
    lasted_s: float,
    beyond_s: float | None = None,
    waited: Waited = NO_WAIT,
    *,
    is_tree: bool = False,
) -> None:
    """A round without prompts is over. load: of its pass; lasted_s: all of it, drafts and host included.

    beyond_s: what of that was not the pass, where rounds do not overlap. waited: what of it the device waited for whom.
    is_tree: it checked trees of device drafters.
    """
    drafting.round_s = times.draft + times.verify
    drafting.planner.observe_pass(times.rows, times.verify, load, is_tree=is_tree)
    turns = [Turn(a.id, v.drafted, len(v.tokens), v.authors.names) for a, v in zip(answers, verdicts, strict=True)]
    drafting.planner.observe_round(turns, lasted_s, load.context, beyond_s, waited, times.hoped, times.ready)
