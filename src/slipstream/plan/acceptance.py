"""Estimates of the chance that guesses are right, learned from verdicts.

A drafter has one estimate for each depth, over all requests. A request has one number, its ease: the log odds by which
guesses for it are right more often than that. It begins at 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import exp, log

import numpy as np

from slipstream.core.draft import MAX_NODES
from slipstream.plan.types import Floats, TreeSeen

PRIOR_WEIGHT = 4.0
"""The weight of a prior, in guesses: of the assumed rate, and of all requests' estimate for one request."""

DEPTHS = 12  # depths with an estimate of their own; deeper guesses use the last one
_PRIOR = 0.6  # assumed chance of a guess
_FADE = 1 - 1 / (16 * PRIOR_WEIGHT)  # of a depth's counts, by guess and by step
_EASE_FADE = 1 - 1 / (2 * PRIOR_WEIGHT)  # of a request's information, by draft
_MOST = 0.98  # upper bound of a chance


class Ease:
    """By request: the log odds by which its text is easier to guess than others'."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}  # log odds, and the information behind them

    def of(self, request_ids: Sequence[str]) -> Floats:  # [B]
        known = self._known
        return np.array([known[name][0] if name in known else 0.0 for name in request_ids])

    def observe(self, request_id: str, shared: Sequence[float], right: float) -> None:
        """Update by compared guesses. shared: their log odds over all requests; right: how many were right."""
        lean, sure = self._known.get(request_id, (0.0, 0.0))
        expected = [1 / (1 + exp(-odds - lean)) for odds in shared]
        sure = sure * _EASE_FADE + sum([chance * (1 - chance) for chance in expected])
        lean += (right - sum(expected)) / (sure + PRIOR_WEIGHT / 2)
        self._known[request_id] = min(max(lean, -4.0), 4.0), sure

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)


class Acceptance:
    """The estimates of one drafter. A guess is compared when everything before it was right."""

    def __init__(self, ease: Ease) -> None:
        """ease: may be shared between drafters."""
        self._ease = ease
        self._right, self._tried = np.zeros(DEPTHS), np.zeros(DEPTHS)
        self._odds: list[float] | None = None  # [DEPTHS] over all requests
        self._seen: deque[tuple[int, int]] = deque(maxlen=32)  # right and compared guesses, by draft
        self._ranks: NodeRanks | None = None  # of a drafter of trees

    def next_step(self) -> None:
        self._right[1:] *= _FADE  # an untried depth approaches the one before it
        self._tried[1:] *= _FADE
        self._odds = None
        if self._ranks is not None:
            self._ranks.next_step()

    @property
    def ranks(self) -> NodeRanks:
        if self._ranks is None:
            self._ranks = NodeRanks()
        return self._ranks

    def odds(self) -> list[float]:  # [DEPTHS]
        """Log odds of a guess over all requests. A depth with few counts uses the one before it as its prior."""
        if self._odds is None:
            chance, self._odds = _PRIOR, []
            for right, tried in zip(self._right.tolist(), self._tried.tolist(), strict=True):
                chance = min(max((right + PRIOR_WEIGHT * chance) / (tried + PRIOR_WEIGHT), 1e-3), _MOST)
                self._odds.append(log(chance / (1 - chance)))
        return self._odds

    def paths(self, request_ids: Sequence[str], depth: int) -> Floats:  # [depth, B]
        """The chances that the first 1, 2, … guesses are all right."""
        odds = np.array(self.odds())[np.minimum(np.arange(depth), DEPTHS - 1)]  # [depth]
        chances = 1 / (1 + np.exp(-odds[:, None] - self._ease.of(request_ids)))
        return np.asarray(np.minimum(chances, _MOST).cumprod(0))

    def observe(self, request_id: str, drafted: int, accepted: int, tree: TreeSeen | None = None) -> None:
        """Learn from one draft of `drafted` levels. tree: a larger tree might have had the next token."""
        tried = accepted + (accepted < drafted)
        odds, missed = self.odds(), 0.0
        if tree is not None:
            if accepted < drafted:
                lean = float(self._ease.of([request_id])[0])
                chance = 1 / (1 + exp(-odds[min(accepted, DEPTHS - 1)] - lean))
                missed = self.ranks.missed(chance, tree.nodes, accepted)
            self.ranks.observe(tree.path, tree.nodes)
        compared = min(tried, DEPTHS)
        self._ease.observe(request_id, odds[:compared], min(accepted, compared) + missed * (accepted < compared))
        self._right[:compared] *= _FADE
        self._tried[:compared] *= _FADE
        self._tried[:compared] += 1
        self._right[: min(accepted, compared)] += 1
        if accepted < compared:
            self._right[accepted] += missed
        self._seen.append((accepted, tried))

    def forget(self, request_id: str) -> None:
        self._ease.forget(request_id)

    def told(self) -> str:
        """The recent counts in words, or the assumption. Thread-safe."""
        seen = list(self._seen)
        right, tried = sum([right for right, _ in seen]), sum([tried for _, tried in seen])
        if not tried:
            return f"assuming that {_PRIOR:.0%} of its guesses are right: none was compared yet"
        return f"{right} of its last {tried} guesses for all requests were right"


# --- trees ------------------------------------------------------------------------------------------------------------

EDGES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, MAX_NODES)  # sizes of trees with an estimate of their own
_BUCKET = [bisect_right(EDGES, rank) for rank in range(MAX_NODES)]  # by a node's rank: the first size that has it


def _usual() -> Floats:  # [D, S]
    """The prior share of a whole tree's right nodes that trees of each size have; 0.7 for a chain of 6 nodes."""
    depths, sizes = np.arange(1, DEPTHS + 1)[:, None], np.array(EDGES, dtype=np.float64)
    kept = (1 - np.exp(-0.6 * sizes / depths)) / (1 - np.exp(-0.6 * MAX_NODES / depths))
    return np.where(sizes >= depths, kept, 1e-9)


