"""Lookahead decoding: the target itself writes the n-grams that are drafted, in spare rows of its passes.

Besides the candidates of a step, the pass has a window of guesses at later tokens. The target's choices behind them
make n-grams, which are kept and become candidates when the text reaches their first token. No weights, no second model.
See docs/drafters/lookahead.md.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from slipstream.core.draft import MAX_NODES, ROOT, Tree
from slipstream.core.errors import ConfigError
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter, Needs

_WINDOW_SHARE = 0.75  # of a draft's nodes, at most, for the window: n-grams that are never drafted gain nothing


class NgramPool:
    """N-grams by their first token, latest first; the least recently met are dropped.

    per_token: most n-grams for one first token. size: most of all.
    """

    def __init__(self, per_token: int, size: int) -> None:
        self._per_token = per_token
        self._size = size
        self._count = 0
        self._followers: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def add(self, gram: Sequence[int]) -> None:
        first, rest = gram[0], tuple(gram[1:])
        followers = self._followers.setdefault(first, OrderedDict())
        self._followers.move_to_end(first)
        self._count += rest not in followers
        followers[rest] = None
        followers.move_to_end(rest)
        if len(followers) > self._per_token:
            followers.popitem(last=False)
            self._count -= 1
        if self._count > self._size:
            token, oldest = next(iter(self._followers.items()))
            oldest.popitem(last=False)
            self._count -= 1
            if not oldest:
                del self._followers[token]

    def after(self, token: int) -> Iterator[tuple[int, ...]]:
        """What followed this token, latest first."""
        return reversed(self._followers.get(token, ()))


class TreeBuilder:
    """Builds a tree; siblings with the same token are one node."""

    def __init__(self, budget: int) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}
        self._budget = budget

    def add(self, parent: int, token: int) -> int | None:
        """The node of this token under this parent; None if there is no room for it."""
        node = self._nodes.get((parent, token))
        if node is None and len(self._tokens) < self._budget:
            node = self._nodes[parent, token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
        return node

    def add_path(self, path: Sequence[int]) -> None:
        parent = ROOT
        for token in path:
            node = self.add(parent, token)
            if node is None:
                return
            parent = node

    def __len__(self) -> int:
        return len(self._tokens)

    def tree(self) -> Tree:
        return Tree(tuple(self._tokens), tuple(self._parents))


class Window:
    """Guesses at later tokens, in columns: level j of column i is i + j tokens behind the root.

    The first level is a chain from the root, which is its column 0; the rest of each column hangs below its token. Each
    step gives the target's choice behind every column: column and choice are an n-gram, and the column continues with
    the choice, without its first level.
    """

    def __init__(self) -> None:
        self.columns: list[list[int]] = []  # [W][N - 1]
        self._nodes: list[int] = []  # [W]: last node of each column in the current draft

    def plant(self, tree: TreeBuilder, root: int) -> None:
        """Add the columns to an empty tree, which must have room for them."""
        self._nodes = []  # forgets a tree that was not verified
        if not self.columns:
            return
        heads: list[int] = [ROOT]
        self.columns[0][0] = root
        for column in self.columns[1:]:
            heads.append(_placed(tree.add(heads[-1], column[0])))
        for head, column in zip(heads, self.columns, strict=True):
            node = head
            for token in column[1:]:
                node = _placed(tree.add(node, token))
            self._nodes.append(node)

    def advance(self, choices: Sequence[int], emitted: int) -> list[list[int]]:
        """Take the target's `choices` (behind the root, then behind each node), of which `emitted` were emitted.

        Returns the n-grams. The columns move on with the root; those that it has passed are dropped.
        """
        grams = [[*column, choices[1 + node]] for column, node in zip(self.columns, self._nodes, strict=True)]
        self._nodes = []
        usable = [gram for gram in grams if gram[-1] >= 0]
        self.columns = [gram[1:] for gram in grams[emitted - 1 :]] if len(usable) == len(grams) else []
        return usable


def _placed(node: int | None) -> int:
    assert node is not None, "the window must be cut to the budget before it is planted"
    return node


@dataclass(slots=True)
class _Text:
    """The drafter's state of one request."""

    pool: NgramPool
    dice: random.Random
    window: Window = field(default_factory=Window)
    drafted: int = 0  # nodes of the current draft
    read: int = 0  # tokens whose n-grams are in the pool


