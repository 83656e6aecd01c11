"""Products by our own compiled loop, with a weight in huge pages: plain, or as the codes that it was made from."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slipstream.kernels.cpu.arena import Arena
from slipstream.kernels.cpu.compiled import Compiled, compiled
from slipstream.kernels.cpu.interface import LANES, TILE, Codes
from slipstream.kernels.linear import PackedLinear, joined_bias

CODES_PAY = platform.machine() == "x86_64"
"""Whether reading codes is faster than reading numbers. Without look-up in a register, decoding takes longer than
reading five times the bytes."""


def tiler(*weights: Tensor) -> Compiled | None:
    """The compiled code, if it can run here and takes these weights [N, K]."""
    fit = all(
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.shape[0] % TILE == 0
        and weight.shape[1] % LANES == 0
        and weight.numel() > 0
        for weight in weights
    )
    return compiled() if fit else None


class TiledLinear(PackedLinear):
    """The product for CPUs with compiled code. Takes ownership of one or more weights of one input, rows end to end.

    A row's bits do not depend on the number of rows.
    """

    def __init__(self, code: Compiled, weights: Sequence[Tensor], bias: Tensor | None, arena: Arena) -> None:
        nn.Module.__init__(self)
        self.packed = True
        self.code = code
        self.in_features = weights[0].shape[1]
        self.out_features = sum(weight.shape[0] for weight in weights)
        weights = [weight.detach() for weight in weights]
        self.tiles: Tensor | Codes = _kept(code, weights, arena)
        self.bias = None if bias is None else bias.detach().clone()  # a copy, so that the old weights can be freed

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            return self.forward(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        return self.code.linear(x.contiguous(), self.tiles, self.bias)

    def refill(self, weight: Tensor) -> None:  # [out, in]
        if isinstance(self.tiles, Tensor):
            self.tiles.copy_(weight)
        else:  # the codes fit only the old weight
            arena = Arena()
            self.tiles = _kept(self.code, [weight], arena)

    def extra_repr(self) -> str:
        form = f"{self.tiles.bits}-bit codes" if isinstance(self.tiles, Codes) else "plain"
        return f"{self.in_features} -> {self.out_features}, {form}"


def join(*linears: nn.Linear, arena: Arena) -> PackedLinear:
    """One product from one or more products of the same input: the rows of the weights end to end.

    In the fastest form on this machine. arena: where the weights of one model lie together.
    """
    bias = joined_bias(*linears)
    weights = [linear.weight.detach() for linear in linears]
    code = tiler(*weights)
    if code is not None:
        return TiledLinear(code, weights, bias, arena)
    return PackedLinear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)


def _kept(code: Compiled, weights: Sequence[Tensor], arena: Arena) -> Tensor | Codes:
    """As codes if that is faster and reproduces the weights, else plain; rows end to end."""
    return (code.encode(weights, arena) if CODES_PAY else None) or _joined(weights, arena)


def _joined(weights: Sequence[Tensor], arena: Arena) -> Tensor:
    return torch.cat(list(weights), out=arena.floats(sum(len(weight) for weight in weights), weights[0].shape[1]))
