"""Medusa: heads on the target's last hidden state guess the next positions.

A draft needs no cache of its own: it starts from the hidden state that the target left at the token before the last
one, and our own heads also read the last token. `MedusaDrafter` runs heads that know nothing of one another: all guess
at once, and a static tree of their best guesses follows how often each rank of each head is right. In
`ChainedMedusaDrafter` each head continues the one before it: it reads the guesses so far, and trees grow level by
level by its confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES, ROOT, Draft
from slipstream.core.errors import ConfigError
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, DeviceTree, DraftRequest, DraftRound, Needs, Opening, Services
from slipstream.drafters.heads import check_sizes, grow_trees, host_draft, parse_sizes, slots_before_last
from slipstream.kernels.gpu.grow_tree import Growth, Level, candidates
from slipstream.models.heads.checkpoint import TargetShape, read_config
from slipstream.models.heads.medusa import CHAINED, MedusaHeads, check_medusa, load_medusa
from slipstream.models.runner import Runner
from slipstream.sampling.rank import Ranked, rank
from slipstream.sampling.rows import SampleRows

_REVIEW = 512  # drafts between reviews of the tree's shape
_GAIN = 1.02  # expected gain that justifies another shape
_IN_FLIGHT = 2  # steps that may still use the old shape after a change; nothing is learnt from them


class MedusaDrafter(DeviceDrafter):
    """Drafts static trees. acceptance [heads][ranks]: accuracy of each guess, if known."""

    name: ClassVar[str] = "medusa"
    needs: ClassVar[Needs] = Needs(device=True)
    default_draft_tokens: ClassVar[int] = MAX_NODES
    makes_trees = True
    _services: Services  # set by `attach`

    def __init__(self, heads: MedusaHeads, acceptance: Sequence[Sequence[float]] | None = None) -> None:
        self.heads = heads
        self.taps = heads.taps
        self.depth = heads.heads
        self.weights_bytes = heads.weights_bytes
        prior = usual_table(heads.heads) if acceptance is None else acceptance
        table = check_table(prior, heads.heads, "medusa_acceptance")
        self._ranks = min(RANKS, heads.width)
        self._acceptance = HeadAcceptance(tuple(row[: self._ranks] for row in table))
        self._seen = self._stale = 0  # drafts since the last review; steps still in flight with the old shape
        self.tree = best_tree(self._acceptance.table)
        self.most_nodes = len(self.tree)

    @classmethod
    def check(cls, opening: Opening) -> None:
        assert opening.path is not None  # its registration requires a path
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
        """Load the heads in a folder. Its config.json may have `medusa_acceptance`, a measured table."""
        assert opening.path is not None
        place, _, options = opening.path.partition("?")
        folder = opening.resolve(place)
        heads = load_medusa(folder, target)
        if heads.chained:
            return ChainedMedusaDrafter(heads, **parse_sizes(options).sizes)
        return cls(heads, read_config(folder).get("medusa_acceptance"))

    @property
    def acceptance(self) -> Table:
        """Accuracy of each rank of each head, as measured so far."""
        return self._acceptance.table

    def adopt(self, table: Table) -> None:
        """Replace the table and its tree: the heads have new weights."""
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
        """Use this tree from the next draft on. It is copied in place: captured graphs stay valid."""
        self.tree = tree
        host = torch.tensor((tree.heads, tree.ranks, tree.parents), dtype=torch.int64)
        self._shape.copy_(host.pin_memory() if self._shape.is_cuda else host, non_blocking=True)

    def draft(self, round: DraftRound) -> DeviceTree:
        state, lanes, requests = round.state, round.lanes, round.lanes.shape[0]
        slots = slots_before_last(state, lanes, self._services.pool.page_size)
        logits = self.heads.logits(self._services.hidden(slots), state.last[lanes])  # [heads, B, Vd]
        ahead = torch.arange(self.depth, device=lanes.device)[:, None]  # [heads, 1]
        rows = SampleRows(
            slots=lanes.repeat(self.depth),
            positions=(state.length[lanes] + 1 + ahead).flatten(),
            generated=(state.generated[lanes] + ahead).flatten(),
        )
        sampling = self._services.sampling.apart(self.name, round.features)
        best = rank(logits.flatten(0, 1), rows, sampling, round.features, self._ranks, self.heads.vocab).tokens
        head, place, parents = self._shape[:, : round.nodes]
        tokens = best.view(self.depth, requests, self._ranks)[head, :, place].T.contiguous()  # [B, nodes]
        return DeviceTree(tokens, parents.expand_as(tokens))

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        """The same as `draft`, from the host's view of the requests."""
        return host_draft(self.draft, self._services, requests, budget, self.depth, self._shape.device)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        # in merged drafts the accepted nodes are not attributed to one drafter
        drafted = [v for v in verdicts if v.drafted and not v.authors.mixed]
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


