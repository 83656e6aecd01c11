"""Products with a weight that never changes.

A decoding pass reads every weight for a handful of rows, so the layout of the weight decides the speed. Where our own
compiled loops can run they are best (`tiled.py`). On other x86 CPUs MKL multiplies by a weight that was packed once:
1.3x faster than `F.linear` for one row, 2x for 8 to 16 rows, at the memory of the plain weight, and each row comes out
the same to the bit whatever the number of rows (up to the 64 of a decoding pass). Elsewhere the weight stays as it is.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PACK_ROWS = 64
"""MKL lays the weight out for this many rows; the packed weight serves any number."""


def packs(weight: Tensor) -> bool:
    """Would `PackedLinear` pack this weight?"""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkl, "_mkl_linear")
    )


class PackedLinear(nn.Module):
    """`nn.Linear` for inference: takes the weight over, and gives what `F.linear` gives."""

    scale: Tensor | None = None  # of the rows of a weight in 8 bits (`narrow.py`)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = packs(weight)
        weight = weight.detach()
        # MKL's product asks the plain weight only for its shape: a tensor of one number has it too
        self._shape = torch.empty((), dtype=weight.dtype).expand(weight.shape) if self.packed else None
        self.weight = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACK_ROWS) if self.packed else weight
        self.bias = None if bias is None else bias.detach().clone()  # so that nothing of the old weights stays in use

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        if x.dim() != 2:
            return self.forward(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        product = torch.ops.mkl._mkl_linear.default  # by its overload: looking one up costs as much as a small product
        return cast(Tensor, product(x, self.weight, self._shape, self.bias, x.shape[0]))

    def refill(self, weight: Tensor) -> None:  # [out, in]
        """Another weight in place of this one; in the same memory, but where it is packed. The bias stays."""
        if self.packed:
            self.weight = torch.ops.mkl._mkl_reorder_linear_weight(weight.to(self.weight.dtype), _PACK_ROWS)
        else:
            self.weight.copy_(weight)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, packed={self.packed}"


def joined_bias(*linears: nn.Linear) -> Tensor | None:
    """The biases end to end, with zeros for those that have none; None where nobody has one."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
    ).detach()
