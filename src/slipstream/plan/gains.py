"""The guard: what speculation truly brought, against rounds without it, by kind of request.

Estimates can be wrong together: a clock that lies, a drafter that promises too much, a cost that nobody thought of. So
every drafted round is compared with undrafted ones of as many requests. Where rounds bring less than was expected of
them, more must be expected of the next (`doubt`), and no draft may lose more than was won (`stake`). Where a kind of
request is slower for its drafts all the same, they are off for it while about as many run, and tried again for a while,
the more rarely the more they cost. Drafters are judged by themselves, and those that guess together by what they bring
together: nobody is off for another's rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.plan.context import ContextCost
from slipstream.plan.cost import PassCost
from slipstream.plan.extras import crowd_of
from slipstream.plan.gain import Gain
from slipstream.plan.measured import Load
from slipstream.plan.purses import Purses, Whose
from slipstream.plan.traits import Traits

_EVIDENCE, _ROUNDS = 16, 6
"""Drafts of a kind before it is judged, also after each rest; and rounds, where a device may wait for the host: one of
many requests has drafts enough, but it may be a hiccup. So most of them must have been too slow, too."""
_SLACK = 0.97
"""It is off below so much of the gain that is asked for, and on again at the whole of it: no flapping between."""
_WASTE = 0.005
_SHORTEST_REST = 64
_LONGEST_REST = 2048
"""What trials may cost of the time, and rounds between two of them; the shortest behind the first that failed."""
_OLD, _CHANGED = 512, 1.5
"""Rounds after which there must be another plain one of as many requests to compare with: machines change. And how many
times as long or short a pass takes where there must be one at once."""
_SOON, _AGAIN = 8, 256
"""… and from one to the next where nothing was heard of it, twice as many each time: rounds in which something is
recorded are not told of, nor those in which prompts are read where no clock tells how long that took."""
_TRIES = 12
"""Plain rounds that are made to find out what such rounds wait for the host, before that is left for as long."""
_HICCUP = 4.0
"""A round that lasts so many plain ones says nothing about drafts, unless it has so many rows that half is usual."""

_IDLE_WEIGHT = 0.2
"""Of the last plain round, in what the device waits in such rounds."""
_AMONG, _FEW = 2, 8
"""Plain rounds before one that is a plain one among others; and requests for whom the host has no more to do than fits
into a round."""

_DOUBT_DECAY, _DOUBT_FADES = 0.95, 0.99
"""How drafted rounds count against what was expected of them, and how that is forgotten while nothing is drafted."""
_TRUST, _MOST_DOUBT = 6.0, 1.5
"""Rounds that brought what they promised, which everybody starts with; and the most that is asked beyond the gain."""

_UNKNOWN = Traits()


class Waited(NamedTuple):
    """What of a round the device waited for drafters on the host: whoever guesses without them has no part in it."""

    drafters: Sequence[str] = ()
    seconds: float = 0.0
    beyond: float = 0.0  # … and besides, for whatever else the host did


NO_WAIT = Waited()


class Turn(NamedTuple):
    """What a round was for one request."""

    request_id: str
    drafted: int
    emitted: int
    drafters: tuple[str, ...] = ()  # whose guesses they were


def guessers(turns: Sequence[Turn]) -> frozenset[str]:
    """Whose guesses were in a round."""
    return frozenset([name for turn in turns if turn.drafted for name in turn.drafters])


class Kind(NamedTuple):
    """Requests of such traits, while about so many run: what pays alone need not pay among many. And whose guesses."""

    traits: Traits
    crowd: int
    drafters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join([f"{self.traits}; {self.crowd} at once", *[" + ".join(self.drafters)] * bool(self.drafters)])


@dataclass(slots=True)
class _Record:
    """Of drafted rounds: how many times as fast as plain ones they were to be, and were."""

    hoped: float = 0.0
    measured: float = 0.0
    scatter: float = 0.0  # the sum of squares of what lay between

    def add(self, hoped: float, measured: float) -> None:
        self.hoped = self.hoped * _DOUBT_DECAY + hoped
        self.measured = self.measured * _DOUBT_DECAY + measured
        self.scatter = self.scatter * _DOUBT_DECAY**2 + (hoped - measured) ** 2

    def fade(self) -> None:
        self.hoped *= _DOUBT_FADES
        self.measured *= _DOUBT_FADES
        self.scatter *= _DOUBT_FADES**2

    @property
    def doubt(self) -> float:
        lacking = self.hoped - self.measured - 2 * self.scatter**0.5  # beyond what chance may have to do with it
        return 1.0 if lacking <= 0 else min(1 + lacking / (self.measured + _TRUST), _MOST_DOUBT)


class _Asked(NamedTuple):
    """Plain rounds that were made to compare with."""

    until: int = 0  # the round before which there are no more
    waits: int = _SOON  # rounds to the next
    tries: int = 0


_NEVER = _Asked()


class _Run(NamedTuple):
    """Plain rounds that followed each other."""

    crowd: int = 0
    round: int = 0  # the last of them
    length: int = 0


@dataclass(slots=True)
class _Kind:
    gain: Gain = field(default_factory=Gain)
    rounds: deque[float] = field(default_factory=lambda: deque(maxlen=2 * _ROUNDS))  # gains, one by one
    until: int = 0  # the round before which nothing is drafted for it
    judged: int = 0  # rounds since then
    failed: int = 0  # times in a row that it was found not to pay
    last: float = 1.0  # gain when it was last judged


class Gains:
    """Who may have drafts. Told of every round, drafted or not.

    min_gain: how many times as fast as plain decoding a kind must be to go on drafting.
    """

    def __init__(
        self, slope: float, min_gain: float = 1.0, context: ContextCost | None = None, passes: PassCost | None = None
    ) -> None:
        """passes: what a pass takes by now; None: that is not known."""
        self._passes = passes
        self._passes_then: dict[int, float] = {}  # by size of pass: … and took when a plain round was seen
        self._plain = PassCost(slope, context=context, learns=False)  # seconds of undrafted rounds by requests
        self._last_plain: dict[int, int] = {}  # by size of pass: the round
        self._asked_plain: dict[int, _Asked] = {}  # … when there was to be one of which nothing was heard
        self._asked_idle: dict[int, _Asked] = {}  # by crowd: the same of some that follow each other
        self._plain_idle: dict[int, float] = {}  # by crowd: what of those that follow each other the device waits
        self._before = _Run()
        self._min_gain = min_gain
        self.hiccups = False  # may a round take long for no fault of its drafts?
        self._kinds: dict[Kind, _Kind] = {}
        self._resting: set[Kind] = set()  # those that are off
        self._off: set[tuple[Traits, tuple[str, ...]]] = set()  # of these, those of the round that is planned
        self._records: dict[int, dict[frozenset[str], _Record]] = {}  # by crowd and who drafted in the round
        self._purses = Purses()
        self._crowd = 1  # of the round that is planned
        self._traits: dict[str, Traits] = {}
        self._own: dict[str, Gain] = {}
        self._told = False  # does anybody tell it of rounds?
        self._rounds = 0

    def start(self, request_id: str, traits: Traits) -> None:
        self._traits[request_id] = traits

    def forget(self, request_id: str) -> None:
        self._traits.pop(request_id, None)
        self._own.pop(request_id, None)

    def next_round(self, requests: int = 1) -> None:
        self._rounds += 1
        self._crowd = crowd_of(requests)
        if self._resting:
            self._resting = {kind for kind in self._resting if self._rounds < self._kinds[kind].until}
            self._off = {(kind.traits, kind.drafters) for kind in self._resting if kind.crowd == self._crowd}

    def doubt(self, drafters: Sequence[str] = ()) -> float:
        """How many times the gain that is asked for a plan must promise in which these draft: by what became of their
        promises of late."""
        record = self._records.get(self._crowd, {}).get(frozenset(drafters))
        return 1.0 if record is None else record.doubt

    def stake(self, drafters: Sequence[str], request_ids: Sequence[str], requests: int) -> float:
        """How many plain rounds a round may take longer than a plain one in which these draft, if nothing is right.

        What its requests won by drafts so far, and what is in the purse.
        """
        won = sum([max(0.0, own.tokens - own.plain) for r in request_ids if (own := self._own.get(r)) is not None])
        traits = [self._traits.get(request_id, _UNKNOWN) for request_id in request_ids]
        return won / requests + self._purses.left(Whose.of(self._crowd, drafters, traits), self._rounds)

    def hear(self, drafter: str, request_id: str, right: bool) -> None:
        """A guess that was not sent would have been right, or not."""
        whose = Whose.of(self._crowd, (drafter,), (self._traits.get(request_id, _UNKNOWN),))
        self._purses.hear(whose, right, max(len(self._traits), 1), self._rounds)

    def drafts(self, request_id: str, drafters: tuple[str, ...] = ()) -> bool:
        """May these draft for it? As long as that pays for its kind, and in trials."""
        return not self._off or (self._traits.get(request_id, _UNKNOWN), drafters) not in self._off

    @property
    def silences(self) -> bool:
        """Is there a kind for which somebody may not?"""
        return bool(self._off)

    def lacks_plain(self, requests: int) -> bool:
        """Was no undrafted round of about so many requests seen lately? There must be one to compare with."""
        edge = PassCost.edge(requests)
        if not self._told or self._rounds < self._asked_plain.get(edge, _NEVER).until:
            return False
        is_old = self._rounds - self._last_plain.get(edge, self._rounds) > _OLD
        return is_old or self._has_changed(requests) or not self._plain.seen(requests)

    def _has_changed(self, requests: int) -> bool:
        """Does a pass of so many take much more or less than when a plain round was seen last?"""
        if not requests or self._passes is None or not self._passes.observed:
            return False
        then, now = self._passes_then.get(PassCost.edge(requests), 0.0), self._passes.about(requests)
        return then > 0 and not 1 / _CHANGED < now / then < _CHANGED

    def ask_plain(self, requests: int) -> None:
        """This round of so many goes without drafts, to compare with."""
        edge = PassCost.edge(requests)
        waits = self._asked_plain.get(edge, _NEVER).waits
        self._asked_plain[edge] = _Asked(self._rounds + waits, min(2 * waits, _AGAIN))
        crowd = crowd_of(requests)
        tries = self._asked_idle.get(crowd, _NEVER).tries + 1
        over = tries >= _TRIES
        self._asked_idle[crowd] = _Asked(self._rounds + _AGAIN if over else 0, tries=0 if over else tries)

    def lacks_idle(self, requests: int) -> bool:
        """Is it not known what plain rounds of about so many wait for the host, where they may? Of few they do not."""
        crowd = crowd_of(requests)
        if self._rounds < self._asked_idle.get(crowd, _NEVER).until:
            return False
        return self._told and self.hiccups and requests > _FEW and crowd not in self._plain_idle

    def of(self, request_id: str) -> Gain:
        """What was measured for a request."""
        return self._own.get(request_id, Gain())

    def kinds(self) -> dict[Kind, Gain]:
        return {name: kind.gain for name, kind in list(self._kinds.items())}  # any thread may ask

    def resting(self) -> list[str]:
        """Kinds for which nothing is drafted at present, by whom."""
        return sorted(str(kind) for kind in list(self._resting) if self._rounds < self._kinds[kind].until)

    def off(self, request_id: str, drafter: str | None = None) -> str | None:
        """Why a drafter, or anybody, does not guess for it, alone or beside others; None: nobody is off."""
        mine = (self._traits.get(request_id, _UNKNOWN), self._crowd)
        off = [kind for kind in list(self._resting) if kind[:2] == mine and self._rounds < self._kinds[kind].until]
        name = next((kind for kind in off if drafter is None or kind.drafters[-1:] == (drafter,)), None)
        if name is None:
            return None
        own, last = self.of(request_id), self._kinds[name].last
        this = f", this one {own.measured:.2f}x" if own.drafts else ""
        return f"off: drafts made requests of its kind ({name}) {last:.2f}x as fast as none{this}; tried again later"

    def observe(
        self,
        turns: Sequence[Turn],
        seconds: float,
        expected: float = 1.0,
        context: int = 0,
        usual: float = 1.0,
        waited: Waited = NO_WAIT,
        *,
        is_probe: bool = False,
    ) -> None:
        """A round is over, of which such a gain was expected; its requests have so many tokens in all.

        usual: how many plain rounds one with as many rows takes. waited: what of the seconds was a wait. is_probe: it
        was not expected to pay, and that it does not is held against nobody.
        """
        self._told = True
        drafted = sum(turn.drafted for turn in turns)
        requests = len(turns)
        crowd, who = crowd_of(requests), guessers(turns)
        for others, record in self._records.get(crowd, {}).items():
            if not drafted or others != who:
                record.fade()
        if not drafted:
            if requests:
                self.observe_plain(Load(requests, context), seconds, waited)
            return
        self._plain.at(Load(requests, context))
        if not self._plain.observed:  # perhaps only now: those over quite other lengths were forgotten
            return
        longest = max(_HICCUP, 2 * usual)
        plain_s = self._plain.seconds(requests)

        def lasted(drafters: Iterable[str]) -> float:
            """In plain rounds, for those who guess so."""
            own_s = seconds if not waited.seconds or set(waited.drafters) & set(drafters) else seconds - waited.seconds
            return min(own_s / plain_s, longest)

        dearer = lasted(who) - 1  # may be noise below 0
        if expected > 1 and dearer < longest - 1:
            brought = sum(turn.emitted for turn in turns) / requests
            record = self._records.setdefault(crowd, {}).setdefault(who, _Record())
            record.add(expected, brought / max(0.1, 1 + dearer))
            drafted_for = [turn.request_id for turn in turns if turn.drafted]
            if whose := [self._traits[name] for name in drafted_for if name in self._traits]:
                self._purses.put(Whose.of(crowd, who, whose), brought - 1 - dearer, self._rounds)
        seen: dict[tuple[Traits, tuple[str, ...]], Gain] = {}  # of this round
        longer: dict[tuple[str, ...], float] = {}  # by those who guess so, for each of their nodes
        for request_id, nodes, emitted, drafters in turns:
            traits = self._traits.get(request_id)
            if not nodes or traits is None:
                continue
            if drafters not in longer:  # who asks for more rows pays more
                longer[drafters] = (lasted(drafters) - 1) * requests / drafted
            plain = max(0.1, 1 + longer[drafters] * nodes)
            gain = self._own.get(request_id)
            if gain is None:
                gain = self._own[request_id] = Gain()
            gain.add(emitted, plain, expected)
            if not is_probe:
                gain = seen.get((traits, drafters))
                if gain is None:
                    gain = seen[traits, drafters] = Gain()
                gain.add(emitted, plain, expected)
        for (traits, drafters), gain in seen.items():
            name = Kind(traits, crowd, drafters)
            kind = self._kinds.setdefault(name, _Kind())
            kind.gain.join(gain)
            kind.rounds.append(gain.measured)
            kind.judged += 1
            self._judge(name, kind)

    def observe_plain(self, load: Load, seconds: float, waited: Waited) -> None:
        """A round without drafts took so long, beside what it took to read prompts."""
        requests = load.requests
        if self._has_changed(requests):
            self._plain.forget(requests)
        self._plain.observe(requests, self._plain_s(crowd_of(requests), seconds, waited), load)
        edge = PassCost.edge(requests)
        self._last_plain[edge] = self._rounds
        self._asked_plain.pop(edge, None)
        if self._passes is not None and self._passes.observed:
            self._passes_then[edge] = self._passes.about(requests)

    def _plain_s(self, crowd: int, seconds: float, waited: Waited) -> float:
        """What an undrafted round would have taken among others.

        Behind a drafted one the device waits until the host is done with that one's guesses and with the next plan:
        that is none of plain decoding's. So it counts how long it waits where nothing was drafted before, either: the
        host tells of a round while the next but one is on its way.
        """
        follows = self._before.crowd == crowd and self._rounds - self._before.round <= 1
        self._before = _Run(crowd, self._rounds, self._before.length + 1 if follows else 1)
        if self._before.length > _AMONG:
            usual = self._plain_idle.get(crowd, waited.beyond)
            self._plain_idle[crowd] = usual + _IDLE_WEIGHT * (waited.beyond - usual)
            return seconds - waited.seconds
        return seconds - waited.seconds - waited.beyond + min(waited.beyond, self._plain_idle.get(crowd, 0.0))

    def _judge(self, name: Kind, kind: _Kind) -> None:
        if kind.gain.drafts < _EVIDENCE - 2.5 or self._rounds < kind.until:  # decayed, 16 of them weigh 13
            return
        if self.hiccups and len(kind.rounds) < _ROUNDS:
            return
        value = kind.last = kind.gain.measured
        if value >= self._min_gain:
            kind.failed = 0
        elif (
            value < self._min_gain * _SLACK
            and kind.gain.lacks(self._min_gain)
            and not (self.hiccups and sorted(kind.rounds)[len(kind.rounds) // 2] >= self._min_gain)
        ):
            kind.failed += 1
            loss = 1 / value - 1 if value else 1.0
            rest = _SHORTEST_REST * 2.0 ** min(kind.failed - 1, 5)
            if kind.failed > 1:  # else it may have been a text of which too much was hoped
                rest = max(rest, min(kind.judged, _EVIDENCE) * loss / _WASTE)
            kind.until = self._rounds + int(min(rest, _LONGEST_REST))
            kind.gain = Gain()  # a trial is judged by itself
            kind.rounds.clear()
            kind.judged = 0
            self._resting.add(name)
            if name.crowd == self._crowd:
                self._off.add((name.traits, name.drafters))
