"""Drafts from the request's own text: what followed the last time that these tokens stood here.

Answers that quote, edit or repeat (code, extraction, retrieval, loops) say again what prompt and answer already hold.
Looking that up costs microseconds and no weights. See docs/drafters/ngram.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from slipstream.core.draft import MAX_NODES, Tree
from slipstream.core.errors import ConfigError
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.drafters.promise import PromiseTable

LONGEST_MATCH = 32  # a longer agreement says no more

# Match length -> state, and the chance of a token in each state before anything was seen.
_STEPS = ((1, 0.15), (2, 0.25), (3, 0.4), (4, 0.5), (6, 0.6), (8, 0.7), (12, 0.8), (16, 0.87), (24, 0.92), (32, 0.95))
_PRIORS = tuple(prior for _, prior in _STEPS)
_STATE = [
    next((state for state, (top, _) in enumerate(_STEPS) if length <= top), len(_STEPS) - 1)
    for length in range(LONGEST_MATCH + MAX_NODES + 1)
]


class GramIndex:
    """Where each gram of n tokens was followed by something, latest first. Grows with the text, never rescans it.

    Grams are kept by hash: a place that it gives may be wrong, so whoever asks compares the tokens.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._latest: dict[int, int] = {}  # hash of a gram -> where its latest continuation begins
        self._earlier = array("q", [-1] * n)  # continuation -> the one before it of the same gram, -1 for none

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in what stands behind the part already seen."""
        n, latest, earlier = self.n, self._latest, self._earlier
        begin = len(earlier)
        if begin >= len(tokens):
            return
        text = tuple(tokens[begin - n :])
        for first in range(len(text) - n):
            key = hash(text[first : first + n])
            earlier.append(latest.get(key, -1))
            latest[key] = begin + first

    def places(self, gram: Sequence[int]) -> Iterator[int]:
        """Where continuations of this gram begin, latest first."""
        place = self._latest.get(hash(tuple(gram)), -1)
        while place >= 0:
            yield place
            place = self._earlier[place]

    @property
    def length(self) -> int:
        """Tokens taken in."""
        return len(self._earlier)


@dataclass(frozen=True, slots=True)
class _Guess:
    tokens: Sequence[int]
    states: Sequence[int]  # by how many tokens before each of them agreed


class NgramDrafter(HostDrafter):
    """Copies what followed the longest match of the latest tokens; of equally long ones, the most recent.

    min_match: fewest agreeing tokens to draft from.
    long_match: size of the second index, which finds long matches among many short ones.
    candidates: most places looked at in each index.
    """

    name: ClassVar[str] = "ngram"
    bounded: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = 16

    def __init__(self, min_match: int = 2, long_match: int = 6, candidates: int = 32) -> None:
        if not 1 <= min_match <= LONGEST_MATCH:
            raise ConfigError(f"min_match={min_match}: must be 1 to {LONGEST_MATCH}")
        if not min_match <= long_match <= LONGEST_MATCH:
            raise ConfigError(f"long_match={long_match}: must be min_match={min_match} to {LONGEST_MATCH}")
        if candidates < 1:
            raise ConfigError(f"candidates={candidates}: must be 1 or more")
        self._sizes = tuple(dict.fromkeys((long_match, min_match)))  # longest first
        self._candidates = candidates
        self._indexes: dict[str, list[GramIndex]] = {}
        self._guesses: dict[str, _Guess] = {}
        self._table = PromiseTable(_PRIORS)

    def start(self, request: DraftRequest) -> None:
        self.stop(request.id)
        self._grow(request)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._propose(request, nodes) for request, nodes in zip(requests, budget, strict=True)]

    def promise(self, request_id: str) -> Sequence[float] | None:
        guess = self._guesses.get(request_id)
        return self._table.along(request_id, guess.states) if guess else []

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if guess := self._guesses.pop(verdict.request_id, None):
                self._table.learn(verdict.request_id, guess.states, guess.tokens, verdict.tokens)

    def stop(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)
        self._guesses.pop(request_id, None)
        self._table.forget(request_id)

    def _propose(self, request: DraftRequest, budget: int) -> Tree:
        self._guesses.pop(request.id, None)
        place, match = self._longest_match(request.tokens, self._grow(request))
        if not match or budget < 1:
            return Tree()
        tokens = _copy(request.tokens, place, min(budget, MAX_NODES))
        self._guesses[request.id] = _Guess(tokens, _STATE[match : match + len(tokens)])
        return Tree.chain(tokens)

    def _grow(self, request: DraftRequest) -> list[GramIndex]:
        tokens = request.tokens
        indexes = self._indexes.get(request.id)
        if indexes is None or indexes[-1].length > max(indexes[-1].n, len(tokens)):  # new, or the text shrank
            indexes = self._indexes[request.id] = [GramIndex(n) for n in self._sizes]
        for index in indexes:
            index.grow(tokens)
        return indexes

    def _longest_match(self, tokens: Sequence[int], indexes: Sequence[GramIndex]) -> tuple[int, int]:
        """Where the best continuation begins, and how many tokens before it agree: 0 for none."""
        best_place = best = 0
        tail = tokens[: -LONGEST_MATCH - 1 : -1]  # the latest token first
        for index in indexes:
            if len(tail) < index.n:
                continue
            for place in islice(index.places(tokens[-index.n :]), self._candidates):
                # A longer match must agree at the first token that the best one does not reach.
                if best and (best >= place or best >= len(tail) or tokens[place - 1 - best] != tail[best]):
                    continue
                match = _agreement(tokens, place, tail)
                if match >= index.n and match > best:
                    best_place, best = place, match
                    if match == LONGEST_MATCH:
                        break
            if best:  # the shorter grams have nothing longer
                break
        return best_place, best


def _agreement(tokens: Sequence[int], place: int, tail: Sequence[int]) -> int:
    """How many tokens before `place` agree with the tail, which has the latest first."""
    length = 0
    for before, token in zip(range(place - 1, -1, -1), tail, strict=False):
        if tokens[before] != token:
            break
        length += 1
    return length


def _copy(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on. Past the end of the text it reads its own guesses, so a loop goes on looping."""
    guess = list(tokens[place : place + count])
    period = len(tokens) - place
    while len(guess) < count:
        guess.append(guess[-period])
    return guess
