"""What passes and drafts cost on this machine, timed before the first request, and remembered for the next start.

Seconds at the most: a few sizes of pass, one long context, and each device drafter by its size and the number of
requests. The planner corrects all of it by the rounds that follow; but a plan that begins with wrong costs would pay
for it with those rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import slipstream
from slipstream.drafters.base import DeviceDrafter
from slipstream.engine.caps import reach
from slipstream.engine.draft_loops import DraftSize
from slipstream.engine.queued import QueuedBackend
from slipstream.engine.rehearsal import Rehearsal, Work, most_context, rehearse
from slipstream.engine.step import Engine
from slipstream.models.parity import chip_name, code_digest
from slipstream.models.paths import Progress, cache_folder
from slipstream.plan.types import VERSION, Curve, DraftSeen, MeasuredCosts

_SHORT = 16
_LONG = {"cpu": 1024, "cuda": 2048}
"""Tokens of context of requests that pose: hardly any, and so many that they are seen in the time."""
_LOOKING_BACK = {"cpu": 1, "cuda": 8}
"""Requests with the long context."""
ROWS = 64  # that a request may bring
_LIMIT_S = {"cpu": 2.0, "cuda": 20.0}
"""What it may take, unless it was asked for. On a CPU, where every pass is slow, sizes are left out beforehand; on a
GPU, where recording takes longer than running, nothing more is begun when it is over. What was measured by then is of
use, but not remembered: the next start finds everything compiled, and has the time."""
_LARGEST = {"cpu": 64, "cuda": 256}
SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Rows of passes that are timed: on a GPU each is captured for it."""
_FEWEST = 3
"""Sizes that make a curve."""
_ROW_COST = 0.25
"""What a row is taken to add to a pass, as a part of it, when it is reckoned how long measuring takes."""
_STEADY = 1.3
"""The same pass, timed at the beginning and at the end: where they differ by more, nothing is remembered."""
_SMALL_MODEL = 2**25
"""Bytes of weights below which nothing is measured by itself: such passes are shorter than what surrounds them."""
_KEPT = "(once, unless the machine is busy)"
_CROWDS = {"cpu": (1, 4), "cuda": (1, 8, 64)}
"""Numbers of requests that drafters are timed with."""


def known_costs(
    engine: Engine, model_path: Path, wanted: bool | None, progress: Progress | None = None
) -> MeasuredCosts | None:
    """As remembered from an earlier start, or measured now; None: the rounds themselves must tell.

    wanted: True measures in any case, False never; None: where the model is large enough, and it is soon done.
    """
    if wanted is False or engine.config.planner == "fixed" or not engine.drafting.drafters:
        return None
    note = _Note(engine, model_path)
    if not wanted:
        if engine.target.weights_bytes < _SMALL_MODEL:
            return None
        found = note.read()
        if found is not None:
            return found
    try:
        costs = measure(engine, None if wanted else _LIMIT_S[engine.target.device.type], progress)
    except Exception as error:  # whatever it is, requests can run without; what is broken will say so by itself
        if wanted:
            raise
        if progress:
            progress(f"costs could not be measured ({type(error).__name__}: {error}): rounds will tell")
        return None
    finally:
        backend = engine.backend
        failed = isinstance(backend, QueuedBackend) and backend.rounds.capture_again()  # a round ran without a graph
    if costs is not None and costs.is_steady and costs.is_whole and not failed:
        note.write(costs)
    return costs


