"""Medusa's heads where each goes on from the one before it: trees that grow level by level, a head a level.

A head reads the guesses before it, so it says something else behind each of them, and how sure it is shapes the tree:
no table of ranks is needed. As other Medusa heads these keep nothing of a text: a draft begins with the hidden state
that the target left in its cache at the token before the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES, Draft
from slipstream.core.errors import ConfigError
from slipstream.drafters.base import DeviceDrafter, DeviceTree, DraftRequest, DraftRound, Needs, Services
from slipstream.drafters.growing import answer_of, check_sizes, grow_trees, host_round
from slipstream.drafters.head_rows import slots_before_last
from slipstream.kernels.gpu.grow_tree import Growth, Level, candidates
from slipstream.models.heads.medusa import MedusaHeads
from slipstream.sampling.rank import Ranked, rank
from slipstream.sampling.rows import SampleRows

WIDTH = 16
"""Twice EAGLE's: heads are less sure, and a tree has few levels, so that it has room for what is next best."""


class ChainedMedusaDrafter(DeviceDrafter):
    """Drafts trees with chained heads.

    depth: levels of a tree, at most one a head. width: guesses that each row offers, and rows of each level that are
    gone on from. nodes: of a tree at most, the surest of all that were offered.
    """

    name: ClassVar[str] = "medusa"
    needs: ClassVar[Needs] = Needs(device=True)
    default_draft_tokens: ClassVar[int] = MAX_NODES  # as many as `most_nodes` says
    makes_trees = grows = True

    def __init__(
        self, heads: MedusaHeads, *, depth: int | None = None, width: int = WIDTH, nodes: int = MAX_NODES
    ) -> None:
        assert heads.chained, "heads that do not know of one another draft by a table: `MedusaDrafter`"
        self.depth = heads.heads if depth is None else depth
        if not 1 <= self.depth <= heads.heads:
            raise ConfigError(f"depth={depth}: these heads guess 1 to {heads.heads} tokens in a row")
        self.width = min(width, heads.width)
        self.most_nodes = min(nodes, check_sizes(self.depth, self.width, nodes))
        self.heads = heads
        self.taps = heads.taps
        self.weights_bytes = heads.weights_bytes
        self._services: Services | None = None

    def most_at(self, levels: int) -> int:
        return min(self.most_nodes, candidates(self.width, levels))

    def attach(self, services: Services) -> None:
        self._services = services
        device = services.sampling.token_hashes.device
        self._nowhere = torch.zeros(self.width * self.depth, dtype=torch.int64, device=device)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        """The same as inside a queued round, from what the host knows."""
        return self.propose_trees(requests, budget, self.depth)

    def propose_trees(self, requests: Sequence[DraftRequest], budget: Sequence[int], levels: int) -> Draft:
        assert self._services is not None
        asked = [i for i, nodes in enumerate(budget) if nodes]
        views = [requests[i] for i in asked]
        made = self.draft(host_round(self._services, views, max(budget), levels, self._nowhere.device))
        return answer_of(made, asked, budget)

    def draft(self, round: DraftRound) -> DeviceTree:
        """A level a head; of a level nothing is kept but what its head made of each row."""
        assert self._services is not None
        assert self._services.taps is not None
        state, lanes = round.state, round.lanes
        width = min(self.width, round.nodes)  # see `FeatureDrafter`
        table = self._services.sampling.apart(self.name, round.features)  # first nodes depend on what the last ones are
        length = state.length[lanes]  # [B]
        slots = slots_before_last(state, lanes, self._services.pool.page_size)

        def go_on(level: Level, made: Tensor, step: int) -> Tensor:
            return self.heads.chained_hidden(step, made[level.rows], level.tokens)

        def offer(made: Tensor, rows: SampleRows, step: int) -> Ranked:
            return rank(self.heads.head_logits(step, made), rows, table, round.features, width, self.heads.vocab)

        first = self.heads.chained_hidden(0, self._services.taps.at(slots), state.last[lanes])
        roots = SampleRows(lanes, length + 1, state.generated[lanes])
        growth = Growth(state, lanes, width, round.depth, last_place=0, guests=self._nowhere, each=0)
        return grow_trees(round, growth, roots, first, go_on, offer)
