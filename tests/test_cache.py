"""The cache's tensors: writes, moves that overlap, pages copied and cleared, and compaction of batches of trees."""

from __future__ import annotations

import torch

from slipstream.kv.cache import KVCache, LayerShape, compaction
from slipstream.kv.pages import PageCopy

CPU = torch.device("cpu")
LAYERS = (LayerShape(2, 4, 4), LayerShape(2, 4, 4), LayerShape(1, 4, 3))


def numbered(num_pages: int = 4, page_size: int = 4, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache whose slot s holds 100 * layer + s, values negated."""
    cache = KVCache(LAYERS, num_pages, page_size, dtype, CPU)
    slots = torch.arange(num_pages * page_size)
    for layer, shape in enumerate(LAYERS):
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
    cache = KVCache(LAYERS, 3, 16, torch.bfloat16, CPU)
    assert cache.keys(0).shape == (48, 2, 4)
    assert cache.values(2).shape == (48, 1, 3)
    assert KVCache.bytes_per_page(LAYERS, 16, torch.bfloat16) == (16 + 16 + 7) * 16 * 2
    assert cache.bytes == 3 * KVCache.bytes_per_page(LAYERS, 16, torch.bfloat16)
    tensors = [cache.keys(i) for i in range(3)] + [cache.values(i) for i in range(3)]
    assert cache.bytes == sum(t.numel() * t.element_size() for t in tensors)


def test_a_fresh_cache_is_zeros_even_where_nan_lay() -> None:
    torch.full((64, 16, 2, 4), float("nan"))  # freed at once: its memory may be given out again
    cache = KVCache(LAYERS, 64, 16, torch.float32, CPU)
    for layer in range(len(LAYERS)):
        assert not cache.keys(layer).any()
        assert not cache.values(layer).any()


def test_an_empty_cache_is_possible() -> None:
    assert KVCache(LAYERS, 0, 16, torch.float32, CPU).bytes == 0
    assert KVCache((), 4, 16, torch.float32, CPU).bytes == 0


def test_layers_do_not_overlap() -> None:
    cache = numbered()
    for layer in range(len(LAYERS)):
        assert held(cache, layer) == list(range(16))


def test_a_write_converts_to_the_caches_type() -> None:
    cache = numbered(dtype=torch.bfloat16)
    assert cache.keys(0).dtype == torch.bfloat16
    assert held(cache, 0) == list(range(16))


def test_moves_that_overlap_read_before_they_write() -> None:
    cache = numbered()
    cache.move(torch.tensor([3, 5, 1, 7]), torch.tensor([2, 3, 5, 7]))
    for layer in range(len(LAYERS)):
        assert held(cache, layer) == [0, 1, 3, 5, 4, 1, 6, *range(7, 16)]


def test_pages_are_copied_and_cleared_in_all_layers() -> None:
    cache = numbered()
    cache.copy_pages([PageCopy(0, 3), PageCopy(1, 2)])
    cache.copy_pages([])
    for layer in range(len(LAYERS)):
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
