"""Texts that can be searched for what followed the latest tokens: a growing one, or many that come and go.

`SuffixIndex` holds one text, or several end to end; `index.py` explains its format. `SuffixStore` keeps past answers in
an index for each tenant, and evicts the least recently used sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.drafters.suffix import index as code
from slipstream.drafters.suffix.compiling import Numbers
from slipstream.drafters.suffix.index import BESIDE, BLOCKS, HEAD, INDEXED, LENGTH, MOST, ROOM, SINCE, WIDTH

_SMALLEST = 128  # int32 numbers of text in the smallest index, which takes 5 kB
_FEWEST_TENANTS = 64  # kept even by the smallest store; larger ones keep one for each smallest index of their size

_MOST_USES = 8192  # uses recorded before they are applied


@dataclass(frozen=True, slots=True)
class Match:
    """The places whose context agrees longest with the end of a text."""

    length: int = 0  # agreeing tokens; 0: no place
    places: tuple[int, ...] = ()  # in the index's text, up to the number asked for


class SuffixIndex:
    """A text and its sorted places. `address` and `size` locate the array, and change with `reserve`."""

    __slots__ = ("address", "data", "length", "room", "size")

    def __init__(self, room: int = 0) -> None:
        self.length = 1  # of the text, as last told to the index, with the -1 before the first sequence
        self._make(max(room, _SMALLEST))
        self.text[0] = -1
        self.data[LENGTH] = self.data[INDEXED] = 1

    def _make(self, room: int) -> None:
        most = 4 * room // WIDTH + 4  # neighbours together fill more than half a block
        self.room = room
        self.data: Numbers = np.zeros(HEAD + 4 * most + room + most * WIDTH, np.int32)
        self.data[MOST], self.data[ROOM] = most, room
        self.data[HEAD : HEAD + most] = np.arange(most)
        self.address, self.size = self.data.ctypes.data, len(self.data)

    @property
    def text(self) -> Numbers:
        return code.text_of(self.data)

    def reserve(self, length: int) -> None:
        """Make room for a text of `length` numbers."""
        if length <= self.room:
            return
        old, head, places = self.data, self.data[:HEAD].copy(), code.places_of(self.data)
        text, most = self.text, int(self.data[MOST])
        self._make(2 * length)
        blocks, self.data[LENGTH], self.data[INDEXED] = int(head[BLOCKS]), head[LENGTH], head[INDEXED]
        self.data[BESIDE], self.data[SINCE] = head[BESIDE], head[SINCE]
        now = int(self.data[MOST])
        self.data[BLOCKS] = blocks
        for row in range(4):  # the tables of blocks
            self.data[HEAD + row * now :][:most] = old[HEAD + row * most :][:most]
        self.text[: len(text)] = text
        code.places_of(self.data)[: len(places)] = places

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text and index them."""
        end = self.length + len(tokens)
        self.reserve(end)
        self.text[self.length : end] = tokens
        self.data[LENGTH] = self.length = end
        code.take_in(self.data)

    def longest(self, tokens: Sequence[int], least: int = 1, most: int = 64) -> Match:
        """The places that agree longest with the end of these tokens."""
        other = np.array([-1, *tokens[-code.LONGEST :]], np.int32)
        found, lengths = np.empty(most, np.int32), np.empty(most, np.int32)
        given, length = code.gather(self.data, other, len(other), least, 1, found, lengths)
        return Match(length, tuple(found[:given].tolist()))


@dataclass(slots=True)
class _Kept:
    """A sequence in the store."""

    tenant: str
    begin: int  # in its tenant's text
    end: int


@dataclass(slots=True)
class _Tenant:
    index: SuffixIndex = field(default_factory=SuffixIndex)
    kept: list[_Kept] = field(default_factory=list)  # in text order
    begins: list[int] = field(default_factory=list)  # their beginnings
    tokens: int = 0


