"""Rules for cutting the pending tokens of requests into passes, and for resuming a prompt behind cached pages.

Where sums depend on the number of rows that share a product, these rules make a prompt's bits the same beside any other
requests, and also if its beginning was found in the cache (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.state import Answer

_LEAST = 16
"""Rows that a prompt may always take: a pass with fewer would cost nearly the same."""
_PIECE_S = 0.04
_PIECE_FLOPS = 5e14
"""Most seconds of a piece of a prompt on a fast GPU, and the speed of that GPU. The size of a piece decides a prompt's
bits, so it depends on the model alone; measured time decides only the number of pieces in a step (`allowance.py`)."""
_LEAST_PIECE = 512
"""Rows below which a piece would not keep a fast GPU busy."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pending tokens of one request to compute in this pass. If no others are pending, it also chooses a token."""

    answer: Answer
    rows: int

    @property
    def completes(self) -> bool:
        return self.rows == self.answer.pending


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """The rule where every cut gives the same bits: chunks fill the room that decodes leave in a pass.

    `kind` and `resumes` say whether requests with equal beginnings can share pages: a page must be computed in the same
    way for both, and the rest must have the same bits whether the pages before it were computed or found.
    """

    max_rows: int

    @property
    def least(self) -> int:
        """The fewest prompt rows of a step that has any."""
        return min(_LEAST, self.max_rows)

    def room(self, decodes: int) -> int:
        """Rows for chunks in a step with this number of decodes."""
        return self.max_rows - decodes

    def rows(self, answer: Answer, room: int) -> int:
        """Rows of the answer's next chunk in a pass with this room; 0: none in this pass."""
        return min(room, answer.pending)

    def first(self, answer: Answer, room: int) -> int:
        """Rows reserved for the oldest prompt: all that it needs, or half of the room if that does not fit."""
        return answer.pending if answer.pending <= room else room - room // 2

    def kind(self, prompt_length: int, end: int) -> int | None:
        """How the page that ends before `end` is computed, in a prompt of this length. None: as in no other prompt."""
        return 0

    def resumes(self, prompt_length: int, place: int) -> bool:
        """Whether the tokens from `place` on have the same bits if those before it are found in the cache."""
        return True


_NARROW, _TOGETHER, _ALONE = range(3)


@dataclass(frozen=True, slots=True)
class OwnChunks(ChunkRule):
    """The rule where sums depend on the rows of a pass: a request's own length and cache decide its cuts.

    A prompt is divided into blocks of `max_rows`. The part of a block that is not cached is one chunk, if it has more
    than `narrow` tokens. Its pass may sum in an order that depends on the number of rows, so it is alone in the pass,
    unless several are known to give the same bits (`wide_together`). It has prompt tokens only, and never the last one,
    whose logits choose.
    Rows of narrow passes have the same bits wherever they are cut and whatever shares the pass, so several share one.

    The end of a block may therefore be computed after its beginning was found if it is narrow, or if it may share
    passes: then at any multiple of `grain` rows, the unit of attention.
    """

    narrow: int
    together: int
    wide_together: int = 0  # most rows of wide chunks in one pass; 0: each has its own
    grain: int = 1
    step_rows: int = 0  # most rows of prompts in a step; 0: one block

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
        is_whole = (end - 1) // self.max_rows * self.max_rows + self.max_rows < prompt_length
        return None if way == _ALONE and not is_whole else way

    def resumes(self, prompt_length: int, place: int) -> bool:
        way, offset = self._way(prompt_length, place), place % self.max_rows
        return not offset or way == _NARROW or (way == _TOGETHER and not offset % self.grain)

    def passes(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Divide chunks into passes, wide and narrow ones apart."""
        parts: tuple[list[Chunk], ...] = ([], [], [])
        for chunk in chunks:
            parts[self._way_of(chunk)].append(chunk)
        alone = [[chunk] for chunk in parts[_ALONE]]
        return [*_shared(parts[_TOGETHER], self.wide_together), *alone, *_shared(parts[_NARROW], self.together)]

    def is_wide(self, chunks: Sequence[Chunk]) -> bool:
        """Whether this pass has wide chunks."""
        return self._way_of(chunks[0]) != _NARROW

    def shares(self, chunks: Sequence[Chunk]) -> bool:
        """Whether this pass has wide chunks of the kind that can share a pass, even if there is only one."""
        return self._way_of(chunks[0]) == _TOGETHER

    def _way_of(self, chunk: Chunk) -> int:
        return self._way(chunk.answer.prompt_length, chunk.answer.cached)

    def _way(self, prompt_length: int, place: int) -> int:
        """The kind of pass that computes the token at `place`, whatever part of its block was found."""
        begin, last = place // self.max_rows * self.max_rows, prompt_length - 1
        rows = min(begin + self.max_rows, last) - begin
        if place >= last or rows <= self.narrow:
            return _NARROW
        return _TOGETHER if self.wide_together else _ALONE


def piece_rows(row_flops: float, most: int) -> int:
    """Rows of a prompt's blocks on a GPU: `most`, or fewer for a model that would take too long."""
    rows = most
    while rows // 2 >= _LEAST_PIECE and rows * row_flops > _PIECE_S * _PIECE_FLOPS:
        rows //= 2
    return rows


def _shared(chunks: Sequence[Chunk], most: int) -> list[list[Chunk]]:
    """Divide chunks, in order, into passes of at most `most` rows, or of one chunk."""
    passes: list[list[Chunk]] = []
    rows = most
    for chunk in chunks:
        if rows + chunk.rows > most:
            passes.append([])
            rows = 0
        passes[-1].append(chunk)
        rows += chunk.rows
    return passes