def _between() -> Floats:  # [S + 1, MAX_NODES + 1]
    """Weights that interpolate sizes 0, 1, 2, … between `EDGES`, linearly in the logarithm."""
    known = np.log1p(np.array((0, *EDGES), dtype=np.float64))
    every = np.log1p(np.arange(MAX_NODES + 1, dtype=np.float64))
    return np.stack([np.interp(every, known, line) for line in np.eye(len(known))])


_USUAL = _usual()
_USUALLY_LOST = np.concatenate((np.ones((DEPTHS, 1)), 1 - _USUAL[:, :-1] / _USUAL[:, 1:]), axis=1)
_BETWEEN = _between()
_POSSIBLE = np.arange(MAX_NODES + 1) >= np.arange(1, DEPTHS + 1)[:, None]  # a tree is no deeper than its node count


class NodeRanks:
    """The accepted nodes of a drafter's trees, by depth and by the drafter's own rank.

    The first nodes of a tree are the best tree of that size, so a verdict shows the result of each smaller tree. The
    result of a larger one is unknown: sizes are compared only within drafts that have both.
    """

    def __init__(self) -> None:
        self._last = np.zeros((DEPTHS, len(EDGES) + 1))  # accepted nodes in a size but not in the one before
        self._had = np.zeros((DEPTHS, len(EDGES) + 1))  # differences; sums: accepted nodes of drafts of a size or more
        self._kept: Floats | None = None

    def next_step(self) -> None:
        self._last *= _FADE
        self._had *= _FADE

    def observe(self, path: Sequence[int], nodes: int) -> None:
        whole = bisect_right(EDGES, nodes)  # sizes that the draft covers
        for depth, rank in enumerate(path[:DEPTHS]):
            size = _BUCKET[rank]
            if size < whole:
                self._last[depth, size] += 1
                self._had[depth, size] += 1
                self._had[depth, whole] -= 1
        self._kept = None

    def kept(self) -> Floats:  # [D, MAX_NODES + 1]
        """By depth and size: the share of a whole tree's right nodes at that depth."""
        if self._kept is None:
            last, had = self._last[:, :-1], self._had[:, :-1].cumsum(1)  # [D, S]
            lost = (last + PRIOR_WEIGHT * _USUALLY_LOST) / (had + PRIOR_WEIGHT)
            down = np.cumprod((1 - lost)[:, :0:-1], axis=1)[:, ::-1]  # [D, S - 1]
            sizes = np.concatenate((np.zeros((DEPTHS, 1)), down, np.ones((DEPTHS, 1))), axis=1)
            self._kept = np.minimum(np.where(_POSSIBLE, sizes @ _BETWEEN, 0.0), 1.0)
        return self._kept

    def missed(self, chance: float, nodes: int, accepted: int) -> float:
        """The chance that a whole tree had the next token where a tree of `nodes` nodes did not.

        chance: that a whole tree has the right token at that depth.
        """
        kept, depth = self.kept(), min(accepted, DEPTHS - 1)
        above = float(kept[depth - 1, nodes]) if depth else 1.0
        part = min(1.0, float(kept[depth, nodes]) / above) if above > 0 else 0.0
        return chance * (1 - part) / max(1 - chance * part, 1e-6)


# --- promises ---------------------------------------------------------------------------------------------------------


class Promises:
    """The reliability of a drafter's own probabilities: accepted tokens over promised tokens, at most 1."""

    def __init__(self) -> None:
        self._promised: dict[str, float] = {}  # by request: of the draft in verification
        self._requests: dict[str, tuple[float, float]] = {}  # by request: tokens promised and accepted
        self._shared = (0.0, 0.0)

    def factor(self, request_id: str) -> float:
        promised, brought = self._shared
        usual = min(1.0, (brought + PRIOR_WEIGHT) / (promised + PRIOR_WEIGHT))
        promised, brought = self._requests.get(request_id, (0.0, 0.0))
        return min(1.0, (brought + PRIOR_WEIGHT * usual) / (promised + PRIOR_WEIGHT))

    def promise(self, request_id: str, tokens: float) -> None:
        """Note the tokens that a draft of this step promises."""
        self._promised[request_id] = tokens

    def observe(self, request_id: str, accepted: int) -> None:
        said = self._promised.pop(request_id, None)
        if said is not None:
            fade = 1 - 1 / PRIOR_WEIGHT
            promised, brought = self._requests.get(request_id, (0.0, 0.0))
            self._requests[request_id] = promised * fade + said, brought * fade + accepted
            promised, brought = self._shared
            self._shared = promised * _FADE + said, brought * _FADE + accepted

    def forget(self, request_id: str) -> None:
        self._promised.pop(request_id, None)
        self._requests.pop(request_id, None)
