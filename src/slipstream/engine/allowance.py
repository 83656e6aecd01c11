"""How many prompt tokens a step may read while other requests decode, decided by time as measured on this machine.

No step reads prompts for longer than `LONGEST_S` beside streams. Reading borrows time from streams that have run for
`SETTLED_S`, and decoding pays it back: beside a prompt that arrived after them streams keep half of their speed and
the prompt takes little more than twice its time alone. Beside prompts that have waited for longer than streams have
run, streams keep a third: else a server with much to read would fall behind for ever. Requests that arrive together do
not hold each other up, since none of their streams has run for that long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from slipstream.engine.state import Answer

LONGEST_S = {"cpu": 0.22, "cuda": 0.04}
"""Seconds of a step that go to prompts beside streams: with the step's own part, a gap of 0.3 s and 50 ms."""
SETTLED_S = 0.5
"""Requests of one burst arrive within this time."""
_NEWER, _OLDER = 0.5, 0.7
"""Part of the time that prompts get beside streams that are older than they, and beside streams that are not. Steps
that read also bring each stream a token, so at 0.5 streams keep more than half of their speed."""
_FADE = 0.8
"""Weight of what was measured before, at each new measurement: the machine may be busy only for a while."""
_OUTLIER = 3.0
"""A reading counts for no more than this many times what was expected: a stall says nothing of the next one."""


class PromptAllowance:
    """A budget in seconds: what reading has borrowed and decoding has not paid back yet."""

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._owed_s = 0.0
        self._rows = self._seconds = 0.0  # of prompts that were read, faded
        self._decode_s = 0.0  # a step without prompts

    def rows(self, least: int) -> int:
        """Prompt rows that a step may read beside streams. `least` where nothing was measured, and at least that."""
        return max(least, int(self._longest_s * self._rows / self._seconds)) if self._seconds else least

    def may_read(self, decodes: Sequence[Answer]) -> bool:
        """Not while more is owed than one step may take. So a prompt of two pieces need not wait for its second one."""
        return self._owed_s < self._longest_s or not self._settled(decodes)

    def borrow(self, rows: int, answer: Answer, decodes: Sequence[Answer]) -> None:
        """A step will read these rows of the answer's prompt."""
        if self._rows and (settled := self._settled(decodes)):
            older = sum(began <= answer.job.arrived for began in settled) / len(settled)
            ratio = older * (1 - _NEWER) / _NEWER + (1 - older) * (1 - _OLDER) / _OLDER
            self._owed_s += ratio * min(rows * self._seconds / self._rows, 2 * self._longest_s)

    def observe(self, read_rows: int, lasted_s: float, read_s: float | None, decodes: bool) -> None:
        """A step is over. read_s: what its prompts took; None: they shared a pass with the decodes."""
        if read_s is None:
            read_s = max(0.0, lasted_s - self._decode_s) if decodes else lasted_s
        if read_rows:
            expected_s = read_rows * self._seconds / self._rows if self._rows else read_s
            self._rows = self._rows * _FADE + read_rows
            self._seconds = self._seconds * _FADE + min(read_s, _OUTLIER * expected_s)
        elif decodes:
            self._decode_s = lasted_s
        self._owed_s = max(0.0, self._owed_s - (lasted_s - read_s)) if decodes else 0.0

    def _settled(self, decodes: Sequence[Answer]) -> list[float]:
        """When the streams began that have run for some time."""
        latest, seen = (
            self._clock() - SETTLED_S,
            ((one.job.arrived, one.output.timing.first_token_s) for one in decodes),
        )
        return [arrived + first_s for arrived, first_s in seen if first_s and arrived + first_s <= latest]
