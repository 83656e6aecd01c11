"""silu(gate) * up, where the two were computed by one product: for passes wide enough to leave products to cuBLAS."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.jit import jit, on_gpu, tl, triton

_BLOCK = 1024


@jit
def gated(gate: tl.tensor, up: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """silu(gate) * up of rounded numbers, in fp32; rounded where separate modules would round."""
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
    tl.store(out_ptr + row * N + at, gated(gate, up, kind).to(kind), mask=at < N)


def silu_mul(both: Tensor) -> Tensor:
    """[M, N] of [M, 2 N]."""
    return _launch(both) if on_gpu(both) else _twin(both)


def _launch(both: Tensor) -> Tensor:
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, width), dtype=both.dtype, device=both.device)
    _silu_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](both, out, width, BLOCK=_BLOCK, num_warps=4)
    return out


def _twin(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up
