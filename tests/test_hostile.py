"""Forms that try to hang a server: each is refused with a limit, or followed with a bounded amount of work."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench_scripts import hostile
from conftest import VOCAB
from constrain_scenes import allowed, start, tokens_of
from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.constrain import matcher
from slipstream.constrain.compiler import Grammars
from slipstream.constrain.limits import CompileLimits
from slipstream.constrain.trials import TRIALS
from slipstream.core.draft import Tree
from slipstream.core.errors import InvalidRequest

FORMS: dict[str, dict[str, Any]] = hostile.FORMS
LIMITS = CompileLimits(trial_s=0.1)
TOKENS = 60
NODES = 16
LIMIT_NAMED = "more than|at most|must be|cannot|too |no text|another"


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    TRIALS.close()


def test_there_are_many_kinds() -> None:
    assert len(FORMS) >= 40


@pytest.mark.parametrize("name", FORMS)
def test_it_is_refused_or_followed(name: str, grammars: Grammars) -> None:
    try:
        constraint = grammars.constraint(StructuredOutputsParams(**FORMS[name]), limits=LIMITS)
    except InvalidRequest as error:
        with pytest.raises(InvalidRequest, match=LIMIT_NAMED):
            raise error
        return
    dice, tokens = random.Random(0), list[int]()
    while len(tokens) < TOKENS and constraint.failure is None:
        before = constraint._masks
        forced = constraint.forced(NODES)
        assert constraint._masks - before <= 4 * NODES + 1
        assert constraint.legal(Tree.chain(forced)) == [True] * len(forced)
        after = allowed(constraint, Tree.chain(forced[:1]))
        if constraint.failure is not None or not after[0]:
            break
        assert not forced or forced[0] in after[0]
        tokens += forced or [dice.choice(sorted(after[0]))]
        if tokens[-1] >= VOCAB - 44:  # an end
            break
        constraint.advance(tokens, 0)
    assert constraint.failure is None or "too ambiguous" in constraint.failure


@torch.inference_mode()
def test_a_heavy_form_is_followed_in_inference_mode(grammars: Grammars) -> None:
    """As in the engine's thread: the other thread fills masks that were made here."""
    form = StructuredOutputsParams(json={"type": "integer", "multipleOf": 997})
    constraint = grammars.constraint(form, limits=CompileLimits(trial_s=5))  # about 0.05, and more on a busy machine
    masks = torch.zeros((1, matcher.mask_words(VOCAB)), dtype=torch.int32)
    constraint.masks(Tree(), masks, 0)
    assert constraint.failure is None
    assert masks.any()


@pytest.mark.parametrize(
    "name",
    [
        "json: a required property of its own kind",
        "json: 100,000 items that are known",
        "grammar: a text without end",
        "grammar: text that doubles 400 times",
    ],
)
def test_text_that_is_forced_without_end_is_drafted_as_far_as_there_is_room(
    name: str, open_llm: Callable[..., LLM]
) -> None:
    llm = open_llm(drafter="ngram", planner="fixed")
    endless = SamplingParams(max_tokens=TOKENS, structured_outputs=StructuredOutputsParams(**FORMS[name]))
    theirs, mine = (out.outputs[0] for out in llm.generate([[1], [2]], [endless, SamplingParams(max_tokens=9)]))
    assert (theirs.finish_reason, len(theirs.token_ids)) == ("length", TOKENS)
    assert theirs.speculation.tau > 4
    assert mine.finish_reason in ("length", "stop")


def test_forced_text_is_read_off_masks(grammars: Grammars) -> None:
    """Until there is a choice, the room is full, or the answer ends."""
    constraint = start(grammars, regex="abcdef(g|h)")
    assert constraint.forced(99) == tokens_of("abcdef")
    assert constraint.forced(4) == tokens_of("abcd")
    constraint.advance(tokens_of("abcdefg"), 0)
    assert constraint.forced(9) == [257]


def test_a_call_that_never_ends_ends_its_answer_and_the_form_is_known(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = StructuredOutputsParams(regex="[ab]{400}c")
    constraint = grammars.constraint(form, limits=LIMITS)
    monkeypatch.setattr(matcher, "LONGEST_S", 0.01)
    released = threading.Event()

    def spin(*_: object) -> None:
        while not released.is_set():
            pass

    monkeypatch.setattr(constraint, "_fill", spin)
    assert allowed(constraint) == [set()]
    assert "too ambiguous" in str(constraint.failure)
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        grammars.constraint(form, limits=LIMITS)
    other = grammars.constraint(StructuredOutputsParams(regex="[ab]{400}d"), limits=LIMITS)
    assert allowed(other) == [set(tokens_of("ab"))]  # another thread follows the others
    released.set()


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (hostile.SCHEMAS["two that refer to each other"], "#/properties/x: .ref '#/.defs/a' cannot be followed"),
        ({"items": {"type": "integer", "minimum": -(10**300)}}, "#/items: minimum"),
        ({"properties": {"a": {"type": "array", "minItems": 10**18}}}, "#/properties/a: minItems 1000000000000000000"),
    ],
)
def test_a_refusal_names_the_place(schema: Any, place: str, grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match=place):
        start(grammars, json=schema)
