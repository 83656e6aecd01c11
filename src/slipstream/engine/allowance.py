"""How many prompt tokens a step may read while other requests decode, decided by time as measured on this machine.

A prompt that arrives while streams run gets `SHARE` of the time, and no step reads prompts for longer than `LONGEST_S`:
a stream keeps half of its speed, and the prompt takes little more than twice its time alone. Requests that arrive
together do not hold each other up: a stream has a claim only against a prompt that arrived `HEAD_START_S` after the
stream began, or that arrived after it and is still unread after that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from slipstream.engine.state import Answer

SHARE = 0.43
"""Part of the time that prompts get beside streams with a claim: at 0.42 a prompt would take 2.4 times its time alone,
and at 0.5 a stream would lose half of its speed."""
LONGEST_S = {"cpu": 0.22, "cuda": 0.04}
"""Seconds of a step that go to prompts beside streams: with the step's own part, a gap of 0.3 s and 50 ms."""
HEAD_START_S = 0.5
"""Requests of one burst arrive within this time."""
_REPAY = (1 - SHARE) / SHARE
_FADE = 0.8
"""Weight of what was measured before, at each new measurement: the machine may be busy only for a while."""


class PromptAllowance:
    """A budget in seconds. Reading a prompt borrows time from the streams that it delays; decoding pays it back."""

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._owed_s = 0.0
        self._rows = self._seconds = 0.0  # of prompts that were read, faded
        self._decode_s = 0.0  # a step without prompts

    def rows(self, least: int) -> int:
        """Prompt rows that a step may read beside streams. `least` where nothing was measured, and at least that."""
        return max(least, int(self._longest_s * self._rows / self._seconds)) if self._seconds else least

    def may_read(self, answer: Answer, decodes: Sequence[Answer]) -> bool:
        """While more is owed than one step may take, only prompts that delay no stream with a claim are read.

        So a prompt of one or two pieces does not wait for its second piece.
        """
        return self._owed_s < self._longest_s or not self._claim(answer, decodes)

    def borrow(self, rows: int, answer: Answer, decodes: Sequence[Answer]) -> None:
        """A step will read these rows of the answer's prompt."""
        if self._rows:
            self._owed_s += rows * self._seconds / self._rows * _REPAY * self._claim(answer, decodes)

    def observe(self, read_rows: int, lasted_s: float, read_s: float | None, decodes: bool) -> None:
        """A step is over. read_s: what its prompts took; None: they shared a pass with the decodes."""
        if read_s is None:
            read_s = max(0.0, lasted_s - self._decode_s) if decodes else lasted_s
        if read_rows:
            self._rows = self._rows * _FADE + read_rows
            self._seconds = self._seconds * _FADE + read_s
        elif decodes:
            self._decode_s = lasted_s
        self._owed_s = max(0.0, self._owed_s - (lasted_s - read_s)) if decodes else 0.0

    def _claim(self, answer: Answer, decodes: Sequence[Answer]) -> float:
        """The part of the streams that have a claim against this prompt."""
        latest = answer.job.arrived
        if self._clock() - latest < HEAD_START_S:
            latest -= HEAD_START_S
        older = [one for one in decodes if 0 < one.output.timing.first_token_s <= latest - one.job.arrived]
        return len(older) / len(decodes) if decodes else 0.0
