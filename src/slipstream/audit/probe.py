"""A drafter that knows the answer, and is wrong on purpose.

A real drafter may be right so seldom that accepted paths, and what follows them in the cache, are hardly tried. This
one is right for a while and then wrong, in chains and in trees whose wrong branches stand before the right one and lead
on as if they had been right: so it is accepted, rejected and moved about in every way there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slipstream.core.draft import ROOT, Tree
from slipstream.drafters.base import DraftRequest, HostDrafter

PROBE = "probe"
_BUSH = 3  # nodes of a level: a wrong one, what it leads on to, the right one


class Probe(HostDrafter):
    """Drafts from the plain answers that it was told."""

    name: ClassVar[str] = PROBE
    bounded: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = 12

    def __init__(self) -> None:
        self.vocab_size = 2
        self._answers: dict[tuple[tuple[int, ...], int | None], tuple[int, ...]] = {}

    def forget(self) -> None:
        self._answers.clear()

    def tell(self, prompt: Sequence[int], seed: int | None, answer: Sequence[int]) -> None:
        """The plain answer to a prompt. Seeds tell apart what was asked of the same prompt."""
        self._answers[tuple(prompt), seed] = tuple(answer)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._tree(request, nodes) for request, nodes in zip(requests, budget, strict=True)]

    def _tree(self, request: DraftRequest, budget: int) -> Tree:
        prompt = tuple(request.tokens[: request.prompt_length])
        done = len(request.tokens) - request.prompt_length
        rest = self._answers.get((prompt, request.params.seed), ())[done:]
        if not rest or not budget:
            return Tree((), ())
        right = (done * 5 + len(prompt)) % 4  # how many levels are right: by turns, and not the same for all
        if done % 3 == 0 or budget < _BUSH:
            return self._chain(rest, right, budget)
        return self._bush(rest, right, budget)

    def _chain(self, rest: Sequence[int], right: int, budget: int) -> Tree:
        """So many right tokens, a wrong one, and behind it what would have come."""
        tokens = list(rest[:budget])
        if right < len(tokens):
            tokens[right] = self._wrong(tokens[right])
        return Tree.chain(tokens)

    def _bush(self, rest: Sequence[int], right: int, budget: int) -> Tree:
        """At each level a wrong token that leads on as if it were right, then the right one."""
        tokens: list[int] = []
        parents: list[int] = []

        def add(token: int, parent: int) -> int:
            tokens.append(token)
            parents.append(parent)
            return len(tokens) - 1

        parent = ROOT
        for level, token in enumerate(rest[: right + 1]):
            if len(tokens) + _BUSH > budget:
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
