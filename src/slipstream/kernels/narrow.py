"""Weights in 8 bits, for drafters: what a guess costs on a large target is reading its weights.

A float of 8 bits (e4m3) has three binary digits behind the point; with a scale for each row of a weight, a product is
off by 2 or 3%. A guess that comes out otherwise for it is one more wrong guess, found out by the target as any other:
so only drafters may have such weights, never what decides a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.kernels.linear import PackedLinear, joined_bias

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_LEAST = 1e-12  # a row of zeros has a scale as well


def narrowed(weight: Tensor) -> tuple[Tensor, Tensor]:  # [N, K] -> [N, K] fp8, [N] fp32
    """A weight's codes, and the scale of each row."""
    exact = weight.float()
    scale = (exact.abs().amax(dim=1) / _LARGEST).clamp_min(_LEAST)
    return (exact / scale[:, None]).to(FP8), scale


class NarrowLinear(PackedLinear):
    """The product by a weight in 8 bits. Kernels read `weight` and `scale`; other passes, of prompts, widen it."""

    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.packed = False
        self.weight, self.scale = narrowed(weight.detach())
        self.bias = None if bias is None else bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, widened(self.weight, self.scale, x.dtype), self.bias)

    def refill(self, weight: Tensor) -> None:
        """Another weight in place of this one, in the same memory."""
        codes, scale = narrowed(weight)
        self.weight.copy_(codes)
        self.scale.copy_(scale)


def narrow_join(*linears: nn.Linear) -> NarrowLinear:
    """One product or several of one input, as one."""
    return NarrowLinear(torch.cat([linear.weight.detach() for linear in linears]), joined_bias(*linears))


def widened(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:  # [N, K]
    """The weight that the codes stand for; without a scale, the weight itself."""
    # in place: each number is computed in fp32 and rounded once, and nothing as large as that is ever written
    return codes if scale is None else codes.to(dtype).mul_(scale[:, None])
