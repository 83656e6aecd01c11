"""A drafter that knows the answer and is wrong on purpose.

A real drafter may be right too rarely to test accepted paths and the cache after them. This one is right for a while,
then wrong, in chains and in trees whose wrong branches come before the right one and continue as if they were right. It
exercises acceptance, rejection and cache moves in every way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slipstream.core.draft import ROOT, Tree
from slipstream.drafters.base import DraftRequest, HostDrafter

PROBE = "probe"
_BRANCHING = 3  # nodes of a level: a wrong one, its continuation, the right one


class Probe(HostDrafter):
    """Drafts from registered plain answers."""

    name: ClassVar[str] = PROBE
    bounded: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = 12

    def __init__(self) -> None:
        self.vocab_size = 2
        self._answers: dict[tuple[tuple[int, ...], int | None], tuple[int, ...]] = {}

    def forget(self) -> None:
        self._answers.clear()

    def tell(self, prompt: Sequence[int], seed: int | None, answer: Sequence[int]) -> None:
        """Register the plain answer to a prompt with a seed."""
        self._answers[tuple(prompt), seed] = tuple(answer)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._tree(request, nodes) for request, nodes in zip(requests, budget, strict=True)]

    def _tree(self, request: DraftRequest, budget: int) -> Tree:
        prompt = tuple(request.tokens[: request.prompt_length])
        done = len(request.tokens) - request.prompt_length
        rest = self._answers.get((prompt, request.params.seed), ())[done:]
        if not rest or not budget:
            return Tree((), ())
        right = (done * 5 + len(prompt)) % 4  # correct levels, varying by position and prompt
        if done % 3 == 0 or budget < _BRANCHING:
            return self._chain(rest, right, budget)
        return self._branches(rest, right, budget)

    def _chain(self, rest: Sequence[int], right: int, budget: int) -> Tree:
        """`right` correct tokens, a wrong one, then what would have followed."""
        tokens = list(rest[:budget])
        if right < len(tokens):
            tokens[right] = self._wrong(tokens[right])
        return Tree.chain(tokens)

    def _branches(self, rest: Sequence[int], right: int, budget: int) -> Tree:
        """At each level a wrong token with the right token's continuation, then the right token."""
        tokens: list[int] = []
        parents: list[int] = []

        def add(token: int, parent: int) -> int:
            tokens.append(token)
            parents.append(parent)
            return len(tokens) - 1

        parent = ROOT
        for level, token in enumerate(rest[: right + 1]):
            if len(tokens) + _BRANCHING > budget:
                break
            decoy = add(self._wrong(token), parent)
            if level + 1 < len(rest):
                add(rest[level + 1], decoy)
            if level == right:
                break
            parent = add(token, parent)
        return Tree(tuple(tokens), tuple(parents))

    def _wrong(self, token: int) -> int:
        return (token + 1) % self.vocab_size
