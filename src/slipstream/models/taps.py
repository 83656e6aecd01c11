"""Which hidden states of the target somebody reads, and where they lie in the cache.

Heads (EAGLE, Medusa, multi-token prediction) guess from what the target thought at a token. A pass writes that into
the target's cache beside K and V, one row a token: so it is moved, forked, cleared and recomputed with the tokens, and
nobody has to carry it from round to round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.errors import DrafterError


@dataclass(frozen=True, slots=True)
class Taps:
    """Which hidden states of the target somebody wants, side by side for each row."""

    layers: tuple[int, ...] = ()  # the residual stream after so many layers: 0 the embedding, before the final norm
    normed: bool = False  # after the final norm, behind the others

    def __bool__(self) -> bool:
        return bool(self.layers) or self.normed

    def width(self, hidden: int) -> int:
        """Numbers a row, where the target's hidden states have so many."""
        return hidden * (len(self.layers) + self.normed)

    def check(self, num_layers: int) -> None:
        """Raise `DrafterError` where the target has no such layer."""
        wrong = [layer for layer in self.layers if not 0 <= layer <= num_layers]
        if wrong:
            raise DrafterError(
                f"hidden states after layer {wrong[0]} are wanted, but the target has {num_layers} layers: "
                f"use a head that was made for this target"
            )

    @staticmethod
    def union(wanted: Sequence[Taps]) -> Taps:
        """All that somebody wants, each once: layers in order, the normed states last."""
        layers = sorted({layer for taps in wanted for layer in taps.layers})
        return Taps(tuple(layers), any(taps.normed for taps in wanted))


@dataclass(frozen=True, slots=True)
class TapView:
    """One reader's columns of the features that the cache keeps for all readers."""

    plane: Tensor  # [slots, F]
    columns: tuple[slice, ...]  # neighbours are one slice

    @staticmethod
    def of(mine: Taps, union: Taps, plane: Tensor) -> TapView:
        """Where `mine` lies, in a plane that holds `union`."""
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
    """For few rows on a GPU `index_select` takes four times as long as an index; on a CPU it copies whole rows."""
    return plane[slots] if plane.is_cuda else plane.index_select(0, slots)
