"""Pages and the tensors behind them: who owns what, moves, forks and copies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.core.errors import CapacityError, ConfigError
from slipstream.kv.cache import KVCache, LayerShape, compaction
from slipstream.kv.pages import OutOfPages, PageCopy, PagePool, PageTable


def test_the_lowest_free_pages_go_first_in_order() -> None:
    pool = PagePool(8, page_size=4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]
    pool.release([2, 0])
    assert pool.allocate(3) == [0, 2, 5]


def test_running_out_takes_nothing() -> None:
    pool = PagePool(4, page_size=4)
    table = PageTable(pool)
    table.reserve(4)
    with pytest.raises(OutOfPages, match="4 cache pages asked for, 3 of 4 are free"):
        table.reserve(20)
    assert isinstance(OutOfPages(), CapacityError)
    assert table.pages == (0,)
    assert pool.free_pages == 3
    assert pool.allocate(3) == [1, 2, 3]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="page_size=0"):
        PagePool(4, page_size=0)


def test_slots_of_neighbouring_pages_are_a_range() -> None:
    pool = PagePool(8, page_size=4)
    table = PageTable(pool)
    table.reserve(12)
    assert table.slots(2, 7) == range(2, 9)
    assert table.slots(5, 0) == range(0)


def test_slots_cross_scattered_pages() -> None:
    pool = PagePool(8, page_size=4)
    table, other = PageTable(pool), PageTable(pool)
    table.reserve(4)
    other.reserve(4)
    table.reserve(8)
    assert table.pages == (0, 2)
    assert list(table.slots(2, 4)) == [2, 3, 8, 9]


def test_slots_and_commit_stay_within_what_is_reserved() -> None:
    table = PageTable(PagePool(8, page_size=4))
    table.reserve(5)
    with pytest.raises(AssertionError, match="not in 8 reserved"):
        table.slots(6, 3)
    table.commit(8)
    with pytest.raises(AssertionError, match="8 are reserved"):
        table.commit(1)


def test_a_shared_page_is_never_written() -> None:
    pool = PagePool(8, page_size=4)
    table = PageTable(pool)
    table.reserve(8)
    table.commit(5)
    pool.share([table.pages[1]])
    assert list(table.slots(0, 5)) == [0, 1, 2, 3, 4]  # reading is fine
    with pytest.raises(AssertionError, match="page 1 is shared"):
        table.slots(5, 1)


def test_a_fork_shares_full_pages_and_copies_the_last() -> None:
    pool = PagePool(8, page_size=4)
    table = PageTable(pool)
    table.reserve(16)  # more than it has committed: those pages stay its own
    table.commit(6)
    twin, copies = table.fork()
    assert copies == [PageCopy(1, 4)]
    assert (twin.pages, twin.length) == ((0, 4), 6)
    assert [pool.references(page) for page in range(5)] == [2, 1, 1, 1, 1]
    pool.check_integrity([table.pages, twin.pages])


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    pool = PagePool(2, page_size=4)
    table = PageTable(pool)
    table.reserve(8)
    table.commit(8)
    twin, copies = table.fork()
    assert copies == []
    assert twin.pages == table.pages
    table.release()
    twin.release()
    assert pool.free_pages == 2


def test_a_fork_whose_last_tokens_differ_copies_their_pages() -> None:
    pool = PagePool(8, page_size=4)
    table = PageTable(pool)
    table.reserve(12)
    table.commit(9)
    twin, copies = table.fork(apart=2)
    assert copies == [PageCopy(1, 3), PageCopy(2, 4)]
    assert (twin.pages, twin.length) == ((0, 3, 4), 9)
    assert [pool.references(page) for page in range(5)] == [2, 1, 1, 1, 1]
    pool.check_integrity([table.pages, twin.pages])


def test_a_fork_without_a_page_left_shares_nothing() -> None:
    pool = PagePool(2, page_size=4)
    table = PageTable(pool)
    table.reserve(8)
    table.commit(6)
    with pytest.raises(OutOfPages):
        table.fork()
    pool.check_integrity([table.pages])


def test_trim_keeps_the_page_of_the_next_token() -> None:
    pool = PagePool(8, page_size=4)
    table = PageTable(pool)
    table.reserve(32)
    table.commit(8)
    table.trim(table.length + 1)
    assert table.pages == (0, 1, 2)
    assert pool.free_pages == 5


def test_integrity_finds_leaks_and_double_frees() -> None:
    pool = PagePool(4, page_size=4)
    pages = pool.allocate(2)
    pool.check_integrity([pages])
    with pytest.raises(AssertionError, match="page 1: 1 references, but 0 owners"):
        pool.check_integrity([pages[:1]])
    with pytest.raises(AssertionError, match="page 3: 0 references, but 1 owners"):
        pool.check_integrity([pages, [3]])
    with pytest.raises(AssertionError, match="not in the pool"):
        pool.check_integrity([pages, [4]])
    pool.release(pages)
    with pytest.raises(AssertionError, match="cannot be released again"):
        pool.release(pages[:1])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(pages[:1])


PAGE_SIZE = 4


NUM_PAGES = 12


LAYERS = (LayerShape(1, 2, 2), LayerShape(2, 1, 3))


@dataclass
class Owned:
    table: PageTable
    contents: list[int]  # the model: what each committed position holds


class Caches(RuleBasedStateMachine):
    """Rounds, forks, trims and releases in any order; each committed token is a number written to all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE)
        self.cache = KVCache(LAYERS, NUM_PAGES, PAGE_SIZE, torch.float32, torch.device("cpu"))
        self.owned: list[Owned] = []
        self.next_value = 1

    def write(self, slots: list[int]) -> list[int]:
        values = list(range(self.next_value, self.next_value + len(slots)))
        self.next_value += len(slots)
        for layer, shape in enumerate(LAYERS):
            rows = torch.tensor(values, dtype=torch.float32)[:, None, None]
            self.cache.write(
                layer,
                torch.tensor(slots),
                rows.expand(-1, shape.kv_heads, shape.key_dim),
                -rows.expand(-1, shape.kv_heads, shape.value_dim),
            )
        return values

    @precondition(lambda self: len(self.owned) < 4)
    @rule()
    def admit(self) -> None:
        self.owned.append(Owned(PageTable(self.pool), []))

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), rows=st.integers(1, 9))
    def round(self, data: st.DataObject, rows: int) -> None:
        one = data.draw(st.sampled_from(self.owned))
        pages = one.table.pages
        try:
            one.table.reserve(one.table.length + rows)
        except OutOfPages:
            assert one.table.pages == pages
            return
        slots = list(one.table.slots(one.table.length, rows))
        values = self.write(slots)
        path = sorted(data.draw(st.sets(st.integers(0, rows - 2)))) if rows > 1 else []
        padded = path + [0] * (rows - 1 - len(path))
        moves = compaction(
            torch.tensor([slots]),
            torch.tensor([padded], dtype=torch.int64).view(1, rows - 1),
            torch.tensor([len(path)]),
        )
        self.cache.move(moves.src, moves.dst)
        one.table.commit(1 + len(path))
        one.contents += [values[0], *(values[1 + node] for node in path)]

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), rows=st.integers(1, 9))
    def roll_back(self, data: st.DataObject, rows: int) -> None:
        one = data.draw(st.sampled_from(self.owned))
        if self.pool.pages_for(one.table.length + rows) - len(one.table.pages) <= self.pool.free_pages:
            one.table.reserve(one.table.length + rows)
            self.write(list(one.table.slots(one.table.length, rows)))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.owned))
        try:
            twin, copies = one.table.fork()
        except OutOfPages:
            assert self.pool.free_pages == 0
            return
        self.cache.copy_pages(copies)
        self.owned.append(Owned(twin, list(one.contents)))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.owned)).table
        table.trim(table.length + 1)
        assert table.capacity <= table.length + PAGE_SIZE

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.owned))
        one.table.release()
        assert (one.table.pages, one.table.length) == ((), 0)
        self.owned.remove(one)

    @invariant()
    def committed_tokens_stay(self) -> None:
        self.pool.check_integrity([one.table.pages for one in self.owned])
        for one in self.owned:
            assert one.table.length == len(one.contents)
            slots = torch.tensor(list(one.table.slots(0, one.table.length)), dtype=torch.int64)
            expected = torch.tensor(one.contents, dtype=torch.float32)[:, None, None]
            for layer in range(len(LAYERS)):
                assert (self.cache.keys(layer)[slots] == expected).all()
                assert (self.cache.values(layer)[slots] == -expected).all()


