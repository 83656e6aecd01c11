"""Requests of a given form in a round: guesses against the form are cut, and every row learns what it may choose.

A mask depends on the tokens before it, so such a request needs the host between two rounds (see `queued.py`). Rows of
other requests have masks that allow everything: they choose as they would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.constrain.matcher import mask_words
from slipstream.core.draft import Draft, Tree, cut
from slipstream.engine.state import Answer

Promises = Sequence[Sequence[float] | None]


class Lawful(NamedTuple):
    """Trees without what the requests' grammars forbid, and their promises."""

    trees: Sequence[Tree]
    promises: Promises


class Constraining:
    """Asks the constraints of answers. Answers without one cost nothing here."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = mask_words(vocab_size)
        self._device = device

    def lawful(self, answers: Sequence[Answer], trees: Sequence[Tree], promises: Promises) -> Lawful:
        """What host drafters guessed, without the nodes that a grammar forbids and all that hangs from them."""
        if not any(answer.constraint is not None and tree.tokens for answer, tree in zip(answers, trees, strict=True)):
            return Lawful(trees, promises)
        parts = [self._cut(*part) for part in zip(answers, trees, promises, strict=True)]
        return Lawful([tree for tree, _ in parts], [promise for _, promise in parts])

    def lawful_chains(self, answers: Sequence[Answer], draft: Draft) -> Draft:
        """Chains that a device drafter guessed, cut where a grammar ends them.

        Not where rejection sampling judges: there a drawn guess is never left out for its value.
        """
        mine = [i for i, a in enumerate(answers) if a.constraint is not None and not a.params.rejects]
        if not mine or not draft.width or not draft.is_chain:
            return draft
        counts = draft.counts.clone()
        for i in mine:
            counts[i] = sum(_legal(answers[i], draft.tree(i)))
        return Draft(draft.tokens, draft.parents, counts, draft.is_chain, draft.q)

    def allowed(self, answers: Sequence[Answer], counts: Sequence[int], tree_of: Callable[[int], Tree]) -> Tensor:
        """Masks [R, W] int32 on the device for the rows of these answers: of each its root, then its nodes.

        counts: nodes of each; tree_of: the draft of the answer with this index.
        """
        masks = torch.full((len(answers) + sum(counts), self._words), -1, dtype=torch.int32)
        row = 0
        for i, (answer, nodes) in enumerate(zip(answers, counts, strict=True)):
            if answer.constraint is not None:
                answer.constraint.advance(answer.tokens, answer.prompt_length)
                answer.constraint.masks(tree_of(i) if nodes else _EMPTY, masks, row)
            row += 1 + nodes
        return masks if self._device.type == "cpu" else masks.pin_memory().to(self._device, non_blocking=True)

    @staticmethod
    def _cut(answer: Answer, tree: Tree, promise: Sequence[float] | None) -> tuple[Tree, Sequence[float] | None]:
        if answer.constraint is None or not tree.tokens:
            return tree, promise
        kept = _legal(answer, tree)
        if all(kept):
            return tree, promise
        return cut(tree, kept), None if promise is None else [p for p, keep in zip(promise, kept, strict=True) if keep]


_EMPTY = Tree()


def forced_tokens(answer: Answer, most: int) -> list[int]:
    """What the answer's grammar leaves no choice about, from here on."""
    assert answer.constraint is not None
    answer.constraint.advance(answer.tokens, answer.prompt_length)
    return answer.constraint.forced(most)


def _legal(answer: Answer, tree: Tree) -> list[bool]:
    assert answer.constraint is not None
    answer.constraint.advance(answer.tokens, answer.prompt_length)
    return answer.constraint.legal(tree)
