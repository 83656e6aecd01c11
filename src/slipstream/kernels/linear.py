"""Products with a weight that never changes, in torch; on a CPU with MKL, with a packed weight.

A decoding pass reads every weight for a few rows, so the layout of the weight decides the speed. Our own compiled loops
are the fastest where they run (`cpu/tiled.py`). On other x86 CPUs MKL multiplies by a weight that was packed once: 1.3
times as fast as `F.linear` for one row and twice as fast for 8 to 16 rows, in the same memory, and a row has the same
bits for every number of rows up to the 64 of a decoding pass. Elsewhere the weight stays as it is.

A drafter's weights may have 8 bits (e4m3, with a scale for each row of a weight): on a large target, reading its
weights is what a guess costs. A product is then off by 2 or 3%. That changes some guesses, which the target checks as
any other; weights that decide tokens never have 8 bits.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_LEAST = 1e-12  # the scale of a row of zeros
_PACK_ROWS = 64
"""MKL lays the weight out for this many rows; the packed weight serves any number."""


def packs(weight: Tensor) -> bool:
    """Whether `PackedLinear` packs this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkl, "_mkl_linear")
    )


class PackedLinear(nn.Module):
    """`nn.Linear` for inference: takes ownership of the weight and gives the result of `F.linear`."""

    scale: Tensor | None = None  # of the rows of an 8-bit weight (`NarrowLinear`)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = packs(weight)
        weight = weight.detach()
        # MKL's product reads only the shape of the plain weight, so a one-element tensor stands in for it
        self._shape = torch.empty((), dtype=weight.dtype).expand(weight.shape) if self.packed else None
        self.weight = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACK_ROWS) if self.packed else weight
        self.bias = None if bias is None else bias.detach().clone()  # a copy, so that the old weights can be freed

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        if x.dim() != 2:
            return self.forward(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        product = torch.ops.mkl._mkl_linear.default  # by its overload: looking it up takes as long as a small product
        return cast(Tensor, product(x, self.weight, self._shape, self.bias, x.shape[0]))

    def refill(self, weight: Tensor) -> None:  # [out, in]
        """Replace the weight, in the same memory unless it is packed. The bias stays."""
        if self.packed:
            self.weight = torch.ops.mkl._mkl_reorder_linear_weight(weight.to(self.weight.dtype), _PACK_ROWS)
        else:
            self.weight.copy_(weight)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, packed={self.packed}"


def joined_bias(*linears: nn.Linear) -> Tensor | None:
    """The biases end to end, with zeros for missing ones; None if all are missing."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
    ).detach()


def narrowed(weight: Tensor) -> tuple[Tensor, Tensor]:  # [N, K] -> [N, K] fp8, [N] fp32
    """A weight's codes and the scale of each row."""
    exact = weight.float()
    scale = (exact.abs().amax(dim=1) / _LARGEST).clamp_min(_LEAST)
    return (exact / scale[:, None]).to(FP8), scale


class NarrowLinear(PackedLinear):
    """The product with an 8-bit weight. Kernels read `weight` and `scale`; passes over prompts widen it."""

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
        """Replace the weight in the same memory."""
        codes, scale = narrowed(weight)
        self.weight.copy_(codes)
        self.scale.copy_(scale)


def narrow_join(*linears: nn.Linear) -> NarrowLinear:
    """One product from one or more products of the same input."""
    return NarrowLinear(torch.cat([linear.weight.detach() for linear in linears]), joined_bias(*linears))


def widened(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:  # [N, K]
    """The weight that the codes stand for; the weight itself if there is no scale."""
    # in place: each number is computed in fp32 and rounded once, and no fp32 copy of the weight is written
    return codes if scale is None else codes.to(dtype).mul_(scale[:, None])