Caches.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


TestCaches = Caches.TestCase


CPU = torch.device("cpu")


CACHE_LAYERS = (LayerShape(2, 4, 4), LayerShape(2, 4, 4), LayerShape(1, 4, 3))


def numbered(num_pages: int = 4, page_size: int = 4, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache whose slot s holds 100 * layer + s, values negated."""
    cache = KVCache(CACHE_LAYERS, num_pages, page_size, dtype, CPU)
    slots = torch.arange(num_pages * page_size)
    for layer, shape in enumerate(CACHE_LAYERS):
        rows = (100.0 * layer + slots)[:, None, None]
        cache.write(
            layer,
            slots,
            rows.expand(-1, shape.kv_heads, shape.key_dim),
            -rows.expand(-1, shape.kv_heads, shape.value_dim),
        )
    return cache


def held(cache: KVCache, layer: int) -> list[int]:
    """What each slot holds, after checking that its keys and values agree."""
    k, v = cache.keys(layer), cache.values(layer)
    assert torch.equal(k, k[:, :1, :1].expand_as(k))
    assert torch.equal(v, -k[:, :1, :1].expand_as(v))
    return [int(x) - 100 * layer for x in k[:, 0, 0]]


def test_shapes_and_sizes() -> None:
    cache = KVCache(CACHE_LAYERS, 3, 16, torch.bfloat16, CPU)
    assert cache.keys(0).shape == (48, 2, 4)
    assert cache.values(2).shape == (48, 1, 3)
    assert KVCache.bytes_per_page(CACHE_LAYERS, 16, torch.bfloat16) == (16 + 16 + 7) * 16 * 2
    assert cache.bytes == 3 * KVCache.bytes_per_page(CACHE_LAYERS, 16, torch.bfloat16)
    tensors = [cache.keys(i) for i in range(3)] + [cache.values(i) for i in range(3)]
    assert cache.bytes == sum(t.numel() * t.element_size() for t in tensors)


def test_a_fresh_cache_is_zeros_even_where_nan_lay() -> None:
    torch.full((64, 16, 2, 4), float("nan"))  # freed at once: its memory may be given out again
    cache = KVCache(CACHE_LAYERS, 64, 16, torch.float32, CPU)
    for layer in range(len(CACHE_LAYERS)):
        assert not cache.keys(layer).any()
        assert not cache.values(layer).any()


def test_an_empty_cache_is_possible() -> None:
    assert KVCache(CACHE_LAYERS, 0, 16, torch.float32, CPU).bytes == 0
    assert KVCache((), 4, 16, torch.float32, CPU).bytes == 0


def test_layers_do_not_overlap() -> None:
    cache = numbered()
    for layer in range(len(CACHE_LAYERS)):
        assert held(cache, layer) == list(range(16))


def test_a_write_converts_to_the_caches_type() -> None:
    cache = numbered(dtype=torch.bfloat16)
    assert cache.keys(0).dtype == torch.bfloat16
    assert held(cache, 0) == list(range(16))


def test_moves_that_overlap_read_before_they_write() -> None:
    cache = numbered()
    cache.move(torch.tensor([3, 5, 1, 7]), torch.tensor([2, 3, 5, 7]))
    for layer in range(len(CACHE_LAYERS)):
        assert held(cache, layer) == [0, 1, 3, 5, 4, 1, 6, *range(7, 16)]


def test_pages_are_copied_and_cleared_in_all_layers() -> None:
    cache = numbered()
    cache.copy_pages([PageCopy(0, 3), PageCopy(1, 2)])
    cache.copy_pages([])
    for layer in range(len(CACHE_LAYERS)):
        assert held(cache, layer) == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 0, 1, 2, 3]
    cache.keys(1)[5] = float("nan")
    cache.clear([1])
    cache.clear([])
    assert not cache.keys(1)[4:8].any()
    assert held(cache, 0)[:4] == [0, 1, 2, 3]
    assert not cache.values(2)[4:8].any()


def test_compaction_of_a_batch() -> None:
    slot_of_row = torch.tensor([[0, 1, 2, 3], [12, 13, 4, 5], [8, 0, 0, 0]])  # the last request brought no draft
    path = torch.tensor([[0, 2, 0], [1, 2, 0], [0, 0, 0]])
    accepted = torch.tensor([2, 2, 0])
    cache = numbered()
    moves = compaction(slot_of_row, path, accepted)
    cache.move(moves.src, moves.dst)
    assert held(cache, 0) == [0, 1, 3, 3, 5, 5, 6, 7, 8, 9, 10, 11, 12, 4, 14, 15]


def test_compaction_writes_no_slot_twice_with_different_contents() -> None:
    slot_of_row = torch.tensor([[0, 1, 2, 3], [12, 13, 4, 5], [8, 0, 0, 0]])
    moves = compaction(slot_of_row, torch.tensor([[2, 0, 0], [0, 1, 2], [0, 0, 0]]), torch.tensor([1, 3, 0]))
    source: dict[int, int] = {}
    for src, dst in zip(moves.src.tolist(), moves.dst.tolist(), strict=True):
        assert source.setdefault(dst, src) == src
    assert source[1] == 3


def test_compaction_without_drafts() -> None:
    moves = compaction(torch.tensor([[4], [9]]), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0]))
    assert moves.src.numel() == moves.dst.numel() == 0
    cache = numbered()
    cache.move(moves.src, moves.dst)
    assert held(cache, 0) == list(range(16))
