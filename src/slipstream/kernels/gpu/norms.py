"""RMS norms and what is joined to them: the residual between two products, and the input of a draft head's layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton


@jit
def plus(x: tl.tensor, delta: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """The residual sum in fp32, rounded where separate modules round."""
    return (x + delta.to(kind).to(tl.float32)).to(kind).to(tl.float32)


@jit
def squares(x: tl.tensor) -> tl.tensor:
    """The sum of squares in fp64, so that the order of the sum does not show in fp32."""
    return tl.sum((x * x).to(tl.float64), 0)


@jit
def norm_scale(squares: tl.tensor, D: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    """The factor of a row."""
    return tl.rsqrt(squares.to(tl.float32) / D + eps)


@jit
def normed(x: tl.tensor, scale: tl.tensor, weight: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    return ((x * scale).to(kind).to(tl.float32) * weight).to(kind)


@jit(sizes=["M"], pointers=["rows_ptr"])
def _add_norm_kernel(
    delta_ptr: tl.tensor,  # [splits, M, D]; unused if SPLITS is 0
    x_ptr: tl.tensor,  # [M, D]
    sum_ptr: tl.tensor,  # x itself, or [R, D] if PICKED: written if there is a delta
    rows_ptr: tl.tensor,  # [R] int64: rows of x; unused unless PICKED
    weight_ptr: tl.tensor,  # [D]
    out_ptr: tl.tensor,  # [M, D], or [R, D] if PICKED
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
    """RMS norm [M, D] of x [M, D] after delta [splits, M, D] was added to x in place."""
    if not on_gpu(x):
        return add_norm_twin(x, delta, weight, eps)
    return _launch_add_norm(x, delta, weight, eps, overlap)


class Picked(NamedTuple):
    """The result for some rows."""

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
    """As `add_norm` for these rows alone; x is not changed."""
    if not on_gpu(x):
        sums = x[rows]
        return Picked(sums, add_norm_twin(sums, delta[:, rows], weight, eps))
    sums = x.new_empty((rows.shape[0], x.shape[1]))
    return Picked(sums, _launch_add_norm(x, delta, weight, eps, overlap, rows, sums))


def _launch_add_norm(
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


class Joined(NamedTuple):
    """The residual and the input of a head's first layer."""

    beside: Tensor  # [M, D]: the residual; the layer may write to it
    read: Tensor  # [M, 2 D]: token, then feature


@jit(sizes=["rows"], pointers=["ids_ptr", "behind_ptr"])
def _join_feature_kernel(
    ids_ptr: tl.tensor,  # [M] int64
    table_ptr: tl.tensor,  # [rows, D]
    feature_ptr: tl.tensor,  # [M, D], or all features if PICKED
    behind_ptr: tl.tensor,  # [M] int64: the feature that each row reads; unused unless PICKED
    token_norm_ptr: tl.tensor,  # [D]; unused unless NORMS
    feature_norm_ptr: tl.tensor,
    beside_ptr: tl.tensor,  # [M, D] out
    read_ptr: tl.tensor,  # [M, 2 D] out
    rows: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
    NORMED_BESIDE: tl.constexpr,
    PICKED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < D
    kind = read_ptr.dtype.element_ty
    if NORMS:
        token_weight = tl.load(token_norm_ptr + at, mask=real, other=0.0).to(tl.float32)
        feature_weight = tl.load(feature_norm_ptr + at, mask=real, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # ids of padding rows may be anything
    token_id = tl.minimum(tl.maximum(tl.load(ids_ptr + row), 0), rows - 1)
    token = tl.load(table_ptr + token_id * D + at, mask=real, other=0.0).to(tl.float32)
    source = tl.load(behind_ptr + row) if PICKED else row
    feature = tl.load(feature_ptr + source * D + at, mask=real, other=0.0).to(tl.float32)
    beside = feature.to(kind)
    if NORMS:
        token = normed(token, norm_scale(squares(token), D, eps), token_weight, kind)
        feature = normed(feature, norm_scale(squares(feature), D, eps), feature_weight, kind)
        if NORMED_BESIDE:
            beside = feature
    tl.store(beside_ptr + row * D + at, beside, mask=real)
    tl.store(read_ptr + row * 2 * D + at, token.to(kind), mask=real)
    tl.store(read_ptr + row * 2 * D + D + at, feature.to(kind), mask=real)


def join_feature(
    ids: Tensor,  # [M] int64; ids outside the table read its first or last row
    table: Tensor,  # [rows, D]
    feature: Tensor,  # [M, D]
    norms: tuple[Tensor, Tensor] | None,  # of the token and of the feature, each [D]
    eps: float,
    *,
    behind: Tensor | None = None,  # [M] int64: the feature that each row reads; None: row i reads feature i
    normed_beside: bool = False,  # the residual is the normed feature instead of the feature
    overlap: bool = False,
) -> Joined:
    if not on_gpu(feature):
        return join_feature_twin(ids, table, feature, norms, eps, behind=behind, normed_beside=normed_beside)
    return _launch_join_feature(ids, table, feature, norms, eps, behind, normed_beside, overlap)


def _launch_join_feature(
    ids: Tensor,
    table: Tensor,
    feature: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    behind: Tensor | None,
    normed_beside: bool,
    overlap: bool,
) -> Joined:
    m, d = ids.shape[0], feature.shape[1]
    beside, read = feature.new_empty((m, d)), feature.new_empty((m, 2 * d))
    block = triton.next_power_of_2(d)
    token_norm, feature_norm = norms or (feature, feature)
    if m:
        _join_feature_kernel[(m,)](
            ids, table, feature, behind, token_norm, feature_norm, beside, read, table.shape[0], eps, D=d, BLOCK=block,
            NORMS=norms is not None, NORMED_BESIDE=normed_beside, PICKED=behind is not None, OVERLAP=overlap,
            num_warps=min(16, max(1, block // 512)), launch_pdl=overlap,
        )  # fmt: skip
    return Joined(beside, read)


def join_feature_twin(
    ids: Tensor,
    table: Tensor,
    feature: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    *,
    behind: Tensor | None = None,
    normed_beside: bool = False,
) -> Joined:
    feature = feature if behind is None else feature[behind]
    token = table[ids.clamp(0, table.shape[0] - 1)]
    beside = feature
    if norms is not None:
        token, feature = add_norm_twin(token, None, norms[0], eps), add_norm_twin(feature, None, norms[1], eps)
        beside = feature if normed_beside else beside
    return Joined(beside.clone(), torch.cat((token, feature), dim=1))
