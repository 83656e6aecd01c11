"""Drafts from the request's own text: what followed the last occurrence of the latest tokens.

Answers that quote, edit or repeat (code, extraction, retrieval, loops) reuse what prompt and answer already contain.
Finding it takes microseconds and no weights. See docs/drafters/ngram.md.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from slipstream.core.draft import MAX_NODES, Tree
from slipstream.core.errors import ConfigError
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.drafters.promise import PromiseTable

LONGEST_MATCH = 32  # longer agreement adds no information

# Match length -> state, and the initial probability of a token in each state.
_STEPS = ((1, 0.15), (2, 0.25), (3, 0.4), (4, 0.5), (6, 0.6), (8, 0.7), (12, 0.8), (16, 0.87), (24, 0.92), (32, 0.95))
_PRIORS = tuple(prior for _, prior in _STEPS)
_STATE = [
    next((state for state, (top, _) in enumerate(_STEPS) if length <= top), len(_STEPS) - 1)
    for length in range(LONGEST_MATCH + MAX_NODES + 1)
]

_NOTHING = Tree()
_ENTRY = 2 * sys.getsizeof(2**40)  # bytes of a key and a value in a dictionary


class GramIndex:
    """Where each gram of n tokens was followed by something, latest first. It grows with the text.

    Grams are stored by hash. A found place can be wrong, so the caller compares the tokens.
    """

    __slots__ = ("_key", "_latest", "earlier", "latest", "n")

    def __init__(self, n: int) -> None:
        self.n = n
        self._latest: dict[int, int] = {}  # hash of a gram -> beginning of its latest continuation
        self._key: int | None = None  # hash of the text's last gram, which the next token continues
        self.latest = -1  # latest earlier continuation of the last gram; -1: none
        self.earlier = array("q", [-1] * n)  # continuation -> the previous one of the same gram; -1: none

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self._latest) + len(self._latest) * _ENTRY + sys.getsizeof(self.earlier)

    def grow(self, tokens: Sequence[int]) -> None:
        """Add the text's new tokens."""
        n, known, earlier, key, place = self.n, self._latest, self.earlier, self._key, self.latest
        begin, end = len(earlier), len(tokens)
        if key is None:
            if end < n:
                return
            key = hash(tuple(tokens[:n]))
        if begin < end:
            text = tuple(tokens[begin - n + 1 :])
            for i in range(end - begin):
                earlier.append(place)
                known[key] = begin + i
                key = hash(text[i : i + n])
                place = known.get(key, -1)
        self._key, self.latest = key, place


@dataclass(slots=True)
class _Text:
    """The drafter's state of one request: its indexes, and its last guess."""

    short: GramIndex
    long: GramIndex  # finds long matches among too many short ones
    length: int = 0  # tokens indexed
    guess: tuple[int, ...] = ()
    states: Sequence[int] = ()  # state of each guess, by the agreement before it


@dataclass(slots=True)
class _Match:
    place: int = 0  # beginning of the continuation
    length: int = 0  # agreeing tokens before it


class NgramDrafter(HostDrafter):
    """Copies the continuation of the longest match of the latest tokens, the most recent one among equals.

    min_match: fewest agreeing tokens to draft from.
    long_match: size of the second index, which finds long matches among many short ones.
    candidates: most places compared in each index.
    """

    name: ClassVar[str] = "ngram"
    bounded: ClassVar[bool] = True
    source: ClassVar[str] = "text"
    default_draft_tokens: ClassVar[int] = 16

    def held_bytes(self) -> int:
        return sum([text.short.nbytes + text.long.nbytes for text in list(self._texts.values())])

    def __init__(self, min_match: int = 2, long_match: int = 6, candidates: int = 32) -> None:
        if not 1 <= min_match <= LONGEST_MATCH:
            raise ConfigError(f"min_match={min_match}: must be 1 to {LONGEST_MATCH}")
        if not min_match <= long_match <= LONGEST_MATCH:
            raise ConfigError(f"long_match={long_match}: must be min_match={min_match} to {LONGEST_MATCH}")
        if candidates < 1:
            raise ConfigError(f"candidates={candidates}: must be 1 or more")
        self._min_match = min_match
        self._long_match = long_match
        self._candidates = candidates
        self._texts: dict[str, _Text] = {}
        self._table = PromiseTable(_PRIORS)

    def start(self, request: DraftRequest) -> None:
        self.stop(request.id)
        self._grown(request).long.grow(request.tokens)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._propose(request, nodes) for request, nodes in zip(requests, budget, strict=True)]

    def promise(self, request_id: str) -> Sequence[float] | None:
        text = self._texts.get(request_id)
        return self._table.along(request_id, text.states) if text and text.guess else []

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            text = self._texts.get(verdict.request_id)
            if text and text.guess:
                self._table.learn(verdict.request_id, text.states, text.guess, verdict.tokens)
                text.guess = ()

    def stop(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
        self._table.forget(request_id)

    def _propose(self, request: DraftRequest, budget: int) -> Tree:
        text = self._grown(request)
        text.guess = ()
        if text.short.latest < 0 or budget < 1:
            return _NOTHING
        found = self._longest_match(request.tokens, text)
        if not found.length:
            return _NOTHING
        text.guess = _copy(request.tokens, found.place, min(budget, MAX_NODES))
        text.states = _STATE[found.length : found.length + len(text.guess)]
        return Tree.chain(text.guess)

    def _grown(self, request: DraftRequest) -> _Text:
        """The request's text with all its tokens in the index of short grams; the other follows when it is asked."""
        tokens = request.tokens
        text = self._texts.get(request.id)
        if text is None or text.length > len(tokens):  # new, or it shrank
            text = self._texts[request.id] = _Text(GramIndex(self._min_match), GramIndex(self._long_match))
        text.short.grow(tokens)
        text.length = len(tokens)
        return text

    def _longest_match(self, tokens: Sequence[int], text: _Text) -> _Match:
        tail = tokens[: -LONGEST_MATCH - 1 : -1]  # the latest token first
        best = _Match()
        if self._search(text.short, tokens, tail, best):  # places are left: the best may be among those
            text.long.grow(tokens)
            self._search(text.long, tokens, tail, best)
        return best

    def _search(self, index: GramIndex, tokens: Sequence[int], tail: Sequence[int], best: _Match) -> bool:
        """Look for a longer match than the best. Returns True if there are more places than it compared."""
        place, earlier, length = index.latest, index.earlier, best.length
        for _ in range(self._candidates):
            if place < 0:
                return False
            # A longer match must agree at the first token that the best one does not reach.
            if not length or (length < place and length < len(tail) and tokens[place - 1 - length] == tail[length]):
                match = _agreement(tokens, place, tail)
                if match > length and match >= index.n:
                    best.place, best.length = place, match
                    length = match
                    if match == LONGEST_MATCH:
                        return False
            place = earlier[place]
        return place >= 0


def _agreement(tokens: Sequence[int], place: int, tail: Sequence[int]) -> int:
    """Number of tokens before `place` that agree with the tail, which is latest first."""
    length = 0
    for before, token in zip(range(place - 1, -1, -1), tail, strict=False):
        if tokens[before] != token:
            break
        length += 1
    return length


def _copy(tokens: Sequence[int], place: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `place` on. Past the end of the text it reads its own guesses, which continues a loop."""
    guess = tuple(tokens[place : place + count])
    while len(guess) < count:
        guess += guess[: count - len(guess)]  # the guess so far is a whole number of periods
    return guess
