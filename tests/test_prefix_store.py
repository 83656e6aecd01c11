"""Names of pages, and the rule of where a prompt may go on from what another has computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.chunks import Chunk, OwnChunks
from slipstream.kv.pages import OutOfPages, PagePool, PageTable
from slipstream.kv.prefix import PrefixStore

TOKENS = list(range(100, 120))


def store(pages: int = 8, most_kept: int | None = None) -> PrefixStore:
    return PrefixStore(PagePool(pages, 4, most_kept))


def test_a_name_is_of_all_before_it_and_of_the_token_behind() -> None:
    names = store()
    base = names.names(("t", "s"), TOKENS, [0, 0, 0])
    assert len(set(base)) == 3
    assert names.names(("t", "s"), TOKENS[:13], [0, 0, 0]) == base
    assert names.names(("t", "s"), [*TOKENS[:12], 7], [0, 0, 0])[:2] == base[:2]
    assert names.names(("t", "s"), [*TOKENS[:12], 7], [0, 0, 0])[2] != base[2]
    others = [
        names.names(("s", "t"), TOKENS, [0, 0, 0]),
        names.names(("ts", ""), TOKENS, [0, 0, 0]),
        names.names(("t", "s"), [1, *TOKENS[1:]], [0, 0, 0]),
        names.names(("t", "s"), TOKENS, [1, 0, 0]),
        store().names(("t", "s"), TOKENS, [0, 0, 0]),  # another key
    ]
    assert set(base).isdisjoint(name for other in others for name in other)


def test_pages_are_kept_found_and_given_away_from_their_end() -> None:
    prefixes = store(pages=5)
    pool, names = prefixes.pool, prefixes.names(("", ""), TOKENS, [0, 0, 0])
    table = PageTable(pool)
    table.reserve(20)
    first = table.pages
    for page, name in zip(first, names, strict=False):
        prefixes.keep(page, name)
    table.release()
    assert (pool.free_pages, pool.kept_pages) == (5, 3)
    assert prefixes.find(names) == list(first[:3])
    assert prefixes.find([names[0], b"unknown", names[2]]) == [first[0]]
    other = PageTable(pool)
    other.reserve(12)  # two were free, and the end of what is kept goes next
    assert prefixes.find(names) == list(first[:2])
    prefixes.check_integrity()
    again = PageTable(pool)
    again.adopt(prefixes.find(names))
    assert (again.length, pool.kept_pages, pool.free_pages) == (8, 0, 0)
    with pytest.raises(OutOfPages):
        other.reserve(16)
    pool.check_integrity([other.pages, again.pages])


def test_no_more_is_kept_than_is_allowed() -> None:
    prefixes = store(pages=8, most_kept=2)
    table = PageTable(prefixes.pool)
    table.reserve(16)
    names = prefixes.names(("", ""), TOKENS, [0, 0, 0, 0])
    for page, name in zip(table.pages, names, strict=True):
        prefixes.keep(page, name)
    table.release()
    assert len(prefixes.find(names)) == prefixes.pool.kept_pages == 2
    assert prefixes.pool.free_pages == 8
    prefixes.check_integrity()


def test_who_has_read_a_page() -> None:
    prefixes = store()
    pages = prefixes.pool.allocate(3)
    names = prefixes.names(("", ""), TOKENS, [0, 0, 0])
    for page, name in zip(pages[:2], names, strict=False):
        prefixes.keep(page, name)
    prefixes.mark(pages, "model")
    prefixes.mark(pages[:1], "eagle")
    assert [prefixes.read_by(pages, name) for name in ("model", "eagle", "nobody")] == [2, 1, 0]
    prefixes.forget(pages[:1])
    assert prefixes.read_by(pages, "model") == 0
    prefixes.check_integrity()
    prefixes.pool.release(pages)
    assert prefixes.pool.kept_pages == 1


def test_integrity_finds_a_page_that_lost_its_name() -> None:
    prefixes = store()
    (page,) = prefixes.pool.allocate(1)
    prefixes.keep(page, b"name")
    prefixes.check_integrity()
    prefixes.pool.forget(page)
    with pytest.raises(AssertionError, match="the pool keeps other pages"):
        prefixes.check_integrity()


@dataclass(eq=False)
class Prompt:
    """A prompt of a known text that is computed by the rule; `bits` says of each token how that was done."""

    prompt_length: int
    cached: int = 0
    bits: list[object] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return self.prompt_length - self.cached

    def compute(self, rule: OwnChunks) -> None:
        while self.pending:
            rows = rule.rows(self, 10**6)  # type: ignore[arg-type]
            chunk = Chunk(self, rows)  # type: ignore[arg-type]
            for row in range(rows):
                tile = self.cached + row // rule.grain * rule.grain
                if not rule.is_wide([chunk]):
                    how: object = "narrow"
                elif rule.shares([chunk]):
                    how = ("together", tile)  # the rows that attention takes together
                else:
                    how = ("alone", self.cached, rows)
                self.bits.append(how)
            self.cached += rows


@settings(max_examples=300)
@given(
    rule=st.builds(
        OwnChunks,
        max_rows=st.sampled_from([6, 16, 20, 24]),
        narrow=st.integers(1, 10),
        together=st.just(20),
        wide_together=st.sampled_from([0, 24]),
        grain=st.sampled_from([1, 2, 3, 8]),
    ),
    size=st.sampled_from([1, 3, 4, 8]),
    first=st.integers(1, 80),
    second=st.integers(1, 80),
)
def test_what_is_found_is_what_would_have_been_computed(rule: OwnChunks, size: int, first: int, second: int) -> None:
    """One text, of which two prompts have so many tokens: the second finds what the first computed."""

    def kinds(length: int) -> list[int | None]:
        return [rule.kind(length, end) for end in range(size, length, size)]

    one, fresh, other = Prompt(first), Prompt(second), Prompt(second)
    one.compute(rule)
    fresh.compute(rule)
    pages = 0
    for mine, theirs in zip(kinds(second), kinds(first), strict=False):
        if mine is None or mine != theirs:
            break
        pages += 1
    while pages and not rule.resumes(second, pages * size):
        pages -= 1
    other.cached = pages * size
    other.bits = one.bits[: pages * size]
    other.compute(rule)
    assert other.bits == fresh.bits
