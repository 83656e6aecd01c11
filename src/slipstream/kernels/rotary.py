"""Rotary position embedding of a pass's heads: prepared once, applied in every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin of a pass, laid out so that turning a head is one roll and two products."""

    given: Tensor  # the cos that this was made of
    cos: Tensor  # [N, 1, R]
    sin: Tensor  # [N, 1, R], the first half negative: x * cos + roll(x) * sin is the rotation

    @staticmethod
    def of(cos: Tensor, sin: Tensor) -> Rotary:
        """From a model's cos and sin [1, N, R], both halves alike."""
        low, high = sin[0, :, None].chunk(2, dim=-1)
        return Rotary(cos, cos[0, :, None], torch.cat((-low, high), dim=-1))

    def turn(self, heads: Tensor) -> Tensor:
        """Turn [N, H, D]; what a head has beyond R stays as it is."""
        size = self.cos.shape[-1]
        if size < heads.shape[-1]:
            return torch.cat((self.turn(heads[..., :size]), heads[..., size:]), dim=-1)
        return torch.addcmul(heads * self.cos, heads.roll(size // 2, -1), self.sin)
