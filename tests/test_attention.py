"""Attention over pages against the plainest form of it: one row, one head, one key at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels.attention import Span, paged_attention, visible_rows
from slipstream.models.attention import PassContext
from slipstream.models.batch import PassBatch

PAGE = 4
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Request:
    """What one request brings: rows behind a prefix, as a tree or (no parents) in causal order."""

    prefix: int
    rows: int
    parents: tuple[int, ...] | None

    def ancestors(self, row: int) -> list[int]:
        """The rows that a row sees, itself the last."""
        if self.parents is None:
            return list(range(row + 1))
        above = self.ancestors(self.parents[row]) if self.parents[row] >= 0 else []
        return [*above, row]

    def position(self, row: int) -> int:
        return self.prefix + len(self.ancestors(row)) - 1


class Scene:
    """A cache with some requests in it, on scattered pages; free slots hold NaN."""

    def __init__(
        self, requests: list[Request], kv_heads: int, group: int, dim: int, value_dim: int, seed: int, scattered: bool
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.requests = requests
        counts = [-(-(r.prefix + r.rows) // PAGE) for r in requests]
        ids = list(range(sum(counts) + 2))
        if scattered:
            ids = torch.randperm(len(ids), generator=generator).tolist()
        self.pages = [tuple(ids[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(len(counts))]
        slots = len(ids) * PAGE
        rows = sum(r.rows for r in requests)
        self.query = torch.randn(rows, kv_heads * group, dim, generator=generator)
        self.keys = torch.full((slots, kv_heads, dim), math.nan)
        self.values = torch.full((slots, kv_heads, value_dim), math.nan)
        for i, request in enumerate(requests):
            own = [self.slot(i, at) for at in range(request.prefix + request.rows)]
            self.keys[own] = torch.randn(len(own), kv_heads, dim, generator=generator)
            self.values[own] = torch.randn(len(own), kv_heads, value_dim, generator=generator)

    def slot(self, request: int, at: int) -> int:
        return self.pages[request][at // PAGE] * PAGE + at % PAGE

    def spans(self) -> list[Span]:
        """As a pass makes them."""
        starts = [0]
        masks: list[int] = []
        for request in self.requests:
            starts.append(starts[-1] + request.rows)
            tree = request.parents is not None
            masks += [_word(request.ancestors(row)) if tree else 0 for row in range(request.rows)]
        batch = PassBatch(
            input_ids=torch.zeros(starts[-1], dtype=torch.int64),
            positions=torch.tensor([r.position(row) for r in self.requests for row in range(r.rows)]),
            slots=torch.tensor(
                [self.slot(i, r.prefix + n) for i, r in enumerate(self.requests) for n in range(r.rows)]
            ),
            row_starts=tuple(starts),
            prefix_lengths=tuple(r.prefix for r in self.requests),
            pages=tuple(self.pages),
            is_tree=tuple(r.parents is not None for r in self.requests),
            masks=torch.tensor(masks) if any(r.parents is not None for r in self.requests) else None,
            logit_rows=None,
        )
        return PassContext(batch, _PagesOnly()).spans  # type: ignore[arg-type]

    def plain(
        self, scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:  # [N, H, D_v]
        out = []
        row_of_all = 0
        for i, request in enumerate(self.requests):
            for row in range(request.rows):
                seen = [(at, self.slot(i, at)) for at in range(request.prefix)]
                seen += [(request.position(n), self.slot(i, request.prefix + n)) for n in request.ancestors(row)]
                if window is not None:
                    seen = [(at, slot) for at, slot in seen if request.position(row) - at < window]
                out.append(self._row(row_of_all, [slot for _, slot in seen], scaling, softcap, sinks))
                row_of_all += 1
        return torch.stack(out)

    def _row(self, row: int, slots: list[int], scaling: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
        heads, kv_heads = self.query.shape[1], self.keys.shape[1]
        out = []
        for head in range(heads):
            kv = head * kv_heads // heads
            scores = (self.keys[slots, kv].double() @ self.query[row, head].double()) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out.append((weights / total) @ self.values[slots, kv].double())
        return torch.stack(out).float()


class _PagesOnly:
    page_size = PAGE


def _word(rows: list[int]) -> int:
    """Bits as one signed 64-bit word."""
    word = sum(1 << row for row in rows)
    return word - (1 << 64) if word >= 1 << 63 else word


@st.composite
def requests(draw: st.DrawFn, most_rows: int = 12) -> Request:
    rows = draw(st.integers(1, most_rows))
    parents = None
    if draw(st.booleans()):
        parents = (-1, *(draw(st.integers(0, row - 1)) for row in range(1, rows)))
    return Request(draw(st.integers(0, 21)), rows, parents)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.lists(requests(), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.sampled_from([2, 5, 8]),
    value_dim=st.sampled_from([3, 8]),
    window=st.none() | st.integers(1, 25),
    softcap=st.none() | st.sampled_from([0.5, 3.0]),
    with_sinks=st.booleans(),
    scattered=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_few_rows(
    batch: list[Request],
    kv_heads: int,
    group: int,
    dim: int,
    value_dim: int,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    scattered: bool,
    seed: int,
) -> None:
    scene = Scene(batch, kv_heads, group, dim, value_dim, seed, scattered)
    sinks = torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(seed)) if with_sinks else None
    ours = paged_attention(
        scene.query, scene.keys, scene.values, scene.spans(), scaling=0.7, window=window, softcap=softcap, sinks=sinks
    )
    torch.testing.assert_close(ours, scene.plain(0.7, window, softcap, sinks), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"), [(None, None, False), (9, None, False), (9, 2.0, False), (None, None, True)]
)
@pytest.mark.parametrize("rows", [63, 64, 65, 300])
def test_many_rows(rows: int, window: int | None, softcap: float | None, with_sinks: bool, scattered: bool) -> None:
    """On both sides of where another kernel takes over, with a small request on either side."""
    batch = [Request(5, 1, None), Request(13, rows, None), Request(3, 4, (-1, 0, 0, 2))]
    scene = Scene(batch, 2, 2, 4, 6, rows, scattered)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.1]) if with_sinks else None
    ours = paged_attention(
        scene.query, scene.keys, scene.values, scene.spans(), scaling=0.5, window=window, softcap=softcap, sinks=sinks
    )
    torch.testing.assert_close(ours, scene.plain(0.5, window, softcap, sinks), atol=TOLERANCE, rtol=0)


def test_a_full_tree_of_64_rows() -> None:
    """The last row's bit is the sign of its word."""
    parents = (-1, *(row // 2 for row in range(63)))
    scene = Scene([Request(6, 64, parents)], 1, 2, 4, 4, 0, True)
    ours = paged_attention(scene.query, scene.keys, scene.values, scene.spans(), scaling=1.0)
    torch.testing.assert_close(ours, scene.plain(1.0, None, None, None), atol=TOLERANCE, rtol=0)


def test_visible_rows_reads_every_bit() -> None:
    words = torch.tensor([_word(sorted({row, 0})) for row in range(64)])
    wanted = torch.eye(64, dtype=torch.bool)
    wanted[:, 0] = True
    assert torch.equal(visible_rows(words, 64), wanted)


def test_neighbouring_pages_are_read_in_place() -> None:
    """A slice of the cache is no copy; scattered pages are gathered."""
    neighbours, scattered = (
        Scene([Request(9, 2, None)], 1, 1, 2, 2, 0, False),
        Scene([Request(9, 2, None)], 1, 1, 2, 2, 1, True),
    )
    (span,) = neighbours.spans()
    assert span.keys == slice(0, 11)
    (span,) = scattered.spans()
    assert isinstance(span.keys, Tensor)
    assert span.keys.tolist() == [scattered.slot(0, at) for at in range(11)]


def test_work_that_layers_share_is_done_once() -> None:
    (span,) = Scene([Request(9, 3, None)], 1, 1, 2, 2, 0, False).spans()
    assert span.bias(4) is span.bias(4)
    assert span.bias(None) is span.bias(None)
    assert span.bias(None) is not span.bias(4)


def test_one_row_that_sees_everything_needs_no_mask() -> None:
    (span,) = Scene([Request(9, 1, None)], 1, 1, 2, 2, 0, False).spans()
    assert span.bias(None) is None
    assert span.bias(10) is None  # ten tokens: the prefix and itself
    narrow = span.bias(9)
    assert narrow is not None
    assert narrow.tolist() == [[-math.inf] + [0.0] * 9]


def test_the_cache_is_not_modified() -> None:
    scene = Scene([Request(9, 3, None)], 2, 2, 4, 4, 0, True)
    before = scene.keys.clone(), scene.values.clone(), scene.query.clone()
    paged_attention(scene.query, scene.keys, scene.values, scene.spans(), scaling=1.0, window=3, softcap=1.0)
    for now, then in zip((scene.keys, scene.values, scene.query), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [3, 70])
def test_16_bits(dtype: torch.dtype, rows: int) -> None:
    scene = Scene([Request(9, rows, None)], 2, 2, 8, 8, 0, True)
    ours = paged_attention(
        scene.query.to(dtype), scene.keys.to(dtype), scene.values.to(dtype), scene.spans(), scaling=0.4, window=11
    )
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), scene.plain(0.4, 11, None, None), atol=3e-2, rtol=0)


def test_large_scores_do_not_overflow() -> None:
    scene = Scene([Request(4, 2, None)], 1, 1, 4, 4, 0, False)
    out = paged_attention(1e4 * scene.query, 1e4 * scene.keys, scene.values, scene.spans(), scaling=1.0)
    assert torch.isfinite(out).all()
