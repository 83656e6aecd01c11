"""The files of a head, read and checked: missing, left-over or misshapen tensors are reported before serving.

Trainers name a head's tensors differently, leave some to the target, and save safetensors or pickles. Here a folder
becomes tensors under the names of its files; the layouts say which tensors there must be.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

from slipstream.core.errors import DrafterError, ModelError
from slipstream.models.describe import max_positions_of
from slipstream.models.headers import has_head, read_header, weight_files
from slipstream.models.runner import Runner

_PICKLES = ("pytorch_model.bin",)
AGAIN = "Fetch the head again, or correct its config.json"
MOST_PARTS = 256
"""The most layers or heads of a checkpoint: a larger number is a mistake, and must not take memory first."""

_KINDS = {"eagle": "an EAGLE head", "medusa": "Medusa heads", "model": "a whole model"}
_MEDUSA = re.compile(r"(medusa_head\.)?(\d+\.\d+\.(linear\.)?(weight|bias)|blocks\.\d+\.|lm_heads\.\d+\.)")
_WHOLE = re.compile(r"(model\.|transformer\.)?(layers|h)\.0\.(input_layernorm|ln_1)\.")
_EAGLE = re.compile(r"(model\.)?(fc\.weight$|midlayer\.|layers\.0\.hidden_norm\.)")


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The sizes of the target that a head must fit."""

    hidden: int
    vocab: int
    layers: int
    max_positions: int

    @staticmethod
    def of(target: Runner) -> TargetShape:
        hidden = cast(int, target.config.hidden_size)
        return TargetShape(hidden, target.vocab_size, len(target.layers), target.max_positions)

    @staticmethod
    def of_config(config: PreTrainedConfig) -> TargetShape | None:
        """From a configuration, before weights are read; None if it lacks a size."""
        hidden, vocab, layers = (
            getattr(config, key, None) for key in ("hidden_size", "vocab_size", "num_hidden_layers")
        )
        if not (isinstance(hidden, int) and isinstance(vocab, int) and isinstance(layers, int)):
            return None
        return TargetShape(hidden, vocab, layers, max_positions_of(config))


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head's folder: its configuration, and its tensors under their own names."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @staticmethod
    def read(
        folder: Path,
        pickles: Sequence[str] = _PICKLES,
        safetensors: Sequence[str] = (),
        load: Callable[[Path], Mapping[str, Tensor]] = load_file,
    ) -> HeadFiles:
        """Read everything in `folder`. pickles, safetensors: further file names of weights."""
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such folder. A head is a folder with config.json and its weights")
        return HeadFiles(folder, read_config(folder), read_tensors(folder, pickles, safetensors, load))

    @staticmethod
    def outline(folder: Path, pickles: Sequence[str] = _PICKLES, safetensors: Sequence[str] = ()) -> HeadFiles:
        """As `read`, but only shapes of weights in safetensors, and values of ids: fast for large heads."""
        return HeadFiles.read(folder, pickles, safetensors, _outlines)


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: a head's folder has config.json and its weights") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error}). Fetch the file again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file}: must hold an object, not {type(found).__name__}. Fetch the file again")
    return found


def read_tensors(
    folder: Path,
    pickles: Sequence[str] = _PICKLES,
    safetensors: Sequence[str] = (),
    load: Callable[[Path], Mapping[str, Tensor]] = load_file,
) -> dict[str, Tensor]:  # on the CPU
    """The weights in `folder`: from safetensors, else from a pickle, which may hold only tensors."""
    files = weight_files(folder) or [folder / name for name in safetensors if (folder / name).is_file()][:1]
    tensors: dict[str, Tensor] = {}
    for file in files:
        read_header(file)  # raises an error that names the file if it is damaged
        try:
            tensors.update(load(file))
        except SafetensorError as error:  # contradictory offsets and sizes
            raise ModelError(f"{file}: damaged ({error}); fetch the file again") from error
    if files:
        return tensors
    for name in pickles:
        if (folder / name).is_file():
            return _unpickled(folder / name)
    names = ", ".join(("model.safetensors", *safetensors, *pickles))
    raise ModelError(f"{folder}: no weights; one of these files must be there: {names}")


def _outlines(file: Path) -> dict[str, Tensor]:
    """Ids and marks with their values; weights as shapes alone."""
    found: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - no mapping
            part = stored.get_slice(name)
            is_weight = part.get_dtype().startswith(("F", "BF"))
            found[name] = torch.empty(part.get_shape(), device="meta") if is_weight else stored.get_tensor(name)
    return found


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{file}: holds more than tensors, or is damaged; loading it could run code, so it is refused "
            f"({(str(error).splitlines() or [''])[0]}). Use a checkpoint in safetensors"
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{file}: damaged or cut short ({why}); fetch the file again") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ModelError(f"{file}: must hold a dictionary of tensors. Use a checkpoint of the head's weights alone")
    return {str(name): tensor for name, tensor in found.items()}


def check_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    spelled: Callable[[str], str] = str,
) -> None:
    """Raise `ModelError` unless these are the tensors that the configuration asks for, each in its shape.

    spelled: maps our names to those in the files.
    """
    known = {**wanted, **optional}
    missing = [f"{spelled(name)} {list(shape)}" for name, shape in wanted.items() if name not in tensors]
    strange = [f"{spelled(name)} {list(tensor.shape)}" for name, tensor in tensors.items() if name not in known]
    misshapen = [
        f"{spelled(name)} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in known.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = [
        f"{what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for what, names in (("missing", missing), ("of the wrong shape", misshapen), ("unknown", strange))
        if names
    ]
    if problems:
        raise ModelError(f"{folder}: the head's tensors do not fit its config.json; {'; '.join(problems)}. {AGAIN}")


def number(
    config: Mapping[str, Any], key: str, folder: Path, otherwise: int | None = None, most: int | None = None
) -> int:
    """A positive whole number of the configuration, at most `most`; `otherwise` if it is missing."""
    found = config.get(key)
    if found is None:
        found = otherwise
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ModelError(f"{folder / 'config.json'}: {key}={found!r}, must be a positive whole number. {AGAIN}")
    if most is not None and found > most:
        raise ModelError(f"{folder / 'config.json'}: {key}={found}, must be at most {most}. {AGAIN}")
    return found


def check_target(folder: Path, what: str, found: int, target: int) -> None:
    """Raise `DrafterError` if a head was made for another target."""
    if found != target:
        raise DrafterError(
            f"{folder}: the head was made for a target with {what} {found}, this one has {target}. "
            "Use a head that was trained for this target"
        )


def kind_of(names: Collection[str]) -> str | None:
    """The kind of drafter with tensors of these names; None if unknown."""
    for kind, mark in (("eagle", _EAGLE), ("medusa", _MEDUSA), ("model", _WHOLE)):
        if any(mark.match(name) for name in names):
            return kind
    return None


def check_kind(folder: Path, names: Collection[str], wanted: str) -> None:
    """Raise `DrafterError` if these are clearly weights of another kind of drafter."""
    found = kind_of(names) or ("medusa" if has_head(folder) else None)
    if found is not None and found != wanted:
        also = ", or mtp if it has modules for that" if found == "model" else ""
        raise DrafterError(
            f"{folder}: the folder holds {_KINDS[found]}, not {_KINDS[wanted]}; write {found}:{folder}{also}"
        )
