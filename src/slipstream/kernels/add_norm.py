"""The residual and the norm between two products, in one step: x += delta; RMS norm of x."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.jit import jit, on_gpu, tl, triton


@jit
def plus(x: tl.tensor, delta: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """The residual, in fp32; rounded where separate modules would round."""
    return (x + delta.to(kind).to(tl.float32)).to(kind).to(tl.float32)


@jit
def squares(x: tl.tensor) -> tl.tensor:
    """The sum of squares in fp64, so that the order of the sum does not show in fp32."""
    return tl.sum((x * x).to(tl.float64), 0)


@jit
def norm_scale(squares: tl.tensor, D: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    """What a row is multiplied by."""
    return tl.rsqrt(squares.to(tl.float32) / D + eps)


@jit
def normed(x: tl.tensor, scale: tl.tensor, weight: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    return ((x * scale).to(kind).to(tl.float32) * weight).to(kind)


@jit(sizes=["M"], pointers=["rows_ptr"])
def _add_norm_kernel(
    delta_ptr: tl.tensor,  # [splits, M, D], or not read
    x_ptr: tl.tensor,  # [M, D]
    sum_ptr: tl.tensor,  # x itself, or [R, D] where PICKED: written where there is a delta
    rows_ptr: tl.tensor,  # [R] int64: rows of x, or not read
    weight_ptr: tl.tensor,  # [D]
    out_ptr: tl.tensor,  # [M, D], or [R, D] where PICKED
    M: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,  # 0: no delta
    PICKED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    to = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    real = at < D
    kind = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + at, mask=real, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + to) if PICKED else to
    x = tl.load(x_ptr + row * D + at, mask=real, other=0.0).to(tl.float32)
    if SPLITS > 0:
        delta = tl.load(delta_ptr + row * D + at, mask=real, other=0.0).to(tl.float32)
        for s in tl.static_range(1, SPLITS):
            delta += tl.load(delta_ptr + (s * M + row) * D + at, mask=real, other=0.0)
        x = plus(x, delta, kind)
        tl.store(sum_ptr + to * D + at, x.to(kind), mask=real)
    tl.store(out_ptr + to * D + at, normed(x, norm_scale(squares(x), D, eps), weight, kind), mask=real)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, overlap: bool = False) -> Tensor:
    """RMS norm [M, D] of x [M, D], to which delta [splits, M, D] is added first, in place."""
    if not on_gpu(x):
        return add_norm_twin(x, delta, weight, eps)
    return _launch(x, delta, weight, eps, overlap)


class Picked(NamedTuple):
    """Some of the rows."""

    sums: Tensor  # [R, D]
    normed: Tensor  # [R, D]


def add_norm_at(
    x: Tensor,  # [M, D]
    delta: Tensor,  # [splits, M, D]
    rows: Tensor,  # [R] int64
    weight: Tensor,
    eps: float,
    *,
    overlap: bool = False,
) -> Picked:
    """The same for these rows alone; x stays as it is."""
    if not on_gpu(x):
        sums = x[rows]
        return Picked(sums, add_norm_twin(sums, delta[:, rows], weight, eps))
    sums = x.new_empty((rows.shape[0], x.shape[1]))
    return Picked(sums, _launch(x, delta, weight, eps, overlap, rows, sums))


def _launch(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    overlap: bool,
    rows: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    sums = x if sums is None else sums
    out = torch.empty_like(sums)
    m, d = x.shape
    block = triton.next_power_of_2(d)
    _add_norm_kernel[(out.shape[0],)](
        delta if delta is not None else x, x, sums, rows, weight, out, m, eps, D=d, BLOCK=block,
        SPLITS=0 if delta is None else delta.shape[0], PICKED=rows is not None, OVERLAP=overlap,
        num_warps=min(16, max(1, block // 512)), launch_pdl=overlap,
    )  # fmt: skip
    return out


def add_norm_twin(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if delta is not None:
        total = delta[0].to(torch.float32, copy=True)
        for part in delta[1:]:
            total += part
        x += total.to(x.dtype)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight
