"""Which tokens a head can name: the most frequent in what the target says.

A head's LM head is most of its cost. A few thousand tokens are nearly all of what a model writes, and a token that the
head cannot name costs one guess, no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError

_STEP = 1024
"""Sizes are multiples of it, as kernels like them."""


@dataclass(frozen=True, slots=True)
class DraftVocab:
    ids: Tensor  # [Vd] int64, ascending: the target's ids
    coverage: float  # share of the counted tokens that are among them

    @property
    def offsets(self) -> Tensor:  # [Vd] int64
        """As checkpoints store them (d2t): target id = i + offset."""
        return self.ids - torch.arange(len(self.ids))


def check_size(size: int, vocab: int) -> None:
    if size > vocab:
        raise ConfigError(f"option draft_vocab={size}: the target's vocabulary has {vocab} tokens, it cannot be larger")


def choose_vocab(counts: Tensor, size: int, coverage: float, most: int) -> DraftVocab:
    """The most frequent tokens by `counts` [V]; ties go to the lower id.

    size: so many; 0: the least multiple of 1024 that covers a share of `coverage`, but `most`.
    """
    counts = counts.cpu().long()
    vocab, seen = len(counts), int(counts.sum())
    check_size(size, vocab)
    order = counts.sort(descending=True, stable=True)
    if not size:
        covered = order.values.cumsum(0) >= coverage * seen
        needed = int(covered.int().argmax()) + 1  # the first that is enough
        size = min(-(-needed // _STEP) * _STEP, most, vocab)
    ids = order.indices[:size].sort().values
    return DraftVocab(ids, int(counts[ids].sum()) / max(seen, 1))
