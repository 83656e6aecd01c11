"""What the nodes of a queued round were drawn from, for rejection sampling: the largest tensors of a round by far.

A drafter fills in a row of the vocabulary for each of its guesses. They are brought to the nodes of the round as the
guesses are, without the host looking on; what was drafted on the host or has no such row counts as not drawn (q = 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES
from slipstream.drafters.base import DeviceDrafter, Drafter


def most_nodes(drafter: Drafter) -> int:
    """Nodes that a drafter guesses for a request at most, whatever is said."""
    return drafter.most_nodes if isinstance(drafter, DeviceDrafter) else MAX_NODES


def made_for(drafter: Drafter) -> int:
    """Nodes that a drafter guesses for a request where nothing else is said."""
    return min(drafter.default_draft_tokens, most_nodes(drafter))


def reach(drafter: Drafter) -> int:
    """Nodes that a planner may have it guess for a request where nothing else is said."""
    return max(made_for(drafter), min(drafter.planned_draft_tokens, most_nodes(drafter)))


def judged_nodes(drafters: Sequence[Drafter], draft_tokens: int | None) -> int:
    """Most nodes of a request that is judged by what some of them were drawn from: twice as many as those are made for
    who tell it, so that others have room beside them.

    draft_tokens: the engine's own limit; None: there is none.
    """
    told = sum(made_for(drafter) for drafter in drafters if drafter.needs.probabilities)
    return min(MAX_NODES, 2 * told if draft_tokens is None else draft_tokens)


def odds_bytes(drafters: Sequence[Drafter], draft_tokens: int | None, requests: int, vocab_size: int) -> int:
    """What is kept of what nodes were drawn from, at most: by those who draw, and once more node by node."""
    telling = [drafter for drafter in drafters if drafter.needs.probabilities]
    nodes = judged_nodes(drafters, draft_tokens)
    drawn = sum(nodes if draft_tokens is not None else made_for(drafter) for drafter in telling)
    return (nodes + drawn) * requests * vocab_size * 4 if telling else 0


class OddsRoom:
    """Memory for distributions, the same for all rounds, as these follow one another.

    Nothing is taken before a request is judged by rejection sampling. Whoever got a part keeps it: what is recorded
    over a smaller room goes on there.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._room = torch.zeros(0, vocab_size, device=device)

    def part(self, requests: int, nodes: int) -> Tensor:  # [B, K, V] fp32
        if self._room.shape[0] < requests * nodes:
            self._room = self._room.new_zeros(max(requests * nodes, 2 * self._room.shape[0]), self._room.shape[1])
        return self._room[: requests * nodes].view(requests, nodes, -1)


@dataclass(frozen=True, slots=True)
class Odds:
    """Of a round's nodes, in tensors that stay where they are."""

    q: Tensor  # [B, K, V] fp32: means nothing where not drawn
    drawn: Tensor  # [B, K] bool

    @staticmethod
    def empty(q: Tensor) -> Odds:
        return Odds(q, torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device))

    def forget(self) -> None:
        self.drawn.zero_()

    def take(self, q: Tensor, mine: Tensor) -> None:
        """A drafter's distributions [B, M, V], for the requests that it alone drafts for (mine [B, 1])."""
        nodes = q.shape[1]
        own, drawn = self.q[:, :nodes], self.drawn[:, :nodes]
        torch.where(mine[:, :, None], q, own, out=own)
        drawn.logical_or_(mine)

    def take_merged(self, q: Tensor, owners: Tensor, number: int) -> None:
        """Distributions [B, M, V] of a chain that was just joined to the drafts; owners [B, K]: as in `Union`.

        A node that another proposed before stays what it was: the later one, its equal, is not tried. A chain's nodes
        stand in the union in the chain's own order.
        """
        place = ((owners >> number) & 1).cumsum(1).sub_(1).clamp_(0, q.shape[1] - 1)  # [B, K]: which guess it was
        new = owners == 1 << number  # [B, K]
        told = q.gather(1, place[:, :, None].expand(-1, -1, q.shape[2]))
        torch.where(new[:, :, None], told, self.q, out=self.q)
        self.drawn.logical_or_(new)
