"""The state of a constraint, and forms that try to hang a server."""

from __future__ import annotations

import builtins
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench_scripts import hostile
from conftest import EOS, VOCAB
from constrain_scenes import TABLE, WORDS, allowed, start, tokens_of
from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.constrain import matcher
from slipstream.constrain.compiler import Grammars
from slipstream.constrain.limits import CompileLimits
from slipstream.constrain.matcher import Constraint
from slipstream.constrain.trials import TRIALS
from slipstream.core.draft import ROOT, Tree
from slipstream.core.errors import InvalidRequest
from structured_scenes import SCHEMAS


class TestState:
    def test_masks_along_a_tree(self, grammars: Grammars) -> None:
        a, b, c = tokens_of("abc")
        constraint = start(grammars, regex="a(b|c)a|bb")
        tree = Tree((a, b, c, b, a, c), (ROOT, 0, 0, ROOT, 2, ROOT))  # a, ab, ac, b, aca, and c: forbidden
        assert allowed(constraint, tree)[:6] == [{a, b}, {b, c}, {a}, {a}, {b}, {EOS}]
        assert len(allowed(constraint, tree)[6]) == 32 * WORDS - (32 * WORDS - VOCAB)  # nobody gets there
        assert constraint.legal(tree) == [True] * 5 + [False]
        assert allowed(constraint) == [{a, b}]  # as before

    def test_an_end_has_nothing_below_it(self, grammars: Grammars) -> None:
        (a,) = tokens_of("a")
        constraint = start(grammars, regex="a")
        tree = Tree((a, EOS, a), (ROOT, 0, 1))
        assert constraint.legal(tree) == [True, True, False]
        assert allowed(constraint, tree)[:2] == [{a}, {EOS}]

    def test_what_is_forced(self, grammars: Grammars) -> None:
        constraint = start(grammars, json={"properties": {"name": {"enum": ["x", "y"]}}, "required": ["name"]})
        assert constraint.forced(99) == tokens_of('{"name": "')
        assert constraint.forced(3) == tokens_of('{"n')
        constraint.advance(tokens_of('{"name": "x'), 0)
        assert constraint.forced(99) == [*tokens_of('"}'), EOS]
        assert not constraint.complete
        constraint.advance(tokens_of('{"name": "x"}'), 0)
        assert constraint.complete
        constraint.advance([*tokens_of('{"name": "x"}'), EOS, 3], 0)  # what a round gave beyond the end
        assert constraint.failure is None
        assert constraint.forced(9) == []

    def test_half_a_character_is_forced_too(self, grammars: Grammars) -> None:
        first, second = tokens_of("é")
        constraint = start(grammars, regex="(é|a)b?")
        constraint.advance([7, 7, first], 2)
        assert constraint.forced(5) == [second]

    def test_a_token_against_the_grammar_is_a_failure(self, grammars: Grammars) -> None:
        constraint = start(grammars, regex="ab")
        constraint.advance(tokens_of("b"), 0)
        assert "against the grammar" in str(constraint.failure)
        assert allowed(constraint) == [set()]
        assert constraint.forced(4) == []
        assert constraint.legal(Tree.chain(tokens_of("ab"))) == [False, False]

    def test_control_characters_are_never_allowed_in_json(self, grammars: Grammars) -> None:
        constraint = start(grammars, json={"type": "string", "maxLength": 3})
        constraint.advance(tokens_of('"'), 0)
        following = allowed(constraint)[0]
        assert following.isdisjoint(TABLE[:32])
        assert TABLE[ord("x")] in following

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_it_follows_and_goes_back_like_a_fresh_one(self, grammars: Grammars, data: st.DataObject) -> None:
        """Any tokens, trees of any shape in between: the state is that of one who only heard the committed tokens."""
        name = data.draw(st.sampled_from(sorted(SCHEMAS)))
        constraint = start(grammars, json=SCHEMAS[name])
        said: list[int] = [1, 2]  # a prompt, which is not looked at
        for _ in range(data.draw(st.integers(1, 6))):
            tree = data.draw(trees(said, constraint))
            masks = allowed(constraint, tree)
            fresh = start(grammars, json=SCHEMAS[name])
            fresh.advance(said, 2)
            assert masks[0] == allowed(fresh)[0]
            legal = constraint.legal(tree)
            for node in range(len(tree)):
                path = path_of(tree, node)
                alone = start(grammars, json=SCHEMAS[name])
                alone.advance([*said, *path], 2)
                assert legal[node] == (alone.failure is None and EOS not in path[:-1])
                if legal[node] and path[-1] != EOS:
                    assert masks[1 + node] == allowed(alone)[0]
            accepted = [node for node in range(len(tree)) if legal[node] and EOS not in path_of(tree, node)]
            said += path_of(tree, data.draw(st.sampled_from(accepted))) if accepted else []
            constraint.advance(said, 2)


