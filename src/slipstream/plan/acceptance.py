"""How likely a drafter's guesses are right, by request and by depth, learned from verdicts."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from slipstream.plan.ranks import DEPTHS
from slipstream.plan.traits import Traits

Floats = NDArray[np.float64]

_PRIOR = 0.6
_PRIOR_WEIGHT = 4.0
_DECAY = 0.9
_SHARED_DECAY = 0.98
_AGES = 0.99
"""How what is known of guesses fades with every draft, of a request and of everybody; and with every round, where it is
of a depth."""
_FIRST_DECAY = 0.995
"""The same for first guesses, where those further on are compared with them: what is tried in every draft must not
waver more than what is not."""
_FRESH, _FADES = 4, 0.95
"""Rounds without a guess for a request, of drafters whose guesses take time, before what was seen of it begins to fade,
and how it does: who stopped when it was least lucky would seem to be so for as long as the request runs."""
_TOLD = 32
"""Drafts that `Acceptance.told` counts."""
_MOST_WEIGHT = 16.0
"""Guesses of one request that are remembered: a long run of right ones must not hide that the text has changed."""
_HEAVY = 1e9
"""A weight at which numbers are brought down again."""
_DEPTH_WEIGHT = 6.0
"""Guesses at a depth that the drafter's usual course is worth."""
_ALIKE = 0.7
"""How much of what makes texts easier or harder for one drafter, since another was tried last, does so for that one."""
_SURE = 0.02
"""No share is taken to be nearer to none or all than this where two are compared."""


@dataclass(slots=True)
class _Tally:
    right: float
    tried: float

    @property
    def share(self) -> float:
        return self.right / self.tried

    def add(self, right: float, tried: int, decay: float) -> None:
        self.right = self.right * decay + right
        self.tried = self.tried * decay + tried


class _Course:
    """Right and tried guesses by depth: how a drafter fares the further it goes.

    What was seen before fades by what is new weighing more: so a draft changes as many numbers as it has guesses.
    """

    __slots__ = ("right", "tried", "weight")

    def __init__(self) -> None:
        self.right = array("d", bytes(8 * DEPTHS))
        self.tried = array("d", bytes(8 * DEPTHS))
        self.weight = 1.0  # of what was seen last

    def add(self, right: int, tried: int, decay: float, missed: float = 0.0) -> None:
        self.fade(decay)
        for depth in range(min(tried, DEPTHS)):
            self.tried[depth] += self.weight
            self.right[depth] += self.weight if depth < right else missed * self.weight

    def fade(self, decay: float) -> None:
        """Everything that was seen so far."""
        self.weight /= decay
        if self.weight > _HEAVY:
            self.right = array("d", [count / self.weight for count in self.right])
            self.tried = array("d", [count / self.weight for count in self.tried])
            self.weight = 1.0

    def known(self) -> Sequence[float]:  # [D]
        """Right guesses of those that were tried, by depth."""
        return self.right

    def chances(self, usual: float) -> Floats:  # [D]
        """By depth; where little was seen, as one depth before, and in the first as `usual`."""
        prior, found = _DEPTH_WEIGHT * self.weight, []
        for right, tried in zip(self.known(), self.tried, strict=True):
            usual = (right + prior * usual) / (tried + prior)
            found.append(usual)
        return np.array(found)

    def beside(self, usual: Floats) -> Floats:  # [D]
        """By depth; where little was seen, as `usual` [D]."""
        prior = _DEPTH_WEIGHT * self.weight
        return (np.array(self.known()) + prior * usual) / (np.array(self.tried) + prior)


