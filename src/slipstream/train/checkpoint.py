"""Checkpoints and the best drafter of a run: folders that are replaced atomically.

After a kill, either the old or the new folder exists, complete. A resumed run continues exactly: bit for bit on a CPU.
Weights are safetensors; the optimizer's state is torch's format, read without running code. The best drafter is chosen
by the tau that the engine measured, not by loss, and is exported when it is measured.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.core.errors import ConfigError

_STATE, _OPTIMIZER = "state.json", "optimizer.pt"
_NOTE, _DRAFTER = "best.json", "drafter"


def _new_folder(folder: Path) -> Path:
    """An empty work folder beside `folder`, for its next version."""
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return work


def _swap_in(folder: Path) -> None:
    """Replace `folder` by its work folder. The old version stays until the new one is in place."""
    _recover(folder)  # never remove the only version
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    folder.with_name(f".{folder.name}.part").rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Undo the first rename of a `_swap_in` that was killed before the second. Call before reading `folder`."""
    if not folder.exists() and _old(folder).exists():
        with suppress(FileNotFoundError):  # another rank was faster
            _old(folder).rename(folder)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run after a step."""

    step: int  # steps completed
    weights: Mapping[str, Tensor]
    average: Mapping[str, Tensor]  # moving average of the weights; empty if disabled
    optimizer: Mapping[str, Any]
    noise: Sequence[Tensor]  # states of torch's generators: the CPU's, then this device's
    curves: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    seconds: float  # training time so far


def save_checkpoint(out: Path, state: Checkpoint) -> Path:
    """Replace the run's checkpoint."""
    folder = out / "checkpoint"
    work = _new_folder(folder)
    _save(work / "weights.safetensors", state.weights)
    _save(work / "average.safetensors", state.average)
    torch.save({"optimizer": dict(state.optimizer), "noise": list(state.noise)}, work / _OPTIMIZER)
    values = {"step": state.step, "seconds": state.seconds, "config": dict(state.config), "curves": list(state.curves)}
    (work / _STATE).write_text(json.dumps(values) + "\n")
    _swap_in(folder)
    return folder


def update_curves(out: Path, curves: Sequence[Mapping[str, Any]]) -> None:
    """Add measurements to the last checkpoint without writing its weights again."""
    file = out / "checkpoint" / _STATE
    part = file.with_name(f".{_STATE}.part")
    part.write_text(json.dumps({**json.loads(file.read_text()), "curves": list(curves)}) + "\n")
    part.replace(file)


def stored_config(out: Path) -> Mapping[str, Any] | None:
    """The configuration of the run in this folder, read without its weights.

    None if there is no checkpoint or it is unreadable; `load_checkpoint` reports the latter.
    """
    _recover(out / "checkpoint")
    try:
        found = json.loads((out / "checkpoint" / _STATE).read_text())["config"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found, dict) else None


def load_checkpoint(out: Path, device: torch.device) -> Checkpoint | None:
    """The run's last checkpoint, or None. Raises `ConfigError` if it is damaged or too old."""
    folder = out / "checkpoint"
    _recover(folder)
    if not (folder / _STATE).exists():
        return None
    try:
        values = json.loads((folder / _STATE).read_text())
        kept = torch.load(folder / _OPTIMIZER, map_location=device, weights_only=True)
        found = Checkpoint(
            step=values["step"],
            weights=load_file(folder / "weights.safetensors", str(device)),
            average=load_file(folder / "average.safetensors", str(device)),
            optimizer=kept["optimizer"],
            noise=[noise.cpu() for noise in kept["noise"]],
            curves=values["curves"],
            config=values["config"],
            seconds=values["seconds"],
        )
    except Exception as error:
        raise ConfigError(
            f"{folder}: cannot read this checkpoint ({type(error).__name__}: {error}); remove it to start again"
        ) from error
    if "parts" not in found.optimizer:
        raise ConfigError(
            f"{folder / _OPTIMIZER}: has no 'parts', so an older Slipstream wrote it; remove {folder} to start again, "
            "or finish the run with the version that began it"
        )
    return found


def _save(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}, file)


@dataclass(frozen=True, slots=True)
class Best:
    """A measurement: its step, and the tau that it found."""

    step: int
    tau: Mapping[str, float]  # by temperature

    def beats(self, other: Best | None) -> bool:
        """True if this is strictly better; the earlier of two equals stays."""
        return other is None or sum(self.tau.values()) > sum(other.tau.values())


def load_best(out: Path) -> Best | None:
    """The best drafter kept in `out`, or None."""
    _recover(out / "best")
    file = out / "best" / _NOTE
    try:
        return Best(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file}: cannot read it ({error}); remove {file.parent} to go on without it") from error


def keep_best(out: Path, best: Best, export: Callable[[Path], None]) -> None:
    """Replace the best drafter. export: writes a drafter into a folder."""
    work = _new_folder(out / "best")
    export(work / _DRAFTER)
    (work / _NOTE).write_text(json.dumps(asdict(best)) + "\n")
    _swap_in(out / "best")


def forget_best(out: Path) -> None:
    """Remove the best drafter of an earlier run."""
    for stale in (_old(out / "best"), out / "best"):
        shutil.rmtree(stale, ignore_errors=True)


def copy_best(out: Path, folder: Path) -> None:
    """Copy the best drafter to `folder`, the finished one."""
    shutil.copytree(out / "best" / _DRAFTER, _new_folder(folder), dirs_exist_ok=True)
    _swap_in(folder)
