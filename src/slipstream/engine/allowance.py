"""The budget of prompt tokens that a step may read beside decodes, in seconds as measured on this machine.

No step reads prompts for longer than `LONGEST_S` beside streams. Reading borrows time from streams that have run for
`SETTLED_S`, and decoding pays it back: beside a prompt that arrived after them, streams keep half of their speed, and
the prompt takes little more than twice its time alone. Beside prompts that have waited for longer than the streams have
run, streams keep a third: otherwise a server with much to read would never catch up. Requests that arrive together do
not delay each other, since none of their streams has run that long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from slipstream.engine.state import Answer

LONGEST_S = {"cpu": 0.22, "cuda": 0.04}
"""Most seconds of prompts in a step beside streams. With the decoding itself, tokens are 0.3 s and 50 ms apart."""
SETTLED_S = 0.5
"""Requests of one burst arrive within this time."""
_NEWER, _OLDER = 0.44, 0.7
"""The part of the time that prompts get beside streams that are older than they, and beside younger ones. At 0.47 a
stream kept 0.45 of its speed on a GPU, since the last piece is not paid back; at 0.42 a prompt would take 2.4 times its
time alone."""
_CREDIT = 0.5
"""Part of a step's time that may be owed when the next piece begins."""
_FADE = 0.8
"""Weight of earlier measurements at each new one: the machine may be busy only for a while."""
_OUTLIER = 3.0
"""A measurement counts for at most this many times the expected one: a stall predicts nothing."""


class PromptAllowance:
    """The balance, in seconds, of what reading has borrowed and decoding has not paid back yet."""

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._owed_s = 0.0
        self._rows = self._seconds = 0.0  # of prompts that were read, faded
        self._decode_s = 0.0  # the last step without prompts

    def rows(self, least: int) -> int:
        """Most prompt rows of a step beside streams: `least` or more, and `least` before anything was measured."""
        return max(least, int(self._longest_s * self._rows / self._seconds)) if self._seconds else least

    def may_read(self, decodes: Sequence[Answer]) -> bool:
        """Whether little is owed: a short prompt need not wait for its second piece."""
        return self._owed_s < _CREDIT * self._longest_s or not self._settled(decodes)

    def borrow(self, rows: int, answer: Answer, decodes: Sequence[Answer]) -> None:
        """The next step reads these rows of the answer's prompt."""
        if self._rows and (settled := self._settled(decodes)):
            older = sum(began <= answer.job.arrived for began in settled) / len(settled)
            ratio = older * (1 - _NEWER) / _NEWER + (1 - older) * (1 - _OLDER) / _OLDER
            self._owed_s += ratio * min(rows * self._seconds / self._rows, 2 * self._longest_s)

    def observe(self, read_rows: int, lasted_s: float, read_s: float | None, decodes: bool) -> None:
        """A step ended. read_s: the time of its prompts; None: they shared a pass with the decodes."""
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
        """The times at which those streams began that have run for `SETTLED_S`."""
        latest = self._clock() - SETTLED_S
        began = [(one.job.arrived, one.output.timing.first_token_s) for one in decodes]
        return [arrived + first_s for arrived, first_s in began if first_s and arrived + first_s <= latest]
