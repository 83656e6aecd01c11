"""Guesses that were there and did not pay: what the request then said tells whether they would have been right.

So a drafter on the host that was given up is heard of in every round for nothing, and comes back as soon as it is
right; where nobody tells what was said, it must be probed (`plan/probes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.core.draft import Tree


class FirstGuess(NamedTuple):
    """The first token of a draft that was not made, and its chance by the drafter's word; None: it gives none."""

    token: int
    said: float | None


class Unsent:
    """The first guesses of this round that nobody checks, by drafter and request."""

    def __init__(self) -> None:
        self._guesses: dict[str, dict[str, FirstGuess]] = {}  # of drafters whose requests are listened to

    def is_heard(self, drafter: str) -> bool:
        """Does anybody tell what its requests say?"""
        return drafter in self._guesses

    def note(self, drafter: str, request_id: str, tree: Tree, chances: Sequence[float], factor: float) -> None:
        """factor: what its word is worth; 0: it gives none. One whose word is good is believed anyway."""
        if tree.tokens and factor < 1 and drafter in self._guesses:
            self._guesses[drafter][request_id] = FirstGuess(tree.tokens[0], chances[0] if factor else None)
        else:
            self.drop(drafter, request_id)

    def heard(self, drafter: str, request_id: str) -> FirstGuess | None:
        """The request said something: what had been guessed?"""
        if drafter not in self._guesses:
            self._guesses[drafter] = {}
        return self._guesses[drafter].pop(request_id, None)

    def drop(self, drafter: str, request_id: str) -> None:
        """Another guess of it was checked, or it has none: what was noted before is over."""
        if drafter in self._guesses:
            self._guesses[drafter].pop(request_id, None)

    def forget(self, request_id: str) -> None:
        for guesses in self._guesses.values():
            guesses.pop(request_id, None)
