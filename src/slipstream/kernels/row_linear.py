"""Products by a fixed weight in which every row comes out the same, however many rows there are.

Exactness in bf16 rests on this (idea 1 of the architecture): a token's logits may not depend on who else is in the
pass. So each element is summed over K in one order, given by the weight's shape alone: `splits` runs of equal length,
each added up in steps of the tensor cores, then the runs in order. The number of rows only decides how many of them
share a tile, and the tensor cores give an element the same sum whatever the tile's width (checked on the GPU by a
test). The weight stands where such products usually have the rows, because its tiles are tall and the rows are few.

A decoding pass reads the weights at the memory's speed and does little else, so the next kernel's start must not
leave the memory idle: with `overlap`, a kernel begins while the one before it still runs, and fetches the first part
of its weight into the L2 cache before it waits for its input.

A drafter's weight may lie in 8 bits with a scale for each of its rows (`narrow.py`): half of what is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.jit import TensorDescriptor, is_recording, jit, on_gpu, shared_bytes, tl, triton
from slipstream.kernels.silu_mul import gated as silu_gated

_MULTIPROCESSORS = 132
_LONG = 512  # rows of a product that takes a device longer than a host to launch it
_SUMMED_ROWS = 256  # with more rows one program sums all runs
_SPARE_BYTES = 2048  # shared memory for everything but tiles
_UNFUSED = {"enable_fp_fusion": False}  # a scaled run is rounded before it is added, whoever adds it
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16} if tl is not None else {}


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program does at a time, and which are neighbours. It changes the speed, never a number."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    tma: bool = False
    flip: bool = False  # the rows stand first
    whole: bool = False  # one program sums all runs
    beside: bool = False  # those that read the same of the weight, for other rows, are neighbours

    @staticmethod
    def of(
        rows: int, n: int, k: int, *, splits: int, gated: bool, size: int, tma: bool = False, narrow: bool = False,
        shared: int = 227 * 1024, one: bool = False,
    ) -> Tile:  # fmt: skip
        """For so many rows, a weight [N, K] and elements of `size` bytes. Tuned on an H200.

        tma: may they come by descriptors? narrow: the weight has 8 bits. shared: bytes that a program may keep by it.
        one: the smallest tile, however many rows there are.
        """
        whole = splits > 1 and rows > _SUMMED_ROWS
        if one:
            rows = 1
        # narrow ones have more stages: as many bytes are under way, and still two programs fit side by side
        if rows <= 16:
            tile = Tile(16, 64, 128, 6 if narrow else 3, 4)
        elif rows <= 32:
            wide = tma and not gated and not narrow
            tile = Tile(32, 128, 64, 5, 4, tma=True) if wide else Tile(32, 64, 64, 8 if narrow else 4, 4)
        elif rows <= 64:
            tile = Tile(64, 64 if gated else 128, 64, 6 if narrow else 4, 4, tma and not narrow)
        elif tma:
            tile = Tile._of_many(rows, gated, narrow)
        else:
            tile = Tile(128, 64 if gated else 128, 128 if narrow else 64, 3 if narrow else 4, 8)
        block_n, block_k, stages = tile.block_n, tile.block_k, tile.stages
        if size == 4:
            block_n, block_k, stages = 64, 32, 2
        # two steps a run at least, whatever the tile: a compiler may add a single one to what is summed already
        block_k = min(block_k, _step(k) or block_k, max(16, _power_below(k // splits)))
        few = -(-n // 64) * splits <= _MULTIPROCESSORS
        if few:
            block_n = 64
        if few and rows <= 64:
            # one program a multiprocessor, or none: it is waiting that takes the time, so all is asked for at once
            stages = max(stages, min(-(-k // (splits * block_k)), 8))
        tile = replace(tile, block_n=block_n, block_k=block_k, whole=whole)
        most = (shared - _SPARE_BYTES) // tile.stage_bytes(gated=gated, size=size, narrow=narrow)
        return replace(tile, stages=max(2, min(stages, most)))

    @staticmethod
    def _of_many(rows: int, gated: bool, narrow: bool) -> Tile:
        """For more than 64 rows, by descriptors: of the fastest in `bench/tiles.py`, those that serve most products."""
        wide = 64 if gated else 128  # of a gated one there are two
        if narrow:  # what is widened can only be the first operand
            return Tile(128, wide, 64, 5, 8, tma=True, beside=True)
        if 128 < rows <= 192:
            return Tile(64, wide, 64, 4, 4, tma=True, beside=True)
        if rows <= 256:
            return Tile(128, wide, 64, 3 if rows <= 128 else 5, 8, tma=True, flip=True, beside=True)
        return Tile(128, 2 * wide, 64, 3, 8, tma=True, flip=True)

    def stage_bytes(self, *, gated: bool, size: int, narrow: bool) -> int:
        """What one of its stages holds in shared memory."""
        weight = (2 if gated else 1) * self.block_n * (1 if narrow else size)
        return (weight + self.block_m * size) * self.block_k

    def fits(self, *, gated: bool, size: int, narrow: bool, shared: int) -> bool:
        """Is there room for all of its stages?"""
        return self.stages * self.stage_bytes(gated=gated, size=size, narrow=narrow) <= shared - _SPARE_BYTES


def _step(k: int) -> int | None:
    """The longest step that divides K."""
    return next((b for b in (128, 64, 32, 16) if k % b == 0), None)


def _power_below(size: int) -> int:
    """The largest power of two that is less than the size."""
    return 1 << max(0, (size - 1).bit_length() - 1)


def splits_of(n: int, k: int) -> int:
    """In how many runs a product by a weight [N, K] is summed: as many as keep a GPU busy at one row."""
    block_k = _step(k)
    if block_k is None:
        return 1
    tiles = -(-n // 64)
    enough = [s for s in (2, 3, 4) if k % (s * block_k) == 0 and k // s > 16 and tiles * s <= 3 * _MULTIPROCESSORS]
    return max(enough, default=1)


@jit(sizes=["M"])
def _linear_kernel(
    x_ptr: tl.tensor,  # [M, K]; where TMA, a descriptor of it
    w_ptr: tl.tensor,  # [N, K], or [2 N, K] where gated: gate, then up; where TMA, a descriptor of it
    raw_ptr: tl.tensor,  # the weight itself
    bias_ptr: tl.tensor,  # [N], or [2 N] where gated; not read unless there is one
    scale_ptr: tl.tensor,  # [N], or [2 N] where gated, fp32: of the weight's rows; not read unless narrow
    out_ptr: tl.tensor,  # [splits, M, N] fp32 where PARTIAL, else [M, N]
    M: tl.tensor,
    N: tl.tensor,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,  # one program sums all runs, in the same order
    GATED: tl.constexpr,
    PARTIAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NARROW: tl.constexpr,  # the weight has 8 bits
    PRECISION: tl.constexpr,
    KIND: tl.constexpr,
    TMA: tl.constexpr,
    FLIP: tl.constexpr,  # the rows stand first after all
    BESIDE: tl.constexpr,  # the grid begins with the rows
    OVERLAP: tl.constexpr,
    FETCH: tl.constexpr,  # how much of a row's run is asked for before the input is there
    EARLY: tl.constexpr,  # let the next kernel begin at once
) -> None:
    RUN: tl.constexpr = (K + SPLITS - 1) // SPLITS
    split = tl.program_id(2 if BESIDE else 1)
    first_column = tl.program_id(1 if BESIDE else 0) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    safe = tl.where(columns < N, columns, 0).to(tl.int64)
    first_row = tl.program_id(0 if BESIDE else 2) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    steps = tl.arange(0, BLOCK_K)
    start = 0 if WHOLE else split * RUN
    if OVERLAP:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        for at in tl.static_range(0, FETCH, 128 // raw_ptr.dtype.element_ty.primitive_bitwidth * 8):
            _fetch(raw_ptr + safe * K + start + at)
            if GATED:
                _fetch(raw_ptr + (safe + N) * K + start + at)
        tl.extra.cuda.gdc_wait()
    if FLIP:
        rows_at, columns_at = rows[:, None], columns[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        rows_at, columns_at = rows[None, :], columns[:, None]
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros(total.shape, tl.float32)
    real = rows[None, :] < M
    if not TMA:
        x_tile = x_ptr + rows[None, :].to(tl.int64) * K + steps[:, None]
        w_tile = w_ptr + safe[:, None] * K + steps[None, :]
        v_tile = w_tile + N.to(tl.int64) * K  # the second weight, where gated
    safe_at = tl.where(columns_at < N, columns_at, 0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + safe_at).to(tl.float32)
        if GATED and not NARROW:
            up += tl.load(bias_ptr + N + safe_at).to(tl.float32)
    if NARROW:
        scale = tl.load(scale_ptr + safe_at)
    for run in range(SPLITS if WHOLE else 1):
        acc = tl.zeros(total.shape, tl.float32)
        if HAS_BIAS and not NARROW:
            # first of all: what is added behind a product might be added before it after all, in some tiles
            acc += tl.where(split + run == 0, bias, 0.0)
        for k in range(start + run * RUN, start + run * RUN + RUN, BLOCK_K):
            if TMA:
                x = tl.trans(x_ptr.load([first_row, k]))
                w = w_ptr.load([first_column, k])
            elif K % BLOCK_K == 0:
                x = tl.load(x_tile + k, mask=real, other=0.0)
                w = tl.load(w_tile + k)
            else:
                x = tl.load(x_tile + k, mask=real & (k + steps[:, None] < K), other=0.0)
                w = tl.load(w_tile + k, mask=k + steps[None, :] < K, other=0.0)
            if NARROW:
                w = w.to(tl.float32).to(x.dtype)  # not at once: from fp16 to bf16 there is but a slow instruction
            if FLIP:
                acc = tl.dot(tl.trans(x), tl.trans(w), acc, input_precision=PRECISION)
            else:
                acc = tl.dot(w, x, acc, input_precision=PRECISION)
            if GATED:
                if TMA:
                    v = w_ptr.load([N + first_column, k])
                elif K % BLOCK_K == 0:
                    v = tl.load(v_tile + k)
                else:
                    v = tl.load(v_tile + k, mask=k + steps[None, :] < K, other=0.0)
                if NARROW:
                    v = v.to(tl.float32).to(x.dtype)
                if FLIP:
                    up = tl.dot(tl.trans(x), tl.trans(v), up, input_precision=PRECISION)
                else:
                    up = tl.dot(v, x, up, input_precision=PRECISION)
        if NARROW:
            acc *= scale  # each run by itself, as where others sum them
            if HAS_BIAS:
                acc += tl.where(split + run == 0, bias, 0.0)
        total = acc if SPLITS == 1 or not WHOLE else total + acc
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if GATED:
        if NARROW:
            up *= tl.load(scale_ptr + N + safe_at)
            if HAS_BIAS:
                up += tl.load(bias_ptr + N + safe_at).to(tl.float32)
        total = silu_gated(total.to(KIND).to(tl.float32), up.to(KIND).to(tl.float32), KIND)
    place = out_ptr + split.to(tl.int64) * M * N + rows_at.to(tl.int64) * N + columns_at
    kept = (rows_at < M) & (columns_at < N)
    if PARTIAL:
        tl.store(place, total, mask=kept)
    else:
        tl.store(place, total.to(out_ptr.dtype.element_ty), mask=kept)


@jit
def _fetch(pointers: tl.tensor) -> None:
    """Bring the lines that these point to into the L2 cache; nobody waits for them."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def row_linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K], or [2 N, K] where gated
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,  # [N], or [2 N] where gated, fp32: of the rows of a weight of 8 bits
    splits: int = 1,
    gated: bool = False,
    partial: bool = False,
    out_dtype: torch.dtype | None = None,
    overlap: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """x times the weight's transpose, [M, N]; partial: its runs [splits or 1, M, N] in fp32, for the next kernel.

    gated: silu(x gate^T) * (x up^T) of a weight that is both, one above the other. tile: another one than is chosen for
    these sizes, to see whether it is faster.
    """
    assert partial or splits == 1, "runs are summed by the next kernel"
    if not on_gpu(x):
        return row_linear_twin(
            x, weight, bias, scale=scale, splits=splits, gated=gated, partial=partial, out_dtype=out_dtype
        )
    return _launch(x, weight, bias, splits, gated, partial, out_dtype or x.dtype, overlap, scale, tile)


