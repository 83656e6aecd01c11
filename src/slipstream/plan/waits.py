"""What it costs that rounds wait for a drafter on the host, and whether what it brings is worth that."""

from __future__ import annotations

from dataclasses import dataclass

_TRIAL = 16
_EVIDENCE = 128
_PAID = 8.0
"""Rounds over which a drafter on the host must have been worth the wait for it: these at least, but of many requests as
few as make four times the evidence, a round of each being a piece of it. Texts repeat themselves in stretches, so few
requests are listened to for longer, but not when the waits come to so many passes."""
_FREE = 0.04
"""A wait that is a smaller part of the pass is always borne: texts change, and a good guess brings far more."""
_WASTE = 0.01
_LONGEST_REST = 512
"""What trials may cost of the time, and the most rounds that go without a drafter which was not worth the wait."""
_MOST_FAILED = 5
"""Trials in vain, each of which doubles the number of newcomers for whom there is another before its time."""


@dataclass(slots=True)
class Waits:
    """What waiting for one drafter costs and brings. Where it does not pay, rounds go on without, and nobody waits.

    A drafter that is asked learns from its guesses even where none is drafted; so it is asked again for some rounds now
    and then, the more rarely the longer the wait, and when half of the requests have gone: at first. Where it was not
    worth it for those who came then either, twice as many must have gone the next time.
    """

    seconds: float = 0.0  # a round's wait, lately
    worth: float = 0.0  # how fast rounds with it are beside plain ones: the sum over `asked` rounds
    asked: int = 0
    until: int = 0  # the round before which nobody asks
    rows: int = 0  # requests when that was decided
    gone: int = 0  # requests that ended since
    failed: int = 0  # trials in a row in which it was not worth the wait
    _seen: bool = False

    def observe(self, seconds: float) -> None:
        self.seconds = self.seconds + 0.2 * (min(seconds, 3 * self.seconds) - self.seconds) if self._seen else seconds
        self._seen = True

    def rests(self, now: int, rows: int) -> bool:
        return now < self.until and 2 * rows > self.rows and self.gone < self.rows * 2 ** (self.failed - 2)

    def weigh(self, speed: float, pass_s: float, now: int, rows: int) -> None:
        self.worth += speed
        self.asked += 1
        share = self.seconds / pass_s
        seen = self.asked * rows
        if (self.asked < _TRIAL and seen < 4 * _EVIDENCE) or (seen < _EVIDENCE and self.asked * share < _PAID):
            return
        self.failed = min(self.failed + 1, _MOST_FAILED) if self.worth <= self.asked else 0
        if self.failed and share > _FREE:
            self.until, self.rows, self.gone = now + min(_LONGEST_REST, int(self.asked * share / _WASTE)), rows, 0
        self.worth, self.asked = 0.0, 0
