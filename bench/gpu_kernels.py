"""Where the time of passes goes, kernel by kernel: a plain step, passes over trees, the draft of an EAGLE-3 head.

What `tree` and `heads` time as a whole. A kernel that begins while the one before it still runs, as most do, has only
what it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_clock import KernelTime, Work, by_kernel
from gpu_heads import DEPTH, NODES, OPENED_DEPTH, WIDTH, draft_work, random_head
from gpu_passes import CONTEXT, REPEATS, binary_tree, lay_out, random_cache

from slipstream.core.draft import Tree
from slipstream.models.runner import Runner

TREES = (16, 32, 64)
"""Rows of the trees, roots included."""
CROWD_ROWS = 256
"""Rows of a pass of many requests, which have trees of as many each."""
_SHOWN = 12
"""Kernels of a piece of work; the others together."""


@torch.inference_mode()
def works(runner: Runner, context: int = CONTEXT, trees: Sequence[int] = TREES) -> dict[str, Work]:
    """What is looked into, by name."""
    cache = random_cache(runner, 1, context + max(trees))
    passes = {"plain step": lay_out(runner, cache, [Tree()], context).run}
    for rows in trees:
        passes[f"tree of {rows} rows"] = lay_out(runner, cache, [binary_tree(rows, runner.vocab_size)], context).run
    draft = draft_work(runner, random_head(runner, "fp8"), 1, context, DEPTH, WIDTH, NODES)
    return {**passes, "EAGLE-3 draft in 8 bits": draft}


@torch.inference_mode()
def crowd_works(runner: Runner, requests: Sequence[int], context: int = CONTEXT) -> dict[str, Work]:
    """For so many requests at once: a plain step, a pass over trees of 256 rows together, and the draft of these trees
    by a head as it is opened, which may guess deeper, after a round of such trees."""
    head = random_head(runner, "fp8")
    found: dict[str, Work] = {}
    for n in requests:
        rows = max(2, CROWD_ROWS // n)
        cache = random_cache(runner, n, context + rows)
        tree = binary_tree(rows, runner.vocab_size)
        nodes = rows - 1
        found[f"{n} requests: plain step"] = lay_out(runner, cache, [Tree()] * n, context).run
        found[f"{n} requests: trees of {rows} rows"] = lay_out(runner, cache, [tree] * n, context).run
        depth = min(DEPTH, nodes)
        recent = 4 if depth < 4 else 8  # as rounds of many have it, `engine/draft_loops.py`
        draft = draft_work(runner, head, n, context, depth, WIDTH, max(nodes, 4), deepest=OPENED_DEPTH, recent=recent)
        found[f"{n} requests: EAGLE-3 draft of {nodes} nodes in 8 bits"] = draft
    return found


@torch.inference_mode()
def kernel_part(
    runner: Runner,
    watch: Callable[[Work, int], Sequence[KernelTime]] = by_kernel,
    context: int = CONTEXT,
    requests: Sequence[int] = (1,),
) -> dict[str, list[dict[str, Any]]]:
    """By work, its kernels."""
    crowds = [n for n in requests if n > 1]
    wanted = works(runner, context) if 1 in requests else {}
    wanted |= crowd_works(runner, crowds, context) if crowds else {}
    return {name: [one._asdict() for one in fewer(watch(work, REPEATS))] for name, work in wanted.items()}


def fewer(times: Sequence[KernelTime]) -> list[KernelTime]:
    rest = times[_SHOWN:]
    others = [KernelTime("others", sum(one.launches for one in rest), sum(one.us for one in rest))] if rest else []
    return [*times[:_SHOWN], *others]
