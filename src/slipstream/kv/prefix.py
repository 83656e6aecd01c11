"""Which pages hold the beginning of which prompt, so that the next prompt that begins alike need not compute it again.

A full page of a prompt gets a name: a hash of everything before it, of its own tokens and of the token behind it (a
head's row for a token lies in the slot of the one before, so what a page holds for it depends on that token, too; where
a drafter's rows depend on several tokens behind them, of as many). The first link of the chain is whose prompt it is,
so tenants never meet. The hash has a key that is drawn when the engine begins: nobody outside can make two prompts of
one name, or tell names apart from chance.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from slipstream.kv.pages import PagePool

Name = bytes


class PrefixStore:
    """Names of pages. A page that has one is kept when nobody holds it any more, until the pool needs the room.

    Any number of caches hang on a page. The target's is always filled in; which of the drafters' own are is kept here.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.queries = 0  # prompt tokens of requests that were admitted
        self.hits = 0  # … whose pages were found
        self._key = secrets.token_bytes(32)
        self._pages: dict[Name, int] = {}
        self._names: dict[int, Name] = {}
        self._readers: dict[int, frozenset[str]] = {}  # by page: drafters whose own cache has it
        pool.on_evict = self._drop

    def names(
        self, owner: Sequence[str], tokens: Sequence[int], kinds: Sequence[int], ahead: int = 1
    ) -> tuple[Name, ...]:
        """The names of the first pages of a prompt, one for each of `kinds`, which says how a page is computed.

        Pages with the same tokens that are computed in another way have other names. ahead: tokens behind a page that
        what it holds depends on.
        """
        size = self.pool.page_size
        name = self._hash(b"".join(len(part.encode()).to_bytes(8) + part.encode() for part in owner))
        known = array("q", tokens[: len(kinds) * size + ahead])
        found = []
        for page, kind in enumerate(kinds):
            own = known[page * size : (page + 1) * size + ahead]
            assert len(own) == size + ahead, "a page is named by the tokens behind it as well"
            name = self._hash(name + bytes((kind,)) + own.tobytes())
            found.append(name)
        return tuple(found)

    def find(self, names: Sequence[Name]) -> list[int]:
        """The pages of the longest beginning that is known. They are not held yet."""
        pages: list[int] = []
        for name in names:
            page = self._pages.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def keep(self, page: int, name: Name) -> None:
        """This page, which somebody holds, is computed. Where another has its name already, that one stays."""
        if name not in self._pages:
            self._pages[name] = page
            self._names[page] = name
            self.pool.keep(page)

    def mark(self, pages: Sequence[int], reader: str) -> None:
        """A drafter's own cache has these pages, too."""
        for page in pages:
            readers = self._readers.get(page, frozenset())
            if page in self._names and reader not in readers:
                self._readers[page] = readers | {reader}

    def read_by(self, pages: Sequence[int], reader: str) -> int:
        """How many of the first of these pages a drafter's own cache has."""
        for count, page in enumerate(pages):
            if reader not in self._readers.get(page, ()):
                return count
        return len(pages)

    def forget(self, pages: Sequence[int]) -> None:
        """What is in these pages must not be found any more."""
        for page in pages:
            if page in self._names:
                self._drop(page)
                self.pool.forget(page)

    def clear(self) -> None:
        """Forget everything."""
        self.forget(list(self._names))

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless names and pages belong together. For tests and idle moments."""
        assert {page: name for name, page in self._pages.items()} == self._names, "a page has another name than it has"
        assert self.pool.named == self._names.keys(), "the pool keeps other pages than those that have names"
        assert self._readers.keys() <= self._names.keys(), "a page without a name was read"

    def _drop(self, page: int) -> None:
        del self._pages[self._names.pop(page)]
        self._readers.pop(page, None)

    def _hash(self, data: bytes) -> Name:
        return blake2b(data, digest_size=16, key=self._key).digest()
