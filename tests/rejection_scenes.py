"""A made-up target and drafters over 12 tokens, to see what distribution the rejection verifier gives.

The next token depends on the last one only, so the distribution of every place of an answer is known. Drafters draw by
the noise that real ones draw by, and tens of thousands of requests go through several rounds at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draft import ROOT, Draft
from slipstream.core.params import SamplingParams
from slipstream.sampling import SampleRows, SamplingTable, processed
from slipstream.sampling.noise import gumbel, position_keys, stream_keys
from slipstream.verify.rejection import rejection_keys, verify_rejection

V = 12
REQUESTS = 30_000
PLACES = 3  # tokens of each answer that are looked at
START = 0  # the last token of every prompt


@dataclass(frozen=True)
class Pair:
    """A target and a drafter, as the probabilities of the next token by the last."""

    p: Tensor  # [V, V]
    q: Tensor  # [V, V]


def pair(params: SamplingParams, *, seed: int = 0, likeness: float = 0.6) -> Pair:
    """Random ones, alike to a degree, both behind the same temperature, top-k and top-p."""
    generator = torch.Generator().manual_seed(seed)
    target, other = torch.randn(2, V, V, generator=generator) * 1.5
    return Pair(*(_probabilities(logits, params) for logits in (target, likeness * target + (1 - likeness) * other)))


def _probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    table = SamplingTable(1, V)
    table.add(0, params, seed=0)
    none = torch.zeros(logits.shape[0], dtype=torch.int64)
    return processed(logits, SampleRows(none, none, none), table, table.features([0])).softmax(1)


SETTINGS = {
    "T 1": SamplingParams(temperature=1.0),
    "T 1, top-k 6": SamplingParams(temperature=1.0, top_k=6),
    "T 0.6, top-p 0.9": SamplingParams(temperature=0.6, top_p=0.9),
    "T 0.6, top-k 5, top-p 0.95": SamplingParams(temperature=0.6, top_k=5, top_p=0.95),
}


@dataclass(frozen=True)
class Proposal:
    """A draft, and how it was drawn."""

    draft: Draft
    q: Tensor | None  # [B, K, V]
    drawn: Tensor | None  # [B, K]


@dataclass(frozen=True)
class Node:
    """One node of a proposal's plan: under which one it hangs, and which of its parent's draws it is."""

    parent: int
    draw: int | None  # None: copied, not drawn


Proposer = Callable[[Pair, Tensor, Tensor, Tensor], Proposal]
"""From the pair, last tokens [B], streams [B] and positions [B] to a draft."""


def planned(nodes: list[Node], *, told: bool = True) -> Proposer:
    """A proposer of trees of one shape. Where a sibling comes twice, the later one joins the earlier."""

    def propose(pair: Pair, last: Tensor, streams: Tensor, positions: Tensor) -> Proposal:
        batch, width = last.shape[0], len(nodes)
        tokens = torch.zeros(batch, width, dtype=torch.int64)
        parents = torch.full((batch, width), ROOT)
        twin = torch.arange(width).repeat(batch, 1)  # [B, K]: the node that stands for it
        out = torch.zeros(batch, width, dtype=torch.bool)
        rows = torch.zeros(batch, width, V)
        depths: list[int] = []
        noise: dict[int, Tensor] = {}  # by depth: it belongs to the position, not to the node
        for i, node in enumerate(nodes):
            depths.append(0 if node.parent == ROOT else depths[node.parent] + 1)
            before = last if node.parent == ROOT else tokens[:, node.parent]
            rows[:, i] = pair.q[before]
            if node.draw is None:
                tokens[:, i] = (5 * before + 3) % V  # what a copied text would say
            else:  # the largest score is the first draw, the next one the second without replacement
                if depths[i] not in noise:
                    noise[depths[i]] = gumbel(position_keys(streams, positions + depths[i]), torch.arange(V).int())
                tokens[:, i] = (rows[:, i].log() + noise[depths[i]]).topk(node.draw + 1).indices[:, node.draw]
                # a draw beyond what top-k and top-p left has no probability: a drafter does not propose it
                out[:, i] = rows[:, i].gather(1, tokens[:, i, None])[:, 0] == 0
            if node.parent != ROOT:
                parents[:, i] = twin[:, node.parent]
                out[:, i] |= out[:, node.parent]
            for j in reversed(range(i)):
                same = (tokens[:, j] == tokens[:, i]) & (parents[:, j] == parents[:, i]) & (twin[:, j] == j)
                twin[:, i] = torch.where(same & ~out[:, i] & ~out[:, j], j, twin[:, i])
        is_drawn = torch.tensor([node.draw is not None for node in nodes]).repeat(batch, 1)
        alive = (twin == torch.arange(width)) & ~out
        order = (~alive).int().argsort(dim=1, stable=True)  # [B, K]: those that stay, in their order
        place = torch.cat((torch.full((batch, 1), ROOT), order.argsort(1)), 1)  # [B, K + 1]
        draft = Draft(
            tokens.gather(1, order),
            place.gather(1, parents.gather(1, order) + 1),
            alive.sum(1),
            all(node.parent == i - 1 for i, node in enumerate(nodes)),
        )
        if not told:
            return Proposal(draft, None, None)
        return Proposal(draft, rows.gather(1, order[:, :, None].expand_as(rows)), is_drawn.gather(1, order))

    return propose


CHAIN = planned([Node(ROOT, 0), Node(0, 0), Node(1, 0)])
TREE = planned(
    [Node(ROOT, 0), Node(ROOT, 1), Node(ROOT, 2), *(Node(parent, i) for parent in (0, 1) for i in (0, 1, 2))]
)
DEEP_FIRST = planned([Node(ROOT, 0), Node(0, 0), Node(1, 0), Node(0, 1), Node(ROOT, 1), Node(4, 0), Node(ROOT, 2)])
COPIED = [Node(ROOT, None), Node(0, None)]
DRAWN = [Node(ROOT, 0), Node(ROOT, 1), Node(0, 0), Node(0, 1), Node(1, 0)]


def joined(first: list[Node], second: list[Node]) -> list[Node]:
    return first + [Node(n.parent if n.parent == ROOT else n.parent + len(first), n.draw) for n in second]


SHAPES = {
    "chain": CHAIN,
    "tree": TREE,
    "tree, deep first": DEEP_FIRST,
    "merged, copied first": planned(joined(COPIED, DRAWN)),
    "merged, drawn first": planned(joined(DRAWN, COPIED)),
    "merged, by turns": planned(
        [Node(ROOT, 0), Node(ROOT, None), Node(ROOT, 1), Node(1, 0), Node(1, None), Node(1, 1)]
    ),
    "copied": planned([*COPIED, Node(0, 0)], told=False),
    "drawn, then chosen": planned([Node(ROOT, 0), Node(ROOT, 1), Node(1, 1), Node(1, 0)], told=False),
}


def rows_of(pair: Pair, last: Tensor, draft: Draft) -> Tensor:
    """p [B, K + 1, V] of the root's row and each node's."""
    return pair.p[torch.cat((last[:, None], draft.tokens), 1)]


def answers(pair: Pair, propose: Proposer, *, requests: int = REQUESTS) -> Tensor:
    """The first tokens [B, PLACES] of as many answers, each in as many rounds as it needs."""
    streams = stream_keys(torch.arange(requests), torch.zeros(requests, dtype=torch.int64))
    last, length = torch.full((requests,), START), torch.zeros(requests, dtype=torch.int64)
    told = torch.zeros(requests, PLACES + 16, dtype=torch.int64)
    for _ in range(PLACES):
        proposal = propose(pair, last, streams, length)
        draft = proposal.draft
        keys = rejection_keys(streams, length, draft.width + 1)
        verdicts = verify_rejection(draft, rows_of(pair, last, draft), keys, proposal.q, proposal.drawn)
        going = length < PLACES
        index = length[:, None] + torch.arange(draft.width + 1)
        emits = (torch.arange(draft.width + 1) <= verdicts.accepted[:, None]) & going[:, None]
        told.scatter_(1, index.clamp(max=told.shape[1] - 1), torch.where(emits, verdicts.tokens, 0))
        own = verdicts.tokens.gather(1, verdicts.accepted[:, None])[:, 0]
        last = torch.where(going, own, last)
        length = length + (verdicts.accepted + 1) * going
    return told[:, :PLACES]


def chi_square(codes: Tensor, expected: Tensor) -> float:
    """The p-value of codes [B] under probabilities `expected` [C]; what is impossible must not occur."""
    observed = codes.bincount(minlength=expected.shape[0]).double()
    wanted = expected.double() * codes.shape[0]
    if observed[expected == 0].sum() > 0:
        return 0.0
    common = wanted >= 5
    observed = torch.cat((observed[common], observed[~common].sum()[None]))
    wanted = torch.cat((wanted[common], wanted[~common].sum()[None]))
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2).double(), statistic / 2))


def p_value(pair: Pair, tokens: Tensor) -> float:
    """Of each place alone and each two neighbours together the smallest, times their number: the more one looks, the
    more often chance alone looks wrong.
    """
    p = pair.p.double()
    found, at = [], p[START]  # [V]: the distribution at a place
    for place in range(PLACES):
        found.append(chi_square(tokens[:, place], at))
        if place + 1 < PLACES:
            found.append(chi_square(tokens[:, place] * V + tokens[:, place + 1], (at[:, None] * p).flatten()))
        at = at @ p
    return min(1.0, min(found) * len(found))
