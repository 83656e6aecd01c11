"""The plan of a round: how many nodes each request's draft gets.

More rows make the pass dearer; each node brings its chance of acceptance. The plan takes the nodes that raise the
expected tokens per second of the whole batch, and none where none does. It changes speed only, never tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.core.draft import ROOT, Tree
from slipstream.plan.acceptance import Acceptance
from slipstream.plan.cost import Floats, PassCost

_FIRST_PROBE = 16
_LAST_PROBE = 256
"""Rounds between two probes of a drafter that does not pay: first, and at the most."""
_MARGIN = 1.02
"""What a draft must promise beyond plain decoding: the estimates are no better than this."""


class Planner:
    """Decides sizes before drafting (`budget`) and after it, where the drafter says how sure it is (`trim`).

    This one always drafts as much as was asked for: for measurements and tests.

    rows: how many requests decode in the pass, those with other drafters or none included: each emits a token anyway.
    """

    def budget(self, drafter: str, request_ids: Sequence[str], caps: Sequence[int], rows: int) -> list[int]:
        """Most nodes for each request, for a drafter whose guesses cost time."""
        return list(caps)

    def trim(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        rows: int,
    ) -> list[Tree]:
        """What to keep of guesses that cost nothing to have."""
        return list(trees)

    def observe_pass(self, rows: int, seconds: float) -> None:
        """A target pass over this many rows took this long."""

    def observe_draft(self, drafter: str, nodes: int, seconds: float) -> None:
        """A device drafter took this long to go `nodes` deep."""

    def observe(self, drafter: str, request_id: str, drafted: int, accepted: int) -> None:
        """What became of one request's draft."""

    def forget(self, request_id: str) -> None:
        """The request ended."""


class AdaptivePlanner(Planner):
    """Drafts what pays by what was measured, and probes now and then whether it has begun to."""

    def __init__(self, cost: PassCost) -> None:
        self._cost = cost
        self._acceptance: dict[str, Acceptance] = {}
        self._draft_cost: dict[str, PassCost] = {}
        self._idle: dict[str, int] = {}  # rounds since the drafter last drafted
        self._patience: dict[str, int] = {}  # idle rounds before the next probe

    def budget(self, drafter: str, request_ids: Sequence[str], caps: Sequence[int], rows: int) -> list[int]:
        """Sizes for a drafter whose guesses cost time: one depth for all, since its steps run for all together."""
        deepest = max(caps, default=0)
        if deepest == 0:
            return list(caps)
        alphas = np.array([self._estimate(drafter).alpha(r) for r in request_ids])  # [B]
        depths = np.arange(deepest + 1)[:, None]  # [K + 1, 1]
        drafted = np.minimum(depths, np.array(caps)).sum(1)  # [K + 1]: nodes of all requests together
        gained = np.where((depths > 0) & (depths <= np.array(caps)), alphas**depths, 0).cumsum(0).sum(1)  # [K + 1]
        pass_s = self._cost.curve(rows, rows + int(drafted[-1]))[drafted]
        draft_s = np.concatenate(([0.0], self._drafting(drafter).curve(1, deepest)))
        measured = self._drafting(drafter).observed and self._cost.observed  # else the two have different units
        rate = (rows + gained) / (pass_s + draft_s * measured)
        depth = int(rate.argmax()) if rate.max() > rate[0] * _MARGIN else 0
        depth = self._probe(drafter, depth, min(2, deepest))
        return [min(depth, cap) for cap in caps]

    def trim(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        rows: int,
    ) -> list[Tree]:
        """Keep the nodes that pay, of guesses that cost nothing to have. A node stays only with its parent."""
        if not any(trees):
            return list(trees)
        chances = [
            _along_paths(tree, self._promise(drafter, request_id, tree) if promise is None else promise)
            for request_id, tree, promise in zip(request_ids, trees, promises, strict=True)
        ]
        pooled = np.concatenate(chances)
        order = np.argsort(-pooled, kind="stable")  # stable: a parent as likely as its child comes first
        gained = np.concatenate(([0.0], np.cumsum(pooled[order])))
        rate = (rows + gained) / self._cost.curve(rows, rows + len(pooled))
        best = int(rate.argmax()) if rate.max() > rate[0] * _MARGIN else 0
        best = self._probe(drafter, best, min(4, len(pooled)))
        kept = np.zeros(len(pooled), dtype=bool)
        kept[order[:best]] = True
        ends = np.cumsum([len(tree) for tree in trees])
        return [_cut(tree, kept[end - len(tree) : end]) for tree, end in zip(trees, ends, strict=True)]

    def observe_pass(self, rows: int, seconds: float) -> None:
        self._cost.observe(rows, seconds)

    def observe_draft(self, drafter: str, nodes: int, seconds: float) -> None:
        self._drafting(drafter).observe(nodes, seconds)

    def observe(self, drafter: str, request_id: str, drafted: int, accepted: int) -> None:
        if drafted:
            self._estimate(drafter).observe(request_id, drafted, accepted)
            if accepted:
                self._patience.pop(drafter, None)

    def forget(self, request_id: str) -> None:
        for estimate in self._acceptance.values():
            estimate.forget(request_id)

    def _probe(self, drafter: str, chosen: int, small: int) -> int:
        """Nothing pays by the estimates: now and then try a little all the same, ever more rarely while it fails."""
        if chosen:
            self._idle[drafter] = 0
            return chosen
        idle = self._idle[drafter] = self._idle.get(drafter, 0) + 1
        patience = self._patience.get(drafter, _FIRST_PROBE)
        if idle < patience:
            return 0
        self._idle[drafter] = 0
        self._patience[drafter] = min(2 * patience, _LAST_PROBE)
        return small

    def _promise(self, drafter: str, request_id: str, tree: Tree) -> Sequence[float]:
        """For a drafter that does not say: siblings share their parent's chance, the first of them most of it."""
        alpha = self._estimate(drafter).alpha(request_id)
        chances: list[float] = []
        left = {ROOT: 1.0}  # the chance that a node is accepted and none of its children so far is
        for node, parent in enumerate(tree.parents):
            chances.append(alpha * left[parent])
            left[parent] -= chances[node]
            left[node] = chances[node]
        return chances

    def _estimate(self, drafter: str) -> Acceptance:
        return self._acceptance.setdefault(drafter, Acceptance())

    def _drafting(self, drafter: str) -> PassCost:
        return self._draft_cost.setdefault(drafter, PassCost(slope=1.0))


def _along_paths(tree: Tree, promise: Sequence[float]) -> Floats:
    """A path is at most as likely as any path it goes on from."""
    chances: list[float] = []
    for parent, chance in zip(tree.parents, promise, strict=True):
        chances.append(chance if parent == ROOT else min(chance, chances[parent]))
    return np.array(chances, dtype=np.float64)


def _cut(tree: Tree, kept: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Tree:
    if kept.all():
        return tree
    new_index = np.cumsum(kept) - 1
    nodes = np.flatnonzero(kept).tolist()
    parents = [tree.parents[n] for n in nodes]
    return Tree(
        tuple(tree.tokens[n] for n in nodes),
        tuple(ROOT if p == ROOT else int(new_index[p]) for p in parents),
    )
