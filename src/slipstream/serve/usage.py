"""What an answer cost and what speculation did for it, as clients read it."""

from __future__ import annotations

from typing import Any

from slipstream.core.outputs import SpeculationStats, Timing
from slipstream.serve.record import AnswerRecord, Record

PREDICTION = "prediction"


def usage(record: Record, *, predicted: bool) -> dict[str, Any]:
    """OpenAI's `usage`. Of a prediction: guesses taken from it that stood, and that did not."""
    told: dict[str, Any] = {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "total_tokens": record.prompt_tokens + record.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
    }
    if predicted:
        stats = record.speculation.by_drafter.get(PREDICTION)
        accepted, drafted = (stats.accepted, stats.drafted) if stats else (0, 0)
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return told


def speculation_report(answer: AnswerRecord, off: str | None = None) -> dict[str, Any]:
    """What speculation did for one answer. tau counts the target's own token.

    off: why it could not be on, where that was known beforehand.
    """
    stats = answer.speculation
    return {
        **_stats(stats),
        "why": f"off: {off}" if off else stats.why,
        "plan": dict(stats.plan),
        "seconds": _seconds(stats, answer.timing),
    }


def _stats(stats: SpeculationStats) -> dict[str, Any]:
    return {
        "rounds": stats.rounds,
        "tokens": stats.emitted,
        "tau": round(stats.tau, 4),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "alpha": round(stats.alpha, 4),
        "expected_gain": None if stats.expected_gain is None else round(stats.expected_gain, 4),
        "measured_gain": None if stats.measured_gain is None else round(stats.measured_gain, 4),
        "drafters": {
            name: {
                "drafts": drafter.drafts,
                "drafted": drafter.drafted,
                "accepted": drafter.accepted,
                "failures": drafter.failures,
            }
            for name, drafter in stats.by_drafter.items()
        },
    }


def _seconds(stats: SpeculationStats, timing: Timing) -> dict[str, float]:
    times = {
        "queued": timing.queued_s,
        "first_token": timing.first_token_s,
        "total": timing.total_s,
        "draft": stats.draft_s,
        "verify": stats.verify_s,
        "host": stats.host_s,
    }
    return {key: round(value, 6) for key, value in times.items()}
