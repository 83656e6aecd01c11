"""The record of a run: what was trained, from what, by which versions, and how it went. With a picture, where matplotlib
is installed."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from slipstream import __version__
from slipstream.train.config import TrainConfig

Curves = Sequence[Mapping[str, Any]]


def write_record(
    config: TrainConfig, data: Mapping[str, Any], curves: Curves, *, step: int, seconds: float, parameters: int
) -> Path:
    """Write `run.json`, and `curves.png` beside it."""
    record = {
        "config": config.as_dict(),
        "data": dict(data),
        "parameters": parameters,
        "steps_done": step,
        "training_seconds": round(seconds, 1),
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
    draw(curves, config.out / "curves.png", f"{config.recipe} for {config.target}")
    return file


def draw(curves: Curves, file: Path, title: str) -> bool:
    """Loss and acceptance by step as a picture; False where there is no matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    trained = [point for point in curves if "loss" in point]
    measured = [point for point in curves if "tau" in point]
    left.plot([p["step"] for p in trained], [p["loss"] for p in trained], label="loss")
    left.set(xlabel="step", ylabel="loss", title=title)
    for guess in range(max((len(p["acceptance"]) for p in trained), default=0)):
        points = [p for p in trained if guess < len(p["acceptance"])]
        right.plot([p["step"] for p in points], [p["acceptance"][guess] for p in points], label=f"guess {guess + 1}")
    right.set(xlabel="step", ylabel="acceptance (estimated)", ylim=(0, 1))
    if measured:
        beside = right.twinx()
        for temperature in measured[-1]["tau"]:
            points = [p for p in measured if temperature in p["tau"]]
            steps, tau = [p["step"] for p in points], [p["tau"][temperature] for p in points]
            beside.plot(steps, tau, "o--", label=f"tau at T={temperature}")
        beside.set(ylabel="tau (held out, in the engine)")
        beside.legend(loc="lower right", fontsize="small")
    if trained:
        right.legend(loc="upper left", fontsize="small")
    figure.savefig(file, dpi=110)
    return True


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
