"""What requests will most likely need is compiled and recorded before the first of them: else they would wait for it.

A kernel takes a tenth of a second and more to compile, once on a machine, and a round some 30 ms to record, at every
start. Not all shapes of rounds are recorded, of which there are hundreds, but some that can stand in for the others: of
greedy requests, sampled ones and both, with up to some 2,000 tokens. What is not here is recorded when it is asked for:
longer contexts, top-k, top-p and min-p, penalties and biases, grammars, log probabilities, rejection sampling,
lookahead, and what drafters on the device do.
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
from slipstream.engine.rounds import Rounds, RoundShape, crowds
from slipstream.engine.step import Engine
from slipstream.kernels.gpu.jit import room_for
from slipstream.models.gpu import WIDE_SIZES
from slipstream.models.graphs import PROMPT_ROWS, WIDE_PROMPT_ROWS
from slipstream.models.paths import Progress
from slipstream.plan.cost import filled
from slipstream.sampling.table import Features

_LIMIT_S = 60.0
"""Nothing more is begun when so much is over: on a fresh machine nearly all of it goes by compiling."""
_LEAVE_BYTES = 2**30
"""Of the device's memory: prompts and what comes later need some."""
_FEATURES = (Features(greedy=True), Features(sampled=True), Features(greedy=True, sampled=True))
_CONTEXTS = (1, 1024)
"""Tokens of context: a round has sizes for them, too."""
_LEAST_ROWS = 16
"""Of rounds with drafts. Twice as many, and so on: each stands in for those that have more than half as many."""
_KINDS = ((16, False), (MAX_NODES, False), (16, True))
"""Nodes of a request, and whether they are trees: for what such rounds have of their own to be compiled."""


def likely_shapes(engine: Engine) -> Iterator[RoundShape]:
    """What rounds will be like, each once: short contexts before long ones, greedy requests before others."""
    return iter(dict.fromkeys(_all_likely(engine)))


def _all_likely(engine: Engine) -> Iterator[RoundShape]:
    most, most_rows, guesses = engine.config.max_num_seqs, engine.config.draft_rows, bool(engine.drafting.drafters)
    for context, features, (fewer, crowd) in product(_CONTEXTS, _FEATURES, pairwise([0, *crowds(most)])):
        requests = min(crowd, most)
        for count in (fewer + 1, requests):
            yield (plain := usual_shape(engine, [0] * count, context, features))
        if guesses and requests == 1 and most_rows > 1:
            yield usual_shape(engine, [1], context, features)  # so few rows nobody stands in for
        for rows in _ladder(min(requests * (1 + MAX_NODES), most_rows)) if guesses else ():
            if rows > fewer:
                yield plain._replace(width=MAX_NODES, rows=rows, is_tree=True)
    rooms = {room_for(requests): min(requests, most) for requests in crowds(most)}
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
    """Compile and record in an engine without requests. Does nothing in one that records nothing."""
    if not isinstance(engine.backend, QueuedBackend) or engine.backend.rounds.pool is None:
        return
    rounds, say = engine.backend.rounds, progress or (lambda _: None)
    rounds.let_stand_in()
    say("warming up: compiling and recording what requests will need (once compiled, it takes seconds)")
    end = time.perf_counter() + _LIMIT_S
    try:
        with closing(_warming(engine, rounds)) as steps:
            for _ in steps:
                if why := _enough(engine, rounds, end):
                    say(f"warming up ends here ({why}): what is left is recorded when it comes")
                    break
    except Exception as error:  # requests can run without; what is broken will say so by itself
        say(f"warming up ends here ({type(error).__name__}: {error}): what is left is recorded when it comes")
    finally:
        rounds.capture_again()  # what no graph was made of may have been larger than what comes


def _warming(engine: Engine, rounds: Rounds) -> Generator[None]:
    """Step by step: it may be left at each."""
    context = min(most_context(engine, 1), WIDE_PROMPT_ROWS)
    wide = WIDE_SIZES if engine.target.shares_wide else ()
    passes = [(rows, False) for rows in PROMPT_ROWS]
    passes += [(rows, True) for rows in wide for _ in range(2)]  # what comes for the second time is recorded
    if context > 0:
        with rehearse(engine, 1, context) as scene:
            for rows, is_wide in passes:
                yield
                if rows <= context:
                    scene.read(rows, wide=is_wide)
    for shape in likely_shapes(engine):
        yield
        rounds.of(shape, exactly=True)


def _enough(engine: Engine, rounds: Rounds, end: float) -> str:
    """Why nothing more is to be recorded; empty: there is no reason."""
    if rounds.pool is None:
        return "a round could not be recorded"
    if time.perf_counter() > end:
        return f"after {_LIMIT_S:.0f} s"
    device = engine.target.device
    if device.type == "cuda" and (left := torch.cuda.mem_get_info(device)[0]) < _LEAVE_BYTES:
        return f"{left / 2**20:.0f} MiB of memory are left"
    return ""
