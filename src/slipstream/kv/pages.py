"""The owners of cache pages, and the committed length of each request.

Drafts live in the cache as guests: a step writes their rows behind the committed length, `PageTable.commit` advances
the length over the accepted ones, and rollback is not advancing it. Nothing else on the host changes lengths; on a
GPU the kernel `accept` advances the device's copy. Any
number of caches (the target's, a drafter's own) share the same table, so this file knows no tensors.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain

from slipstream.core.errors import CapacityError, ConfigError


class OutOfPages(CapacityError):
    """The pool has fewer free pages than were asked for; nothing was taken."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A page that every cache on the table must copy before the next pass."""

    src: int
    dst: int


class PagePool:
    """Reference-counted pages. The lowest free ones go first, so a lone request's pages are neighbours.

    Named pages are kept after their last release, because their contents may be wanted. They count as free: when there
    are no others, the one that was released first is given away.

    most_kept: most pages that are kept; None: any number.
    """

    def __init__(self, num_pages: int, page_size: int = 16, most_kept: int | None = None) -> None:
        if num_pages < 0 or page_size < 1:
            raise ConfigError(f"num_pages={num_pages}, page_size={page_size}: must be 0 or more, and 1 or more")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))  # a heap
        self._references = [0] * num_pages
        self._most_kept = num_pages if most_kept is None else most_kept
        self._named: set[int] = set()  # pages, held or not, that are kept after their last release
        self._kept: dict[int, None] = {}  # named pages that are not held, in the order of their release
        self.on_evict: Callable[[int], None] = lambda page: None  # is called with a page that is kept no longer

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated, kept ones included."""
        return len(self._free) + len(self._kept)

    @property
    def kept_pages(self) -> int:
        """Pages that are not held, with contents that may be wanted."""
        return len(self._kept)

    @property
    def named(self) -> Set[int]:
        """Pages, held or not, that are kept after their last release."""
        return self._named

    def references(self, page: int) -> int:
        """The number of tables that hold this page."""
        return self._references[page]

    def pages_for(self, length: int) -> int:
        """The number of pages for `length` tokens."""
        return -(-length // self.page_size)

    def allocate(self, n: int) -> list[int]:
        """The n lowest free pages in ascending order, held once each. Takes all of them or raises `OutOfPages`.

        Kept pages are taken only where there are too few others.
        """
        if n > self.free_pages:
            raise OutOfPages(
                f"{n} cache pages asked for, {self.free_pages} of {self.num_pages} are free: "
                "raise the memory budget, or run fewer or shorter requests"
            )
        while len(self._free) < n:
            self._evict()
        pages = [heapq.heappop(self._free) for _ in range(n)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of these pages, which must be held or kept."""
        for page in pages:
            assert self._references[page] > 0 or page in self._kept, f"page {page} is free: it cannot be shared"
            self._references[page] += 1
            self._kept.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer for each of these pages; a page without holders is free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free: it cannot be released again"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._named:
                self._kept[page] = None
                if len(self._kept) > self._most_kept:
                    self._evict()
            else:
                heapq.heappush(self._free, page)

    def keep(self, page: int) -> None:
        """Name a held page: after its last release it is kept as long as there are other free pages."""
        assert self._references[page] > 0, f"page {page} is free: it has no contents to keep"
        self._named.add(page)

    def forget(self, page: int) -> None:
        """The opposite of `keep`."""
        self._named.remove(page)
        if page in self._kept:
            del self._kept[page]
            heapq.heappush(self._free, page)

    def _evict(self) -> None:
        page = next(iter(self._kept))
        self.forget(page)
        self.on_evict(page)

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless the owners hold exactly what the pool has lent. For tests and idle moments."""
        held = Counter(chain.from_iterable(owners))
        free = Counter([*self._free, *self._kept])
        for page in range(self.num_pages):
            if self._references[page] != held[page]:
                raise AssertionError(
                    f"page {page}: {self._references[page]} references, but {held[page]} owners hold it"
                )
            if free[page] != (held[page] == 0):
                raise AssertionError(f"page {page}: {held[page]} owners hold it, and it is {free[page]} times free")
        if unknown := [page for page in held | free if not 0 <= page < self.num_pages]:
            raise AssertionError(f"pages {unknown} are not in the pool of {self.num_pages}")
        if not self._kept.keys() <= self._named:
            raise AssertionError(f"pages {[*self._kept]} are kept, but only {[*self._named]} are named")


class PageTable:
    """One request's pages, and its committed length: the tokens with K and V that stay in the cache."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._pages: list[int] = []
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(self._pages)

    @property
    def capacity(self) -> int:
        """Tokens that fit on the held pages."""
        return len(self._pages) * self.pool.page_size

    def adopt(self, pages: Sequence[int]) -> None:
        """Begin with these full pages of committed tokens, which other requests computed. The table must be new."""
        assert not self._pages, "a table with pages cannot adopt others"
        self.pool.share(pages)
        self._pages = list(pages)
        self._length = len(pages) * self.pool.page_size

    def reserve(self, length: int) -> None:
        """Hold pages for `length` tokens, the committed ones included. Takes all it needs or raises `OutOfPages`."""
        missing = self.pool.pages_for(length) - len(self._pages)
        if missing > 0:
            self._pages += self.pool.allocate(missing)

    def slots(self, start: int, count: int) -> Sequence[int]:
        """Cache slots of `count` positions from `start` on: a range where they are neighbours.

        Slots from the committed length on will be written: their pages must be held by this table alone.
        """
        if count == 0:
            return range(0)
        end = start + count
        assert 0 <= start < end <= self.capacity, f"positions {start} to {end} are not in {self.capacity} reserved"
        size = self.pool.page_size
        pages = self._pages[start // size : (end - 1) // size + 1]
        if end > self._length:
            for page in self._pages[max(start, self._length) // size : (end - 1) // size + 1]:
                assert self.pool.references(page) == 1, f"page {page} is shared: it must not be written"
        base = pages[0] * size + start % size
        if all(page == pages[0] + i for i, page in enumerate(pages)):
            return range(base, base + count)
        return [self._pages[p // size] * size + p % size for p in range(start, end)]

    def commit(self, n: int) -> None:
        """Commit the next n tokens behind the committed length: they stay in the cache."""
        assert 0 <= n <= self.capacity - self._length, f"{n} more than {self._length}: {self.capacity} are reserved"
        self._length += n

    def trim(self, length: int) -> None:
        """Release the pages that neither `length` tokens nor the committed ones need."""
        keep = self.pool.pages_for(max(length, self._length))
        self.pool.release(self._pages[keep:])
        del self._pages[keep:]

    def fork(self, length: int | None = None, apart: int = 0) -> tuple[PageTable, list[PageCopy]]:
        """A second table with the same committed tokens, and the copies that each cache must make for it.

        length: the number of tokens to take; None takes all. apart: the number of last tokens with different contents
        in some cache. Full pages are shared; a partly filled last one, and those of the tokens apart, are copied,
        because both tables write to them. Allocates all pages or raises `OutOfPages`.
        """
        length = self._length if length is None else length
        assert 0 <= length <= self._length, f"a fork at {length}: only {self._length} tokens are committed"
        twin = PageTable(self.pool)
        full = max(0, length - apart) // self.pool.page_size
        fresh = self.pool.allocate(self.pool.pages_for(length) - full)
        self.pool.share(self._pages[:full])
        twin._pages = self._pages[:full] + fresh
        twin._length = length
        return twin, [PageCopy(*pair) for pair in zip(self._pages[full:], fresh, strict=False)]

    def release(self) -> None:
        """Release all pages; the table is as new."""
        self.pool.release(self._pages[::-1])  # of a kept prompt, the end is evicted first
        self._pages = []
        self._length = 0