WIDTH = 16  # twice EAGLE's: heads are less certain, and trees of few levels have room


class ChainedMedusaDrafter(DeviceDrafter):
    """Drafts trees with chained heads.

    depth: levels, at most the number of heads. width: guesses that each row offers, and rows of each level that are
    continued. nodes: largest tree, which takes the likeliest of all guesses offered.
    """

    name: ClassVar[str] = "medusa"
    needs: ClassVar[Needs] = Needs(device=True)
    default_draft_tokens: ClassVar[int] = MAX_NODES  # limited by `most_nodes`
    makes_trees = grows = True
    _services: Services  # set by `attach`

    def __init__(
        self, heads: MedusaHeads, *, depth: int | None = None, width: int = WIDTH, nodes: int = MAX_NODES
    ) -> None:
        assert heads.chained, "unchained heads need `MedusaDrafter`"
        self.depth = heads.heads if depth is None else depth
        if not 1 <= self.depth <= heads.heads:
            raise ConfigError(f"depth={depth}: must be 1 to {heads.heads}, the number of heads")
        self.width = min(width, heads.width)
        self.most_nodes = min(nodes, check_sizes(self.depth, self.width, nodes))
        self.heads = heads
        self.taps = heads.taps
        self.weights_bytes = heads.weights_bytes

    def most_at(self, levels: int) -> int:
        return min(self.most_nodes, candidates(self.width, levels))

    def attach(self, services: Services) -> None:
        self._services = services
        device = services.sampling.token_hashes.device
        self._nowhere = torch.zeros(self.width * self.depth, dtype=torch.int64, device=device)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        """The same as `draft`, from the host's view of the requests."""
        return self.propose_trees(requests, budget, self.depth)

    def propose_trees(self, requests: Sequence[DraftRequest], budget: Sequence[int], levels: int) -> Draft:
        return host_draft(self.draft, self._services, requests, budget, levels, self._nowhere.device)

    def draft(self, round: DraftRound) -> DeviceTree:
        """One level a head."""
        state, lanes = round.state, round.lanes
        width = min(self.width, round.nodes)  # see `FeatureDrafter._tree`
        # noise apart from the text's: a tree's first nodes depend on what its last ones are
        table = self._services.sampling.apart(self.name, round.features)
        length = state.length[lanes]  # [B]
        slots = slots_before_last(state, lanes, self._services.pool.page_size)

        def go_on(level: Level, made: Tensor, step: int) -> Tensor:
            return self.heads.chained_hidden(step, made[level.rows], level.tokens)

        def offer(made: Tensor, rows: SampleRows, step: int) -> Ranked:
            return rank(self.heads.head_logits(step, made), rows, table, round.features, width, self.heads.vocab)

        first = self.heads.chained_hidden(0, self._services.hidden(slots), state.last[lanes])
        roots = SampleRows(lanes, length + 1, state.generated[lanes])
        growth = Growth(state, lanes, width, round.depth, last_place=0, guests=self._nowhere, each=0)
        return grow_trees(round, growth, roots, first, go_on, offer)


RANKS = 10  # guesses of a head that can become nodes

Table = tuple[tuple[float, ...], ...]
"""[heads][ranks]: probability that the head's guess of that rank is right, given a right path to it."""

_PRIOR_WEIGHT = 64.0  # tries that the initial table counts for
_MEMORY = 4096.0  # tries of a rank after which older ones count half


