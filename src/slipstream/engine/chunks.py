"""How the pending tokens of requests are cut into passes, and where a prompt may go on from what another has computed.

Where sums depend on how many rows share a product, it is these rules that make a prompt come out the same in any
company, and with its beginning found in the cache (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.state import Answer

_LEAST = 16
"""Rows that a prompt may always take: fewer would cost a pass nearly as much."""
_PIECE_S = 0.04
_PIECE_FLOPS = 5e14
"""What a piece of a prompt may take on a fast GPU, and its speed. The size of a piece decides a prompt's bits, so it
follows from the model alone; how many pieces a step takes follows from their measured time (`allowance.py`)."""
_LEAST_PIECE = 512
"""Rows below which a piece would no longer keep a fast GPU busy."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pending tokens of one request to compute in this pass. It emits a token when nothing else is pending."""

    answer: Answer
    rows: int

    @property
    def completes(self) -> bool:
        return self.rows == self.answer.pending


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """How pending tokens are cut into passes: as many as a pass has room for, beside the decodes.

    Where a prompt's pages are shared with others that begin alike, two questions matter: are the tokens of a page
    computed in the same way for both (`kind`), and can the rest be computed from there on as if nothing had been there
    (`resumes`)? Here any cut is as good as any other.
    """

    max_rows: int

    @property
    def least(self) -> int:
        """Rows of prompts that a step takes at least, if it takes any."""
        return min(_LEAST, self.max_rows)

    def room(self, decodes: int) -> int:
        """Rows for chunks in a step with this number of decodes."""
        return self.max_rows - decodes

    def rows(self, answer: Answer, room: int) -> int:
        """How many of the answer's pending tokens come into a pass that has room for so many; 0: not in this one."""
        return min(room, answer.pending)

    def first(self, answer: Answer, room: int) -> int:
        """Rows that are kept for the oldest prompt: all it needs, or half of the room where that is not enough."""
        return answer.pending if answer.pending <= room else room - room // 2

    def kind(self, prompt_length: int, end: int) -> int | None:
        """How a page that ends before `end` is computed, of a prompt of this length. None: as in no other prompt."""
        return 0

    def resumes(self, prompt_length: int, place: int) -> bool:
        """Do the tokens from `place` on come out the same where those before it are not computed, but found?"""
        return True


_NARROW, _TOGETHER, _ALONE = range(3)


@dataclass(frozen=True, slots=True)
class OwnChunks(ChunkRule):
    """Cut by what a request has itself, so that its prompt comes out the same in any company.

    A prompt stands in blocks of `max_rows`. What it has of a block, if more than `narrow` tokens, is one chunk. A pass
    over it may sum in an order that depends on how many rows there are, so it has a pass to itself, unless that is
    known not to matter. It holds prompt tokens only, and never the last, whose logits choose.
    Rows of narrow passes come out the same however they are cut, and in whatever company: so many share one.

    So the end of a block may be computed after its beginning was found where it is narrow, or shares passes: there at
    any multiple of `grain` rows, by which attention parts them.
    """

    narrow: int
    together: int
    wide_together: int = 0  # rows of chunks larger than narrow ones that share a pass; 0: none do
    grain: int = 1
    step_rows: int = 0  # of all passes over prompts in one step; 0: one block

    @property
    def least(self) -> int:
        return self.max_rows

    def room(self, decodes: int) -> int:
        return self.step_rows or self.max_rows  # chunks and decodes have passes of their own

    def rows(self, answer: Answer, room: int) -> int:
        start = answer.cached
        if self._way(answer.prompt_length, start) == _NARROW:
            return min(answer.pending, self.narrow, room)
        rows = min((start // self.max_rows + 1) * self.max_rows, answer.prompt_length - 1) - start
        return rows if rows <= room else 0

    def first(self, answer: Answer, room: int) -> int:
        return self.rows(answer, room)  # there is room for more than one block

    def kind(self, prompt_length: int, end: int) -> int | None:
        way = self._way(prompt_length, end - 1)
        whole = (end - 1) // self.max_rows * self.max_rows + self.max_rows < prompt_length
        return None if way == _ALONE and not whole else way

    def resumes(self, prompt_length: int, place: int) -> bool:
        way, offset = self._way(prompt_length, place), place % self.max_rows
        return not offset or way == _NARROW or (way == _TOGETHER and not offset % self.grain)

    def is_wide(self, chunks: Sequence[Chunk]) -> bool:
        """Is this a pass over more than narrow chunks?"""
        return self._way_of(chunks[0]) != _NARROW

    def passes(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Which chunks share a pass: wide ones with wide ones, narrow ones with narrow ones."""
        parts: tuple[list[Chunk], ...] = ([], [], [])
        for chunk in chunks:
            parts[self._way_of(chunk)].append(chunk)
        alone = [[chunk] for chunk in parts[_ALONE]]
        return [*_shared(parts[_TOGETHER], self.wide_together), *alone, *_shared(parts[_NARROW], self.together)]

    def shares(self, chunks: Sequence[Chunk]) -> bool:
        """Is this a pass that several wide chunks may share, whether they do or not?"""
        return self._way_of(chunks[0]) == _TOGETHER

    def _way_of(self, chunk: Chunk) -> int:
        return self._way(chunk.answer.prompt_length, chunk.answer.cached)

    def _way(self, prompt_length: int, place: int) -> int:
        """In what kind of pass the token at `place` is computed, whatever of its block was found."""
        begin, last = place // self.max_rows * self.max_rows, prompt_length - 1
        rows = min(begin + self.max_rows, last) - begin
        if place >= last or rows <= self.narrow:
            return _NARROW
        return _TOGETHER if self.wide_together else _ALONE


def piece_rows(row_flops: float, most: int) -> int:
    """Rows of the blocks that a prompt is cut into on a GPU: `most`, or fewer for a model that would take too long."""
    rows = most
    while rows // 2 >= _LEAST_PIECE and rows * row_flops > _PIECE_S * _PIECE_FLOPS:
        rows //= 2
    return rows


def _shared(chunks: Sequence[Chunk], most: int) -> list[list[Chunk]]:
    """In order, as many in a pass as have no more than `most` rows together; one at least."""
    passes: list[list[Chunk]] = []
    rows = most
    for chunk in chunks:
        if rows + chunk.rows > most:
            passes.append([])
            rows = 0
        passes[-1].append(chunk)
        rows += chunk.rows
    return passes
