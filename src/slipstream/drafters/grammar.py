"""Forced tokens as guesses: where the form of an answer leaves one text to come, it is drafted for nothing.

An answer that must be JSON of a schema is in good part known beforehand: its keys, its quotes, its commas. The text is
certain; how the model cuts it into tokens is not, so that it is a draft like any other and is verified like one. The
engine adds this drafter to those of every request with `structured_outputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slipstream.core.draft import Tree
from slipstream.drafters.base import DraftRequest, HostDrafter


class GrammarDrafter(HostDrafter):
    """Drafts what a request's grammar forces; nothing for requests without one."""

    name: ClassVar[str] = "grammar"
    bounded: ClassVar[bool] = True
    source: ClassVar[str] = "follows the form of the answer"
    default_draft_tokens: ClassVar[int] = 16

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [
            Tree() if request.forced is None else Tree.chain(request.forced(nodes))
            for request, nodes in zip(requests, budget, strict=True)
        ]