@dataclass(frozen=True, slots=True)
class StaticTree:
    """Nodes in descending order of probability, parents before children: every prefix is the best tree of its size."""

    heads: tuple[int, ...]  # [K] head of the node: its depth - 1
    ranks: tuple[int, ...]  # [K] rank among the head's guesses
    parents: tuple[int, ...]  # [K]
    chances: tuple[float, ...]  # [K] probability that the path to the node is accepted

    def __len__(self) -> int:
        return len(self.heads)


def best_tree(table: Table, nodes: int = MAX_NODES) -> StaticTree:
    """The tree of the `nodes` likeliest paths; ties go to shallower nodes and lower ranks."""
    found: list[tuple[int, int, int, float]] = []  # head, rank, parent, chance
    # -probability, head, parent, index of the rank in the head's order: a path enters after its parent and after its
    # likelier sibling
    waiting: list[tuple[float, int, int, int]] = []
    orders = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in table]

    def offer(head: int, parent: int, place: int, above: float) -> None:
        if head < len(table) and place < len(table[head]):
            heappush(waiting, (-above * table[head][orders[head][place]], head, parent, place))

    offer(0, ROOT, 0, 1.0)
    while waiting and len(found) < nodes:
        minus, head, parent, place = heappop(waiting)
        found.append((head, orders[head][place], parent, -minus))
        offer(head, parent, place + 1, 1.0 if parent == ROOT else found[parent][3])
        offer(head + 1, len(found) - 1, 0, -minus)
    heads, ranks, parents, chances = zip(*found, strict=True) if found else ((), (), (), ())
    return StaticTree(heads, ranks, parents, chances)


def chances_under(tree: StaticTree, table: Table) -> list[float]:
    """The nodes' probabilities under another table than the tree's own."""
    chances: list[float] = []
    for head, index, parent in zip(tree.heads, tree.ranks, tree.parents, strict=True):
        chances.append(table[head][index] * (1.0 if parent == ROOT else chances[parent]))
    return chances


def usual_table(heads: int) -> Table:
    """The table to start with: roughly what trained heads of a 7B model were reported to reach."""
    first = [0.6 * 0.8**head for head in range(heads)]
    return tuple(tuple(top * 0.25 / rank if rank else top for rank in range(RANKS)) for top in first)


def check_table(table: Sequence[Sequence[float]], heads: int, name: str) -> Table:
    """Validate a table; raises `ConfigError`."""
    if not isinstance(table, Sequence) or len(table) != heads:
        raise ConfigError(f"{name}: must have one row for each of the {heads} heads")
    rows = []
    for head, row in enumerate(table):
        numbers = isinstance(row, Sequence) and all(isinstance(p, int | float) and 0 <= p <= 1 for p in row)
        if not numbers or not 0 < len(row) <= RANKS:
            raise ConfigError(f"{name}[{head}]={row!r}: must be 1 to {RANKS} numbers from 0 to 1, one for each rank")
        rows.append(tuple(float(p) for p in row))
    return tuple(rows)


class HeadAcceptance:
    """Counts how often each rank of each head was right below a right path."""

    def __init__(self, prior: Table) -> None:
        self._prior = prior
        self._tries = [[0.0] * len(row) for row in prior]
        self._hits = [[0.0] * len(row) for row in prior]

    def observe(self, tree: StaticTree, verdict: Verdict) -> None:
        """Learn from the verdict on the first nodes of `tree`."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents[: verdict.drafted]):
            children.setdefault(parent, []).append(node)
        for parent, right in zip((ROOT, *verdict.path), (*verdict.path, None), strict=True):
            for node in children.get(parent, ()):
                self._note(tree.heads[node], tree.ranks[node], node == right)

    def _note(self, head: int, rank: int, right: bool) -> None:
        tries, hits = self._tries[head], self._hits[head]
        tries[rank] += 1
        hits[rank] += right
        if tries[rank] > _MEMORY:
            tries[rank] /= 2
            hits[rank] /= 2

    @property
    def table(self) -> Table:
        """The measured table, blended with the initial one."""
        rows = zip(self._prior, self._hits, self._tries, strict=True)
        return tuple(
            tuple((hit + _PRIOR_WEIGHT * p) / (tried + _PRIOR_WEIGHT) for p, hit, tried in zip(*row, strict=True))
            for row in rows
        )
