"""What drafters share whose trees grow by their own confidence: how a draft goes from level to level, and what may
stand behind the path of such a drafter.

What a row is read by differs (a head with a cache, or one without); what is offered, who goes on and what becomes of
it does not (`kernels/gpu/grow_tree.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES, Draft
from slipstream.core.errors import ConfigError
from slipstream.drafters.base import DeviceTree, DraftRequest, DraftRound, Services
from slipstream.drafters.head_rows import Standing, lane_state
from slipstream.kernels.gpu.grow_tree import Growth, Level, candidates
from slipstream.sampling.rank import Ranked
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features

SIZES = ("depth", "width", "nodes")
_MOST_OFFERED = 8192
"""Tokens among which the nodes of a tree are chosen: one program of the device looks at all of them."""

States = TypeVar("States")


class Asked(NamedTuple):
    """What stands behind a drafter's path."""

    sizes: dict[str, int]  # of its drafts: those that are named
    others: dict[str, str]


def parse_sizes(text: str, others: Sequence[str] = ()) -> Asked:
    """Read `depth=6&width=8&nodes=32`; others: what else may be named."""
    found = Asked({}, {})
    for key, value in parse_qsl(text, keep_blank_values=True):
        if key in others:
            found.others[key] = value
            continue
        if key not in SIZES:
            raise ConfigError(f"PATH?{text}: {key!r} is unknown, must be one of {', '.join((*SIZES, *others))}")
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"PATH?{text}: {key}={value!r}, must be a whole number of at least 1")
        found.sizes[key] = int(value)
    return found


def check_sizes(depth: int, width: int, nodes: int) -> int:
    """Raise where no such tree can be grown. Gives how many tokens one is chosen among."""
    if not (1 <= width <= MAX_NODES and 1 <= nodes <= MAX_NODES):
        raise ConfigError(f"width={width}, nodes={nodes}: each must be 1 to {MAX_NODES}")
    offered = candidates(width, depth)
    if offered > _MOST_OFFERED:
        raise ConfigError(
            f"width={width}, depth={depth}: so wide and deep a tree offers {offered} tokens, at most "
            f"{_MOST_OFFERED} can be ranked; use less of either"
        )
    return offered


def wants_path(features: Features) -> bool:
    """Does what a row may choose depend on the guesses before it?"""
    return features.penalties or features.bad_words


def grow_trees(
    round: DraftRound,
    growth: Growth,
    roots: SampleRows,
    states: States,
    go_on: Callable[[Level, States, int], States],
    offer: Callable[[States, SampleRows, int], Ranked],
) -> DeviceTree:
    """Level by level, each a pass of `width` rows a request. The surest of all that was offered is the tree.

    states: what is known behind each root. go_on: the same behind the rows of a level, from that of the level above.
    offer: the best tokens there. Both are told the level, the roots' is 0.
    """
    path = torch.empty((round.lanes.shape[0], 0), dtype=torch.int64, device=round.lanes.device)
    level = growth.grow(*offer(states, roots, 0), None)
    step = 0
    while level is not None:
        step += 1
        states = go_on(level, states, step)
        if wants_path(round.features):
            path = torch.cat((path[level.rows], level.tokens[:, None]), dim=1)
        rows = SampleRows(level.lanes, level.positions, level.generated, path if path.shape[1] else None)
        level = growth.grow(*offer(states, rows, step), level)
    return DeviceTree(*growth.tree(round.nodes))


def host_round(
    services: Services,
    views: Sequence[DraftRequest],
    nodes: int,
    levels: int,
    device: torch.device,
    ahead: int = 0,
    nobody: int = 0,
) -> DraftRound:
    """What a queued round would say of these requests, from what the host knows.

    ahead: places behind a text that are written to. nobody: the page where none is.
    """
    tables = [services.page_table(view.id).pages for view in views]
    standing = [
        Standing(view.slot, view.tokens, len(view.tokens) - view.prompt_length, pages)
        for view, pages in zip(views, tables, strict=True)
    ]
    slots = [view.slot for view in views]
    keys = max(len(view.tokens) for view in views) + ahead
    reach = max(services.pool.pages_for(keys), *[len(pages) for pages in tables])
    return DraftRound(
        state=lane_state(standing, services.sampling.num_slots, reach, nobody, device),
        lanes=torch.tensor(slots, dtype=torch.int64, device=device),
        depth=min(nodes, levels),
        keys=keys,
        features=services.sampling.features(slots),
        nodes=nodes,
    )


def answer_of(made: Tensor | DeviceTree, asked: Sequence[int], budget: Sequence[int]) -> Draft:
    """What was guessed for the requests `asked`, as the draft of all of them: who may have none gets none."""
    tree = made if isinstance(made, DeviceTree) else None
    guesses = made.tokens if isinstance(made, DeviceTree) else made
    device, nodes = guesses.device, guesses.shape[1]
    tokens = torch.zeros((len(budget), nodes), dtype=torch.int64, device=device)
    parents = torch.arange(-1, nodes - 1, device=device).repeat(len(budget), 1)
    index = torch.tensor(asked, device=device)
    tokens[index] = guesses
    if tree is not None:
        parents[index] = tree.parents
    return Draft(tokens, parents, torch.tensor(budget, dtype=torch.int64, device=device), tree is None)