class LookaheadDrafter(HostDrafter):
    """Drafts n-grams that the target wrote while decoding.

    window: columns of guesses in a pass; fewer if a request has fewer rows.
    ngram: tokens of an n-gram; it is found by its first one.
    candidates: most n-grams for one first token.
    pool_size: most n-grams for one request.
    from_text: n-grams of prompt and answer are candidates too.
    """

    name: ClassVar[str] = "lookahead"
    needs: ClassVar[Needs] = Needs(choices=True)
    bounded: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = MAX_NODES

    def __init__(
        self,
        window: int = 15,
        ngram: int = 4,
        candidates: int = 12,
        pool_size: int = 20_000,
        from_text: bool = True,
    ) -> None:
        if not 2 <= ngram <= 16:
            raise ConfigError(f"ngram={ngram}: must be 2 to 16")
        if not 1 <= window * (ngram - 1) <= MAX_NODES + 1:
            most = (MAX_NODES + 1) // (ngram - 1)
            raise ConfigError(f"window={window}: must be 1 to {most} with ngram={ngram}, to fit into a pass")
        if candidates < 1:
            raise ConfigError(f"candidates={candidates}: must be 1 or more")
        if pool_size < 1:
            raise ConfigError(f"pool_size={pool_size}: must be 1 or more")
        self._window = window
        self._levels = ngram - 1
        self._candidates = candidates
        self._pool_size = pool_size
        self._from_text = from_text
        self._texts: dict[str, _Text] = {}

    def start(self, request: DraftRequest) -> None:
        # seeded by the request: the same request gives the same drafts
        dice = random.Random(len(request.tokens))
        text = self._texts[request.id] = _Text(NgramPool(self._candidates, self._pool_size), dice)
        self._read(text, request.tokens)  # now, before a step waits for the draft

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._propose(request, nodes) for request, nodes in zip(requests, budget, strict=True)]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            text = self._texts.get(verdict.request_id)
            # if nodes were cut, it is unknown which: the choices cannot be assigned to the window
            if text is not None and verdict.choices and verdict.drafted == text.drafted > 0:
                for gram in text.window.advance(verdict.choices, len(verdict.tokens)):
                    text.pool.add(gram)

    def stop(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def _propose(self, request: DraftRequest, budget: int) -> Tree:
        tokens = request.tokens
        if request.id not in self._texts:
            self.start(request)
        text = self._texts[request.id]
        self._read(text, tokens)
        tree = TreeBuilder(budget)
        columns = min(self._window, (int(budget * _WINDOW_SHARE) + 1) // self._levels)
        self._fill(text, tokens, columns)
        text.window.plant(tree, tokens[-1])
        for rest in self._found(text.pool, tokens):
            tree.add_path(rest)
        text.drafted = len(tree)
        return tree.tree()

    @staticmethod
    def _found(pool: NgramPool, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Candidates; those that agree in two tokens come first."""
        if len(tokens) > 1:
            for rest in pool.after(tokens[-2]):
                if rest[0] == tokens[-1]:
                    yield rest[1:]
        yield from pool.after(tokens[-1])

    def _read(self, text: _Text, tokens: Sequence[int]) -> None:
        """Add the text's new n-grams."""
        if not self._from_text:
            return
        size = self._levels + 1
        for begin in range(max(0, text.read - size + 1), len(tokens) - size + 1):
            text.pool.add(tokens[begin : begin + size])
        text.read = len(tokens)

    def _fill(self, text: _Text, tokens: Sequence[int], columns: int) -> None:
        """Set the window's width. New columns begin as pieces of the text, which the target soon replaces."""
        window = text.window.columns
        del window[columns:]
        while len(window) < columns:
            begin = text.dice.randrange(max(1, len(tokens) - self._levels + 1))
            piece = list(tokens[begin : begin + self._levels])
            window.append(piece + piece[-1:] * (self._levels - len(piece)))