class _LastingCourse(_Course):
    """Of everybody. A depth fades when it is tried again, and slowly by rounds: a crowd's short drafts do not make
    anybody forget at once what guesses further on were worth, or nobody would ever try them. Texts change meanwhile:
    if first guesses fare better now than when a depth was tried, that depth would, too.
    """

    __slots__ = ("begun", "first")

    def __init__(self) -> None:
        super().__init__()
        self.first = _Tally(0.0, 0.0)  # guesses
        self.begun = [0.0] * DEPTHS  # as `right`, but first guesses, as they fared when a later depth was tried

    def add(self, right: int, tried: int, decay: float, missed: float = 0.0) -> None:
        first, weight = self.first, self.weight
        first.right = first.right * _FIRST_DECAY + (1.0 if right else missed)
        first.tried = first.tried * _FIRST_DECAY + 1
        begun = weight * first.right / first.tried
        for depth in range(min(tried, DEPTHS)):
            self.tried[depth] = self.tried[depth] * decay + weight
            self.right[depth] = self.right[depth] * decay + (weight if depth < right else missed * weight)
            if depth:
                self.begun[depth] = self.begun[depth] * decay + begun

    def fade(self, decay: float) -> None:
        before = self.weight
        super().fade(decay)
        if self.weight < before:  # numbers were brought down
            self.begun = [count * decay / before for count in self.begun]

    def known(self) -> Sequence[float]:
        if not self.first.tried:
            return self.right
        now, found = _log_odds(self.first.share), [self.right[0]]
        for right, tried, begun in zip(self.right[1:], self.tried[1:], self.begun[1:], strict=True):
            leans = now - _log_odds(begun / tried) if tried else 0.0
            found.append(tried * _share_of(_log_odds(right / tried) + leans) if leans else right)
        return found


