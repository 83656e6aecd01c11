"""Grammars in a step: cut the draft nodes that they forbid, and mask the tokens of every row.

A mask depends on the tokens before it, so a request with a grammar needs the host between two steps
(`Engine._must_wait`). Rows of other requests have masks that allow everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.constrain.matcher import Constraint, mask_words
from slipstream.core.draft import Draft, Tree, cut
from slipstream.engine.state import Answer

Promises = Sequence[Sequence[float] | None]


class Lawful(NamedTuple):
    """Trees without the nodes that grammars forbid, and their promises."""

    trees: Sequence[Tree]
    promises: Promises


class Constraining:
    """Applies the grammars of answers. Answers without one cost nothing here."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = mask_words(vocab_size)
        self._device = device

    def lawful(self, answers: Sequence[Answer], trees: Sequence[Tree], promises: Promises) -> Lawful:
        """The trees of host drafters without the nodes that a grammar forbids and their descendants."""
        if not any(answer.constraint is not None and tree.tokens for answer, tree in zip(answers, trees, strict=True)):
            return Lawful(trees, promises)
        parts = [_cut(*part) for part in zip(answers, trees, promises, strict=True)]
        return Lawful([tree for tree, _ in parts], [promise for _, promise in parts])

    def lawful_chains(self, answers: Sequence[Answer], draft: Draft) -> Draft:
        """The chains of a device drafter, cut before the first token that a grammar forbids.

        Rejection sampling is exact only if no drawn guess is dropped for its value: its chains are not cut.
        """
        mine = [i for i, a in enumerate(answers) if a.constraint is not None and not a.params.rejects]
        if not mine or not draft.width or not draft.is_chain:
            return draft
        counts = draft.counts.clone()
        for i in mine:
            counts[i] = sum(_followed(answers[i]).legal(draft.tree(i)))
        return Draft(draft.tokens, draft.parents, counts, draft.is_chain, draft.q)

    def allowed(self, answers: Sequence[Answer], counts: Sequence[int], tree_of: Callable[[int], Tree]) -> Tensor:
        """Masks [R, W] int32 on the device: for each answer its root row, then its nodes.

        counts: nodes of each answer. tree_of: the draft of the answer with an index.
        """
        masks = torch.full((len(answers) + sum(counts), self._words), -1, dtype=torch.int32)
        row = 0
        for i, (answer, nodes) in enumerate(zip(answers, counts, strict=True)):
            if answer.constraint is not None:
                _followed(answer).masks(tree_of(i) if nodes else Tree(), masks, row)
            row += 1 + nodes
        return masks if self._device.type == "cpu" else masks.pin_memory().to(self._device, non_blocking=True)


def forced_tokens(answer: Answer, most: int) -> list[int]:
    """The next tokens, at most `most`, that the answer's grammar forces."""
    return _followed(answer).forced(most)


def _cut(answer: Answer, tree: Tree, promise: Sequence[float] | None) -> tuple[Tree, Sequence[float] | None]:
    if answer.constraint is None or not tree.tokens:
        return tree, promise
    legal = _followed(answer).legal(tree)
    if all(legal):
        return tree, promise
    return cut(tree, legal), None if promise is None else [p for p, keep in zip(promise, legal, strict=True) if keep]


def _followed(answer: Answer) -> Constraint:
    """The answer's constraint, at its last token."""
    assert answer.constraint is not None
    answer.constraint.advance(answer.tokens, answer.prompt_length)
    return answer.constraint
