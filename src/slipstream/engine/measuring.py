"""Measures the cost of passes and drafts on this machine before the first request, and remembers it for later starts.

It takes seconds: some sizes of passes, one long context, and each device drafter by draft size and number of
requests. The planner corrects these costs by the steps that follow; with wrong ones its first plans would be wrong.
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
"""Tokens of a short and a long context. The long one must be long enough to slow a pass measurably."""
_LOOKING_BACK = {"cpu": 1, "cuda": 8}
"""Requests with the long context."""
ROWS = 64  # most rows of one request
_LIMIT_S = {"cpu": 2.0, "cuda": 20.0}
"""Time limit of a measurement that was not asked for. A CPU leaves out large sizes in advance, since its passes are
slow. A GPU, where capturing takes longer than running, stops when the time is over; such costs are used but not
remembered, and the next start, with all kernels compiled, measures again."""
_LARGEST = {"cpu": 64, "cuda": 256}
SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Rows of the measured passes. A GPU captures a graph for each."""
_FEWEST = 3
"""Least sizes of a curve."""
_ROW_COST = 0.25
"""Assumed cost of one more row, relative to a pass of one row, to estimate the time of measuring."""
_STEADY = 1.3
"""If the same pass at the beginning and at the end differs by more than this factor, costs are not remembered."""
_SMALL_MODEL = 2**25
"""Bytes of weights below which costs are measured only on request: the overhead exceeds such passes."""
_KEPT = "(once, unless the machine is busy)"
_BATCHES = {"cpu": (1, 4), "cuda": (1, 8, 64)}
"""Numbers of requests for which drafts are measured."""


def known_costs(
    engine: Engine, model_path: Path, wanted: bool | None, progress: Progress | None = None
) -> MeasuredCosts | None:
    """Costs that are remembered or measured now; None: the planner learns them from steps.

    wanted: True always measures, False never; None measures a large enough model within `_LIMIT_S`, once.
    """
    if wanted is False or engine.config.planner == "fixed" or not engine.drafting.drafters:
        return None
    file = _costs_file(engine, model_path)
    if not wanted:
        if engine.target.weights_bytes < _SMALL_MODEL:
            return None
        with suppress(OSError, ValueError):
            if (remembered := MeasuredCosts.from_json(json.loads(file.read_text()))) is not None:
                return remembered
    try:
        costs = measure(engine, None if wanted else _LIMIT_S[engine.target.device.type], progress)
    except Exception as error:  # requests run without costs; a real defect will show in them
        if wanted:
            raise
        if progress:
            progress(f"costs could not be measured ({type(error).__name__}: {error}): the first steps measure them")
        return None
    finally:
        backend = engine.backend
        failed = isinstance(backend, QueuedBackend) and backend.rounds.capture_again()  # a step ran without a graph
    if costs is not None and costs.is_steady and costs.is_whole and not failed:
        with suppress(OSError):  # without a cache the next start measures again
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(costs.as_json()))
    return costs


@torch.inference_mode()
def measure(engine: Engine, limit_s: float | None, progress: Progress | None = None) -> MeasuredCosts | None:
    """Time passes and drafts of an engine without requests. None if that takes too long or no context fits.

    limit_s: time limit; None: no limit.
    """
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
    """A deadline. limit_s: None: there is none."""

    def __init__(self, limit_s: float | None) -> None:
        self._end = None if limit_s is None else time.perf_counter() + limit_s
        self.missed = False  # a measurement was left out

    def is_over(self) -> bool:
        """Asked before each measurement."""
        self.missed = self.missed or (self._end is not None and time.perf_counter() > self._end)
        return self.missed


def _within(sizes: Sequence[int], first_s: float, limit_s: float) -> list[int]:
    """The sizes that can be timed within the limit: three passes each, estimated from the smallest."""
    kept: list[int] = []
    for rows in sizes:
        limit_s -= 3 * first_s * (1 + _ROW_COST * (rows - 1))
        if limit_s < 0:
            break
        kept.append(rows)
    return kept


def _context(engine: Engine, curve: Curve) -> tuple[float, float]:
    """The cost of a token of context: for its request, and for each of its rows; 0 if it cannot be measured."""
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
    """Time one drafter by number of requests, and of nodes or a tree's levels. Empty if it fails or time is over."""
    sizes = _draft_sizes(name, drafter, min(reach(drafter), engine.config.draft_tokens or ROWS))
    if progress:
        progress(f"measuring what drafts by {name} cost {_KEPT}")
    seen: list[DraftSeen] = []
    ends = _SHORT + ROWS if drafter.max_positions is None else drafter.max_positions
    for requests in _BATCHES[engine.target.device.type]:
        fits = requests <= engine.config.max_num_seqs and most_context(engine, requests) >= _SHORT <= ends - _SHORT
        if not fits or time_left.is_over():
            break
        try:
            with rehearse(engine, requests, _SHORT) as scene:
                took = [_seconds(scene, scene.draft(size)) for size in sizes.values()]
        except Exception as error:  # it fails again in a step, which handles it
            if progress:
                progress(f"drafter {name} could not be timed ({type(error).__name__}: {error})")
            break
        seen.append(DraftSeen(requests, Curve(tuple(sizes), tuple(took))))
    return tuple(seen)


def _draft_sizes(name: str, drafter: DeviceDrafter, most: int) -> dict[int, DraftSize]:
    """The drafts to time, of at most `most` nodes. The cost of other sizes is interpolated."""
    if not drafter.makes_trees:
        return {nodes: DraftSize(name, nodes) for nodes in sorted({1, -(-most // 2), most})}
    deepest = min(drafter.depth, most)
    levels = sorted({1, deepest} if drafter.grows else {deepest})
    return {count: DraftSize(name, min(most, drafter.most_at(count)), count) for count in levels}


def _seconds(scene: Rehearsal, work: Work, most_s: float | None = None) -> float:
    """The fastest of a few runs after a first one, which compiles. Other work on the machine only adds time.

    most_s: if the first run takes longer, it is the only one.
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


def _costs_file(engine: Engine, model_path: Path) -> Path:
    """The file that remembers the costs of this machine, model, precision and settings."""
    target, config = engine.target, engine.config
    files = sorted(f for f in model_path.iterdir() if f.suffix in (".json", ".safetensors", ".bin"))
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
            for name, d in sorted(engine.drafting.drafters.items())
            if isinstance(d, DeviceDrafter)
        ],
    }
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "costs" / f"{key}.json"


def _settings(drafter: DeviceDrafter) -> list[tuple[str, str]]:
    """Its public settings that are numbers or texts. Private ones may change, or depend on free memory."""
    public = sorted((key, value) for key, value in vars(drafter).items() if not key.startswith("_"))
    return [(key, repr(value)) for key, value in public if isinstance(value, int | float | str)]