@torch.inference_mode()
def measure(engine: Engine, limit_s: float | None, progress: Progress | None = None) -> MeasuredCosts | None:
    """Time passes and drafts of an engine that has no requests. None where it would take too long, or nothing fits."""
    kind = engine.target.device.type
    sizes = [n for n in SIZES if n <= min(_LARGEST[kind], engine.config.draft_rows)]
    most = -(-sizes[-1] // ROWS)
    if most_context(engine, most) < _SHORT or most > engine.config.max_num_seqs:
        sizes, most = [n for n in sizes if n <= ROWS], 1
    if most_context(engine, 1) < _SHORT:
        return None
    if progress:
        progress(f"measuring what passes of the target cost {_KEPT}")
    most_s = limit_s if kind == "cpu" else None
    time_left = _TimeLeft(None if kind == "cpu" else limit_s)
    with rehearse(engine, 1, _SHORT) as alone:
        first_s = _seconds(alone, alone.target_pass(1), most_s)
    if most_s is not None:
        sizes = _within(sizes, first_s, most_s)
    if len(sizes) < _FEWEST:
        return None
    found: list[float] = []
    for rows in sizes:
        if len(found) >= _FEWEST and time_left.is_over():
            break
        with rehearse(engine, -(-rows // ROWS), _SHORT) as scene:
            found.append(_seconds(scene, scene.target_pass(rows)))
    curve = Curve(tuple(sizes[: len(found)]), tuple(found))
    key_s, row_key_s = (0.0, 0.0) if time_left.is_over() else _context(engine, curve)
    drafts: dict[str, tuple[DraftSeen, ...]] = {}
    for name, drafter in engine.drafting.drafters.items():
        if isinstance(drafter, DeviceDrafter) and (seen := _drafts(engine, name, drafter, progress, time_left)):
            drafts[name] = seen
    with rehearse(engine, 1, _SHORT) as alone:
        again = [first_s, found[0], _seconds(alone, alone.target_pass(1))]
    spread = max(again) / min(again)
    return MeasuredCosts(curve, key_s, row_key_s, drafts, spread < _STEADY, spread, not time_left.missed)


class _TimeLeft:
    """Of what measuring may take. limit_s: None: as long as it likes."""

    def __init__(self, limit_s: float | None) -> None:
        self._end = None if limit_s is None else time.perf_counter() + limit_s
        self.missed = False  # something was not begun any more

    def is_over(self) -> bool:
        """Asked before something is begun."""
        self.missed = self.missed or (self._end is not None and time.perf_counter() > self._end)
        return self.missed


def _within(sizes: Sequence[int], first_s: float, limit_s: float) -> list[int]:
    """The sizes that can be timed within the limit, three passes each, by what the smallest took."""
    kept: list[int] = []
    for rows in sizes:
        limit_s -= 3 * first_s * (1 + _ROW_COST * (rows - 1))
        if limit_s < 0:
            break
        kept.append(rows)
    return kept


def _context(engine: Engine, curve: Curve) -> tuple[float, float]:
    """What a token of context adds, once for its request and once for each row of it; 0 where it cannot be seen."""
    kind = engine.target.device.type
    short = dict(zip(curve.sizes, curve.seconds, strict=True))
    requests = max(n for n in short if n <= min(_LOOKING_BACK[kind], engine.config.max_num_seqs))
    context = min(_LONG[kind], most_context(engine, requests))
    few, many = requests, max(n for n in short if n <= 8 * requests)
    if context < 8 * _SHORT or many == few:
        return 0.0, 0.0
    with rehearse(engine, requests, context) as scene:
        one = max(0.0, _seconds(scene, scene.target_pass(few)) - short[few])
        eight = max(0.0, _seconds(scene, scene.target_pass(many)) - short[many])
    keys = requests * (context - _SHORT)
    row_key_s = min(max(0.0, (eight - one) / (many // few - 1)), one) / keys
    return max(0.0, one / keys - row_key_s), row_key_s


def _drafts(
    engine: Engine, name: str, drafter: DeviceDrafter, progress: Progress | None, time_left: _TimeLeft
) -> tuple[DraftSeen, ...]:
    """One drafter's guesses, by number of requests and of nodes, or of a tree's levels.

    Nothing where it cannot, or there is no time.
    """
    sizes = _draft_sizes(name, drafter, min(reach(drafter), engine.config.draft_tokens or ROWS))
    if progress:
        progress(f"measuring what drafts by {name} cost {_KEPT}")
    seen: list[DraftSeen] = []
    ends = _SHORT + ROWS if drafter.max_positions is None else drafter.max_positions
    for requests in _CROWDS[engine.target.device.type]:
        if requests > engine.config.max_num_seqs or most_context(engine, requests) < _SHORT or ends < 2 * _SHORT:
            break
        if time_left.is_over():
            break
        try:
            with rehearse(engine, requests, _SHORT) as scene:
                took = [_seconds(scene, scene.draft(size)) for size in sizes.values()]
        except Exception as error:  # the engine will find out by itself, and say so
            if progress:
                progress(f"drafter {name} could not be timed ({type(error).__name__}: {error})")
            break
        seen.append(DraftSeen(requests, Curve(tuple(sizes), tuple(took))))
    return tuple(seen)


def _draft_sizes(name: str, drafter: DeviceDrafter, most: int) -> dict[int, DraftSize]:
    """The drafts that are timed, of so many nodes at the most: those of other sizes lie on a line with them."""
    if not drafter.makes_trees:
        return {nodes: DraftSize(name, nodes) for nodes in sorted({1, -(-most // 2), most})}
    deepest = min(drafter.depth, most)
    levels = sorted({1, deepest} if drafter.grows else {deepest})
    return {count: DraftSize(name, min(most, drafter.most_at(count)), count) for count in levels}


def _seconds(scene: Rehearsal, work: Work, most_s: float | None = None) -> float:
    """The least of a few runs, behind a first one that compiles and fetches: what disturbs only ever adds.

    most_s: where the first one takes longer than all may, it is the only one.
    """
    gpu = scene.engine.target.device.type == "cuda"

    def once() -> float:
        scene.rewind()
        if gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    first_s = once()
    if most_s is not None and first_s > most_s:
        return first_s
    return max(min(once() for _ in range(5 if gpu else 2)), 1e-9)


class _Note:
    """The costs of one machine, model and precision, remembered."""

    def __init__(self, engine: Engine, model_path: Path) -> None:
        target, config = engine.target, engine.config
        files = sorted(f for f in model_path.iterdir() if f.suffix in (".json", ".safetensors", ".bin"))
        drafters = engine.drafting.drafters
        depends: dict[str, Any] = {
            "files": [(f.name, f.stat().st_size) for f in files],
            "path": str(model_path.resolve()),
            "versions": [VERSION, slipstream.__version__, torch.__version__],
            "code": code_digest("engine", "sampling", "verify", "drafters"),
            "where": [str(target.dtype), chip_name(target.device), platform.node(), os.cpu_count()],
            "how": [isinstance(engine.backend, QueuedBackend), config.graphs, torch.get_num_threads(), target.swaps],
            "sizes": [config.draft_rows, config.max_num_seqs, config.draft_tokens],
            "drafters": [
                (name, type(d).__name__, d.weights_bytes, d.makes_trees, d.depth, reach(d), _settings(d))
                for name, d in sorted(drafters.items())
                if isinstance(d, DeviceDrafter)
            ],
        }
        key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]
        self.file = cache_folder() / "costs" / f"{key}.json"

    def read(self) -> MeasuredCosts | None:
        try:
            return MeasuredCosts.from_json(json.loads(self.file.read_text()))
        except (OSError, ValueError):
            return None

    def write(self, costs: MeasuredCosts) -> None:
        with suppress(OSError):  # a cache that cannot be written costs the next start a second
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(costs.as_json()))


def _settings(drafter: DeviceDrafter) -> list[tuple[str, str]]:
    """What it was opened with, as far as it is numbers and words. What is its own goes by free memory, or changes."""
    told = {key: value for key, value in vars(drafter).items() if not key.startswith("_")}
    return [(key, repr(value)) for key, value in sorted(told.items()) if isinstance(value, int | float | str)]
