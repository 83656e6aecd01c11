"""Drafts the tokens that the format of an answer forces.

In an answer that must be JSON of a schema, keys, quotes and commas are known beforehand. The text is certain, but its
tokenization is not, so it is verified like any draft. The engine adds this drafter to every request with
`structured_outputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slipstream.core.draft import Tree
from slipstream.drafters.base import DraftRequest, HostDrafter


class GrammarDrafter(HostDrafter):
    """Drafts what a request's grammar forces; nothing without a grammar."""

    name: ClassVar[str] = "grammar"
    bounded: ClassVar[bool] = True
    source: ClassVar[str] = "follows the form of the answer"
    default_draft_tokens: ClassVar[int] = 16

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [
            Tree() if request.forced is None else Tree.chain(request.forced(nodes))
            for request, nodes in zip(requests, budget, strict=True)
        ]
