"""What a head is: a small module that guesses the next token from a token and the target's hidden states.

A head's row for the token at position q >= 1 reads that token and the target's features of position q - 1; its K and
V lie in the drafter's cache at place q - 1, which is its rotary position as well; and it guesses the token at q + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from slipstream.kv.cache import LayerShape
from slipstream.models.attention import PassContext
from slipstream.models.taps import Taps

Weights = Literal["auto", "fp8", "plain"]
"""How the weights of a head's products are kept."""


@dataclass(frozen=True, slots=True)
class HeadStates:
    """What a head made of rows."""

    features: Tensor  # [R, H]: what the rows behind them read
    read: Tensor  # [R, H]: what its LM head reads, the same or normed


class Head(Protocol):
    """A recurrent head. `drafters/features.py` runs any of them; it is on the target's device, in its dtype."""

    @property
    def taps(self) -> Taps:
        """The target's hidden states that its rows read."""

    @property
    def layers(self) -> Sequence[LayerShape]:
        """What its own cache keeps of a token."""

    @property
    def vocab(self) -> Tensor | None:  # [Vd] int64
        """The target's id of each of its ids; None: it has the target's vocabulary."""

    @property
    def max_positions(self) -> int:
        """The longest context that it can guess in."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, and of its cache."""

    @property
    def weights_bytes(self) -> int:
        """What it adds to the target's weights."""

    def combine(self, taps: Tensor) -> Tensor:  # [N, F] -> [N, H]
        """What a row reads of the target's hidden states."""

    def run(
        self,
        ids: Tensor,  # [N] int64, of the target's vocabulary
        features: Tensor,  # [N, H]: what `combine` gave, or what `run` gave for the rows before
        context: PassContext,  # attention goes through `context.attend(layer, q, k, v, traits)`
        positions: Tensor,  # [N] int64, for rotary embeddings
        step: int,  # which guess this is for, from 0: heads of several modules have one for each
        *,
        behind: Tensor | None = None,  # [N] int64: which of the features each row reads; None: its own
        wanted: Tensor | None = None,  # [R] int64: rows that somebody asks about; None: all
    ) -> HeadStates:
        """Its hidden states of the wanted rows. Writes K and V of all rows through the context."""

    def logits(self, read: Tensor) -> Tensor:  # [R, H] -> [R, Vd] fp32
        """What it guesses behind these rows, by `HeadStates.read`."""
