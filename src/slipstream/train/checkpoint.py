"""The state of a run on disk, such that what follows is what would have followed: bit for bit on a CPU.

A checkpoint is a folder that is replaced as a whole. Weights are safetensors; what the
optimizer keeps is torch's format, read without running code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.train.swap import beside, recover, swap_in

_NAME, _STATE, _OPTIMIZER = "checkpoint", "state.json", "optimizer.pt"


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
    folder = out / _NAME
    work = beside(folder)
    _save(work / "weights.safetensors", state.weights)
    _save(work / "average.safetensors", state.average)
    torch.save({"optimizer": dict(state.optimizer), "noise": list(state.noise)}, work / _OPTIMIZER)
    told = {"step": state.step, "seconds": state.seconds, "config": dict(state.config), "curves": list(state.curves)}
    (work / _STATE).write_text(json.dumps(told) + "\n")
    swap_in(folder)
    return folder


def note_curves(out: Path, curves: Sequence[Mapping[str, Any]]) -> None:
    """What was measured of the last checkpoint, behind it: its weights are not written again."""
    file = out / _NAME / _STATE
    part = file.with_name(f".{_STATE}.part")
    part.write_text(json.dumps({**json.loads(file.read_text()), "curves": list(curves)}) + "\n")
    part.replace(file)


def begun_with(out: Path) -> Mapping[str, Any] | None:
    """The configuration of the run in this folder, without its weights; None: there is none, or it cannot be read,
    which `load_checkpoint` says."""
    recover(out / _NAME)
    try:
        found = json.loads((out / _NAME / _STATE).read_text())["config"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found, dict) else None


def load_checkpoint(out: Path, device: torch.device) -> Checkpoint | None:
    """The last one of a run; None: it has none. Raises `ConfigError` where it is damaged or too old."""
    folder = out / _NAME
    recover(folder)
    if not (folder / _STATE).exists():
        return None
    try:
        told = json.loads((folder / _STATE).read_text())
        kept = torch.load(folder / _OPTIMIZER, map_location=device, weights_only=True)
        found = Checkpoint(
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
    if "parts" not in found.optimizer:
        raise ConfigError(
            f"{folder / _OPTIMIZER}: it has no 'parts', so an older Slipstream wrote it, with one optimizer where "
            f"there may be two now; remove {folder} to begin anew, or finish the run with the version that began it"
        )
    return found


def _save(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}, file)
