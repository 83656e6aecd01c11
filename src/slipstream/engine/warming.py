"""Compiles kernels and captures graphs before the first request, so that early requests need not wait for them.

Compiling a kernel takes 0.1 s or more, once on a machine; capturing a step takes about 30 ms at every start. A step has
hundreds of shapes. Captured here are some that can stand in for the others: greedy requests, sampled ones and both,
with up to about 2,000 tokens. Longer contexts, top-k, top-p, min-p, penalties, biases, grammars, log probabilities,
rejection sampling, lookahead and device drafters are captured at their first use.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import pairwise, product

import torch

from slipstream.core.draft import MAX_NODES
from slipstream.engine.queued import QueuedBackend
from slipstream.engine.rehearsal import most_context, rehearse, usual_shape
from slipstream.engine.rounds import Rounds, RoundShape, request_sizes
from slipstream.engine.step import Engine
from slipstream.kernels.gpu.jit import room_for
from slipstream.models.gpu import WIDE_SIZES
from slipstream.models.graphs import PROMPT_ROWS, WIDE_PROMPT_ROWS
from slipstream.models.paths import Progress
from slipstream.plan.cost import filled
from slipstream.sampling.table import Features

_LIMIT_S = 60.0
"""Time limit. On a new machine compiling takes nearly all of it."""
_LEAVE_BYTES = 2**30
"""Device memory to leave for prompts and later captures."""
_FEATURES = (Features(greedy=True), Features(sampled=True), Features(greedy=True, sampled=True))
_CONTEXTS = (1, 1024)
"""Tokens of context, which are part of a step's shape."""
_LEAST_ROWS = 16
"""Least rows of a step with drafts; the others double it. Each stands in for steps with more than half its rows."""
_KINDS = ((16, False), (MAX_NODES, False), (16, True))
"""Nodes of a request, and whether they are trees: such steps have kernels of their own to compile."""


def likely_shapes(engine: Engine) -> Iterator[RoundShape]:
    """The likely shapes of steps, each once: short contexts before long ones, greedy requests before others."""
    return iter(dict.fromkeys(_all_likely(engine)))


def _all_likely(engine: Engine) -> Iterator[RoundShape]:
    most, most_rows, guesses = engine.config.max_num_seqs, engine.config.draft_rows, bool(engine.drafting.drafters)
    for context, features, (fewer, crowd) in product(_CONTEXTS, _FEATURES, pairwise([0, *request_sizes(most)])):
        requests = min(crowd, most)
        for count in (fewer + 1, requests):
            yield (plain := usual_shape(engine, [0] * count, context, features))
        if guesses and requests == 1 and most_rows > 1:
            yield usual_shape(engine, [1], context, features)  # no other shape stands in for this one
        for rows in _ladder(min(requests * (1 + MAX_NODES), most_rows)) if guesses else ():
            if rows > fewer:
                yield plain._replace(width=MAX_NODES, rows=rows, is_tree=True)
    rooms = {room_for(requests): min(requests, most) for requests in request_sizes(most)}
    for requests, (nodes, is_tree) in product(rooms.values(), _KINDS if guesses else ()):
        if requests + nodes <= most_rows:
            yield usual_shape(engine, [nodes] + [0] * (requests - 1), 1, _FEATURES[0], is_tree=is_tree)


def _ladder(most_rows: int) -> Iterator[int]:
    rows, last = _LEAST_ROWS, filled(most_rows)
    while rows < last:
        yield rows
        rows *= 2
    yield last


@torch.inference_mode()
def warm_up(engine: Engine, progress: Progress | None = None) -> None:
    """Compile and capture, in an engine without requests. Does nothing if it captures no graphs."""
    if not isinstance(engine.backend, QueuedBackend) or engine.backend.rounds.pool is None:
        return
    rounds, say = engine.backend.rounds, progress or (lambda _: None)
    rounds.let_stand_in()
    say("warming up: compiling and recording what requests will need (once compiled, it takes seconds)")
    end = time.perf_counter() + _LIMIT_S
    try:
        with closing(_warming(engine, rounds)) as steps:
            for _ in steps:
                if why := _why_stop(engine, rounds, end):
                    say(f"warming up ends here ({why}): what is left is recorded when it comes")
                    break
    except Exception as error:  # requests run without it; a real defect will show in them
        say(f"warming up ends here ({type(error).__name__}: {error}): what is left is recorded when it comes")
    finally:
        rounds.capture_again()  # a later shape may be smaller than the one that failed


def _warming(engine: Engine, rounds: Rounds) -> Generator[None]:
    """Warm up in parts. The caller may stop at each yield."""
    context = min(most_context(engine, 1), WIDE_PROMPT_ROWS)
    wide = WIDE_SIZES if engine.target.shares_wide else ()
    passes = [(rows, False) for rows in PROMPT_ROWS]
    passes += [(rows, True) for rows in wide for _ in range(2)]  # the second use is captured
    if context > 0:
        with rehearse(engine, 1, context) as scene:
            for rows, is_wide in passes:
                yield
                if rows <= context:
                    scene.read(rows, wide=is_wide)
    for shape in likely_shapes(engine):
        yield
        rounds.of(shape, exactly=True)


def _why_stop(engine: Engine, rounds: Rounds, end: float) -> str:
    """The reason to stop warming up, or an empty text."""
    if rounds.pool is None:
        return "a round could not be recorded"
    if time.perf_counter() > end:
        return f"after {_LIMIT_S:.0f} s"
    device = engine.target.device
    if device.type == "cuda" and (left := torch.cuda.mem_get_info(device)[0]) < _LEAVE_BYTES:
        return f"{left / 2**20:.0f} MiB of memory are left"
    return ""
