"""Where the time of passes goes, kernel by kernel: a plain step, passes over trees, the draft of an EAGLE-3 head.

What `tree` and `heads` time as a whole. A kernel that begins while the one before it still runs, as most do, has only
what it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_clock import KernelTime, Work, by_kernel
from gpu_heads import DEPTH, NODES, WIDTH, draft_work, random_head
from gpu_passes import CONTEXT, REPEATS, binary_tree, lay_out, random_cache

from slipstream.core.draft import Tree
from slipstream.models.runner import Runner

TREES = (16, 32, 64)
"""Rows of the trees, roots included."""
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
def kernel_part(
    runner: Runner, watch: Callable[[Work, int], Sequence[KernelTime]] = by_kernel, context: int = CONTEXT
) -> dict[str, list[dict[str, Any]]]:
    """By work, its kernels."""
    return {
        name: [one._asdict() for one in fewer(watch(work, REPEATS))] for name, work in works(runner, context).items()
    }


def fewer(times: Sequence[KernelTime]) -> list[KernelTime]:
    rest = times[_SHOWN:]
    others = [KernelTime("others", sum(one.launches for one in rest), sum(one.us for one in rest))] if rest else []
    return [*times[:_SHOWN], *others]
