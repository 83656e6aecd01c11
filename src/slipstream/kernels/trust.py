"""Does this chip keep what row-independence rests on?

Every tile must add up a row's products alike, whatever its height and the way its operands come. Hopper does
(tests/gpu). A chip or a compiler that takes other instructions for other tiles would not, and nothing but a token here
and there would tell. So it is tried once on each chip, and where tiles differ one of them serves for all.

Prompts go by cuBLAS, which promises nothing. But where it adds up a row alike in products of all sizes that prompts'
passes come in, several prompts may share a pass and still come out the same in any company. So that is tried, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.jit import recording
from slipstream.kernels.row_linear import row_linear

_COLUMNS, _SUMMED = 9000, 512  # large enough for the tiles of large weights
_ROWS = (1, 17, 33, 65, 130, 200, 260)  # one of every tile


@cache
def rows_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Are rows of all tiles the same to the bit, in graphs and outside?"""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn((max(_ROWS), _SUMMED), generator=generator, device=device).to(dtype)
    weight = torch.randn((_COLUMNS, _SUMMED), generator=generator, device=device).to(dtype)
    parts = [row_linear(part.contiguous(), weight, out_dtype=torch.float32) for part in x.split(16)]
    expected = torch.cat(parts)  # [rows, columns], all by the smallest tile
    for rows in _ROWS:
        if not torch.equal(row_linear(x[:rows], weight, out_dtype=torch.float32), expected[:rows]):
            return False
        with recording():
            if not torch.equal(row_linear(x[:rows], weight, out_dtype=torch.float32), expected[:rows]):
                return False
    return True


def sizes_agree(weights: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Are rows the same to the bit in products of all these sizes, wherever in the product they stand?"""
    shapes = {weight.shape: weight for weight in weights}
    for (_, k), weight in shapes.items():
        generator = torch.Generator(weight.device).manual_seed(0)
        x = torch.randn((max(sizes), k), generator=generator, device=weight.device).to(weight.dtype)
        whole = F.linear(x, weight)  # [rows, columns]
        for rows in sizes:
            if not torch.equal(F.linear(x[:rows], weight), whole[:rows]):
                return False
            if not torch.equal(F.linear(x[-rows:], weight), whole[-rows:]):
                return False
    return True
