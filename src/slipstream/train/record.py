"""The record of a run: what was trained, from what, by which versions, and how it went, with a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from slipstream import __version__
from slipstream.train.best import Best
from slipstream.train.config import TrainConfig
from slipstream.train.plot import Panel, draw

Curves = Sequence[Mapping[str, Any]]


def write_record(
    config: TrainConfig,
    data: Mapping[str, Any],
    curves: Curves,
    *,
    step: int,
    seconds: float,
    parameters: int,
    best: Best | None,
) -> Path:
    """Write `run.json`, and `curves.svg` beside it. best: the measurement whose drafter is kept."""
    record = {
        "config": config.as_dict(),
        "data": dict(data),
        "parameters": parameters,
        "steps_done": step,
        "training_seconds": round(seconds, 1),
        "best": asdict(best) if best else None,
        "measured": [point for point in curves if "tau" in point],
        "versions": _versions(),
        "device": _device_name(config),
        "curves": [dict(point) for point in curves if "tau" not in point],
    }
    config.out.mkdir(parents=True, exist_ok=True)
    file = config.out / "run.json"
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.replace(file)
    (config.out / "curves.svg").write_text(draw(_panels(curves), f"{config.recipe} for {config.target}"))
    return file


def _panels(curves: Curves) -> list[Panel]:
    """Loss, estimated acceptance by guess, and tau as it was measured, all by step."""
    trained = [point for point in curves if "loss" in point]
    measured = [point for point in curves if "tau" in point]
    guesses = max((len(p["acceptance"]) for p in trained), default=0)
    temperatures = list(dict.fromkeys(t for p in measured for t in p["tau"]))
    return [
        Panel("loss", {"loss": [(p["step"], p["loss"]) for p in trained]}),
        Panel(
            "acceptance, estimated in training",
            {
                f"guess {g + 1}": [(p["step"], p["acceptance"][g]) for p in trained if g < len(p["acceptance"])]
                for g in range(guesses)
            },
        ),
        Panel(
            "tau, in the engine on held-out prompts",
            {f"T={t}": [(p["step"], p["tau"][t]) for p in measured if t in p["tau"]] for t in temperatures},
        ),
    ]


def _versions() -> dict[str, str]:
    return {
        "slipstream": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _device_name(config: TrainConfig) -> str:
    if config.device == "cpu" or not torch.cuda.is_available():
        return platform.processor() or platform.machine()
    return torch.cuda.get_device_name()
