"""Drafters whose guesses take time and that may guess for the same requests: one of them does in a round, the best.

Two heads say much the same, and each takes its time: together they are hardly ever worth it. Which one is better
depends on how many requests run, and on the text. So each is reckoned as if it were alone, every few rounds, and who
promises most has the turn; the others are probed now and then, like all that do not pay, or tried: among a few
requests in its place, among more for some of them, beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.plan.extras import SOME, crowd_of
from slipstream.plan.planner import Beside
from slipstream.plan.sizes import MARGIN

_OLD = 24
"""Rounds after which what one promised does not count any more: it may not be asked at all."""
_FEW = 8
_BETTER, _BETTER_OF_MORE = 1.05, 1.08
"""Whoever takes another's turn must promise so many times as much, beyond what it takes to read what it missed: among a
few requests and among more. To be wrong costs more there."""
_NEW, _NEW_OF_MANY = 0.05, 0.3
"""The part of a new promise in what one is taken to promise, for each round since the last: what is promised wavers far
more than two who can both do it differ, and whoever heeds that changes all the time, and is no better for it. What is
promised for many requests is a mean already."""
_UNTRIED = 0.5
"""Where it has not guessed yet for such a part of the requests, what it promises is what others' texts were like, …"""
_NEAR = 0.7
"""… and it is tried, if it promises so many times as much as the best. Not among many requests: others of their kind
speak for them, and everybody waits for what is read and guessed for a trial."""
_ASKED, _ASKED_OF_MANY = 4, 16
"""Every so many rounds those are asked what they promise whose turn it is not: it changes slowly, and takes time, of
which there is none to spare with many requests."""
_LONGEST = 256
"""Rounds, at the most, for which others have the turn of one who does not guess."""
_TRIAL, _TRIAL_OF_SOME = 3, 6
"""Rounds of a trial, of one request and of a few: texts are easy in stretches, so that three tell little; but with one
request more of them cost as much as they tell. And …"""
RUN = 4
"""… of more: it guesses for a sample of them then, beside whose turn it is. And …"""
_APART, _WASTE, _WASTE_OF_SOME = 48, 0.002, 0.005
"""… from one trial to the next: so many, twice as many behind each that did not win the turn, or as many as trials may
cost of the time: in the place of whose turn it is, and of a sample."""


@dataclass(slots=True)
class _Promise:
    speed: float  # times that of a round without it
    round: int
    requests: frozenset[str]  # for whom
    untried: float = 0.0  # the part of them for which it has not guessed yet
    before: _Promise | None = None  # that of an earlier round


@dataclass(slots=True)
class _Trial:
    drafter: str
    begin: int  # rounds
    end: int
    apart: int = _APART  # rounds from its end to the next
    is_sample: bool = False  # it guesses for a few of many, beside whose turn it is
    has_won: bool = False  # it has had the turn since


@dataclass(frozen=True, slots=True)
class _Heir:
    drafter: str
    since: int  # the round from which on it has the turn


@dataclass(slots=True)
class _Declined:
    drafter: str
    round: int
    lasts: int  # rounds in which others may have its turn

    @property
    def until(self) -> int:
        return self.round + self.lasts


