"""Texts that can be searched for what they say after the latest tokens: one that grows, or many that come and go.

`SuffixIndex` holds one text, or several end to end. `SuffixStore` keeps what was answered before, an index for each
tenant, and forgets the sequences that were not used for longest. How an index works stands in `suffix_code.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.drafters import suffix_code as code
from slipstream.drafters.suffix_code import BESIDE, BLOCKS, HEAD, INDEXED, LENGTH, MOST, ROOM, SINCE, WIDTH
from slipstream.drafters.suffix_compile import Numbers

_SMALLEST = 128
"""Numbers that the smallest index has room for. It takes some 5 kB, and so does a tenant."""
_FEWEST_TENANTS = 64
"""So many may be kept in the smallest store. Else one for each smallest index that its tokens would fill."""

_MOST_USES = 8192
"""Uses that are written down before they are looked at."""


@dataclass(frozen=True, slots=True)
class Match:
    """The places that agree longest with the end of a text."""

    length: int = 0  # how many tokens agree; 0: no place
    places: tuple[int, ...] = ()  # in the index's text; some of them, where there are more than were asked for


class SuffixIndex:
    """A text and the order of its places. `address` and `size` say where it lies: not the same after `reserve`."""

    __slots__ = ("address", "data", "length", "room", "size")

    def __init__(self, room: int = 0) -> None:
        self.length = 1  # the -1 before the first sequence; the text's length as last told to the index
        self._make(max(room, _SMALLEST))
        self.text[0] = -1
        self.data[LENGTH] = self.data[INDEXED] = 1

    def _make(self, room: int) -> None:
        most = 4 * room // WIDTH + 4  # two neighbours hold more than half a block
        self.room = room
        self.data: Numbers = np.zeros(HEAD + 4 * most + room + most * WIDTH, np.int32)
        self.data[MOST], self.data[ROOM] = most, room
        self.data[HEAD : HEAD + most] = np.arange(most)
        self.address, self.size = self.data.ctypes.data, len(self.data)

    @property
    def text(self) -> Numbers:
        return code.text_of(self.data)

    def reserve(self, length: int) -> None:
        """Make room for a text of so many numbers."""
        if length <= self.room:
            return
        old, head, places = self.data, self.data[:HEAD].copy(), code.places_of(self.data)
        text, most = self.text, int(self.data[MOST])
        self._make(2 * length)
        blocks, self.data[LENGTH], self.data[INDEXED] = int(head[BLOCKS]), head[LENGTH], head[INDEXED]
        self.data[BESIDE], self.data[SINCE] = head[BESIDE], head[SINCE]
        now = int(self.data[MOST])
        self.data[BLOCKS] = blocks
        for row in range(4):  # what is known of each block
            self.data[HEAD + row * now :][:most] = old[HEAD + row * most :][:most]
        self.text[: len(text)] = text
        code.places_of(self.data)[: len(places)] = places

    def append(self, tokens: Sequence[int]) -> None:
        """Write tokens behind the text, and take them in."""
        end = self.length + len(tokens)
        self.reserve(end)
        self.text[self.length : end] = tokens
        self.data[LENGTH] = self.length = end
        code.take_in(self.data)

    def longest(self, tokens: Sequence[int], least: int = 1, most: int = 64) -> Match:
        """Where the text agrees longest with the end of these tokens."""
        other = np.array([-1, *tokens[-code.LONGEST :]], np.int32)
        found, lengths = np.empty(most, np.int32), np.empty(most, np.int32)
        given, length = code.gather(self.data, other, len(other), least, 1, found, lengths)
        return Match(length, tuple(found[:given].tolist()))


@dataclass(slots=True)
class _Kept:
    """A sequence of the store."""

    tenant: str
    begin: int  # in its tenant's text
    end: int


@dataclass(slots=True)
class _Tenant:
    index: SuffixIndex = field(default_factory=SuffixIndex)
    kept: list[_Kept] = field(default_factory=list)  # in the order of the text
    begins: list[int] = field(default_factory=list)  # where each of them begins
    tokens: int = 0


class SuffixStore:
    """Past outputs, at most `store_tokens` tokens of them over all tenants. No tenant's tokens show in another's."""

    def __init__(self, store_tokens: int = 1_000_000) -> None:
        if not 0 <= store_tokens <= 2**28:
            raise ConfigError(f"store_tokens={store_tokens}: must be 0 (nothing is kept) to {2**28}")
        self.store_tokens = store_tokens
        self.tokens = 0
        self._most_tenants = max(_FEWEST_TENANTS, store_tokens // _SMALLEST)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the one unused for longest first
        self._by_use: OrderedDict[int, _Kept] = OrderedDict()  # by id(); the one unused for longest first
        self._used: list[tuple[str, int]] = []  # tenants and places that `_by_use` does not know of yet

    @property
    def nbytes(self) -> int:
        return sum([known.index.data.nbytes for known in list(self._tenants.values())])

    def index(self, tenant: str) -> SuffixIndex | None:
        """The tenant's texts; None where it has none."""
        known = self._tenants.get(tenant)
        return known.index if known else None

    def insert(self, tenant: str, tokens: Sequence[int]) -> None:
        """Keep a sequence, and forget as many of the oldest as it needs room for. Of too long a one the end is kept."""
        tokens = tokens[max(0, len(tokens) - self.store_tokens) :]
        if len(tokens) < 2:  # nothing in it follows anything
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
        """Where the tenant's texts agree longest with the end of these tokens."""
        index = self.index(tenant)
        return index.longest(tokens, least, most) if index else Match()

    def use(self, tenant: str, place: int) -> None:
        """A draft came from this place of the tenant's text: its sequence is the last to go.

        It is written down and looked at when something may go: a round waits for this, and for an insert nobody does.
        """
        self._used.append((tenant, place))
        if len(self._used) > _MOST_USES:
            self._note_uses()

    def _note_uses(self) -> None:
        """Before places change."""
        used, self._used = self._used, []
        for tenant, place in reversed(dict.fromkeys(reversed(used))):  # each where it was used last
            known = self._tenants[tenant]
            self._tenants.move_to_end(tenant)
            self._by_use.move_to_end(id(known.kept[bisect_right(known.begins, place) - 1]))

    def _known(self, tenant: str) -> _Tenant:
        """The tenant, made where it is new. Keys are the users' to choose: where there are too many, one is dropped."""
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
    """Move the sequences together. Their order stays, so that of the places does too."""
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
        those -= shift[np.clip(those, 0, index.room - 1)]  # unused ones hold anything
    index.data[LENGTH] = index.data[INDEXED] = index.length = end
