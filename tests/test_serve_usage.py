"""What a client reads of an answer's speculation: the counts, and the planner's own reasons."""

from __future__ import annotations

import pytest

from slipstream.core.outputs import DrafterStats, SpeculationStats
from slipstream.serve.record import AnswerRecord
from slipstream.serve.usage import speculation_report

OFF = "off: batch 48 leaves no spare arithmetic"


@pytest.mark.parametrize(
    ("plan", "drafted", "why"),
    [
        ({"ngram": "off: it had no guess", "suffix": "off: it had no guess"}, 0, "off: it had no guess"),
        ({"ngram": OFF}, 0, OFF),
        ({"ngram": OFF, "suffix": OFF}, 0, OFF),
        ({"ngram": "off: 0.90x expected", "suffix": OFF}, 0, f"ngram off: 0.90x expected; suffix {OFF}"),
        ({"ngram": "ngram 5: 1.30x expected"}, 8, "ngram 5: 1.30x expected; 6 of 8 guesses stood, 2.50 tokens a pass"),
        (
            {"bad": "off: it raised KeyError"},
            8,
            "bad off: it raised KeyError; 6 of 8 guesses stood, 2.50 tokens a pass",
        ),
        ({}, 8, "on: 6 of 8 guesses stood, 2.50 tokens a pass"),
        ({}, 0, "off: it had no drafter: none was named, or speculation is switched off"),
    ],
)
def test_why(plan: dict[str, str], drafted: int, why: str) -> None:
    drafters = {"ngram": DrafterStats(drafted=drafted)} if drafted else {}
    stats = SpeculationStats(4, 10, drafted, min(6, drafted), by_drafter=drafters, plan=plan)
    told = speculation_report(AnswerRecord(10, "stop", speculation=stats))
    assert told["why"] == why
    assert told["plan"] == plan


def test_an_answer_of_one_token_had_no_round_to_draft_in() -> None:
    told = speculation_report(AnswerRecord(1, "length", speculation=SpeculationStats(rounds=1, emitted=1)))
    assert told["why"] == "off: the answer ended with its first token"


def test_what_is_known_beforehand_comes_first() -> None:
    assert speculation_report(AnswerRecord(), "this server has no drafter")["why"] == "off: this server has no drafter"
