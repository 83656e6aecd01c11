"""The modules of the GPU benchmark, and clocks for it that only say what they are told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT_FOLDER = Path(__file__).parent.parent
sys.path.append(str(ROOT_FOLDER / "bench"))
_PARTS = ("clock", "heads", "ours", "passes", "peers", "report", "table", "tokens")
_NAMES = ("gpu", *(f"gpu_{part}" for part in _PARTS), "widen")
gpu, clocks, heads, ours, passes, peers, reports, tables, tokens, widen = (import_module(name) for name in _NAMES)
_CURVE = ("curve", "curve_ours", "curve_peers", "curve_run", "curve_table", "curve_work")
curve, curve_ours, curve_peers, curve_run, curve_table, curve_work = (import_module(name) for name in _CURVE)

CPU = torch.device("cpu")


class FakeClock:
    """Does each work once, keeps what came out, and says that it took as long as it was told to say."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds = seconds or {}
        self.seen: list[dict[str, Any]] = []

    def __call__(self, works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        assert repeats >= 3
        with torch.inference_mode():
            self.seen.append({name: work() for name, work in works.items()})
        return {name: self.seconds.get(name, 0.5) for name in works}


class FakeTime:
    """Seconds that pass only where work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write_prompts(folder: Path) -> Path:
    """Categories in Spec-Bench's sizes: 8 of 10 prompts, which are one group, and two of 80."""
    categories = [*(name for name in sorted(tokens.MULTI_TURN) for _ in range(10)), *["qa"] * 80, *["rag"] * 80]
    rows = [{"category": name, "turns": [f"{name} {i}?", f"and then {i}"]} for i, name in enumerate(categories)]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path
