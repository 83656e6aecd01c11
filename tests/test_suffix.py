"""The drafter `suffix`: what it copies, what it learns, and the store of earlier answers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import ROOT, Tree
from slipstream.core.errors import ConfigError, InvalidRequest
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.suffix import _BY_LENGTH, _BY_VOTES, SuffixDrafter, compiling
from slipstream.drafters.suffix import index as code
from slipstream.drafters.suffix.index import LONGEST
from slipstream.drafters.suffix.store import SuffixIndex, SuffixStore
from slipstream.drafters.suffix.tree import SHARES, STEPS


def request(
    tokens: Sequence[int], name: str = "a", prompt: int | None = None, material: Sequence[Sequence[int]] = ()
) -> DraftRequest:
    """The tenant stands in the name, before a colon."""
    params = SamplingParams(speculation=SpeculationParams(tenant=name.partition(":")[0]))
    return DraftRequest(name, tokens, len(tokens) if prompt is None else prompt, params, slot=0, material=material)


def drafter_of(**options: Any) -> SuffixDrafter:
    """One that drafts as far as it may, unless told otherwise."""
    return SuffixDrafter(**{"min_match": 2, "min_chance": 1e-9, **options})


def propose(drafter: SuffixDrafter, tokens: Sequence[int], budget: int = 4, name: str = "a") -> Tree:
    (tree,) = drafter.propose([request(tokens, name)], [budget])
    tree.check(vocab_size=1000, budget=budget)
    promise = drafter.promise(name)
    assert promise is not None
    assert len(promise) == len(tree)
    for node, parent in enumerate(tree.parents):
        assert 0 < promise[node] <= (1.0 if parent == ROOT else promise[parent])
    return tree


def answered(drafter: SuffixDrafter, answer: Sequence[int], name: str = "before") -> None:
    """A request came, was answered, and went."""
    tokens = [500, 501]
    drafter.start(request(tokens, name))
    tokens.extend(answer)
    drafter.stop(name)


def verdict(emitted: Sequence[int], name: str = "a") -> Verdict:
    return Verdict(name, tuple(emitted), 0, 0, ())


def test_it_copies_what_followed() -> None:
    assert propose(drafter_of(), [1, 2, 3, 4, 5, 6, 9, 1, 2]) == Tree.chain((3, 4, 5, 6))


def test_what_followed_most_often_wins_over_the_latest() -> None:
    text = [1, 2, 30, 5, 1, 2, 30, 6, 1, 2, 40, 7, 1, 2]
    assert propose(drafter_of(), text, budget=1) == Tree.chain((30,))


def test_close_counts_branch_and_the_latest_comes_first() -> None:
    tree = propose(drafter_of(), [9, 1, 2, 30, 31, 8, 1, 2, 40, 41, 7, 1, 2], budget=4)
    assert tree == Tree((40, 30, 41, 31), (-1, -1, 0, 1))


def test_clear_counts_do_not_branch() -> None:
    text = [t for i in range(9) for t in (100 + i, 1, 2, 30, 31, 32)] + [200, 1, 2, 40, 41, 42, 300, 1, 2]
    assert propose(SuffixDrafter(), text, budget=3) == Tree.chain((30, 31, 32))


def test_a_loop_goes_on_past_the_end_of_the_text() -> None:
    assert propose(drafter_of(), [7, 1, 2, 3, 1, 2, 3], budget=8).tokens == (1, 2, 3, 1, 2, 3, 1, 2)
    assert propose(drafter_of(), [4, 4, 4], budget=5, name="b").tokens == (4,) * 5


def test_a_draft_is_as_long_as_it_is_sure() -> None:
    text = list(range(100, 140))
    short = propose(SuffixDrafter(min_chance=0.3), [*text, 7, *text[:1]], budget=30)
    long = propose(SuffixDrafter(min_chance=0.3), [*text, 7, *text[:20]], budget=20)
    assert 0 < len(short) < 8
    assert long.tokens == tuple(text[20:40])
    assert len(propose(SuffixDrafter(min_chance=0.9), [*text, 7, *text[:2]])) == 0


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=30), max_size=5), st.lists(st.integers(0, 3)))
def test_its_first_token_is_that_of_a_plain_count(answers: list[list[int]], text: list[int]) -> None:
    drafter = drafter_of(candidates=1000)
    for answer in answers:
        drafter.store.insert("a", answer)
    chances = _count(answers, text)
    tree = propose(drafter, text, budget=1)
    assert len(tree) == bool(chances)
    if chances:
        assert chances[tree.tokens[0]] == max(chances.values())
        assert drafter.promise("a") == pytest.approx([max(chances.values())[0]])


def _count(answers: list[list[int]], text: list[int]) -> dict[int, tuple[float, float]]:
    """The votes the long way: token -> its chance and share."""
    own = [(_agree(text, p, text), text[p]) for p in range(1, len(text))]
    past = [(_agree(t, p, text), t[p]) for t in answers for p in range(1, len(t))]
    most_own, most_past = (max((length for length, _ in places), default=0) for places in (own, past))
    voters = [(length, token, 1, 2.0 ** min(8, length)) for length, token in own if length >= max(2, most_own / 4)]
    voters += [
        (length, token, 2, 2.0 ** min(8, length) / 2)
        for length, token in past
        if length >= max(2, most_own // 4, most_past / 4)
    ]
    total = sum(weight for *_, weight in voters)
    chances: dict[int, tuple[float, float]] = {}
    for wanted in {token for _, token, _, _ in voters}:
        mine = [voter for voter in voters if voter[1] == wanted]
        share = sum(weight for *_, weight in mine) / total
        kind = sum(share < bar for bar in SHARES)
        kind += kind > 0 or len(mine) < 3
        length = max(length for length, *_ in mine)
        origin = min(origin for *_, origin, _ in mine)
        step = next(i for i, top in enumerate(STEPS) if length <= top)
        chances[wanted] = (_BY_LENGTH[origin][step] * _BY_VOTES[kind], share)
    return chances


def _agree(text: Sequence[int], place: int, query: Sequence[int]) -> int:
    length = 0
    while length < min(place, len(query), LONGEST) and text[place - 1 - length] == query[-1 - length]:
        length += 1
    return length


def test_past_outputs_are_drafted_from() -> None:
    drafter = drafter_of()
    answered(drafter, [1, 2, 3, 4, 5], "a:1")
    assert propose(drafter, [9, 1, 2], name="a:2") == Tree.chain((3, 4, 5))
    assert propose(drafter, [500, 501], name="a:3") == Tree()  # prompts are not kept


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=2, max_size=12)), max_size=25))
def test_no_tenant_is_drafted_anothers_words(asked: list[tuple[int, list[int]]]) -> None:
    """Tenant t says the words 10 t to 10 t + 3 and no others, the word 50 apart, which all of them say."""
    drafter = drafter_of(min_match=0, store_tokens=60)
    for i, (tenant, words) in enumerate(asked):
        tokens = [50]
        one = request(tokens, f"{tenant}:{i}")
        drafter.start(one)
        tokens += [50 if word == 3 else 10 * tenant + word for word in words]
        (tree,) = drafter.propose([one], [63])
        assert set(tree.tokens) <= {50, *range(10 * tenant, 10 * tenant + 3)}
        drafter.stop(one.id)


def test_material_is_drafted_from_and_forgotten_with_its_request() -> None:
    drafter, tokens = drafter_of(), [500, 1, 2]
    one = request(tokens, "a:1", material=[[1, 2, 3, 4], [5, 6, 7, 8, 9]])
    drafter.start(one)
    assert drafter.propose([one], [9]) == [Tree.chain((3, 4))]  # and not on into the next text
    tokens += [3, 4, 5, 6]
    assert drafter.propose([one], [9]) == [Tree.chain((7, 8, 9))]
    drafter.stop("a:1")
    assert propose(drafter, [6, 7], name="a:2") == Tree()
    assert propose(drafter, [3, 4], name="a:3") == Tree.chain((5, 6))  # the answer is kept, as always


def test_material_may_be_read_late_or_anew() -> None:
    drafter = drafter_of(store_tokens=0)
    for _ in range(2):  # never started, then one that shrank
        for tokens in ([1, 2], [5, 6, 1, 2, 3, 9, 9, 9]):
            one = request(tokens, "a", material=[[5, 6, 1, 2, 3]])
            assert drafter.propose([one], [1])[0].tokens == ((3,) if len(tokens) == 2 else (9,))


def test_the_longer_match_comes_first_and_the_other_branches() -> None:
    drafter = drafter_of()
    answered(drafter, [5, 6, 1, 2, 3], "a:1")
    tree = propose(drafter, [1, 2, 4, 8, 5, 6, 1, 2], budget=2, name="a:2")
    assert tree == Tree((3, 4), (-1, -1))


def test_a_request_that_is_computed_anew_is_kept_once() -> None:
    drafter, tokens = drafter_of(), [500, 501]
    drafter.start(request(tokens, "a:1", prompt=2))
    tokens += [1, 2, 3]
    drafter.stop("a:1")
    drafter.start(request(tokens, "a:1", prompt=2))
    tokens += [4, 5, 6]
    drafter.stop("a:1")
    assert drafter.store.tokens == 6


def test_drafts_do_not_depend_on_company() -> None:
    rng = random.Random(1)
    drafter = drafter_of()
    for _ in range(20):
        drafter.store.insert("a", [rng.randrange(4) for _ in range(50)])
    texts = [request([rng.randrange(4) for _ in range(60)], f"a:{i}") for i in range(8)]
    together = drafter.propose(texts, [9] * 8)
    assert [drafter.propose([one], [9])[0] for one in texts] == list(together)
    assert any(not tree.is_chain for tree in together)


def test_a_stopped_request_is_forgotten_and_one_that_shrank_read_anew() -> None:
    drafter = drafter_of(store_tokens=0)
    propose(drafter, [1, 2, 3, 4, 1, 2])
    drafter.stop("a")
    drafter.stop("never started")
    assert drafter.promise("a") == []
    assert propose(drafter, [8, 8, 9, 1, 2]) == Tree()
    assert propose(drafter, [6, 7, 6, 7], budget=1).tokens == (6,)


def first_promise(drafter: SuffixDrafter, name: str) -> float:
    propose(drafter, [1, 2, 3, 9, 1, 2], name=name)
    return (drafter.promise(name) or [0.0])[0]


def test_promises_follow_what_happened_to_the_request_first() -> None:
    drafter = drafter_of()
    before = first_promise(drafter, "a")
    for _ in range(30):
        first_promise(drafter, "a")
        drafter.observe([verdict([3, 5])])
    others, good = first_promise(drafter, "b"), first_promise(drafter, "a")
    assert before < others < good
    assert good > 0.9
    for _ in range(60):
        first_promise(drafter, "a")
        drafter.observe([verdict([4])])
    assert first_promise(drafter, "a") < 0.1


def test_every_branch_is_learned_from_once() -> None:
    text = [9, 1, 2, 30, 31, 8, 1, 2, 40, 41, 7, 1, 2]  # (40, 30) under the root, 41 and 31 under them
    drafter = drafter_of()
    for _ in range(20):
        propose(drafter, text)
        drafter.observe([verdict([30, 31])])
    assert drafter.promise("a") == []  # the guess is spent
    propose(drafter, text)
    promise = drafter.promise("a")
    assert promise
    assert 0.4 < promise[0] < 0.6  # one of two siblings in the same state was right each time
    assert promise[2] / promise[0] > 0.85  # 31 was right each time, and 41 is like it


def test_it_drafts_less_where_it_was_wrong() -> None:
    text = [*range(100, 140), 7, *range(100, 106)]
    drafter = SuffixDrafter(min_chance=0.3)
    before = len(propose(drafter, text, budget=20))
    for _ in range(60):
        propose(drafter, text, budget=20)
        drafter.observe([verdict([3])])
    assert len(propose(drafter, text, budget=20)) < before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": -1}, "min_match=-1: must be 0 to 32"),
        ({"min_chance": 0.0}, "min_chance=0.0: must be above 0, at most 1"),
        ({"candidates": 0}, "candidates=0: must be 1 to 1024"),
        ({"store_tokens": -5}, "store_tokens=-5: must be 0"),
    ],
)
def test_wrong_options_explain_themselves(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SuffixDrafter(**options)


@pytest.mark.alone
def test_a_round_of_32_is_quick() -> None:
    rng = random.Random(0)
    drafter = SuffixDrafter()
    texts = [[rng.randrange(200) for _ in range(1000)] for _ in range(64)]
    for text in texts:
        drafter.store.insert("", text)
    requests = [request(text[:300], f":{i}") for i, text in enumerate(texts[:32])]
    took = []
    for _ in range(20):
        begin = time.perf_counter()
        trees = drafter.propose(requests, [16] * 32)
        took.append(time.perf_counter() - begin)
    assert all(trees)
    assert min(took) < 0.0015  # five times the aim, for slow machines


def test_compiling_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    opening, target = cast(Any, SimpleNamespace(say=said.append)), cast(Any, None)
    SuffixDrafter.open(opening, target)
    said.clear()
    SuffixDrafter.open(opening, target)
    assert not said or compiling._folder() is None, "it is compiled by now"
    monkeypatch.setattr(compiling, "numba", object())
    monkeypatch.setattr(compiling, "_folder", lambda: tmp_path)
    SuffixDrafter.open(opening, target)
    assert "(once)" in said[-1]


PROMPTS = [[5, 6, 7, 8], [9] * 12, list(range(40, 70)), [100, 3, 100, 3, 100, 3], [10, 20, 30, 40, 10, 20, 30], [1]]


PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)


OFF = SpeculationParams(enabled=False)


both = pytest.mark.parametrize("rounds", ["eager", "queued"])


class Watched(SuffixDrafter):
    """Notes what it drafts."""

    def __init__(self, **options: Any) -> None:
        self.trees: list[Tree] = []
        super().__init__(**options)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        trees = super().propose(requests, budget)
        self.trees += trees
        return trees


def ask(llm: LLM, params: SamplingParams, how: SpeculationParams, alone: bool = False) -> list[CompletionOutput]:
    params = replace(params, speculation=how)
    if alone:
        return [llm.generate([prompt], params)[0].outputs[0] for prompt in PROMPTS]
    return [output.outputs[0] for output in llm.generate(PROMPTS, [params] * len(PROMPTS))]


def accepted(answers: Sequence[CompletionOutput]) -> int:
    return sum(answer.speculation.accepted for answer in answers)


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("draft_tokens", "branches"), [(1, False), (24, True)])
def test_the_same_tokens_alone_and_in_company(
    open_llm: Callable[..., LLM], rounds: str, temperature: float, draft_tokens: int, branches: bool
) -> None:
    drafter = Watched()
    llm = open_llm(drafter=drafter, planner="fixed", rounds=rounds)
    params = replace(PARAMS, temperature=temperature)
    plain = [answer.token_ids for answer in ask(llm, params, OFF, alone=True)]
    for alone in (True, False, False):  # from the second time on past outputs vote, too
        got = ask(llm, params, SpeculationParams(draft_tokens=draft_tokens), alone)
        assert [answer.token_ids for answer in got] == plain
        assert not any(stats.failures for answer in got for stats in answer.speculation.by_drafter.values())
    assert any(not tree.is_chain for tree in drafter.trees) == branches
    assert accepted(got) > 0


@both
def test_what_was_answered_before_is_drafted_for_the_same_tenant_only(
    open_llm: Callable[..., LLM], rounds: str
) -> None:
    llm = open_llm(drafter=Watched(min_match=2), planner="fixed", rounds=rounds)
    one, two = SpeculationParams(tenant="one"), SpeculationParams(tenant="two")
    first = accepted(ask(llm, PARAMS, one))
    assert accepted(ask(llm, PARAMS, two)) == first  # no benefit from the other tenant
    assert accepted(ask(llm, PARAMS, one)) > first + 100


@both
def test_material_is_drafted_from(open_llm: Callable[..., LLM], rounds: str) -> None:
    llm = open_llm(drafter=SuffixDrafter(min_match=2, store_tokens=0), planner="fixed", rounds=rounds)
    only_letters = dict.fromkeys(range(64, 90), 12.0)  # ASCII, so that the text gives the same tokens again
    params = replace(PARAMS, logit_bias=only_letters, max_tokens=60)
    plain = ask(llm, params, SpeculationParams())
    texts = [answer.text for answer in plain]
    assert all(llm.tokenizer.encode(text) == answer.token_ids for text, answer in zip(texts, plain, strict=True))
    got = ask(llm, params, SpeculationParams(material=texts))
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in plain]
    assert accepted(got) > accepted(plain) + 150
    assert accepted(ask(llm, params, SpeculationParams())) == accepted(plain)  # it went with its requests


def test_material_without_a_drafter_for_it_is_refused(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter=["ngram", SuffixDrafter()])
    given = SpeculationParams(material=["abc"])
    with pytest.raises(InvalidRequest, match=r"speculation\.material: ngram does not draft from it; name .*: suffix"):
        ask(llm, PARAMS, given)
    with pytest.raises(InvalidRequest, match="prediction does not draft from it"):
        ask(llm, replace(PARAMS, prediction="abc"), given)
    fine = [replace(given, drafter="suffix"), replace(given, drafter="ngram+suffix"), replace(given, enabled=False)]
    for how in fine:
        assert ask(llm, PARAMS, how)[0].error is None
    with pytest.raises(InvalidRequest, match="there is no drafter to draft from it; load one that does, such as suff"):
        ask(open_llm(drafter=None), PARAMS, given)


Texts = list[list[int]]


letters = st.integers(0, 2)


sequences = st.lists(letters, min_size=2, max_size=40)


def agreement(text: Sequence[int], place: int, query: Sequence[int]) -> int:
    length = 0
    while length < min(place, len(query), code.LONGEST) and text[place - 1 - length] == query[-1 - length]:
        length += 1
    return length


def scan(texts: Texts, query: Sequence[int]) -> tuple[int, Counter[int]]:
    """The longest agreement, and what follows there, found the long way."""
    all_of = [(agreement(t, p, query), t[p]) for t in texts for p in range(1, len(t))]
    longest = max((length for length, _ in all_of), default=0)
    return longest, Counter(token for length, token in all_of if length == longest and longest)


def found(store: SuffixStore, query: Sequence[int], tenant: str = "", most: int = 10_000) -> tuple[int, Counter[int]]:
    match = store.longest(tenant, query, most=most)
    index = store.index(tenant)
    return match.length, Counter(index.text[list(match.places)].tolist() if index else [])


def check(index: SuffixIndex) -> None:
    """What must hold of an index at any time: all places once, in order, in blocks that are not too empty."""
    data, text = index.data, index.text
    blocks, most = int(data[code.BLOCKS]), int(data[code.MOST])
    order = data[code.HEAD : code.HEAD + most].tolist()
    sizes = data[code.HEAD + 3 * most : code.HEAD + 4 * most]
    firsts = data[code.HEAD + most :][:blocks].tolist()
    before = data[code.HEAD + 2 * most :][:blocks].tolist()
    assert sorted(order) == list(range(most))
    places = code.places_of(data)
    listed = [int(places[b * code.WIDTH + i]) for b in order[:blocks] for i in range(sizes[b])]
    assert firsts == [int(places[b * code.WIDTH]) for b in order[:blocks]]
    assert before == [int(text[place - 1]) for place in firsts]
    length = int(data[code.LENGTH])
    assert sorted(listed) == [p for p in range(1, length) if text[p] >= 0 and text[p - 1] >= 0]
    keys = [(_context(text.tolist(), place), place) for place in listed]
    assert keys == sorted(keys)
    filled = [int(sizes[b]) for b in order[:blocks]]
    assert all(0 < size <= code.WIDTH for size in filled)
    assert all(one + two > code.WIDTH // 2 for one, two in pairwise(filled))


def _context(text: list[int], place: int) -> list[int]:
    context: list[int] = []
    while len(context) < code.LONGEST and text[place - 1 - len(context)] >= 0:
        context.append(text[place - 1 - len(context)])
    return [*context, -1] if len(context) < code.LONGEST else context


@settings(deadline=None)
@given(st.lists(sequences, max_size=8), st.lists(letters, max_size=45))
def test_it_finds_what_a_scan_finds(texts: Texts, query: list[int]) -> None:
    store = SuffixStore()
    for text in texts:
        store.insert("", text)
    assert found(store, query) == scan(texts, query)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(letters, max_size=30), max_size=12))
def test_a_text_that_grows_is_found_at_once(parts: Texts) -> None:
    index, text = SuffixIndex(), list[int]()
    for part in parts:
        index.append(part)
        text += part
        match = index.longest(text, most=10_000)
        length, counts = scan([text], text)
        assert (match.length, Counter(index.text[list(match.places)].tolist())) == (length, counts)
    check(index)


actions = st.one_of(
    st.tuples(st.just("insert"), st.sampled_from("ab"), st.lists(st.integers(0, 3), min_size=2, max_size=150)),
    st.tuples(st.just("use"), st.sampled_from("ab"), st.lists(st.integers(0, 3), min_size=1, max_size=5)),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(actions, max_size=40), st.integers(100, 600))
def test_eviction_goes_by_use_and_leaves_nothing_behind(steps: list[tuple[str, str, list[int]]], bound: int) -> None:
    """Beside a model: a list of (tenant, sequence), the one unused for longest first."""
    store = SuffixStore(bound)
    kept: list[tuple[str, list[int]]] = []
    for action, tenant, tokens in steps:
        if action == "insert":
            text = tokens[-bound:]
            while sum(len(t) for _, t in kept) + len(text) > bound:
                kept.pop(0)
            kept.append((tenant, text))
            store.insert(tenant, tokens)
        elif index := store.index(tenant):
            match = store.longest(tenant, tokens)
            if match.places:
                place = match.places[-1]
                began = place
                while index.text[began - 1] >= 0:
                    began -= 1
                ended = place
                while index.text[ended] >= 0:
                    ended += 1
                mine = [t for owner, t in kept if owner == tenant]
                used = index.text[began:ended].tolist()
                assert used in mine
                if mine.count(used) == 1:  # of twins the model cannot tell which was used
                    store.use(tenant, place)
                    kept.remove((tenant, used))
                    kept.append((tenant, used))
        assert store.tokens == sum(len(t) for _, t in kept) <= bound
        for owner in "ab":
            texts = [t for name, t in kept if name == owner]
            assert found(store, tokens, owner) == scan(texts, tokens)
    for owner in "ab":
        if index := store.index(owner):
            check(index)


def test_tenants_without_end_take_bounded_room() -> None:
    store = SuffixStore(100_000)
    store.insert("first", [1, 2, 3])
    for i in range(3000):
        store.insert(f"tenant {i}", [i, i + 1])
        if i % 100 == 0:
            store.use("first", 1)
    names = ["first", *(f"tenant {i}" for i in range(3000))]
    kept = [index for name in names if (index := store.index(name)) is not None]
    assert sum(index.data.nbytes for index in kept) < 100 * store.store_tokens
    assert store.tokens == 3 + 2 * (len(kept) - 1)
    assert found(store, [2], "first") == (1, Counter([3]))  # used of late
    assert found(store, [2999], "tenant 2999") == (1, Counter([3000]))
    assert store.index("tenant 0") is None


def test_of_many_places_with_one_context_the_latest_are_given() -> None:
    store = SuffixStore()
    for i in range(1000):
        store.insert("", [7, 8, 100 + i % 2])
    match = store.longest("", [7, 8], most=10)
    assert match.length == 2
    assert list(match.places) == [3 + 4 * i for i in range(999, 989, -1)]


@settings(deadline=None)
@given(st.lists(sequences, max_size=8), st.lists(letters, max_size=45), st.integers(1, 30), st.integers(1, 5))
def test_places_come_by_how_far_they_agree(texts: Texts, query: list[int], most: int, deep: int) -> None:
    index = SuffixIndex()
    for text in texts:
        index.append([*text, -1])
    other = np.array([-1, *query], np.int32)
    places, lengths = np.empty(most, np.int32), np.empty(most, np.int32)
    count, longest = code.gather(index.data, other, len(other), 1, deep, places, lengths)
    agreeing = sorted((agreement(t, p, query) for t in texts for p in range(1, len(t))), reverse=True)
    wanted = [length for length in agreeing if length and length * deep >= agreeing[0]][:most]
    assert lengths[:count].tolist() == wanted
    assert longest == max(wanted, default=0)
    assert len(set(places[:count].tolist())) == count
    whole = index.text.tolist()
    assert [agreement(whole, p, query) for p in places[:count].tolist()] == wanted


def test_too_long_a_sequence_keeps_its_end() -> None:
    store = SuffixStore(10)
    store.insert("", list(range(100)))
    assert store.tokens == 10
    assert found(store, [88, 89]) == (0, Counter())
    assert found(store, [98]) == (1, Counter([99]))


def test_a_store_of_nothing_keeps_nothing() -> None:
    store = SuffixStore(0)
    store.insert("", [1, 2, 3])
    assert store.tokens == 0
    assert store.index("") is None


def test_room_does_not_grow_with_what_was_forgotten() -> None:
    store = SuffixStore(2000)
    for i in range(400):
        store.insert("", [(i * 37 + j * j) % 50 for j in range(90)])
    index = store.index("")
    assert index is not None
    assert index.room <= 4 * 2000 + 400
    check(index)


def test_uses_are_noted_late_but_in_their_order() -> None:
    store = SuffixStore(40)
    for first in (0, 100, 200, 300):
        store.insert("", list(range(first, first + 10)))
    index = store.index("")
    assert index is not None
    places = {first: index.longest([first, first + 1]).places[0] for first in (0, 100, 200, 300)}
    for first in (0, 100, 0, 300, 200, *[100] * 10_000, 300):
        store.use("", places[first])
    assert len(store._used) < 10_000, "they do not pile up"
    for first in (400, 500, 600):  # each takes the place of the one unused for longest
        store.insert("", list(range(first, first + 10)))
    kept = [first for first in (0, 100, 200, 300, 400, 500, 600) if store.longest("", [first, first + 1], 2).length]
    assert kept == [300, 400, 500, 600]


@pytest.mark.alone
def test_inserting_is_quick() -> None:
    store = SuffixStore(20_000)
    text = [(i * i * 31 + i // 7) % 1000 for i in range(2000)]
    store.insert("", text)
    took = []
    for i in range(30):  # from the tenth on each insert evicts as much
        begin = time.perf_counter()
        store.insert("", [t + i for t in text])
        took.append(time.perf_counter() - begin)
    assert min(took[12:]) / len(text) < 50e-6  # five times the aim, for slow machines


def test_without_a_compiler_it_finds_the_same() -> None:
    program = """
import sys
sys.modules["numba"] = None
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.suffix import SuffixDrafter
drafter = SuffixDrafter(store_tokens=8)
for text in ([1, 2, 3], [4, 5, 6, 7], [5, 6, 8, 4]):
    drafter.store.insert("", text)
print([t.tokens for t in drafter.propose([DraftRequest("a", [9, 5, 6], 3, SamplingParams(), 0)], [2])])
"""
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=surroundings
    )
    assert done.stdout == "[(8, 7)]\n", done.stderr
