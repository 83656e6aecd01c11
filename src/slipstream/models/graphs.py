"""CUDA graphs: work on a GPU as one launch, and passes over prompts that are captured as such.

A pass is some three hundred launches, and the host takes longer to make them than a GPU to run them. So the rows of
prompts are copied into static tensors, filled up to one of a few sizes, and the pass is captured once for each size.
Passes over few rows have the kernels of decoding passes: a row has the same bits captured or not, whatever the pass is
filled up with. Passes over many rows use cuBLAS, which promises nothing: the first captured pass of each size is
compared with the same pass launched kernel by kernel, and if a bit differs, none is captured any more.

Recording takes far longer than running, so it is counted, and so is compiling kernels of work that is not recorded:
both happen while a request waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import is_recording, recording, triton
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kv.cache import KVCache
from slipstream.models.batch import PassBatch

_log = logging.getLogger(__name__)

PROMPT_ROWS = (16, 32, 64, 128, 256, 512)
_REQUESTS = (16, 64)
_KEYS = (2048, 8192, 32768, 131072)
"""Few sizes: an unused place costs little, and a size that comes for the first time takes a tenth of a second."""
_MOST = 32
"""Captured passes that are kept; the least recently used ones are dropped."""

WIDE_PROMPT_ROWS = 1024
"""Larger passes over prompts take the device longer than the host, and are not captured."""

Run = Callable[[Tensor, Tensor, RowLayout, KVCache, Tensor], Tensor]
"""Ids, positions, layout, cache and the rows that get logits: returns the logits."""


@dataclass(slots=True)
class Recorded:
    """Graphs that this process recorded, kernels that it compiled outside of them, and the time that both took."""

    graphs: int = 0
    seconds: float = 0.0
    kernels: int = 0


recorded = Recorded()


def count_compiling() -> None:
    """Count kernels that are compiled while no graph is recorded, from now on."""
    settings = getattr(getattr(triton, "knobs", None), "compilation", None)
    if settings is not None and not isinstance(before := getattr(settings, "listener", None), _Counting):
        settings.listener = _Counting(before)


class _Counting:
    """Listens to Triton's compiler, which reports each kernel that it compiles or finds. before: the last listener."""

    def __init__(self, before: Callable[..., None] | None) -> None:
        self._before = before

    def __call__(self, *, times: Any, cache_hit: bool, **told: Any) -> None:
        if not is_recording():  # a recording is timed as a whole
            recorded.seconds += times.total / 1e6
            recorded.kernels += not cache_hit
        if self._before is not None:
            self._before(times=times, cache_hit=cache_hit, **told)


@cache
def _side(device: int) -> torch.cuda.Stream:
    """The stream for recording, always the same: memory that was freed on one stream is not used on another."""
    return torch.cuda.Stream(device)


