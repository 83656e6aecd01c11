"""The protocol of heads: small modules that guess the next token from a token and the target's hidden states.

A head's row for the token at position q >= 1 reads that token and the target's features of position q - 1. Its K and V
lie in the drafter's cache at place q - 1, which is also its rotary position, and it guesses the token at q + 1.
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
"""The format of a head's weights."""


@dataclass(frozen=True, slots=True)
class HeadStates:
    """The output of a head's pass."""

    features: Tensor  # [R, H]: read by later rows
    read: Tensor  # [R, H]: read by the LM head; the same, or normed


class Head(Protocol):
    """A recurrent head on the target's device, in its dtype. `drafters/heads.py` runs any of them."""

    @property
    def taps(self) -> Taps:
        """The target's hidden states that rows read."""

    @property
    def layers(self) -> Sequence[LayerShape]:
        """The cache shapes of its own layers."""

    @property
    def vocab(self) -> Tensor | None:  # [Vd] int64
        """The target's id of each of its ids; None: it has the target's vocabulary."""

    @property
    def max_positions(self) -> int:
        """The longest context in which it can guess."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights and cache."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of its weights, beside the target's."""

    def combine(self, taps: Tensor) -> Tensor:  # [N, F] -> [N, H]
        """The features that rows read, from the target's hidden states."""

    def run(
        self,
        ids: Tensor,  # [N] int64, of the target's vocabulary
        features: Tensor,  # [N, H]: from `combine`, or from `run` for earlier rows
        context: PassContext,  # attention goes through `context.attend(layer, q, k, v, traits)`
        positions: Tensor,  # [N] int64, for rotary embeddings
        step: int,  # the number of the guess, from 0: heads of several modules have one for each
        *,
        behind: Tensor | None = None,  # [N] int64: the feature that each row reads; None: row i reads feature i
        wanted: Tensor | None = None,  # [R] int64: rows whose states are returned; None: all
    ) -> HeadStates:
        """The hidden states of the wanted rows. Writes K and V of all rows through the context."""

    def logits(self, read: Tensor) -> Tensor:  # [R, H] -> [R, Vd] fp32
        """The logits of its guesses, from `HeadStates.read`."""
