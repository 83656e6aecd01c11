"""What a captured round depends on, in a few sizes: every combination is captured by itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from slipstream.core.draft import MAX_NODES
from slipstream.kernels.gpu.paged import SPLIT_KEYS
from slipstream.plan.cost import SIZES
from slipstream.sampling.table import Features

_REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_WIDTHS = (0, 16, MAX_NODES)
"""Sizes that rounds come in; the rows are `plan.cost.SIZES`. Few: each combination is captured by itself."""
_DRAWN_WIDTHS = (0, 2, 4, 6, 8, 12, 16, 24, 32, 48, MAX_NODES)
"""… of rejection sampling, which looks at the whole vocabulary for every node that there might be."""
_CROWD = 16
"""So many requests rarely all have short contexts: they share the next larger size."""
_CHEAP_ROWS = 16
"""A pass of so many rows takes no longer than one of fewer: products have tiles of as many."""


class RoundShape(NamedTuple):
    """What a captured round depends on. Sizes come in buckets, so that there are few of them.

    A tuple, because one is made and looked up every round while the device waits.
    """

    requests: int
    width: int  # nodes of a request at most
    rows: int
    keys: int  # keys that a row sees at most
    is_tree: bool
    features: Features
    version: int  # of the sampling table's tensors
    keeps_logits: bool  # somebody reads them afterwards
    tells_choices: bool = False  # … or what was chosen at every row
    draws: bool = False  # a drafter of the round tells what it draws from

    @staticmethod
    def of(
        counts: Sequence[int],
        longest: int,
        *,
        is_tree: bool,
        features: Features,
        version: int,
        keeps_logits: bool,
        tells_choices: bool = False,
        draws: bool = False,
        most_keys: int = 1 << 40,
    ) -> RoundShape:
        """For requests with so many nodes each; none has more than `longest` tokens before the round.

        most_keys: no row of any round sees more.
        """
        requests = _bucket(len(counts), _REQUESTS)
        width = _bucket(max(counts), _DRAWN_WIDTHS if features.rejection else _WIDTHS)
        rows = _bucket(len(counts) + sum(counts), SIZES)
        keys = _keys(requests, longest + 1 + width, most_keys)
        return RoundShape(requests, width, rows, keys, is_tree, features, version, keeps_logits, tells_choices, draws)

    def does(self, other: RoundShape) -> bool:
        """Does a round of this shape what one of the other would, and nearly as soon? It may have room for larger
        drafts, for trees where there are chains, and for twice as many rows."""
        if self.features.rejection or not other.width or self.width < other.width or self.is_tree < other.is_tree:
            return False
        if not other.rows <= self.rows <= max(2 * other.rows, _CHEAP_ROWS):
            return False
        return other._replace(width=self.width, rows=self.rows, is_tree=self.is_tree) == self

    def keys_behind(self, longest: int, most_keys: int) -> int:
        """Keys of the same requests with as many nodes, once none of them has more than `longest` tokens."""
        return _keys(self.requests, longest + 1 + self.width, most_keys)


def crowds(most: int) -> Iterator[int]:
    """The numbers of requests that rounds come in, where so many may run at once."""
    last = _REQUESTS[-1]
    sizes = chain(_REQUESTS, range(2 * last, most + last, last))
    return (size for size in sizes if size <= _bucket(most, _REQUESTS))


def _keys(requests: int, seen: int, most: int) -> int:
    keys = SPLIT_KEYS if requests < _CROWD else 4 * SPLIT_KEYS
    while keys < seen:
        keys *= 4
    return min(keys, -(-most // SPLIT_KEYS) * SPLIT_KEYS)


def _bucket(size: int, sizes: Sequence[int]) -> int:
    """The next larger size; beyond the last, a multiple of it."""
    last = sizes[-1]
    return sizes[bisect_left(sizes, size)] if size <= last else -(-size // last) * last
