"""Drafters that know the answers, and are right, wrong or slow by plan: what a planner must not be taken in by."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from slipstream.core.draft import Tree
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter

LONG = 6
"""Guesses of a draft."""
SURE = 0.95
"""What each guess is said to be worth, whatever it is worth."""

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""By prompt: what plain decoding answers."""


class Knowing(HostDrafter):
    """Guesses what comes, or what does not come, by the round: a request's first, its second, …"""

    bounded: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = LONG

    def __init__(self, name: str, right: Callable[[int], bool]) -> None:
        self.name = name  # type: ignore[misc]  # every instance is a drafter of its own
        self.right = right
        self.answers: Answers = {}
        self._rounds: dict[str, int] = {}  # by request, so far
        self._sizes: dict[str, int] = {}  # of its last draft

    def start(self, request: DraftRequest) -> None:
        self._rounds[request.id] = 0

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._one(request, most) for request, most in zip(requests, budget, strict=True)]

    def promise(self, request_id: str) -> Sequence[float] | None:
        return [SURE ** (depth + 1) for depth in range(self._sizes.get(request_id, 0))]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            self._rounds[verdict.request_id] = self._rounds.get(verdict.request_id, 0) + 1

    def stop(self, request_id: str) -> None:
        self._rounds.pop(request_id, None)
        self._sizes.pop(request_id, None)

    def _one(self, request: DraftRequest, most: int) -> Tree:
        answer = self.answers.get(tuple(request.tokens[: request.prompt_length]), ())
        coming = answer[len(request.tokens) - request.prompt_length :][:most]
        if not self.right(self._rounds.get(request.id, 0)):
            coming = [token - 1 if token else 1 for token in coming]  # some other token of the vocabulary
        self._sizes[request.id] = len(coming)
        return Tree.chain(coming)


class Slow(Knowing):
    """Always right, and takes `seconds` for each guess."""

    costly: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda _: True)
        self.seconds = 0.0

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        end = time.perf_counter() + self.seconds * max(budget, default=0)
        while time.perf_counter() < end:  # it works; it does not sleep
            pass
        return super().propose(requests, budget)