class Rivals:
    """Of one planner."""

    def __init__(self) -> None:
        self._promises: dict[tuple[int, bool], dict[str, _Promise]] = {}  # by crowd, others' guesses or none, drafter
        self._known: set[str] = set()  # all who ever promised anything
        self._turns: dict[int, str] = {}  # by crowd: whose it is
        self._heirs: dict[int, _Heir] = {}  # by crowd: who has it from the next round on
        self._apart: set[frozenset[str]] = set()  # two who were asked for quite other requests, the last time
        self._trials: dict[int, _Trial] = {}  # by crowd: the last
        self._declined: dict[int, _Declined] = {}  # by crowd: the last

    def beside(self, beside: Sequence[Sequence[Beside]]) -> Sequence[Sequence[Beside]]:
        """Those who guess already, without rivals."""
        if len(self._known) < 2:
            return beside
        return [[one for one in theirs if one.drafter not in self._known] for theirs in beside]

    def company(self, drafters: tuple[str, ...]) -> tuple[str, ...]:
        """Those who guess already and the last, who may, in whose place its rivals do."""
        if len(self._known) < 2 or not drafters or drafters[-1] not in self._known:
            return drafters
        return (*[name for name in drafters[:-1] if name not in self._known], drafters[-1])

    def leave(self, drafter: str, rows: int) -> None:
        """It may not guess with so many requests: nobody waits for its turn."""
        crowd = crowd_of(rows)
        for promises in self._promised_of(crowd):
            promises.pop(drafter, None)
        if self._turns.get(crowd) == drafter:
            del self._turns[crowd]
        if crowd in self._heirs and self._heirs[crowd].drafter == drafter:
            del self._heirs[crowd]
        trial = self._trials.get(crowd)
        if trial is not None and trial.drafter == drafter:
            trial.end = trial.begin

    def asks(self, drafter: str, rows: int, now: int) -> bool:
        """Is it worth knowing in this round what it promises?"""
        crowd = crowd_of(rows)
        last, promises = self._holder(crowd, now), self._promised_of(crowd)
        if not any(drafter in one for one in promises):
            return True  # it is nobody's rival, or was never asked
        if last is None or frozenset((last, drafter)) in self._apart:
            return True
        if self.tries(rows, now, is_sample=True) == drafter:
            return True
        if (tried := self.tries(rows, now)) is not None:
            return tried == drafter
        if now % _asked(rows) == 0 or last == drafter:
            return True
        if any(last in one and now - one[last].round <= 1 and one[last].untried > _UNTRIED for one in promises):
            return True  # whose turn it is knows as little of these requests
        # or whose turn it was guesses no more
        return not any(last in one and now - one[last].round <= _ASKED for one in promises)

    def waits(self, drafter: str, rows: int, now: int) -> bool:
        """Has another one the turn with so many requests? For rounds in which nobody is to take it."""
        holder = self.whose(rows, now)
        if holder in (None, drafter) or frozenset((holder, drafter)) in self._apart:
            return False
        return any(drafter in one for one in self._promised_of(crowd_of(rows)))

    def whose(self, rows: int, now: int) -> str | None:
        """Whose turn it is with so many requests, trials included, if it is anybody's."""
        return self.tries(rows, now) or self._holder(crowd_of(rows), now)

    def decline(self, drafter: str, rows: int, now: int) -> None:
        """It has the turn, and does not guess: then others may, for longer each time."""
        crowd = crowd_of(rows)
        before, trial = self._declined.get(crowd), self._trials.get(crowd)
        if before is not None and before.drafter == drafter and before.round == now:
            return  # this round is planned again
        again = before is not None and before.drafter == drafter and now <= before.until + _OLD
        lasts = min(2 * before.lasts, _LONGEST) if before is not None and again else _asked(rows)
        self._declined[crowd] = _Declined(drafter, now, lasts)
        if trial is not None and trial.drafter == drafter:
            trial.end = min(trial.end, now + 1)

    def tries(self, rows: int, now: int, *, is_sample: bool = False) -> str | None:
        """Who is on trial in this round of so many requests, if anybody is: in place of whose turn it is, or for a
        sample of them beside it."""
        trial = self._trials.get(crowd_of(rows))
        runs = trial is not None and trial.begin <= now < trial.end and trial.is_sample == is_sample
        return trial.drafter if trial is not None and runs else None

    def has_turn(
        self,
        drafter: str,
        request_ids: Sequence[str],
        rows: int,
        speed: float,
        now: int,
        *,
        beside: bool = False,
        untried: float = 0.0,
        loses: float = 0.0,
    ) -> bool:
        """It promises to make this round so many times as fast by guesses for these requests. Is no other one better?

        Whoever guesses for other requests takes nobody's turn. beside: others' guesses are in the round already, and
        leave less to promise: that is compared with what was promised in such rounds, for rivals are asked in turn.
        untried: the part of the requests for which it has not guessed yet. loses: rounds that a trial costs.
        """
        crowd, requests = crowd_of(rows), frozenset(request_ids)
        self._known.add(drafter)
        promises = self._promises.setdefault((crowd, beside), {})
        new = _NEW if rows <= SOME else _NEW_OF_MANY
        promises[drafter] = _promised(promises.get(drafter), _Promise(speed, now, requests, untried), new)
        for name, one in promises.items():
            if one.round == now and name != drafter:
                pair = frozenset((name, drafter))
                (self._apart.add if one.requests.isdisjoint(requests) else self._apart.discard)(pair)
        recent = [name for name, one in promises.items() if now - one.round <= _OLD]
        fresh = {name: promises[name].speed for name in recent if frozenset((name, drafter)) not in self._apart}
        best, last = max(fresh, key=fresh.__getitem__), self._holder(crowd, now) or drafter
        if last not in fresh:
            other = self._promises.get((crowd, not beside), {}).get(last)
            if other is None or now - other.round > _OLD or frozenset((last, drafter)) in self._apart:
                last = best  # else it is asked in this round, too: what it promises then is not known yet
        elif fresh[best] > _more(rows, promises[last].untried) * fresh[last]:
            last = best
        idle = self._declined.get(crowd)
        if idle is not None and last == idle.drafter and now <= idle.until and last in fresh and len(fresh) > 1:
            last = max((name for name in fresh if name != idle.drafter), key=fresh.__getitem__)
        holder = self._pass_on(crowd, last, drafter, now) if self._turns.get(crowd) in fresh else last
        self._turns[crowd] = holder
        trial = self._trials.get(crowd)
        if self.tries(rows, now) in fresh:
            return self.tries(rows, now) == drafter
        if trial is not None and holder == trial.drafter:
            trial.apart, trial.has_won = _APART, True
        waste = _WASTE_OF_SOME if is_by_sample(rows) else _WASTE
        is_time = trial is None or now >= trial.end + max(trial.apart, loses / waste)
        is_unknown = rows <= SOME and holder != drafter and untried > _UNTRIED
        if is_time and is_unknown and speed > max(1.0, _NEAR * fresh[best]):
            again = trial is not None and trial.drafter == drafter and not trial.has_won
            apart = min(2 * trial.apart, _LONGEST) if trial is not None and again else _APART
            end = now + 1 + (_TRIAL if rows == 1 else _TRIAL_OF_SOME if rows <= _FEW else RUN)
            # from the next round on: this one may be another's
            self._trials[crowd] = _Trial(drafter, now + 1, end, apart, is_by_sample(rows))
        return holder == drafter

    def _holder(self, crowd: int, now: int) -> str | None:
        """Whose turn it is, if it is anybody's."""
        heir = self._heirs.get(crowd)
        if heir is not None and heir.since <= now:
            self._turns[crowd] = self._heirs.pop(crowd).drafter
        return self._turns.get(crowd)

    def _pass_on(self, crowd: int, wanted: str, drafter: str, now: int) -> str:
        """The turn becomes another's: at once if whose it was is still to be asked or does not guess, else from the
        next round on. For rivals are asked one by one: else both would guess in this round, or nobody."""
        before = self._turns[crowd]
        if wanted != before and (before == drafter or self._guesses(crowd, before, now)):
            self._heirs[crowd] = _Heir(wanted, now + 1)
            return before
        self._heirs.pop(crowd, None)
        return wanted

    def _guesses(self, crowd: int, drafter: str, now: int) -> bool:
        """Had it the turn in this round already, and took it?"""
        idle = self._declined.get(crowd)
        if idle is not None and idle.drafter == drafter and idle.round == now:
            return False
        promises = [one.get(drafter) for one in self._promised_of(crowd)]
        return any(one is not None and one.round == now for one in promises)

    def _promised_of(self, crowd: int) -> list[dict[str, _Promise]]:
        """What each promised, beside others' guesses and without them."""
        return [one for (of, _), one in self._promises.items() if of == crowd]


def is_by_sample(rows: int) -> bool:
    """Is a rival tried for a few of so many requests, beside whose turn it is, or in its place?"""
    return rows > _FEW


def _more(rows: int, untried: float) -> float:
    """How many times as much one must promise to take another's turn, which has not guessed for such a part yet."""
    if untried > _UNTRIED:
        return MARGIN  # the turn was had with others: both know as little of these
    return _BETTER if rows <= _FEW else _BETTER_OF_MORE


def _promised(last: _Promise | None, this: _Promise, new: float) -> _Promise:
    """Promises waver from round to round, and to take another's turn costs more than that is worth: so each is a mean
    with those before it. Of two in one round the second counts. new: this one's part, for each round since the last."""
    if last is not None and last.round == this.round:
        last = last.before
    if last is None or this.round - last.round > _OLD:
        return this
    part = 1 - (1 - new) ** (this.round - last.round)
    last.before = None
    return replace(this, speed=float(last.speed ** (1 - part) * this.speed**part), before=last)


def _asked(rows: int) -> int:
    """Rounds from one question to the next."""
    return _ASKED if rows <= _FEW else _ASKED_OF_MANY
