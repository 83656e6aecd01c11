"""Room for guesses in the cache: what drafts may have of it, and who went without.

Guesses never preempt anybody. Where pages are short, because running requests will need them soon or others wait for
them, a draft has only the places that its request holds anyway.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.core.draft import Tree
from slipstream.engine.state import Answer

SHORT = "off: cache is short"


class DraftRoom:
    """reserve: pages for so many nodes behind an answer's next token; says how many fit."""

    def __init__(self, reserve: Callable[[Answer, int], int]) -> None:
        self._reserve = reserve
        self.refused = 0  # drafts that found no room at all
        self._short: set[str] = set()  # answers whose last draft did
        self.nobody = False  # … as the last one of all did

    def nodes(self, answer: Answer, used: int, nodes: int) -> int:
        """How many more nodes there is room for, beside those that others gave."""
        if not nodes:
            return 0
        fits = max(0, self._reserve(answer, used + nodes) - used)
        self.nobody = not fits
        if fits:
            self._short.discard(answer.id)
        else:
            self.refused += 1
            self._short.add(answer.id)
        return fits

    def tree(self, answer: Answer, used: int, tree: Tree) -> Tree:
        """As much of the tree as there is room for: the first nodes of a tree are a tree too."""
        fits = self.nodes(answer, used, len(tree))
        return tree if fits == len(tree) else Tree(tree.tokens[:fits], tree.parents[:fits])

    def is_short(self, answer: Answer) -> bool:
        """Did its last draft find no room?"""
        return answer.id in self._short

    def forget(self, answer: Answer) -> None:
        self._short.discard(answer.id)
