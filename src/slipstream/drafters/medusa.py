"""Medusa: heads on the target's last hidden state guess the next positions all at once, and a static tree of their
best guesses is checked in one pass.

No recurrence and no cache of its own: a draft is one small product, read from the hidden state that the target left in
its cache at the token before the last one, and with heads of our own from the last token. The shape of the tree follows
how often each rank of each head is right (`medusa_tree.py`). Heads that are chained draft otherwise
(`medusa_chain.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES, Draft
from slipstream.core.errors import ConfigError
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, DeviceTree, DraftRequest, DraftRound, Needs, Opening, Services
from slipstream.drafters.growing import parse_sizes
from slipstream.drafters.head_rows import slots_before_last
from slipstream.drafters.medusa_chain import ChainedMedusaDrafter
from slipstream.drafters.medusa_tree import (
    RANKS,
    HeadAcceptance,
    StaticTree,
    Table,
    best_tree,
    chances_under,
    check_table,
    usual_table,
)
from slipstream.models.heads.checkpoint import TargetShape, read_config
from slipstream.models.heads.medusa import CHAINED, MedusaHeads, check_medusa, load_medusa
from slipstream.models.runner import Runner
from slipstream.sampling.rank import rank
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features

_REVIEW = 512
"""Drafts after which the shape of the tree is looked at again."""
_GAIN = 1.02
"""What another shape must promise to be worth the change."""
_IN_FLIGHT = 2
"""Rounds that may have been drafted with the old shape when it changes: nothing is learnt from them."""


class MedusaDrafter(DeviceDrafter):
    """Drafts trees with Medusa's heads. acceptance [heads][ranks]: how often each guess is right, if that is known."""

    name: ClassVar[str] = "medusa"
    needs: ClassVar[Needs] = Needs(device=True)
    default_draft_tokens: ClassVar[int] = MAX_NODES
    makes_trees = True

    def __init__(self, heads: MedusaHeads, acceptance: Sequence[Sequence[float]] | None = None) -> None:
        self.heads = heads
        self.taps = heads.taps
        self.depth = heads.heads
        self.weights_bytes = heads.weights_bytes
        prior = usual_table(heads.heads) if acceptance is None else acceptance
        table = check_table(prior, heads.heads, "medusa_acceptance")
        self._ranks = min(RANKS, heads.width)
        self._acceptance = HeadAcceptance(tuple(row[: self._ranks] for row in table))
        self._services: Services | None = None
        self._seen = self._stale = 0  # drafts since the last look at the shape; rounds of the shape before
        self.tree = best_tree(self._acceptance.table)
        self.most_nodes = len(self.tree)

    @classmethod
    def check(cls, opening: Opening) -> None:
        assert opening.path is not None  # it is registered as one that takes a path
        place, _, options = opening.path.partition("?")
        asked = parse_sizes(options).sizes
        folder = opening.resolve(place)
        chained = read_config(folder).get(CHAINED)
        if asked and not chained:
            raise ConfigError(
                f"medusa:{opening.path}: only chained heads grow trees by {', '.join(asked)}; leave it out"
            )
        if (shape := TargetShape.of_config(opening.target_config)) is not None:
            check_medusa(folder, shape)

    @classmethod
    def open(cls, opening: Opening, target: Runner) -> MedusaDrafter | ChainedMedusaDrafter:
        """The heads in a folder. Its config.json may bring `medusa_acceptance`, a table measured before."""
        assert opening.path is not None
        place, _, options = opening.path.partition("?")
        folder = opening.resolve(place)
        heads = load_medusa(folder, target)
        if heads.chained:
            return ChainedMedusaDrafter(heads, **parse_sizes(options).sizes)
        return cls(heads, read_config(folder).get("medusa_acceptance"))

    @property
    def acceptance(self) -> Table:
        """How often each rank of each head is right, as far as this was seen."""
        return self._acceptance.table

    def adopt(self, table: Table) -> None:
        """Go on from this table and its tree, as if nothing had been seen: the heads have other weights now."""
        check_table(table, self.heads.heads, "table")
        self._acceptance = HeadAcceptance(tuple(row[: self._ranks] for row in table))
        self._seen = self._stale = 0
        self._use(best_tree(self._acceptance.table, self.most_nodes))

    def attach(self, services: Services) -> None:
        self._services = services
        device = services.sampling.token_hashes.device
        self._shape = torch.zeros(
            (3, self.most_nodes), dtype=torch.int64, device=device
        )  # head, rank, parent of each node
        self._use(self.tree)

    def _use(self, tree: StaticTree) -> None:
        """From the next draft on. The numbers change, their place does not: what was captured stays good."""
        self.tree = tree
        host = torch.tensor((tree.heads, tree.ranks, tree.parents), dtype=torch.int64)
        self._shape.copy_(host.pin_memory() if self._shape.is_cuda else host, non_blocking=True)

    def draft(self, round: DraftRound) -> DeviceTree:
        assert self._services is not None
        state, lanes = round.state, round.lanes
        slots = slots_before_last(state, lanes, self._services.pool.page_size)
        length, last, generated = state.length[lanes], state.last[lanes], state.generated[lanes]
        tokens = self._guess(slots, last, lanes, length, generated, round.features, round.nodes)
        return DeviceTree(tokens, self._shape[2, : round.nodes].expand_as(tokens))

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        assert self._services is not None
        device = self._shape.device
        tables = [self._services.page_table(request.id) for request in requests]
        numbers = [
            (
                table.slots(len(r.tokens) - 2, 1)[0],
                r.tokens[-1],
                r.slot,
                len(r.tokens) - 1,
                len(r.tokens) - r.prompt_length,
            )
            for r, table in zip(requests, tables, strict=True)
        ]
        places, last, lanes, length, generated = torch.tensor(numbers, dtype=torch.int64, device=device).unbind(1)
        features = self._services.sampling.features([request.slot for request in requests])
        tokens = self._guess(places, last, lanes, length, generated, features, max(budget))
        parents = self._shape[2, : tokens.shape[1]].expand_as(tokens)
        return Draft(tokens, parents, torch.tensor(budget, dtype=torch.int64, device=device), False)

    def _guess(
        self,
        places: Tensor,  # [B]: where the target's hidden state lies of the token before the last one
        last: Tensor,  # [B]: the last token
        lanes: Tensor,  # [B]: rows of the sampling table
        length: Tensor,  # [B]: position of the last token
        generated: Tensor,  # [B]
        features: Features,
        nodes: int,
    ) -> Tensor:  # [B, nodes]
        assert self._services is not None
        assert self._services.taps is not None
        sampling = self._services.sampling.apart(self.name, features)
        logits = self.heads.logits(self._services.taps.at(places), last)  # [heads, B, Vd]
        ahead = torch.arange(self.depth, device=places.device)[:, None]  # [heads, 1]
        rows = SampleRows(
            slots=lanes.repeat(self.depth),
            positions=(length + 1 + ahead).flatten(),
            generated=(generated + ahead).flatten(),
        )
        best = rank(logits.flatten(0, 1), rows, sampling, features, self._ranks, self.heads.vocab).tokens
        head, place = self._shape[0, :nodes], self._shape[1, :nodes]
        return best.view(self.depth, places.shape[0], self._ranks)[head, :, place].T.contiguous()

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        drafted = [v for v in verdicts if v.drafted and not v.authors.mixed]  # else nobody knows which nodes were right
        if self._stale:
            self._stale -= bool(drafted)
            return
        for verdict in drafted:
            self._acceptance.observe(self.tree, verdict)
        self._seen += len(drafted)
        if self._seen >= _REVIEW:
            self._seen = 0
            table = self._acceptance.table
            other = best_tree(table)
            nodes = self.default_draft_tokens
            if sum(other.chances[:nodes]) > _GAIN * sum(chances_under(self.tree, table)[:nodes]):
                self._use(other)
                self._stale = _IN_FLIGHT
