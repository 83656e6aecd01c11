"""The prediction drafter: it follows, loses its place where the answer differs, and finds it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.draft import Tree
from slipstream.core.params import SamplingParams
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.prediction import PredictionDrafter

PROMPT = [1000, 1001]


@dataclass(frozen=True)
class Run:
    rounds: int
    accepted: int
    drafted: int


def answer(prediction: Sequence[int], target: Sequence[int], budget: int = 32) -> Run:
    """Generate `target` as an engine would, with what the drafter proposes on the way."""
    drafter = PredictionDrafter()
    tokens = list(PROMPT)
    request = DraftRequest("a", tokens, len(PROMPT), SamplingParams(), 0, prediction)
    drafter.start(request)
    rounds = accepted = drafted = 0
    done = 0
    while done < len(target):
        (tree,) = drafter.propose([request], [budget])
        assert tree == Tree.chain(tree.tokens)
        assert len(tree) <= budget
        promise = drafter.promise("a")
        assert promise is not None
        assert len(promise) == len(tree)
        right = 0
        while right < min(len(tree), len(target) - done - 1) and tree.tokens[right] == target[done + right]:
            right += 1
        emitted = target[done : done + right + 1]
        tokens += emitted
        done += right + 1
        rounds, accepted, drafted = rounds + 1, accepted + right, drafted + len(tree)
        drafter.observe([Verdict("a", tuple(emitted), len(tree), right, tuple(range(right)))])
    drafter.stop("a")
    return Run(rounds, accepted, drafted)


TEXT = list(range(100))


def test_a_right_prediction_is_followed_to_its_end() -> None:
    assert answer(TEXT, TEXT).rounds == 4  # 33 tokens a round: 32 drafted and the target's own
    assert answer(TEXT, [*TEXT, *range(500, 510)]).rounds == 4 + 10 - 1  # then it is shorter than the answer


def test_without_a_prediction_nothing_is_drafted() -> None:
    assert answer([], TEXT) == Run(100, 0, 0)


def test_a_useless_prediction_is_hardly_drafted() -> None:
    run = answer(range(5000, 5100), TEXT)
    assert run.accepted == 0
    assert run.drafted <= 6 * 32  # the first guesses only: after that the place is lost


def test_a_replaced_word_costs_one_round() -> None:
    target = TEXT.copy()
    target[50:52] = [900, 901]
    assert answer(TEXT, target).rounds <= 4 + 3


def test_a_word_replaced_by_a_longer_one() -> None:
    target = [*TEXT[:50], 900, 901, 902, 903, 904, 905, *TEXT[52:]]
    assert answer(TEXT, target).rounds <= 4 + 8


def test_an_insertion_is_stepped_over() -> None:
    inserted = list(range(900, 920))
    assert answer(TEXT, TEXT[:50] + inserted + TEXT[50:]).rounds <= 4 + len(inserted) + 2


def test_a_deletion_is_jumped_over() -> None:
    assert answer(TEXT, TEXT[:30] + TEXT[60:]).rounds <= 4 + 2


def test_moved_text_is_found_behind_the_pointer() -> None:
    assert answer(TEXT, TEXT[60:] + TEXT[:60]).rounds <= 4 + 6


def test_text_before_the_predicted_text() -> None:
    assert answer(TEXT, list(range(900, 908)) + TEXT).rounds <= 4 + 8 + 2


def lines(count: int, word: int) -> list[int]:
    """Lines that differ in one token only, as in code: the place must not jump to another line."""
    return [t for i in range(count) for t in (1, 2, word + i, 3, 4, 5)]


def test_repeated_lines_keep_their_order() -> None:
    prediction = lines(20, 100)
    target = prediction.copy()
    target[6 * 10 + 3] = 99  # one token changed in line 10: the next lines follow in order
    assert answer(prediction, target).rounds <= 4 + 2


def test_a_word_renamed_everywhere() -> None:
    prediction = [t for i in range(20) for t in (1, 2, 70, 200 + i, 3)]
    target = [71 if t == 70 else t for t in prediction]
    run = answer(prediction, target)
    assert run.rounds <= 21  # one round for each line
    assert run.accepted >= 75


def first_promise(emitted: Sequence[int], prediction: Sequence[int] = tuple(TEXT)) -> float:
    drafter = PredictionDrafter()
    request = DraftRequest("a", [*PROMPT, *emitted], len(PROMPT), SamplingParams(), 0, prediction)
    drafter.start(request)
    drafter.propose([request], [4])
    return (drafter.promise("a") or [0.0])[0]


def test_promises_rise_with_agreement() -> None:
    in_step = first_promise(TEXT[:30])
    found_again = first_promise([*TEXT[:30], 900, TEXT[31]])
    just_lost = first_promise([*TEXT[:30], 900])
    assert in_step > 0.9
    assert in_step > found_again > just_lost > 0


def test_promises_learn() -> None:
    drafter = PredictionDrafter()
    request = DraftRequest("a", PROMPT, len(PROMPT), SamplingParams(), 0, TEXT)

    def first() -> float:
        drafter.propose([request], [4])
        return (drafter.promise("a") or [0.0])[0]

    drafter.start(request)
    before = first()
    for _ in range(20):
        first()
        drafter.observe([Verdict("a", (7,), 4, 0, ())])
    assert first() < 0.3 * before


def test_a_recomputed_request_finds_its_place() -> None:
    drafter = PredictionDrafter()
    request = DraftRequest("a", [*PROMPT, *TEXT[:40]], len(PROMPT), SamplingParams(), 0, TEXT)
    drafter.start(request)
    drafter.stop("a")
    drafter.stop("never started")
    assert drafter.promise("a") == []
    (tree,) = drafter.propose([request], [3])  # without a start, too
    assert tree.tokens == (40, 41, 42)


def test_it_drafts_63_nodes_at_most() -> None:
    drafter = PredictionDrafter()
    (tree,) = drafter.propose([DraftRequest("a", PROMPT, 2, SamplingParams(), 0, TEXT)], [1000])
    assert len(tree) == 63


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=40), st.lists(st.integers(0, 4), max_size=40), st.integers(0, 70))
def test_any_prediction_is_harmless(prediction: list[int], target: list[int], budget: int) -> None:
    run = answer(prediction, target, min(budget, 63))
    assert run.rounds + run.accepted == len(target)
