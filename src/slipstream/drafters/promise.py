"""The chance that a drafted token is accepted, learned from the emitted tokens.

A drafter that copies text knows one thing about a guess: how much of the text before it agreed. It sorts its guesses
into a few states by that, and this table learns the chance of each state. It learns from every proposal, also from
nodes that the planner cut, because the emitted tokens show whether they were right. So a drafter that is switched off
keeps learning and can come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_WEIGHT = 4.0  # initial weight of a prior, in observations; it fades
LEAST_WEIGHT = 0.5  # lower bound of that weight: one bad run is no proof
SHARED_DECAY = 0.99  # about 100 observations of a state over all requests
OWN_DECAY = 0.95  # about 20 observations of a state in the request itself


@dataclass(slots=True)
class _Counts:
    trials: list[float]
    hits: list[float]
    weights: list[float]  # remaining weights of the priors

    @staticmethod
    def empty(states: int) -> _Counts:
        return _Counts([0.0] * states, [0.0] * states, [PRIOR_WEIGHT] * states)

    def add(self, state: int, hit: bool, decay: float) -> None:
        self.trials[state] = self.trials[state] * decay + 1.0
        self.hits[state] = self.hits[state] * decay + hit
        # a request that differs from all others must get away from their prior
        self.weights[state] = max(LEAST_WEIGHT, self.weights[state] * decay)

    def chance(self, state: int, prior: float) -> float:
        weight = self.weights[state]
        return (self.hits[state] + weight * prior) / (self.trials[state] + weight)


class PromiseTable:
    """The chance of each state: a prior, updated by all requests, then by the request itself."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._priors = tuple(priors)
        self._shared = _Counts.empty(len(priors))
        self._chances = list(priors)  # over all requests; cached, because every request needs it in every step
        self._own: dict[str, _Counts] = {}

    def chance(self, request_id: str, state: int) -> float:
        """The chance that a guess in this state is right, given that all before it were."""
        own = self._own.get(request_id)
        return own.chance(state, self._chances[state]) if own else self._chances[state]

    @property
    def shared(self) -> Sequence[float]:
        """The chance of each state for a new request."""
        return self._chances

    def along(self, request_id: str, states: Sequence[int]) -> list[float]:
        """By guess of a chain in these states: the chance that the whole path to it is accepted."""
        along: list[float] = []
        path, chance, last = 1.0, 1.0, None
        for state in states:
            if state != last:  # neighbouring guesses mostly share a state
                chance, last = self.chance(request_id, state), state
            path *= chance
            along.append(path)
        return along

    def learn(self, request_id: str, states: Sequence[int], proposed: Sequence[int], emitted: Sequence[int]) -> None:
        """Compare the chain `proposed` with `emitted`: every guess up to the first wrong one is an observation."""
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = _Counts.empty(len(self._priors))
        shared = self._shared
        for state, guess, token in zip(states, proposed, emitted, strict=False):
            hit = guess == token
            shared.add(state, hit, SHARED_DECAY)
            own.add(state, hit, OWN_DECAY)
            self._chances[state] = shared.chance(state, self._priors[state])
            if not hit:
                break

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)