def captured(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Record the work as a graph and return its launch. A first run compiles kernels.

    pool: memory that graphs share. A graph's results there last until another graph runs.
    """
    start = time.perf_counter()
    side = _side(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), recording():
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()  # so that the graph may use memory that was freed on another stream
    graph = torch.cuda.CUDAGraph()
    # `torch.cuda.graph` would also return all unused memory to the driver, only to ask for it again
    with torch.cuda.stream(side), recording():
        # other threads may use the device during the capture
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    recorded.graphs += 1
    recorded.seconds += time.perf_counter() - start
    return graph.replay


@dataclass(frozen=True, slots=True)
class PromptShape:
    rows: int
    requests: int
    keys: int

    @staticmethod
    def of(batch: PassBatch, keys: int, rows_of: Sequence[int] = PROMPT_ROWS) -> PromptShape | None:
        """The smallest size that fits; None if the batch exceeds all sizes."""
        found = [
            next((size for size in sizes if size >= wanted), None)
            for wanted, sizes in ((batch.size, rows_of), (batch.num_requests, _REQUESTS), (keys, _KEYS))
        ]
        rows, requests, most = found
        return None if rows is None or requests is None or most is None else PromptShape(rows, requests, most)


class _PromptGraph:
    """The static tensors of one size, and the pass over them."""

    def __init__(self, shape: PromptShape, run: Run, cache: KVCache, trash_slot: int) -> None:
        device = cache.device
        rows, requests = shape.rows, shape.requests
        self.ids, self.positions, self.places = torch.zeros((3, rows), dtype=torch.int64, device=device).unbind(0)
        self.slots = torch.full((rows,), trash_slot, dtype=torch.int64, device=device)
        self.starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self.lengths, self.logit_rows = torch.zeros((2, requests), dtype=torch.int64, device=device).unbind(0)
        self.pages = torch.zeros((requests, -(-shape.keys // cache.page_size)), dtype=torch.int32, device=device)
        self.logits: Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self._lanes = torch.arange(requests, device=device)
        self._keys, self._run, self._cache, self._trash_slot = shape.keys, run, cache, trash_slot

    def load(self, batch: PassBatch, layout: RowLayout) -> None:
        rows, requests = batch.size, batch.num_requests
        pairs: Sequence[tuple[Tensor, Tensor]] = (
            (self.ids, batch.input_ids),
            (self.positions, batch.positions),
            (self.places, layout.positions),
            (self.slots, layout.slots),
            (self.lengths, layout.lengths),
        )
        for static, values in pairs:
            static[: values.shape[0]].copy_(values)
        self.slots[rows:] = self._trash_slot
        self.starts[: requests + 1].copy_(layout.starts)
        self.starts[requests + 1 :] = batch.row_starts[-1]  # requests without rows
        columns = min(self.pages.shape[1], layout.pages.shape[1])  # a request may have more pages than the pass reads
        self.pages[:requests, :columns].copy_(layout.pages[:, :columns])
        assert batch.logit_rows is not None
        self.logit_rows[: batch.logit_rows.shape[0]].copy_(batch.logit_rows)

    def work(self) -> None:
        layout = RowLayout(
            positions=self.places,
            slots=self.slots,
            starts=self.starts,
            lanes=self._lanes,
            lengths=self.lengths,
            pages=self.pages,
            ancestors=None,
            page_size=self._cache.page_size,
            max_keys=self._keys,
        )
        self.logits = self._run(self.ids, self.positions, layout, self._cache, self.logit_rows)


class PromptGraphs:
    """A runner's passes over short prompts into one cache, captured on the first use of each size.

    trash_slot: a slot that no request uses. pool: memory shared with other graphs; None: nothing is captured. rows: the
    sizes that passes are padded to.
    """

    def __init__(
        self, run: Run, cache: KVCache, trash_slot: int, pool: Any = None, rows: Sequence[int] = PROMPT_ROWS
    ) -> None:
        self.cache = cache
        self._rows = rows
        self._run = run
        self._trash_slot = trash_slot
        self._pool = pool
        self._graphs: dict[PromptShape, _PromptGraph] = {}

    def run(self, batch: PassBatch, layout: RowLayout) -> Tensor | None:  # [R, V] fp32
        """The logits; None if the pass fits no size and must be run as it is."""
        shape = PromptShape.of(batch, layout.max_keys, self._rows)
        if shape is None or batch.logit_rows is None:
            return None
        graph = self._graphs.pop(shape, None) or self._make(shape)
        self._graphs[shape] = graph  # moved to the end, as the most recently used
        graph.load(batch, layout)
        (graph.replay or graph.work)()
        assert graph.logits is not None
        return graph.logits[: batch.logit_rows.shape[0]].clone()  # a copy: the next pass overwrites them

    def has(self, shape: PromptShape) -> bool:
        return shape in self._graphs

    def _make(self, shape: PromptShape) -> _PromptGraph:
        graph = _PromptGraph(shape, self._run, self.cache, self._trash_slot)
        if self._pool is not None:
            try:
                graph.replay = captured(graph.work, self._pool)
            except Exception:  # the model reads values on the host, or no memory is left for a graph
                self._pool = None
        while len(self._graphs) >= _MOST:
            del self._graphs[next(iter(self._graphs))]
        return graph


class WidePromptGraphs:
    """A runner's passes over many rows of prompts into one cache, captured on the second use of each size.

    sizes: of passes that prompts may share; a prompt in a pass of its own may have any size, and is never captured.
    """

    def __init__(self, run: Run, sizes: Sequence[int], cache: KVCache, trash_slot: int, pool: Any = None) -> None:
        self._sizes = tuple(size for size in sizes if size <= WIDE_PROMPT_ROWS)
        self._run = run
        self._graphs = PromptGraphs(run, cache, trash_slot, pool, self._sizes)
        self._seen: set[PromptShape] = set()
        self._compared: set[PromptShape] = set()
        self._differs = False

    @property
    def cache(self) -> KVCache:
        return self._graphs.cache

    def run(self, batch: PassBatch, layout: RowLayout) -> Tensor | None:  # [R, V] fp32
        """The logits; None if the pass must be run as it is."""
        if self._differs or batch.size not in self._sizes or batch.logit_rows is None:
            return None
        shape = PromptShape.of(batch, layout.max_keys, self._sizes)
        if shape is None:
            return None
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        if shape in self._compared and self._graphs.has(shape):
            return self._graphs.run(batch, layout)
        logits = self._compare(batch, layout)
        if logits is None:
            self._differs = True
            _log.warning(
                "a captured pass over %d rows of prompts does not have the bits of another: none is captured",
                batch.size,
            )
            return None  # the caller runs the pass again, which overwrites what this one wrote
        self._compared.add(shape)
        return logits

    def _compare(self, batch: PassBatch, layout: RowLayout) -> Tensor | None:
        """The captured pass's logits; None if its bits differ from the launched pass, or memory is too short."""
        assert batch.logit_rows is not None
        try:
            self._run(batch.input_ids, batch.positions, layout, self.cache, batch.logit_rows)
            expected = self._written(batch)
            logits = self._graphs.run(batch, layout)
            found = self._written(batch)
        except torch.OutOfMemoryError:  # the copies take memory, too
            return None
        return logits if all(torch.equal(*pair) for pair in zip(expected, found, strict=True)) else None

    def _written(self, batch: PassBatch) -> list[Tensor]:
        """The cache entries of these rows, without padding, whose slot no request uses."""
        slots = batch.slots[: batch.row_starts[-1]]
        return [plane[:, slots].view(torch.uint8) for plane in self.cache.planes]  # as bytes, so that NaN equals NaN