class SuffixStore:
    """Past outputs of all tenants, up to `store_tokens` tokens. A tenant never sees another's tokens."""

    def __init__(self, store_tokens: int = 1_000_000) -> None:
        if not 0 <= store_tokens <= 2**28:
            raise ConfigError(f"store_tokens={store_tokens}: must be 0 (off) to {2**28}")
        self.store_tokens = store_tokens
        self.tokens = 0
        self._most_tenants = max(_FEWEST_TENANTS, store_tokens // _SMALLEST)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # least recently used first
        self._by_use: OrderedDict[int, _Kept] = OrderedDict()  # by id(); least recently used first
        self._used: list[tuple[str, int]] = []  # uses not yet applied to `_by_use`: tenant and place

    @property
    def nbytes(self) -> int:
        return sum([known.index.data.nbytes for known in list(self._tenants.values())])

    def index(self, tenant: str) -> SuffixIndex | None:
        """The tenant's index, or None."""
        known = self._tenants.get(tenant)
        return known.index if known else None

    def insert(self, tenant: str, tokens: Sequence[int]) -> None:
        """Keep a sequence, or its end if it is too long. Evicts the oldest ones to make room."""
        tokens = tokens[max(0, len(tokens) - self.store_tokens) :]
        if len(tokens) < 2:  # no token follows another
            return
        self._note_uses()
        while self.tokens + len(tokens) > self.store_tokens:
            self._evict(next(iter(self._by_use.values())))
        known = self._known(tenant)
        index = known.index
        if index.length + len(tokens) + 1 > index.room and 2 * (known.tokens + len(tokens)) < index.room:
            _close_gaps(known)
        begin = index.length
        index.append([*tokens, -1])
        kept = _Kept(tenant, begin, begin + len(tokens))
        known.kept.append(kept)
        known.begins.append(begin)
        self._by_use[id(kept)] = kept
        known.tokens += len(tokens)
        self.tokens += len(tokens)

    def longest(self, tenant: str, tokens: Sequence[int], least: int = 1, most: int = 64) -> Match:
        """The places of the tenant's texts that agree longest with the end of these tokens."""
        index = self.index(tenant)
        return index.longest(tokens, least, most) if index else Match()

    def use(self, tenant: str, place: int) -> None:
        """Record that a draft came from this place: its sequence becomes the most recently used.

        Recording is cheap, since a step waits for it; uses are applied before something may be evicted.
        """
        self._used.append((tenant, place))
        if len(self._used) > _MOST_USES:
            self._note_uses()

    def _note_uses(self) -> None:
        """Apply the recorded uses. Must run before places change."""
        used, self._used = self._used, []
        for tenant, place in reversed(dict.fromkeys(reversed(used))):  # each at its last use
            known = self._tenants[tenant]
            self._tenants.move_to_end(tenant)
            self._by_use.move_to_end(id(known.kept[bisect_right(known.begins, place) - 1]))

    def _known(self, tenant: str) -> _Tenant:
        """The tenant's entry, created if new. Users choose the keys: above a limit the oldest tenant is dropped."""
        known = self._tenants.get(tenant)
        if known is None:
            if len(self._tenants) == self._most_tenants:
                _, dropped = self._tenants.popitem(last=False)
                self.tokens -= dropped.tokens
                for kept in dropped.kept:
                    del self._by_use[id(kept)]
            known = self._tenants[tenant] = _Tenant()
        self._tenants.move_to_end(tenant)
        return known

    def _evict(self, kept: _Kept) -> None:
        known, length = self._tenants[kept.tenant], kept.end - kept.begin
        del self._by_use[id(kept)]
        code.take_out(known.index.data, kept.begin, kept.end)
        known.index.text[kept.begin : kept.end] = -1
        which = bisect_right(known.begins, kept.begin) - 1
        del known.kept[which], known.begins[which]
        known.tokens -= length
        self.tokens -= length
        if not known.kept:
            del self._tenants[kept.tenant]


def _close_gaps(known: _Tenant) -> None:
    """Move the sequences together. Their order stays the same, and so does that of their places."""
    index = known.index
    text, places = index.text, code.places_of(index.data)
    shift = np.zeros(index.room, np.int32)
    end = 1
    for kept in known.kept:
        begin, length = kept.begin, kept.end - kept.begin
        shift[begin : kept.end] = begin - end
        text[end : end + length] = text[begin : kept.end].copy()
        text[end + length] = -1
        kept.begin, kept.end = end, end + length
        end += length + 1
    known.begins = [kept.begin for kept in known.kept]
    most = int(index.data[MOST])
    for those in (places, index.data[HEAD + most : HEAD + 2 * most]):
        those -= shift[np.clip(those, 0, index.room - 1)]  # unused entries are arbitrary
    index.data[LENGTH] = index.data[INDEXED] = index.length = end
