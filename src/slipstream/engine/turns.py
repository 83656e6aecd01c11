"""What a round was for each of its requests: told to the planner, which compares it with plain rounds.

And noted for the callers, who may want to know what speculation brought them and why it was off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.core.verdict import Verdict
from slipstream.engine.state import Answer
from slipstream.plan.gains import Turn
from slipstream.plan.planner import Planner


def observe_round(planner: Planner, answers: Sequence[Answer], verdicts: Sequence[Verdict], seconds: float) -> None:
    """A round without prompts is over."""
    turns = [Turn(a.id, v.drafted, len(v.tokens)) for a, v in zip(answers, verdicts, strict=True)]
    planner.observe_round(turns, seconds, sum([len(answer.tokens) for answer in answers]))


def note_plan(planner: Planner, answer: Answer, plan: Mapping[str, str]) -> None:
    """The answer leaves: what was measured for it, and what was decided last."""
    stats, gain = answer.output.speculation, planner.gain(answer.id)
    stats.expected_gain, stats.measured_gain = gain.expected, gain.measured
    stats.plan = dict(plan)
