"""Products by a fixed weight in which every row comes out the same, however many rows there are.

Exactness in bf16 rests on this (idea 1 of the architecture): a token's logits may not depend on who else is in the
pass. So each element is summed over K in one order, given by the weight's shape alone: `splits` runs of equal length,
each added up in steps of the tensor cores, then the runs in order. The number of rows only decides how many of them
share a tile, and the tensor cores give an element the same sum whatever the tile's width (checked on the GPU by a
test). The weight stands where such products usually have the rows, because its tiles are tall and the rows are few.

A decoding pass reads the weights at the memory's speed and does little else, so the next kernel's start must not
leave the memory idle: with `overlap`, a kernel begins while the one before it still runs, and fetches the first part
of its weight into the L2 cache before it waits for its input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.jit import jit, on_gpu, tl, triton

_MULTIPROCESSORS = 132
_SHARED_BYTES = 200 * 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program does at a time. It changes the speed, never a number."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int

    @staticmethod
    def of(rows: int, n: int, k: int, *, splits: int, gated: bool, size: int) -> Tile:
        """For so many rows, a weight [N, K] and elements of `size` bytes. Tuned on an H200."""
        if rows <= 16:
            tile = Tile(16, 64, 128, 3, 4)
        elif rows <= 32:
            tile = Tile(32, 64, 64, 4, 4) if gated else Tile(32, 64, 128, 3, 4)
        elif rows <= 64:
            tile = Tile(64, 64, 64, 4, 4) if gated else Tile(64, 128, 64, 4, 4)
        else:
            tile = Tile(128, 64, 64, 4, 8) if gated else Tile(128, 128, 64, 4, 8)
        if size == 4:
            tile = Tile(tile.block_m, 64, 32, 2, tile.warps)
        block_k = min(tile.block_k, _step(k) or tile.block_k)
        stages = tile.stages
        if rows <= 64 and -(-n // tile.block_n) * splits <= _MULTIPROCESSORS:
            # one program a multiprocessor, or none: it is waiting that takes the time, so all is asked for at once
            held = ((2 if gated else 1) * tile.block_n + tile.block_m) * block_k * size
            stages = max(stages, min(-(-k // (splits * block_k)), _SHARED_BYTES // held, 8))
        return Tile(tile.block_m, tile.block_n, block_k, stages, tile.warps)


def _step(k: int) -> int | None:
    """The longest step that divides K."""
    return next((b for b in (128, 64, 32, 16) if k % b == 0), None)


def splits_of(n: int, k: int) -> int:
    """In how many runs a product by a weight [N, K] is summed: as many as keep a GPU busy at one row."""
    block_k = _step(k)
    if block_k is None:
        return 1
    tiles = -(-n // 64)
    return max(s for s in (1, 2, 3, 4) if k % (s * block_k) == 0 and (s == 1 or tiles * s <= 3 * _MULTIPROCESSORS))


@jit(sizes=["M"])
def _linear_kernel(
    x_ptr: tl.tensor,  # [M, K]
    w_ptr: tl.tensor,  # [N, K], or [2 N, K] where gated: gate, then up
    bias_ptr: tl.tensor,  # [N], or [2 N] where gated; not read unless there is one
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
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    RUN: tl.constexpr = (K + SPLITS - 1) // SPLITS
    split = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(columns < N, columns, 0).to(tl.int64)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    steps = tl.arange(0, BLOCK_K)
    start = 0 if WHOLE else split * RUN
    if OVERLAP:
        if BLOCK_K >= 64:
            lines = tl.arange(0, BLOCK_K // 64) * 64
            _fetch(w_ptr + safe[:, None] * K + start + lines[None, :])
            if GATED:
                _fetch(w_ptr + (safe[:, None] + N) * K + start + lines[None, :])
        tl.extra.cuda.gdc_wait()
    real = rows[None, :] < M
    x_tile = x_ptr + rows[None, :].to(tl.int64) * K + steps[:, None]
    w_tile = w_ptr + safe[:, None] * K + steps[None, :]
    v_tile = w_tile + N.to(tl.int64) * K  # the second weight, where gated
    if HAS_BIAS:
        bias = tl.load(bias_ptr + safe).to(tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for run in range(SPLITS if WHOLE else 1):
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(start + run * RUN, start + run * RUN + RUN, BLOCK_K):
            if K % BLOCK_K == 0:
                x = tl.load(x_tile + k, mask=real, other=0.0)
                w = tl.load(w_tile + k)
            else:
                x = tl.load(x_tile + k, mask=real & (k + steps[:, None] < K), other=0.0)
                w = tl.load(w_tile + k, mask=k + steps[None, :] < K, other=0.0)
            acc = tl.dot(w, x, acc, input_precision=PRECISION)
            if GATED:
                if K % BLOCK_K == 0:
                    v = tl.load(v_tile + k)
                else:
                    v = tl.load(v_tile + k, mask=k + steps[None, :] < K, other=0.0)
                up = tl.dot(v, x, up, input_precision=PRECISION)
        if HAS_BIAS:
            # in the first run, whoever sums it: the others are added behind it, here or by the next kernel
            acc += tl.where(split + run == 0, bias, 0.0)[:, None]
        total = acc if SPLITS == 1 or not WHOLE else total + acc
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_BIAS and GATED:
        up += tl.load(bias_ptr + N + safe).to(tl.float32)[:, None]
    if GATED:
        kind = x_ptr.dtype.element_ty
        gate = total.to(kind).to(tl.float32)  # rounded where separate modules would round
        gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        total = gate * up.to(kind).to(tl.float32)
    place = out_ptr + split.to(tl.int64) * M * N + rows[None, :].to(tl.int64) * N + columns[:, None]
    kept = real & (columns[:, None] < N)
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
    splits: int = 1,
    gated: bool = False,
    partial: bool = False,
    out_dtype: torch.dtype | None = None,
    overlap: bool = False,
) -> Tensor:
    """x times the weight's transpose, [M, N]; partial: its runs [splits or 1, M, N] in fp32, for the next kernel.

    gated: silu(x gate^T) * (x up^T) of a weight that is both, one above the other.
    """
    assert partial or splits == 1, "runs are summed by the next kernel"
    if not on_gpu(x):
        return row_linear_twin(x, weight, bias, splits=splits, gated=gated, partial=partial, out_dtype=out_dtype)
    return _launch(x, weight, bias, splits, gated, partial, out_dtype or x.dtype, overlap)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    splits: int,
    gated: bool,
    partial: bool,
    out_dtype: torch.dtype,
    overlap: bool,
) -> Tensor:
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    tile = Tile.of(m, n, k, splits=splits, gated=gated, size=x.element_size())
    whole = m > 128
    if partial:
        out = torch.empty((1 if whole else splits, m, n), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if not m:
        return out
    grid = (triton.cdiv(n, tile.block_n), 1 if whole else splits, triton.cdiv(m, tile.block_m))
    _linear_kernel[grid](
        x, weight, bias, out, m, n, k, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        SPLITS=splits, WHOLE=whole, GATED=gated, PARTIAL=partial, HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", OVERLAP=overlap,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=overlap,
    )  # fmt: skip
    return out


def row_linear_twin(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    splits: int = 1,
    gated: bool = False,
    partial: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in torch, up to the order of summation within a run."""
    parts = torch.stack(
        [a.float() @ w.float().T for a, w in zip(x.chunk(splits, 1), weight.chunk(splits, 1), strict=True)]
    )
    if bias is not None:
        parts[0] += bias.float()
    if partial:
        return parts
    whole = parts[0].to(x.dtype)
    if gated:
        gate, up = whole.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return parts[0].to(out_dtype or x.dtype)
