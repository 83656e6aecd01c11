"""A tree of guesses that grows by confidence (EAGLE-2): a beam finds candidates, the surest of them are the tree.

Level by level each row of the beam offers its best tokens, and the surest paths go on. What was offered on the way and
did not go on may still be surer than what lies deeper: so in the end all candidates are ranked together. A path is
never surer than what it begins with, so the best of them are a tree. All shapes are fixed: this is captured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.drafters.base import DeviceTree
from slipstream.sampling.rank import Ranked


class Level(NamedTuple):
    """The rows that go on from one level to the next."""

    tokens: Tensor  # [B, width] int64
    parents: Tensor  # [B, width] int64: the row of the beam before that each hangs under; 0 where that was the root


class Beam:
    """The trees of B requests while they grow. `width`: tokens that a row offers, and rows that go on, a level."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._tokens: list[Tensor] = []  # [B, candidates] a level
        self._parents: list[Tensor] = []  # [B, candidates], places among all candidates; -1 is the root
        self._scores: list[Tensor] = []
        self._count = 0
        self._places = self._above = torch.empty(0)  # [B, width]: of the beam's rows, places and scores

    def grow(self, offered: Ranked, deeper: bool = True) -> Level | None:
        """The next level, from what the root [B, width] or each row of the beam [B * width, width] offers.

        Returns the rows that go on, unless the tree ends here.
        """
        width = self.width
        first = not self._tokens
        tokens = offered.tokens.view(-1, width if first else width * width)  # [B, C]
        scores = offered.scores.view(tokens.shape)
        if first:
            parents = torch.full_like(tokens, -1)
        else:
            parents = self._places.repeat_interleave(width, dim=1)
            scores = scores + self._above.repeat_interleave(width, dim=1)
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._scores.append(scores)
        before, self._count = self._count, self._count + tokens.shape[1]
        if not deeper:
            return None
        if first:
            chosen = torch.arange(width, device=tokens.device).expand_as(tokens)
        else:
            chosen = scores.topk(width, dim=1).indices  # [B, width]
        self._places = chosen + before
        self._above = scores.gather(1, chosen)
        return Level(tokens.gather(1, chosen), torch.zeros_like(chosen) if first else chosen // width)

    def tree(self, nodes: int) -> DeviceTree:
        """The surest `nodes` of all candidates, surest first; of equals the earlier, so that parents come first.

        Where there are fewer candidates, the last hang under the one before as a chain of token 0.
        """
        tokens, parents = torch.cat(self._tokens, dim=1), torch.cat(self._parents, dim=1)  # [B, C]
        scores = torch.cat(self._scores, dim=1)
        kept = min(nodes, self._count)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :kept]  # [B, K]
        place = torch.full_like(tokens, -1).scatter_(1, order, torch.arange(kept, device=order.device).expand_as(order))
        above = parents.gather(1, order)
        found = torch.where(above < 0, -1, place.gather(1, above.clamp_min(0)))
        chosen = tokens.gather(1, order)
        if kept == nodes:
            return DeviceTree(chosen, found)
        filler = torch.arange(kept - 1, nodes - 1, device=order.device).expand(order.shape[0], -1)
        return DeviceTree(torch.cat((chosen, torch.zeros_like(filler)), dim=1), torch.cat((found, filler), dim=1))
