"""Drafts from the user's own guess at the answer: `prediction`, as in OpenAI's predicted outputs.

It follows the prediction token by token. Where the answer departs from it (a word replaced, lines inserted or deleted),
it finds the latest emitted tokens further on and continues there. See docs/drafters/prediction.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from slipstream.core.draft import MAX_NODES, Tree
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.drafters.promise import PromiseTable

SURE = 3  # agreeing tokens that make the place certain
LONGEST_MATCH = 8  # longer agreement does not make a place better
SUBSTITUTED = 4  # most replaced tokens after which the old position is worth a guess
CANDIDATES_AHEAD = 32
CANDIDATES_BEHIND = 16

# Agreeing tokens before a guess -> state; state 0 is the answer's first token.
_START = 0
_STEPS = ((0, 0.3), (1, 0.45), (2, 0.6), (3, 0.75), (5, 0.85), (9, 0.92), (19, 0.95), (20, 0.97))
_PRIORS = (0.7, *(prior for _, prior in _STEPS))
_STATE = [
    1 + next((state for state, (top, _) in enumerate(_STEPS) if agreed <= top), len(_STEPS) - 1)
    for agreed in range(_STEPS[-1][0] + MAX_NODES + 1)
]


@dataclass(slots=True)
class _Follower:
    """The position of one answer in its prediction."""

    prediction: Sequence[int]
    read: int  # tokens read so far
    pointer: int | None = 0  # the next guess; None: the place is lost
    agreed: int = 0  # agreeing tokens before the pointer
    anchor: int = 0  # the last certain pointer
    since: int = 0  # tokens emitted since then
    places: dict[int, list[int]] = field(default_factory=dict)  # token -> its places in the prediction
    guess: Sequence[int] = ()
    states: Sequence[int] = ()

    def __post_init__(self) -> None:
        for place, token in enumerate(self.prediction):
            self.places.setdefault(token, []).append(place)

    def follow(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Read the tokens emitted since the last call."""
        if len(tokens) == self.read:
            return
        for token in tokens[self.read :]:
            self.since += 1
            if self.pointer is None or self.pointer >= len(self.prediction) or self.prediction[self.pointer] != token:
                self.pointer = None
                continue
            self.pointer += 1
            self.agreed += 1
            if self.agreed >= SURE:
                self.anchor, self.since = self.pointer, 0
        self.read = len(tokens)
        if self.pointer is None:
            self._find(tokens[max(prompt_length, self.read - LONGEST_MATCH) :])

    def _find(self, tail: Sequence[int]) -> None:
        """Point behind the place in the prediction that agrees best with the answer's last tokens."""
        places = self.places.get(tail[-1], [])
        ahead = bisect_left(places, self.anchor)
        best = 0
        self.agreed = 0
        behind = places[max(0, ahead - CANDIDATES_BEHIND) : ahead]
        for place in [*places[ahead : ahead + CANDIDATES_AHEAD], *reversed(behind)]:  # nearest first, for ties
            agreed = self._agreement(place, tail)
            score = agreed - _required_agreement(place - self.anchor) + (2 if len(places) == 1 else 0)
            if score > best:
                best, self.agreed, self.pointer = score, agreed, place + 1
        if best == 0 and self.since <= SUBSTITUTED:
            self.pointer = self.anchor + self.since  # assume replaced tokens, such as a renamed word

    def _agreement(self, place: int, tail: Sequence[int]) -> int:
        length = 0
        for before, token in zip(range(place, -1, -1), reversed(tail), strict=False):
            if self.prediction[before] != token:
                break
            length += 1
        return length

    def draft(self, budget: int, first: bool) -> Tree:
        self.guess = () if self.pointer is None else self.prediction[self.pointer : self.pointer + budget]
        agreed = min(self.agreed, _STEPS[-1][0])
        states = _STATE[agreed : agreed + len(self.guess)]
        self.states = [_START, *states[1:]] if first and states else states
        return Tree.chain(self.guess)


def _required_agreement(distance: int) -> int:
    """Further agreeing tokens required of a place at this distance from the last certain one."""
    if distance < 0:
        return 3
    return 0 if distance < 16 else 1 if distance < 128 else 2


class PredictionDrafter(HostDrafter):
    """Follows `DraftRequest.prediction`; without one it drafts nothing."""

    name: ClassVar[str] = "prediction"
    bounded: ClassVar[bool] = True
    source: ClassVar[str] = "follows the prediction"
    default_draft_tokens: ClassVar[int] = 32

    def __init__(self) -> None:
        self._followers: dict[str, _Follower] = {}
        self._table = PromiseTable(_PRIORS)

    def start(self, request: DraftRequest) -> None:
        self.stop(request.id)
        self._followers[request.id] = _Follower(request.prediction, request.prompt_length)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._propose(request, nodes) for request, nodes in zip(requests, budget, strict=True)]

    def promise(self, request_id: str) -> Sequence[float] | None:
        follower = self._followers.get(request_id)
        return self._table.along(request_id, follower.states) if follower else []

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            follower = self._followers.get(verdict.request_id)
            if follower and follower.guess:
                self._table.learn(verdict.request_id, follower.states, follower.guess, verdict.tokens)
                follower.guess = follower.states = ()

    def stop(self, request_id: str) -> None:
        self._followers.pop(request_id, None)
        self._table.forget(request_id)

    def _propose(self, request: DraftRequest, budget: int) -> Tree:
        if not request.prediction:
            return Tree()
        follower = self._followers.get(request.id)
        if follower is None or follower.read > len(request.tokens):
            follower = _Follower(request.prediction, request.prompt_length)
            self._followers[request.id] = follower
        follower.follow(request.tokens, request.prompt_length)
        return follower.draft(min(budget, MAX_NODES), first=len(request.tokens) == request.prompt_length)