def tile_of(x: Tensor, weight: Tensor, *, splits: int, gated: bool, narrow: bool) -> Tile:
    """The tile that is chosen for these; another one where it will be recorded."""
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    # a descriptor takes the host as long as a launch: worth it where it is done once, or the device takes longer still
    aligned = not (x.data_ptr() | weight.data_ptr()) % 16 and k % 64 == 0 and x.element_size() == 2
    one = (x.device.type, x.dtype) in _one_tile
    return Tile.of(
        m, n, k, splits=splits, gated=gated, size=x.element_size(), narrow=narrow, one=one,
        tma=aligned and TensorDescriptor is not None and (is_recording() or m > _LONG) and not one,
        shared=shared_bytes(x.device),
    )  # fmt: skip


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    splits: int,
    gated: bool,
    partial: bool,
    out_dtype: torch.dtype,
    overlap: bool,
    scale: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    narrow = scale is not None
    tile = tile or tile_of(x, weight, splits=splits, gated=gated, narrow=narrow)
    programs = 1 if tile.whole else splits  # for each part of the result
    if partial:
        out = torch.empty((programs, m, n), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if not m:
        return out
    across, down = triton.cdiv(n, tile.block_n), triton.cdiv(m, tile.block_m)
    few = across * down * programs <= _MULTIPROCESSORS
    _linear_kernel[(down, across, programs) if tile.beside else (across, programs, down)](
        TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]) if tile.tma else x,
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]) if tile.tma else weight,
        weight, bias, scale, out, m, n, k, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        SPLITS=splits, WHOLE=tile.whole, GATED=gated, PARTIAL=partial, HAS_BIAS=bias is not None, NARROW=narrow,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", KIND=KINDS[x.dtype], TMA=tile.tma, FLIP=tile.flip,
        BESIDE=tile.beside, OVERLAP=overlap, FETCH=k // splits if few else tile.block_k, EARLY=few,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=overlap,
        **(_UNFUSED if narrow else {}),
    )  # fmt: skip
    return out


_one_tile: set[tuple[str, torch.dtype]] = set()


def use_one_tile(device: torch.device, dtype: torch.dtype) -> None:
    """From now on rows of this kind all go through the smallest tile: slower for many, and the same to the bit."""
    _one_tile.add((device.type, dtype))


def row_linear_twin(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    splits: int = 1,
    gated: bool = False,
    partial: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in torch, up to the order of summation within a run."""
    parts = torch.stack(
        [a.float() @ w.float().T for a, w in zip(x.chunk(splits, 1), weight.chunk(splits, 1), strict=True)]
    )
    if scale is not None:
        parts *= scale
    if bias is not None:
        parts[0] += bias.float()
    if partial:
        return parts
    whole = parts[0].to(x.dtype)
    if gated:
        gate, up = whole.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return parts[0].to(out_dtype or x.dtype)
