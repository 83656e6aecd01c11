"""The state of a run on disk, such that what follows is what would have followed: bit for bit on a CPU.

A checkpoint is a folder that appears by one rename, so there is always a whole one. Weights are safetensors; what the
optimizer keeps is torch's format, read without running code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.core.errors import ConfigError

_NAME = "checkpoint"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a run is after some step."""

    step: int  # steps done
    weights: Mapping[str, Tensor]
    average: Mapping[str, Tensor]  # of the weights; empty where none is kept
    optimizer: Mapping[str, Any]
    noise: Sequence[Tensor]  # of torch's generators: the CPU's, then this device's
    curves: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    seconds: float  # of training so far


def save_checkpoint(out: Path, state: Checkpoint) -> Path:
    """Write it to the folder of the run, in place of the one before."""
    work, folder, old = out / f".{_NAME}.part", out / _NAME, out / f".{_NAME}.old"
    for stale in (work, old):
        shutil.rmtree(stale, ignore_errors=True)
    work.mkdir(parents=True)
    _save(work / "weights.safetensors", state.weights)
    _save(work / "average.safetensors", state.average)
    torch.save({"optimizer": dict(state.optimizer), "noise": list(state.noise)}, work / "optimizer.pt")
    told = {"step": state.step, "seconds": state.seconds, "config": dict(state.config), "curves": list(state.curves)}
    (work / "state.json").write_text(json.dumps(told) + "\n")
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def load_checkpoint(out: Path, device: torch.device) -> Checkpoint | None:
    """The last one of a run; None: it has none. Raises `ConfigError` where it is damaged."""
    folder = next((f for f in (out / _NAME, out / f".{_NAME}.old") if (f / "state.json").exists()), None)
    if folder is None:
        return None
    try:
        told = json.loads((folder / "state.json").read_text())
        kept = torch.load(folder / "optimizer.pt", map_location=device, weights_only=True)
        return Checkpoint(
            step=told["step"],
            weights=load_file(folder / "weights.safetensors", str(device)),
            average=load_file(folder / "average.safetensors", str(device)),
            optimizer=kept["optimizer"],
            noise=[noise.cpu() for noise in kept["noise"]],
            curves=told["curves"],
            config=told["config"],
            seconds=told["seconds"],
        )
    except Exception as error:
        raise ConfigError(
            f"{folder}: this checkpoint cannot be read ({type(error).__name__}: {error}); remove it to begin anew"
        ) from error


def _save(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}, file)