class Acceptance:
    """The chance that a guess is right when everything before it was. Newcomers start from the record of their kind,
    and a kind of which little is known from everybody's.

    traits: the kinds of requests, by id; filled in by its owner.
    """

    def __init__(self, traits: Mapping[str, Traits] | None = None) -> None:
        self._shared = _Tally(_PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
        self._seen: deque[tuple[int, int]] = deque(maxlen=_TOLD)  # right and tried guesses, by draft
        self._course = _LastingCourse()
        self._kinds: dict[Traits, _Tally] = {}
        self._kind_courses: dict[Traits, _LastingCourse] = {}
        self._traits = {} if traits is None else traits
        self.peers: Collection[Acceptance] = ()  # of drafters that find the same text easy, and itself
        self._beside: dict[Traits | None, dict[Acceptance, _Tally]] = {}  # by kind: their log odds when it was tried
        self._round = 0
        self._requests: dict[str, _Tally] = {}
        self._last: dict[str, int] = {}  # by request: the round in which it was last guessed for
        self._courses: dict[str, _Course] = {}

    def next_round(self) -> None:
        self._round += 1
        for course in (self._course, *self._kind_courses.values()):
            course.fade(_AGES)

    def told(self) -> str:
        """What was seen of the guesses for all requests, or what is assumed before any was compared."""
        seen = list(self._seen)  # another thread may add to it
        right, tried = sum([right for right, _ in seen]), sum([tried for _, tried in seen])
        if not tried:
            return f"assuming that {_PRIOR:.0%} of its guesses are right: none was compared yet"
        return f"{right} of its last {tried} guesses for all requests were right, sent or not"

    @property
    def known(self) -> bool:
        """Was any guess put to the test?"""
        return any(self._course.tried)

    def alpha(self, request_id: str) -> float:
        """At any depth."""
        own = self._requests.get(request_id)
        if own is None:
            return self._newcomer(request_id)
        passed = self._round - self._last[request_id]
        if passed <= _FRESH or not self.peers:
            return own.share
        left = _FADES ** (passed - _FRESH)
        prior = _PRIOR_WEIGHT * (1 - left)
        return (own.right * left + prior * self._newcomer(request_id)) / (own.tried * left + prior)

    def _alphas(self, request_ids: Sequence[str]) -> list[float]:
        """The same of many. Of most a guess was seen lately, and that is soon said."""
        since, last, own = self._round - _FRESH if self.peers else 0, self._last, self._requests
        return [own[r].share if last.get(r, since - 1) >= since else self.alpha(r) for r in request_ids]

    def untried(self, request_ids: Sequence[str]) -> float:
        """For which part of these was nothing of its guesses put to the test?"""
        return sum([request_id not in self._requests for request_id in request_ids]) / max(len(request_ids), 1)

    def paths(self, request_ids: Sequence[str], depth: int) -> Floats:  # [depth, B]
        """The chance that all of the first 1, 2, … guesses are right."""
        alphas = np.array(self._alphas(request_ids))  # [B]
        usual = np.minimum(self._usual_courses(request_ids) * alphas, np.maximum(alphas, 0.98))  # [D, B]
        courses = [self._courses.get(r, _NO_COURSE) for r in request_ids]
        counts = b"".join([part for course in courses for part in (course.right, course.tried)])
        seen = np.frombuffer(counts).reshape(-1, 2, DEPTHS)  # [B, 2, D]
        weights = _DEPTH_WEIGHT * np.array([course.weight for course in courses])  # [B]
        tried = seen[:, 1].T  # [D, B]
        chances = (seen[:, 0].T + weights * usual) / (tried + weights)  # [D, B]
        # what was seen of a request tells depths apart here; how often it is right alpha says, and it counts once
        mean = np.where(tried.any(0), (tried * chances).sum(0) / np.maximum(tried.sum(0), 1e-9), alphas)  # [B]
        chances = np.minimum(chances * alphas / np.maximum(mean, 1e-9), np.maximum(alphas, 0.98))
        deep = np.minimum(np.arange(depth), DEPTHS - 1)
        return np.cumprod(chances[deep], axis=0)

    def _usual_courses(self, request_ids: Sequence[str]) -> Floats:  # [D, B]
        """How many times as likely as any of its guesses each depth's are for each, by what others of its kind saw."""
        shared = max(self._shared.share, 1e-6)
        everybody = self._course.chances(shared) / shared  # [D]
        known: dict[Traits | None, Floats] = {}
        for kind in {self._traits.get(request_id) for request_id in request_ids}:
            course = None if kind is None else self._kind_courses.get(kind)
            if kind is None or course is None:
                known[kind] = everybody
            else:
                share = max(self._kinds[kind].share, 1e-6)
                known[kind] = course.beside(everybody * share) / share
        if len(known) == 1:
            return next(iter(known.values()))[:, None]
        return np.stack([known[self._traits.get(request_id)] for request_id in request_ids], axis=1)

    def observe(self, request_id: str, drafted: int, accepted: int, missed: float = 0.0) -> None:
        """Guesses behind the first wrong one were never put to the test.

        missed: the chance that what was not right would have been in a larger draft, which is what is estimated.
        """
        if not drafted:
            return
        tried = accepted + (accepted < drafted)
        if request_id not in self._requests:
            # what it starts from fades like everything else: one that fares worse than all others must not live on hope
            self._requests[request_id] = _Tally(self._newcomer(request_id) * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
            self._courses[request_id] = _Course()
        own, self._last[request_id] = self._requests[request_id], self._round
        missed *= accepted < drafted
        own.add(accepted + missed, tried, _DECAY)
        if own.tried > _MOST_WEIGHT:
            own.right, own.tried = own.right * _MOST_WEIGHT / own.tried, _MOST_WEIGHT
        self._courses[request_id].add(accepted, tried, _DECAY, missed)
        self._shared.add(accepted + missed, tried, _SHARED_DECAY)
        self._seen.append((accepted, tried))
        self._course.add(accepted, tried, _SHARED_DECAY, missed)
        traits = self._traits.get(request_id)
        if traits is not None:
            if traits not in self._kinds:
                self._kinds[traits], self._kind_courses[traits] = _Tally(0.0, 0.0), _LastingCourse()
            self._kinds[traits].add(accepted + missed, tried, _SHARED_DECAY)
            self._kind_courses[traits].add(accepted, tried, _SHARED_DECAY, missed)
            for peer in self.peers:
                if peer is not self and peer.known:
                    mean = self._beside.setdefault(traits, {}).setdefault(peer, _Tally(0.0, 0.0))
                    mean.add(peer.log_odds(request_id), 1, _SHARED_DECAY)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._last.pop(request_id, None)
        self._courses.pop(request_id, None)

    def _newcomer(self, request_id: str) -> float:
        usual = self._usual(request_id)
        beside = self._beside.get(self._traits.get(request_id))
        if not beside:
            return usual
        leans = [peer.log_odds(request_id) - mean.share for peer, mean in beside.items()]
        return _share_of(_log_odds(usual) + _ALIKE * sum(leans) / len(leans))

    def log_odds(self, request_id: str) -> float:
        """Of a guess for it, by what was seen of it or of its kind."""
        own = self._requests.get(request_id)
        return _log_odds(self._usual(request_id) if own is None else own.share)

    def _usual(self, request_id: str) -> float:
        """Of its kind."""
        shared = self._shared.share
        kind = self._kinds.get(self._traits[request_id]) if request_id in self._traits else None
        if kind is None:
            return shared
        return (kind.right + _PRIOR_WEIGHT * shared) / (kind.tried + _PRIOR_WEIGHT)


def _log_odds(share: float) -> float:
    safe = min(max(share, _SURE), 1 - _SURE)
    return log(safe / (1 - safe))


def _share_of(log_odds: float) -> float:
    return 1 / (1 + exp(-log_odds))


_NO_COURSE = _Course()
