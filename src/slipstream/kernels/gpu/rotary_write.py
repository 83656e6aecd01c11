"""From the joined product to attention: sum the runs, norm and rotate queries and keys, write K and V to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton


@jit
def turn(
    x: tl.tensor,  # [N, D] fp32
    y: tl.tensor,  # [N, D]: the other number of each rotated pair
    cos: tl.tensor,  # [N or 1, D]
    sin: tl.tensor,
    at: tl.tensor,  # [D]
    R: tl.constexpr,
    kind: tl.constexpr,
) -> tl.tensor:
    """Rotary embedding, rounded where separate modules would round."""
    sin = tl.where((at < R // 2)[None, :], -sin, sin)
    straight = (x * cos).to(kind).to(tl.float32)
    crossed = (y * sin).to(kind).to(tl.float32)
    return tl.where((at < R)[None, :], straight + crossed, x)


@jit(sizes=["M"], pointers=["positions_ptr", "slots_ptr"])
def _rotary_write_kernel(
    qkv_ptr: tl.tensor,  # [splits, M, (H + 2 H_kv) * D] fp32
    cos_ptr: tl.tensor,  # [positions, R]
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,  # [M] int64
    slots_ptr: tl.tensor,  # [M] int64
    q_norm_ptr: tl.tensor,  # [D]; unused unless NORMS
    k_norm_ptr: tl.tensor,
    query_ptr: tl.tensor,  # [M, H, D] out
    keys_ptr: tl.tensor,  # [slots, H_kv, D] the layer's cache
    values_ptr: tl.tensor,
    M: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,  # how much of a head is rotated
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
    NORMS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = tl.arange(0, BLOCK_D)
    real = (heads < H + 2 * H_KV)[:, None] & (at < D)[None, :]
    kind = query_ptr.dtype.element_ty
    # the other number of each rotated pair
    other = tl.where(at < R // 2, at + R // 2, tl.where(at < R, at - R // 2, at))
    WIDTH: tl.constexpr = (H + 2 * H_KV) * D
    place = heads[:, None] * D + at[None, :]
    other_place = heads[:, None] * D + other[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions_ptr + row)
    slot = tl.load(slots_ptr + row)
    x = tl.load(qkv_ptr + row * WIDTH + place, mask=real, other=0.0).to(tl.float32)
    y = tl.load(qkv_ptr + row * WIDTH + other_place, mask=real, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SPLITS):
        x += tl.load(qkv_ptr + (s * M + row) * WIDTH + place, mask=real, other=0.0)
        y += tl.load(qkv_ptr + (s * M + row) * WIDTH + other_place, mask=real, other=0.0)
    x = x.to(kind).to(tl.float32)  # rounded where separate modules round
    y = y.to(kind).to(tl.float32)
    is_query = (heads < H)[:, None]
    is_value = (heads >= H + H_KV)[:, None]
    value = x
    if NORMS:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        q_weight = tl.load(q_norm_ptr + at, mask=at < D, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + at, mask=at < D, other=0.0).to(tl.float32)
        q_other = tl.load(q_norm_ptr + other, mask=at < D, other=0.0).to(tl.float32)
        k_other = tl.load(k_norm_ptr + other, mask=at < D, other=0.0).to(tl.float32)
        x = (
            ((x * scale).to(kind).to(tl.float32) * tl.where(is_query, q_weight[None, :], k_weight[None, :]))
            .to(kind)
            .to(tl.float32)
        )
        y = (
            ((y * scale).to(kind).to(tl.float32) * tl.where(is_query, q_other[None, :], k_other[None, :]))
            .to(kind)
            .to(tl.float32)
        )
    turned = at < R
    cos = tl.load(cos_ptr + position * R + at, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * R + at, mask=turned, other=0.0).to(tl.float32)
    x = turn(x, y, cos[None, :], sin[None, :], at, R, kind)
    tl.store(query_ptr + row * H * D + place, x.to(kind), mask=real & is_query)
    k_place = slot * H_KV * D + (heads[:, None] - H) * D + at[None, :]
    tl.store(keys_ptr + k_place, x.to(kind), mask=real & (is_query == 0) & (is_value == 0))
    v_place = slot * H_KV * D + (heads[:, None] - H - H_KV) * D + at[None, :]
    tl.store(values_ptr + v_place, value.to(kind), mask=real & is_value)


def rotary_write(
    qkv: Tensor,  # [splits, M, (H + 2 H_kv) * D] fp32
    cos: Tensor,  # [positions, R]
    sin: Tensor,
    positions: Tensor,  # [M] int64
    slots: Tensor,  # [M] int64
    q_norm: Tensor | None,  # [D]
    k_norm: Tensor | None,
    keys: Tensor,  # [slots, H_kv, D]
    values: Tensor,
    heads: int,
    eps: float = 0.0,
    *,
    overlap: bool = False,
) -> Tensor:  # [M, H, D]
    """The queries of a pass. Its keys and values are written to the cache."""
    if not on_gpu(qkv):
        return rotary_write_twin(qkv, cos, sin, positions, slots, q_norm, k_norm, keys, values, heads, eps)
    return _launch(qkv, cos, sin, positions, slots, q_norm, k_norm, keys, values, heads, eps, overlap)


def _launch(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, keys: Tensor, values: Tensor, heads: int, eps: float, overlap: bool,
) -> Tensor:  # fmt: skip
    m, kv_heads, dim = qkv.shape[1], keys.shape[1], keys.shape[2]
    query = torch.empty((m, heads, dim), dtype=keys.dtype, device=keys.device)
    block_h = 8
    grid = (m, triton.cdiv(heads + 2 * kv_heads, block_h))
    _rotary_write_kernel[grid](
        qkv, cos, sin, positions, slots, q_norm, k_norm, query, keys, values, m, eps,
        H=heads, H_KV=kv_heads, D=dim, R=cos.shape[1], BLOCK_D=triton.next_power_of_2(dim), BLOCK_H=block_h,
        SPLITS=qkv.shape[0], NORMS=q_norm is not None, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return query


def rotary_write_twin(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, keys: Tensor, values: Tensor, heads: int, eps: float,
) -> Tensor:  # fmt: skip
    kind, (kv_heads, dim) = keys.dtype, keys.shape[1:]
    total = qkv[0].to(torch.float32, copy=True)
    for part in qkv[1:]:
        total += part
    x = total.to(kind).view(qkv.shape[1], -1, dim)
    query, key, value = x.split((heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = _norm(query, q_norm, eps), _norm(key, k_norm, eps)
    c, s = cos[positions].to(kind)[:, None], sin[positions].to(kind)[:, None]
    size = c.shape[-1]
    query, key = (
        torch.cat(((h[..., :size] * c) + (_half(h[..., :size]) * s), h[..., size:]), dim=-1) for h in (query, key)
    )
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value.contiguous())
    return query.contiguous()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


def _half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)
