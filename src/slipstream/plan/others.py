"""What a drafter's guesses are worth where others guess for the same requests: what those have right is theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.plan.acceptance import Acceptance
from slipstream.plan.planner import Beside


class Others(NamedTuple):
    """What others draft beside a drafter."""

    right: NDArray[np.float64]  # [K + 1, B]: the chance that one of them is right to each depth; 0 at depth 0
    nodes: int  # of all requests together


def others_of(
    request_ids: Sequence[str],
    beside: Sequence[Sequence[Beside]],
    depth: int,
    estimate_of: Callable[[str], Acceptance],
) -> Others:
    """What those who draft already are taken to bring: a guess that they have right brings nothing more."""
    wrong = np.ones((depth + 1, len(request_ids)))  # [K + 1, B]
    depths, nodes = np.arange(1, depth + 1)[:, None], 0  # [K, 1]
    drafted: dict[str, dict[int, int]] = {}  # by drafter and request: nodes
    for i, theirs in enumerate(beside):
        for name, count in theirs:
            drafted.setdefault(name, {})[i] = count
            nodes += count
    for name, counts in drafted.items():
        estimate, which = estimate_of(name), list(counts)
        alphas = np.array([estimate.alpha(request_ids[i]) for i in which])  # [N]
        right = np.where(depths <= np.array(list(counts.values())), alphas**depths, 0)  # [K, N]
        wrong[1:, which] *= 1 - right
    return Others(1 - wrong, nodes)
