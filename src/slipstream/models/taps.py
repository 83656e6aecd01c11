"""Hidden states of the target that drafters read, and their place in the cache.

Heads (EAGLE, Medusa, multi-token prediction) guess from the target's hidden states. A pass writes those into the
target's cache beside K and V, one row a token, so they are moved, forked, cleared and recomputed with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.errors import DrafterError


@dataclass(frozen=True, slots=True)
class Taps:
    """The hidden states that a drafter reads, side by side for each row."""

    layers: tuple[int, ...] = ()  # the residual stream after this many layers (0: the embedding), before the final norm
    normed: bool = False  # after the final norm; stands behind the others

    def __bool__(self) -> bool:
        return bool(self.layers) or self.normed

    def width(self, hidden: int) -> int:
        """Numbers of a row, for a target with this hidden size."""
        return hidden * (len(self.layers) + self.normed)

    def check(self, num_layers: int) -> None:
        """Raise `DrafterError` if the target has too few layers."""
        wrong = [layer for layer in self.layers if not 0 <= layer <= num_layers]
        if wrong:
            raise DrafterError(
                f"hidden states after layer {wrong[0]} are wanted, but the target has {num_layers} layers: "
                f"use a head that was made for this target"
            )

    @staticmethod
    def union(wanted: Sequence[Taps]) -> Taps:
        """All hidden states that are wanted, each once: layers in order, the normed states last."""
        layers = sorted({layer for taps in wanted for layer in taps.layers})
        return Taps(tuple(layers), any(taps.normed for taps in wanted))


@dataclass(frozen=True, slots=True)
class TapView:
    """One reader's columns of the features in the cache."""

    plane: Tensor  # [slots, F]
    columns: tuple[slice, ...]  # neighbours joined

    @staticmethod
    def of(mine: Taps, union: Taps, plane: Tensor) -> TapView:
        """The columns of `mine` in a plane that holds `union`."""
        hidden = plane.shape[1] // (len(union.layers) + union.normed)
        places = [union.layers.index(layer) for layer in mine.layers] + [len(union.layers)] * mine.normed
        columns: list[slice] = []
        for place in places:
            first, end = place * hidden, (place + 1) * hidden
            if columns and columns[-1].stop == first:
                first = columns.pop().start
            columns.append(slice(first, end))
        return TapView(plane, tuple(columns))

    def at(self, slots: Tensor) -> Tensor:  # [N, width]
        """The hidden states of the tokens at these slots [N]."""
        parts = [_picked(self.plane[:, part], slots) for part in self.columns]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _picked(plane: Tensor, slots: Tensor) -> Tensor:  # [slots, W], [N] -> [N, W]
    """On a GPU `index_select` takes four times as long as indexing a few rows; on a CPU indexing copies whole rows."""
    return plane[slots] if plane.is_cuda else plane.index_select(0, slots)
