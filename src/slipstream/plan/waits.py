"""What it costs that rounds wait for a drafter on the host, and whether what it brings is worth that."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.plan.extras import crowd_of, nearest_crowd
from slipstream.plan.samples import Sample

_TRIAL = 16
_EVIDENCE = 128
_PAID = 8.0
"""Rounds over which a drafter on the host must have been worth the wait for it: these at least, but of many requests as
few as make four times the evidence, a round of each being a piece of it. Texts repeat themselves in stretches, so few
requests are listened to for longer, but not when the waits come to so many passes."""
_HOPELESS, _SOON, _LITTLE = 0.85, 6, 24
"""It need not be waited for that long where rounds with it are only so fast beside others, after so many rounds, with
so much evidence: of few requests there is never as much so soon."""
_WOKEN = 1.0
"""The same of a trial that began because it had something to say: what it said was to be worth far more."""
_CLEARLY = 1.05
"""So many times as fast rounds must be with it: those that wait for nobody hide whatever else the host does."""
_FREE = 0.04
"""A wait that is a smaller part of the pass is always borne: texts change, and a good guess brings far more."""
_WASTE = 0.005
_LONGEST_REST = 1024
"""What trials may cost of the time, and the most rounds that go without a drafter which was not worth the wait."""
_FEW = 8
_WASTE_OF_MANY = 0.003
_LONGEST_OF_MANY = 4096
"""The same where more than these run: a wait for 64 requests is longer than the pass."""
_MOST_FAILED = 5
"""Trials in vain that are counted."""
_DEAF = 32
"""Rounds, twice as many behind each in a row, before another trial among many for what was said of some of them."""


@dataclass(slots=True)
class Waits:
    """What waiting for one drafter costs and brings. Where it does not pay, rounds go on without, and nobody waits.

    A drafter that is asked learns from its guesses even where none is drafted; so it is asked again for some rounds now
    and then, the more rarely the longer the wait, or when it has something to say (`Planner.peek`).
    """

    seconds: float = 0.0  # a round's wait, lately
    won: float = 0.0  # tokens of a request in the rounds of this trial
    spent: float = 0.0  # … and those that as long without it would have brought
    asked: int = 0  # rounds of this trial
    until: int = 0  # the round before which nobody asks
    failed: int = 0  # trials in a row in which it was not worth the wait
    seen: bool = False  # it was waited for
    woken: bool = False  # this trial began because it had something to say
    vain: int = 0  # such trials in a row in which it was not worth the wait
    deaf: int = 0  # the round before which, of many requests, nobody heeds what it has to say
    sample: Sample = field(default_factory=Sample)  # of requests that are looked at meanwhile, where there are many

    def observe(self, seconds: float) -> None:
        self.seconds = self.seconds + 0.2 * (min(seconds, 3 * self.seconds) - self.seconds) if self.seen else seconds
        self.seen = True

    def rests(self, now: int, rows: int) -> bool:
        return rows > 0 and now < self.until

    def wake(self, now: int) -> None:
        """It has something to say: from this round on there is another trial."""
        if now < self.until:
            self.until = now
            self._begin()
            self.woken = True

    def weigh(self, won: float, spent: float, pass_s: float, now: int, rows: int) -> None:
        """A round that waited brought each request so many tokens, where as long without it would have brought so many.

        Both are added up: a round that is over soon is worth no more than one that takes long.
        """
        self.won += won
        self.spent += spent
        self.asked += 1
        share = self.seconds / pass_s
        seen = self.asked * rows
        least = _WOKEN if self.woken else _HOPELESS
        hopeless = self.won < least * self.spent and self.asked >= _SOON and seen >= _LITTLE
        short = (self.asked < _TRIAL and seen < 4 * _EVIDENCE) or (seen < _EVIDENCE and self.asked * share < _PAID)
        if short and not hopeless:
            return
        self.failed = min(self.failed + 1, _MOST_FAILED) if self.won <= _CLEARLY * self.spent else 0
        self.vain = min(self.vain + self.woken, _MOST_FAILED) if self.failed else 0
        if self.vain and self.woken:
            self.deaf = now + (_DEAF << self.vain)
        if self.failed and share > _FREE:
            longest, waste = (_LONGEST_REST, _WASTE) if rows <= _FEW else (_LONGEST_OF_MANY, _WASTE_OF_MANY)
            self.until = now + min(longest, int(self.asked * share / waste))
        self._begin()

    def _begin(self) -> None:
        self.won, self.spent, self.asked, self.woken = 0.0, 0.0, 0, False
        self.sample.begin()


class CrowdWaits:
    """What waiting for one drafter costs and brings by about how many requests run: of many it knows the answers later,
    and what is worth a wait alone need not be worth it among them."""

    def __init__(self) -> None:
        self._crowds: dict[int, Waits] = {}

    def of(self, rows: int) -> Waits:
        """One that is new takes as long as the nearest that is known. Where that is next to it, was tried itself and
        rests, it rests as well, but few requests do not for what was seen of many: those rest far longer."""
        crowd = crowd_of(rows)
        if crowd not in self._crowds:
            near = nearest_crowd(self._crowds, crowd)
            known = Waits() if near is None else self._crowds[near]
            is_next = near is not None and crowd / 2 <= near <= 2 * crowd and (crowd > _FEW or near <= _FEW)
            self._crowds[crowd] = Waits(known.seconds, until=known.until if is_next and known.seen else 0)
        return self._crowds[crowd]
