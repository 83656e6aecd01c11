"""Pages with the beginnings of prompts, by name: a prompt that begins alike need not be computed again.

The name of a full page is a hash of everything before it, of its own tokens and of the token behind it (a head's row
for a token lies in the slot of the one before, so the page depends on that token, too; drafters may depend on several
tokens behind). The chain begins with the tenant, so tenants never share. The hash has a key that is drawn when the
engine
starts: clients can neither make two prompts with one name nor predict names.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from slipstream.kv.pages import PagePool

Name = bytes


class PrefixStore:
    """Names of pages. A named page is kept after its last release, until the pool needs the room.

    Any number of caches share a page's number. The target's is always filled; the store knows which of the drafters'
    are.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.queries = 0  # prompt tokens of admitted requests
        self.hits = 0  # … found here
        self._key = secrets.token_bytes(32)
        self._pages: dict[Name, int] = {}
        self._names: dict[int, Name] = {}
        self._readers: dict[int, frozenset[str]] = {}  # by page: drafters with a filled cache of their own
        pool.on_evict = self._drop

    def names(
        self, owner: Sequence[str], tokens: Sequence[int], kinds: Sequence[int], ahead: int = 1
    ) -> tuple[Name, ...]:
        """The names of the first pages of a prompt, one for each of `kinds`.

        kinds: by page, the way in which it is computed; another way is another name. ahead: tokens behind a page on
        which its contents depend.
        """
        size = self.pool.page_size
        name = self._hash(b"".join(len(part.encode()).to_bytes(8) + part.encode() for part in owner))
        known = array("q", tokens[: len(kinds) * size + ahead])
        found = []
        for page, kind in enumerate(kinds):
            own = known[page * size : (page + 1) * size + ahead]
            assert len(own) == size + ahead, "the name of a page needs the tokens behind it"
            name = self._hash(name + bytes((kind,)) + own.tobytes())
            found.append(name)
        return tuple(found)

    def find(self, names: Sequence[Name]) -> list[int]:
        """The pages of the longest known beginning. They are not held yet."""
        pages: list[int] = []
        for name in names:
            page = self._pages.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def keep(self, page: int, name: Name) -> None:
        """Name a held page that was computed. Where another page has this name, that one stays."""
        if name not in self._pages:
            self._pages[name] = page
            self._names[page] = name
            self.pool.keep(page)

    def mark(self, pages: Sequence[int], reader: str) -> None:
        """A drafter's own cache has these pages."""
        for page in pages:
            readers = self._readers.get(page, frozenset())
            if page in self._names and reader not in readers:
                self._readers[page] = readers | {reader}

    def read_by(self, pages: Sequence[int], reader: str) -> int:
        """The number of first pages that a drafter's own cache has."""
        for count, page in enumerate(pages):
            if reader not in self._readers.get(page, ()):
                return count
        return len(pages)

    def forget(self, pages: Sequence[int]) -> None:
        """Forget the names of these pages."""
        for page in pages:
            if page in self._names:
                self._drop(page)
                self.pool.forget(page)

    def clear(self) -> None:
        """Forget everything."""
        self.forget(list(self._names))

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless names and pages belong together. For tests and idle moments."""
        assert {page: name for name, page in self._pages.items()} == self._names, "names and pages differ"
        assert self.pool.named == self._names.keys(), "the pool keeps other pages than the named ones"
        assert self._readers.keys() <= self._names.keys(), "a page without a name is marked"

    def _drop(self, page: int) -> None:
        del self._pages[self._names.pop(page)]
        self._readers.pop(page, None)

    def _hash(self, data: bytes) -> Name:
        return blake2b(data, digest_size=16, key=self._key).digest()
