"""How often a drafter is asked where nothing hides what the host does: guesses that are free to check are still not
free to make, and to reckon what others would bring takes as long.

To look for guesses, judge them and take none costs some hundredths of a small model's round. Where next to nothing was
taken lately, a drafter is asked in every second to fourth round only, until it has something again: an echo is then
missed by three rounds at most. One whose guesses take time hears nothing between its probes, and is reckoned about as
rarely as every eighth round. Guesses that were not taken and turn out right are a reason to ask at once: it takes some
of them until the drafter is believed again.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST = 0.2
_NEWCOMER = 0.1
"""What asking is taken to bring at first, and when a request begins alone: of this, shares of a plain round are had."""
_DECAY, _SLOWLY = 0.1, 0.02
_HOPE = 2.0
"""A newcomer is worth no more than so many times what questions brought in the long run."""
_HICCUP = 3.0
"""No question is taken to last longer than so many usual ones."""
_WORTH = 2.0
"""Asking that brings so many times what it takes goes on in every round."""
_SELDOM, _RARELY, _RARELY_OF_COSTLY = 2, 4, 8
"""Rounds from one question to the next where it does not; where it brings less than half of what it takes, as many as
make …"""
_WASTE = 0.007
"""… this of the time of it, but no more than the last two of these: of guesses that are free, and of those that take
time."""


@dataclass(slots=True)
class Asking:
    """Of one drafter."""

    costly: bool = False  # its guesses take time
    value: float = _FIRST  # what a question brings, as a part of a plain round, lately
    usual: float = _FIRST  # … and in the long run
    seconds: float = 0.0  # that a question takes, lately
    _passed: int = 0  # rounds since it was asked last
    _heard: int = 0  # guesses of its last answer that were not taken, and of which it is known by now …
    _right: int = 0  # … how many were right

    def due(self, pass_s: float) -> bool:
        """Is it asked in this round, whose plain pass takes so long? Called once a round."""
        share = self.seconds / pass_s
        self._passed += 1
        rarest = _RARELY_OF_COSTLY if self.costly else _RARELY
        every = 1.0
        if self.value < _WORTH * share:
            every = _SELDOM if self.value >= share / 2 else min(max(share / _WASTE, _SELDOM), rarest)
        if self._passed < every and 2 * self._right <= self._heard:
            return False
        self._passed = self._heard = self._right = 0
        return True

    def hear(self, right: bool) -> None:
        """A guess for one of the requests was not taken; it would have been right, or not."""
        self._heard += 1
        self._right += right

    def observe(self, gain: float, seconds: float) -> None:
        """It was asked: what was taken of its guesses is expected to bring so much, and all of it took so long."""
        self.value += _DECAY * (gain - self.value)
        self.usual += _SLOWLY * (gain - self.usual)
        if self.seconds:
            seconds = self.seconds + _DECAY * (min(seconds, _HICCUP * self.seconds) - self.seconds)
        self.seconds = seconds

    def newcomer(self, requests: int) -> None:
        """A request begins, beside so many: texts differ, as far as anything was worth it in any of them."""
        self.value = max(self.value, min(_NEWCOMER, _HOPE * self.usual) / max(requests, 1))
