"""The suffix store: longest matches and counts as a scan finds them, eviction in order of use, tenants kept apart."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.errors import ConfigError
from slipstream.drafters.suffix import index as code
from slipstream.drafters.suffix.store import SuffixIndex, SuffixStore

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


def test_tenants_never_see_each_other() -> None:
    store = SuffixStore()
    store.insert("one", [1, 2, 3, 4])
    store.insert("two", [1, 2, 5, 6])
    assert found(store, [1, 2], "one") == (2, Counter([3]))
    assert found(store, [1, 2], "two") == (2, Counter([5]))
    assert found(store, [1, 2], "") == (0, Counter())
    assert found(store, [5], "one") == (0, Counter())


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


def test_a_wrong_bound_explains_itself() -> None:
    with pytest.raises(ConfigError, match="store_tokens=-1: must be 0"):
        SuffixStore(-1)


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
