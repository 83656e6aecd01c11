"""What a head's first layer reads: a token's embedding and the feature before it, each normed, side by side.

Looking the token up, two norms, joining them and keeping the feature for the residual would be five launches in every
step of a draft; here they are one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.add_norm import add_norm_twin, norm_scale, normed, squares
from slipstream.kernels.jit import jit, on_gpu, tl, triton


class Joined(NamedTuple):
    """What goes on beside the first layer's attention, and what that attention reads."""

    beside: Tensor  # [M, D]; the layer may write to it
    read: Tensor  # [M, 2 D]: token, then feature


@jit(sizes=["rows"], pointers=["ids_ptr", "behind_ptr"])
def _join_feature_kernel(
    ids_ptr: tl.tensor,  # [M] int64
    table_ptr: tl.tensor,  # [rows, D]
    feature_ptr: tl.tensor,  # [M, D], or as many as there are where PICKED
    behind_ptr: tl.tensor,  # [M] int64: which of the features each reads, or not read
    token_norm_ptr: tl.tensor,  # [D], or not read
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
    # what stands in for nobody may hold anything
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
    ids: Tensor,  # [M] int64; those outside the table read its first or last row
    table: Tensor,  # [rows, D]
    feature: Tensor,  # [M, D]
    norms: tuple[Tensor, Tensor] | None,  # the token's and the feature's, each [D]
    eps: float,
    *,
    behind: Tensor | None = None,  # [M] int64: which of the features each reads; None: its own
    normed_beside: bool = False,  # the normed feature goes on, not the feature itself
    overlap: bool = False,
) -> Joined:
    if not on_gpu(feature):
        return join_feature_twin(ids, table, feature, norms, eps, behind=behind, normed_beside=normed_beside)
    return _launch(ids, table, feature, norms, eps, behind, normed_beside, overlap)


def _launch(
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
