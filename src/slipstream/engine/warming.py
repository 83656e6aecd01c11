"""What requests will most likely need is compiled and recorded before the first of them: else they would wait for it.

A kernel takes a tenth of a second and more to compile, once on a machine, and a round some 30 ms to record, at every
start. Not all shapes of rounds are recorded, of which there are hundreds, but some that can stand in for the others.
What is not here comes when it is asked for: longer contexts, penalties, grammars, and what drafters on the device do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import product

import torch

from slipstream.core.draft import MAX_NODES
from slipstream.engine.posing import most_context, posed
from slipstream.engine.queued import QueuedEngine
from slipstream.engine.round_shape import RoundShape, crowds
from slipstream.kernels.jit import ROOMS, room_for
from slipstream.models.gpu import WIDE_SIZES
from slipstream.models.paths import Progress
from slipstream.models.reads import READ_ROWS
from slipstream.models.wide_reads import MOST_ROWS
from slipstream.sampling.table import Features

_LIMIT_S = 60.0
"""Nothing more is begun when so much is over: on a fresh machine nearly all of it goes by compiling."""
_LEAVE_BYTES = 2**30
"""Of the device's memory: prompts and what comes later need some."""
_FEATURES = (Features(greedy=True), Features(sampled=True), Features(greedy=True, sampled=True))
_CONTEXTS = (1, 1024)
"""Tokens of context: a round has sizes for them, too."""
_ROWS = (16, 32, 64, 128, 256)
"""Of rounds with drafts: each stands in for those that have more than half as many."""
_OTHERS = ((16, False), (MAX_NODES, False), (16, True))
"""Nodes of a request, and whether they are trees: for what such rounds have of their own to be compiled."""


def likely_shapes(engine: QueuedEngine) -> Iterator[RoundShape]:
    """What rounds will be like, each once, the likeliest first: without drafts, and as large as they come."""
    most, guesses = engine.config.max_num_seqs, bool(engine.drafting.drafters)

    def shape(counts: Sequence[int], context: int, features: Features, *, is_tree: bool = False) -> RoundShape:
        return RoundShape.of(
            counts,
            context,
            is_tree=is_tree,
            features=features,
            version=engine.sampling.version,
            keeps_logits=False,
            most_keys=engine.plan.max_model_len + 1 + MAX_NODES,
        )

    def all_of_them() -> Iterator[RoundShape]:
        for context, features, requests in product(_CONTEXTS, _FEATURES, crowds(most)):
            yield (plain := shape([0] * requests, context, features))
            for rows in _ROWS if guesses else ():
                if requests <= rows <= min(requests * (1 + MAX_NODES), engine.config.draft_rows):
                    yield plain._replace(width=MAX_NODES, rows=rows, is_tree=True)
        for room, (width, is_tree) in product(ROOMS, _OTHERS if guesses else ()):
            if room <= room_for(most):
                yield shape([width] + [0] * (min(room, most) - 1), 1, _FEATURES[0], is_tree=is_tree)

    return iter(dict.fromkeys(all_of_them()))


@torch.inference_mode()
def warm_up(engine: QueuedEngine, progress: Progress | None = None) -> None:
    """Record it, in an engine that has no requests. Nothing is done where nothing is recorded."""
    if engine.rounds.pool is None:
        return
    if progress:
        progress("warming up: compiling and recording what requests will need (once compiled, it takes seconds)")
    end = time.perf_counter() + _LIMIT_S
    context = most_context(engine, 1)
    if context > 0:
        with posed(engine, 1, min(context, MOST_ROWS)) as scene:
            for rows in (rows for rows in READ_ROWS if rows <= context):
                scene.read(rows, wide=False)
            for rows in (rows for rows in WIDE_SIZES if engine.target.shares_wide and rows <= min(context, MOST_ROWS)):
                for _ in range(2):  # what comes twice is recorded
                    scene.read(rows, wide=True)
    for shape in likely_shapes(engine):
        if why := _enough(engine, end):
            if progress:
                progress(f"warming up ends here ({why}): what is left is recorded when it comes")
            break
        engine.rounds.of(shape, exactly=True)


def _enough(engine: QueuedEngine, end: float) -> str:
    """Why nothing more is to be recorded; empty: there is no reason."""
    if time.perf_counter() > end:
        return f"after {_LIMIT_S:.0f} s"
    device = engine.target.device
    if device.type == "cuda" and (left := torch.cuda.mem_get_info(device)[0]) < _LEAVE_BYTES:
        return f"{left / 2**20:.0f} MiB of memory are left"
    return ""
