"""Where one answer stands in its grammar: what may come next, at the last token and at every node of a draft.

The state follows the committed tokens. A draft is walked depth first, a token taken and given back at each node, so
that the state is the same afterwards; what the verdict keeps of the draft is followed when the next round begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES, ROOT, Tree

WORD = 32
"""Tokens that one number of a mask stands for."""
GRACE_S = 0.25
MASK_S = 0.005
"""Seconds that the grammar of one answer may take: so many in all, and so many more for each mask. One that takes
longer holds up everybody: the answer ends. It is this thread's own time, not that of others who have the CPU. Masks are
counted, and not rounds, so that a draft is never what ends an answer; a slow grammar has small ones (`most_nodes`)."""

_ALL, _NONE = -1, 0


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD)


@dataclass(frozen=True, slots=True)
class Rules:
    """What answers of one form have in common."""

    compiled: Any  # xgrammar's
    end_ids: tuple[int, ...]
    vocab_size: int
    encode: Callable[[str], Sequence[int]] = lambda _: ()
    usual_end: int | None = None
    also: Tensor | None = None  # [W] int32: a mask that holds everywhere, besides
    never: frozenset[int] = frozenset()  # tokens that are no text; asked about one, xgrammar writes to the terminal


class Constraint:
    """One answer's state. Used by the engine's thread alone, once the answer is made.

    A grammar that fails on the way allows nothing from then on, and `failure` says why: so the answer ends.
    """

    def __init__(self, rules: Rules) -> None:
        import xgrammar

        self._rules = rules
        self._matcher = xgrammar.GrammarMatcher(rules.compiled, override_stop_tokens=list(rules.end_ids))
        self._ends = frozenset(rules.end_ids)
        self._usual_end = rules.usual_end if rules.usual_end in self._ends else min(rules.end_ids)
        self._seen = 0  # tokens of the answer that the state has followed
        self._ended = False
        self._spent_s = 0.0
        self._masks = 0
        self._next = torch.zeros((1, mask_words(rules.vocab_size)), dtype=torch.int32)  # [1, W] scratch
        self._only_ends = torch.zeros_like(self._next)  # [1, W]
        for token in rules.end_ids:
            self._only_ends[0, token // WORD] |= _bit(token)
        self.failure: str | None = None

    def fresh(self) -> Constraint:
        """Another answer of the same form, at its beginning."""
        return Constraint(self._rules)

    @property
    def possible(self) -> bool:
        """Is there a token that may come next?"""
        self._fill(self._next, 0)
        return bool(self._next.any())

    @property
    def complete(self) -> bool:
        """May the answer end here?"""
        return bool(self._matcher.is_completed())

    @property
    def most_nodes(self) -> int:
        """Nodes of a draft whose masks take no longer, all together, than the slowest grammar's one."""
        usual_s = self._spent_s / max(1, self._masks)
        return min(MAX_NODES, int(MASK_S / max(usual_s, 1e-9)))

    def advance(self, tokens: Sequence[int], begin: int) -> None:
        """Follow the answer up to its end: `tokens[begin:]`, of which the first may have been followed before."""
        with self._failing():
            for token in tokens[begin + self._seen :]:
                if self.failure is not None or self._ended:
                    return
                if not self._accept(token):
                    self.failure = f"token {token} was chosen against the grammar of structured_outputs"
                    return
                self._seen += 1
                self._ended = token in self._ends

    def legal(self, tree: Tree) -> list[bool]:
        """Of each node of a draft, whether the grammar allows it and all that is above it."""
        kept = [False] * len(tree)
        with self._failing():
            self._walk(tree, kept.__setitem__)
        return kept

    def masks(self, tree: Tree, out: Tensor, row: int) -> None:
        """Write what may follow the last token, then what may follow each node, to rows of `out` [R, W] int32.

        Behind a node that is not allowed anything may follow: nobody gets there.
        """
        if self.failure is None:
            out[row : row + 1 + len(tree)] = _ALL
            with self._failing():
                self._fill(out, row)
                if tree.tokens:
                    self._walk(tree, lambda node, _: self._fill(out, row + 1 + node, tree.tokens[node]))
        if self.failure is not None:
            out[row : row + 1 + len(tree)] = _NONE
        elif self._spent_s > GRACE_S + MASK_S * self._masks:  # these masks are right; the next allow nothing
            spent = f"{self._spent_s:.2f} s for {self._masks} masks"
            self.failure = f"structured_outputs: the grammar is too ambiguous: {spent}; make it simpler"

    def forced(self, most: int) -> list[int]:
        """What comes next whatever the model says, as the tokens that its tokenizer makes of it; at most so many.

        The text is certain, the tokens are the likeliest: the model may cut the same text in another way.
        """
        with self._failing():
            if self.failure is None and not self._ended:
                return self._forced(most)
        return []

    def _forced(self, most: int) -> list[int]:
        tokens: list[int] = []
        for token in self._rules.encode(self._forced_text())[:most]:
            if token in self._ends or not self._accept(token):
                break
            tokens.append(token)
        end: list[int] = []
        while len(tokens) < most and not end:
            only = self._only_token()
            if only in self._ends and only is not None:
                end.append(only)
            elif only is not None and self._accept(only):
                tokens.append(only)
            else:
                break
        self._rollback(len(tokens))
        return tokens + end

    def _forced_text(self) -> str:
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError:  # in the middle of a character
            return ""

    def _only_token(self) -> int | None:
        """The one token that may come next; of several that all end the answer, the usual one; None: a choice."""
        self._fill(self._next, 0)
        if torch.equal(self._next, self._only_ends):
            return self._usual_end
        words = self._next[0].nonzero()[:, 0].tolist()  # [w]
        bits = int(self._next[0, words[0]]) % (1 << WORD) if len(words) == 1 else 0
        return words[0] * WORD + bits.bit_length() - 1 if bits.bit_count() == 1 else None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What goes wrong in the library is this answer's failure, and nobody else's; the time is its own, too."""
        started = time.thread_time()
        try:
            yield
        except Exception as error:
            self.failure = f"the grammar of structured_outputs failed: {type(error).__name__}: {error}"
        finally:
            self._spent_s += time.thread_time() - started

    def _walk(self, tree: Tree, enter: Callable[[int, bool], None]) -> None:
        """Enter each allowed node with the state behind it. The state is as before at the end."""
        if self.failure is not None or self._ended:
            return
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        path: list[int] = []  # the nodes that were taken, from the root on
        todo = [(node, 0) for node in reversed(children.get(ROOT, ()))]  # nodes and their depths
        while todo:
            node, depth = todo.pop()
            self._rollback(len(path) - depth)
            del path[depth:]
            if not self._accept(tree.tokens[node]):
                continue
            path.append(node)
            enter(node, True)
            if tree.tokens[node] not in self._ends:
                todo += [(child, depth + 1) for child in reversed(children.get(node, ()))]
        self._rollback(len(path))

    def _fill(self, out: Tensor, row: int, token: int | None = None) -> None:
        """What may follow here. Behind an end, `token` being one, nothing is asked."""
        if not self._ended and token not in self._ends:
            self._masks += 1
            self._matcher.fill_next_token_bitmask(out, row)
            if self._rules.also is not None:
                out[row] &= self._rules.also

    def _accept(self, token: int) -> bool:
        if token in self._rules.never and token not in self._ends:
            return False
        return bool(self._matcher.accept_token(token))

    def _rollback(self, tokens: int) -> None:
        if tokens:
            self._matcher.rollback(tokens)


def _bit(token: int) -> int:
    """The token's bit as a signed number of 32 bits."""
    bit = 1 << (token % WORD)
    return bit - (1 << WORD) if bit >> (WORD - 1) else bit
