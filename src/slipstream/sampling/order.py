"""One total order of a row's tokens: larger value first, then the lower id.

Logits often tie (bf16 has 8 bits of mantissa), and a sort that breaks ties as it likes would make the edge of a
top-k depend on how it was computed. Here value and id become one integer, and integers do not tie.
"""

from __future__ import annotations

import torch
from torch import Tensor


def order_keys(values: Tensor) -> Tensor:
    """Integers [R, V] int64, distinct within a row; larger stands first. `values` is [R, V] fp32."""
    bits = (values + 0.0).view(torch.int32)  # adding 0 makes -0 the same as 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats order backwards as integers: flip all but the sign
    ids = torch.arange(values.shape[1], 0, -1, device=values.device)
    return bits.to(torch.int64).mul_(1 << 32).add_(ids)


def top_ids(values: Tensor, count: int) -> Tensor:
    """Ids [R, count] int64 of the first `count` tokens of each row of `values` [R, V], in order."""
    keys = order_keys(values)
    if count >= values.shape[1]:
        return keys.argsort(dim=1, descending=True)
    return keys.topk(count, dim=1).indices