@st.composite
def trees(draw: st.DrawFn, said: list[int], constraint: Constraint) -> Tree:
    """Nodes that the grammar likes at the root, what it forces, and anything."""
    likely = sorted(allowed(constraint)[0])[:20] + constraint.forced(4)
    tokens: list[int] = []
    parents: list[int] = []
    seen: set[tuple[int, int]] = set()
    for token in constraint.forced(draw(st.integers(0, 5))):
        parents.append(len(tokens) - 1)
        tokens.append(token)
        seen.add((parents[-1], token))
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.integers(-1, len(tokens) - 1))
        token = draw(st.sampled_from([*likely, EOS, *tokens_of('"}],0a')]) | st.integers(0, VOCAB - 1))
        if (parent, token) not in seen:
            seen.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return Tree(tuple(tokens), tuple(parents))


def path_of(tree: Tree, node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


def test_a_grammar_that_takes_too_long_ends_its_answer(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm: LLM = open_llm(drafter="ngram")
    monkeypatch.setattr(matcher, "GRACE_S", -1.0)
    params = [SamplingParams(structured_outputs=StructuredOutputsParams(regex="a{20}")), SamplingParams(max_tokens=5)]
    slow, other = (output.outputs[0] for output in llm.generate([[1], [2]], params))
    assert slow.finish_reason == "error"
    assert "too ambiguous" in str(slow.error)
    assert len(other.token_ids) == 5 or other.finish_reason == "stop"


def test_a_large_draft_is_not_what_ends_an_answer(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond a mask is slow but allowed: not too much only because there are many nodes, but fewer next time."""
    constraint = start(grammars, regex="a{900}")
    clock = iter(range(10**6))
    monkeypatch.setattr("time.thread_time", lambda: 0.032 * next(clock))  # a walk of 32 masks
    out = torch.zeros((32, WORDS), dtype=torch.int32)
    assert constraint.most_nodes == 63
    for _ in range(40):
        constraint.masks(Tree.chain(tokens_of("a" * 31)), out, 0)
    assert constraint.failure is None
    assert constraint.most_nodes == 5


def test_a_small_draft_does_not_save_a_slow_grammar(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = start(grammars, regex="a{900}")
    clock = iter(range(10**6))
    monkeypatch.setattr("time.thread_time", lambda: 0.02 * next(clock))
    out = torch.zeros((1, WORDS), dtype=torch.int32)
    constraint.masks(Tree(), out, 0)
    assert (constraint.failure, constraint.most_nodes) == (None, 0)
    for _ in range(40):
        constraint.masks(Tree(), out, 0)
    assert "too ambiguous" in str(constraint.failure)


def test_special_tokens_in_drafts_are_refused_quietly(grammars: Grammars, capfd: pytest.CaptureFixture[str]) -> None:
    constraint = start(grammars, regex="ab")
    assert constraint.legal(Tree.chain([290])) == [False]
    assert constraint.failure is None
    assert capfd.readouterr() == ("", "")


def test_without_the_package_the_error_names_the_extra(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm: LLM = open_llm()
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "xgrammar":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InvalidRequest, match=re.escape("pip install -e '.[grammar]' in the clone")):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert llm.generate("a", SamplingParams(max_tokens=2))[0].finished


def test_compiled_rules_are_kept_up_to_a_limit(grammars: Grammars) -> None:
    form = StructuredOutputsParams(json={"properties": {f"p{i}": {"type": "string"} for i in range(100)}})
    grammars.constraint(form)
    compiler = grammars._compiler()
    size = compiler.get_cache_size_bytes()
    grammars.constraint(form)
    assert compiler.get_cache_size_bytes() == size > 0
    assert 0 < compiler.cache_limit_bytes < 1 << 30


def test_a_matcher_that_raises_while_it_looks_ahead_ends_its_answer(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is not where the text is any more: what it allowed from there on would be wrong."""
    constraint = start(grammars, regex="aab|aac")

    def broken() -> None:
        raise RuntimeError("a bug in there")

    monkeypatch.setattr(constraint, "_only_byte", broken)
    assert constraint.forced(5) == []
    assert "a bug in there" in str(constraint.failure)
    assert allowed(constraint) == [set()]


FORMS: dict[str, dict[str, Any]] = hostile.FORMS


LIMITS = CompileLimits(trial_s=0.1)


TOKENS = 60


NODES = 16


LIMIT_NAMED = "more than|at most|must be|cannot|too |no text|another"


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    TRIALS.close()


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
