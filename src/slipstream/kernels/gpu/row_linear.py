"""Products with a fixed weight in which a row's bits do not depend on the number of rows.

Exactness in bf16 rests on this (idea 1 of the architecture): a token's logits may not depend on the other rows of the
pass. So each element is summed over K in one order, which the weight's shape determines: `splits` runs of equal length,
each added up in steps of the tensor cores, then the runs in order. The number of rows only decides how many of them
share a tile, and the tensor cores give an element the same sum for every width of the tile. `rows_agree` checks that on
each chip; if tiles differ, one tile serves all. The weight is the first operand, because its tiles are tall and the
rows are few.

A decoding pass reads the weights at the memory's speed, so the start of the next kernel must not leave the memory idle:
with `overlap`, a kernel begins while the one before it still runs, and fetches the first part of its weight into the L2
cache before it waits for its input. A drafter's weight may have 8 bits with a scale for each row (`kernels/linear.py`).

Passes over prompts leave products to cuBLAS, which promises nothing. If `sizes_agree` finds that cuBLAS sums a row
in one order for all sizes of such passes, several prompts may share a pass and keep their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.gpu.jit import TensorDescriptor, is_recording, jit, on_gpu, recording, shared_bytes, tl, triton

_MULTIPROCESSORS = 132
_LONG = 512  # with more rows, the device takes longer for a product than the host for its launch
_SUMMED_ROWS = 256  # with more rows one program sums all runs
_SPARE_BYTES = 2048  # shared memory for everything but tiles
_UNFUSED = {"enable_fp_fusion": False}  # a scaled run is rounded before it is added, by this kernel or the next
_SILU_BLOCK = 1024  # numbers of a row that one program of `silu_mul` takes
_CHECKED_COLUMNS, _CHECKED_K = 9000, 512  # of the weight of `rows_agree`: large enough for the tiles of large weights
_CHECKED_ROWS = (1, 17, 33, 65, 130, 200, 260)  # one for every tile
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16} if tl is not None else {}


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at a time, and the order of programs. It changes the speed, never a number."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    tma: bool = False
    flip: bool = False  # the rows are the first operand
    whole: bool = False  # one program sums all runs
    beside: bool = False  # programs that read the same part of the weight are neighbours

    @staticmethod
    def of(
        rows: int, n: int, k: int, *, splits: int, gated: bool, size: int, tma: bool = False, narrow: bool = False,
        shared: int = 227 * 1024, one: bool = False,
    ) -> Tile:  # fmt: skip
        """The tile for `rows` rows, a weight [N, K] and elements of `size` bytes. Tuned on an H200.

        tma: tensor descriptors may be used. narrow: the weight has 8 bits. shared: bytes of shared memory of a program.
        one: the smallest tile for every number of rows.
        """
        whole = splits > 1 and rows > _SUMMED_ROWS
        if one:
            rows = 1
        # narrow tiles have more stages: the same bytes are in flight, and two programs still fit side by side
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
        # at least two steps a run for every tile: a compiler may add a single step to the sum before it
        block_k = min(block_k, _step(k) or block_k, max(16, _power_below(k // splits)))
        few = -(-n // 64) * splits <= _MULTIPROCESSORS
        if few:
            block_n = 64
        if few and rows <= 64:
            # at most one program a multiprocessor: latency dominates, so everything is requested at once
            stages = max(stages, min(-(-k // (splits * block_k)), 8))
        tile = replace(tile, block_n=block_n, block_k=block_k, whole=whole)
        most = (shared - _SPARE_BYTES) // tile.stage_bytes(gated=gated, size=size, narrow=narrow)
        return replace(tile, stages=max(2, min(stages, most)))

    @staticmethod
    def _of_many(rows: int, gated: bool, narrow: bool) -> Tile:
        """For more than 64 rows, by descriptors: the best compromise over the products measured on an H200."""
        wide = 64 if gated else 128  # a gated product has two
        if narrow:  # only the first operand can be widened
            return Tile(128, wide, 64, 5, 8, tma=True, beside=True)
        if 128 < rows <= 192:
            return Tile(64, wide, 64, 4, 4, tma=True, beside=True)
        if rows <= 256:
            return Tile(128, wide, 64, 3 if rows <= 128 else 5, 8, tma=True, flip=True, beside=True)
        return Tile(128, 2 * wide, 64, 3, 8, tma=True, flip=True)

    def stage_bytes(self, *, gated: bool, size: int, narrow: bool) -> int:
        """Bytes of shared memory of one stage."""
        weight = (2 if gated else 1) * self.block_n * (1 if narrow else size)
        return (weight + self.block_m * size) * self.block_k

    def fits(self, *, gated: bool, size: int, narrow: bool, shared: int) -> bool:
        """Whether all stages fit into shared memory."""
        return self.stages * self.stage_bytes(gated=gated, size=size, narrow=narrow) <= shared - _SPARE_BYTES


def _step(k: int) -> int | None:
    """The longest step that divides K."""
    return next((b for b in (128, 64, 32, 16) if k % b == 0), None)


def _power_below(size: int) -> int:
    """The largest power of two that is less than the size."""
    return 1 << max(0, (size - 1).bit_length() - 1)


def splits_of(n: int, k: int) -> int:
    """The number of runs in which a product with a weight [N, K] is summed: enough to keep a GPU busy at one row."""
    block_k = _step(k)
    if block_k is None:
        return 1
    tiles = -(-n // 64)
    enough = [s for s in (2, 3, 4) if k % (s * block_k) == 0 and k // s > 16 and tiles * s <= 3 * _MULTIPROCESSORS]
    return max(enough, default=1)


@jit(sizes=["M"])
def _linear_kernel(
    x_ptr: tl.tensor,  # [M, K]; a descriptor of it if TMA
    w_ptr: tl.tensor,  # [N, K], or [2 N, K] if GATED: gate, then up; a descriptor of it if TMA
    raw_ptr: tl.tensor,  # the weight itself
    bias_ptr: tl.tensor,  # [N], or [2 N] if GATED; unused unless HAS_BIAS
    scale_ptr: tl.tensor,  # [N], or [2 N] if GATED, fp32: of the weight's rows; unused unless NARROW
    out_ptr: tl.tensor,  # [splits, M, N] fp32 if PARTIAL, else [M, N]
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
    FLIP: tl.constexpr,  # the rows are the first operand
    BESIDE: tl.constexpr,  # rows are the first axis of the grid
    OVERLAP: tl.constexpr,
    FETCH: tl.constexpr,  # numbers of each row that are prefetched before the input is there
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
        v_tile = w_tile + N.to(tl.int64) * K  # the second weight, if gated
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
            # first of all: some tiles would add a bias at the end before the last step
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
                w = w.to(tl.float32).to(x.dtype)  # in two steps: fp16 to bf16 is one slow instruction
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
            acc *= scale  # each run by itself, as kernels that sum runs do
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
    """Prefetch these lines into the L2 cache."""
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
    scale: Tensor | None = None,  # [N], or [2 N] if gated, fp32: of the rows of an 8-bit weight
    splits: int = 1,
    gated: bool = False,
    partial: bool = False,
    out_dtype: torch.dtype | None = None,
    overlap: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """x times the transposed weight, [M, N]; partial: its runs [splits or 1, M, N] in fp32, for the next kernel to sum.

    gated: silu(x gate^T) * (x up^T) of a weight that holds gate above up. tile: overrides the chosen one, for
    benchmarks.
    """
    assert partial or splits == 1, "runs are summed by the next kernel"
    assert scale is not None or weight.dtype == x.dtype, f"{weight.dtype} times {x.dtype}"
    if not on_gpu(x):
        return row_linear_twin(
            x, weight, bias, scale=scale, splits=splits, gated=gated, partial=partial, out_dtype=out_dtype
        )
    return _launch(x, weight, bias, splits, gated, partial, out_dtype or x.dtype, overlap, scale, tile)


def tile_of(x: Tensor, weight: Tensor, *, splits: int, gated: bool, narrow: bool) -> Tile:
    """The tile of a launch; a recorded launch may have another one."""
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    # making a descriptor takes the host as long as a launch: worth it if it is done once, or if the device takes longer
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
    """From now on use the smallest tile for all rows of this dtype: slower for many rows, with the same bits."""
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
    """The same in torch, up to the order of sums within a run."""
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


@jit
def silu_gated(gate: tl.tensor, up: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """silu(gate) * up of rounded numbers in fp32, rounded where separate modules round."""
    return (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up


@jit
def _silu_mul_kernel(
    both_ptr: tl.tensor,  # [M, 2 N]: gate, then up
    out_ptr: tl.tensor,  # [M, N]
    N: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kind = out_ptr.dtype.element_ty
    gate = tl.load(both_ptr + row * 2 * N + at, mask=at < N, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * N + N + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + at, silu_gated(gate, up, kind).to(kind), mask=at < N)


def silu_mul(both: Tensor) -> Tensor:
    """silu(gate) * up, [M, N], of the product [M, 2 N] that computed both: for passes that leave products to cuBLAS."""
    if not on_gpu(both):
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, width), dtype=both.dtype, device=both.device)
    _silu_mul_kernel[(rows, triton.cdiv(width, _SILU_BLOCK))](both, out, width, BLOCK=_SILU_BLOCK, num_warps=4)
    return out


@cache
def rows_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all tiles give a row the same bits, in graphs and outside of them."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn((max(_CHECKED_ROWS), _CHECKED_K), generator=generator, device=device).to(dtype)
    weight = torch.randn((_CHECKED_COLUMNS, _CHECKED_K), generator=generator, device=device).to(dtype)
    parts = [row_linear(part.contiguous(), weight, out_dtype=torch.float32) for part in x.split(16)]
    expected = torch.cat(parts)  # [rows, columns], all by the smallest tile
    for rows in _CHECKED_ROWS:
        if not torch.equal(row_linear(x[:rows], weight, out_dtype=torch.float32), expected[:rows]):
            return False
        with recording():
            if not torch.equal(row_linear(x[:rows], weight, out_dtype=torch.float32), expected[:rows]):
                return False
    return True


def sizes_agree(weights: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether cuBLAS gives a row the same bits in products of all these sizes, at any place among the rows."""
    shapes = {weight.shape: weight for weight in weights}
    for (_, k), weight in shapes.items():
        generator = torch.Generator(weight.device).manual_seed(0)
        x = torch.randn((max(sizes), k), generator=generator, device=weight.device).to(weight.dtype)
        whole = F.linear(x, weight)  # [rows, columns]
        for rows in sizes:
            if not torch.equal(F.linear(x[:rows], weight), whole[:rows]):
                return False
            if not torch.equal(F.linear(x[-rows:], weight), whole[-rows:]):
                return False
    return True
