"""Forbid tokens by a bit mask: -inf is added to every logit whose bit is 0, in place.

A bit mask is an eighth of a byte mask; it is made on the host and sent to the device every step. -inf is added instead
of written, so that a broken logit (NaN, +inf) stays broken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton

_BLOCK = 4096


@jit(sizes=["words"])
def _forbid_bits_kernel(
    logits_ptr: tl.tensor,  # [R, V] fp32
    bits_ptr: tl.tensor,  # [R, W] int32
    stride: tl.tensor,
    words: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = ids < V
    word = tl.load(bits_ptr + row * words + ids // 32, mask=real, other=0)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    at = logits_ptr + row * stride + ids
    x = tl.load(at, mask=real & forbidden, other=0.0)
    tl.store(at, tl.where(x < float("inf"), float("-inf"), float("nan")), mask=real & forbidden)


def forbid_bits_(logits: Tensor, bits: Tensor) -> None:
    """logits [R, V] fp32; bits [R, W] int32: bit t % 32 of word t // 32 is 1 if token t may be chosen."""
    if on_gpu(logits):
        _launch(logits, bits)
    else:
        forbid_bits_twin_(logits, bits)


def _launch(logits: Tensor, bits: Tensor) -> None:
    rows, vocab_size = logits.shape
    if rows:
        grid = (rows, triton.cdiv(vocab_size, _BLOCK))
        _forbid_bits_kernel[grid](
            logits, bits.contiguous(), logits.stride(0), bits.shape[1], V=vocab_size, BLOCK=_BLOCK, num_warps=4
        )


def forbid_bits_twin_(logits: Tensor, bits: Tensor) -> None:
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits[:, :, None] >> places) & 1  # [R, W, 32]
    forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0  # [R, V]
    logits.add_(torch.zeros_like(logits).masked_fill_(forbidden, -math.inf))
