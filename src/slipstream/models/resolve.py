"""Finds the folder of a model by its name: `default`, a folder, a GGUF file or a Hugging Face hub id.

Fast to import, so that listing models does not wait for torch. The network is used only for hub ids, and for `default`
the first time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.errors import DownloadError, ModelError, ModelNotFound
from slipstream.models.default import default_folder, default_model
from slipstream.models.gguf import ORIGIN, check_gguf, convert_once, converted_folder
from slipstream.models.headers import has_head, has_pickles, summarize, weight_files
from slipstream.models.paths import Progress, models_folder

DEFAULT = "default"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # no pickles, which run code when loaded
_HUB_CODE = ["*.py"]  # only with trust_remote_code: it runs when the model is loaded
_HUB_EXTRAS = ["*/*", "consolidated*"]  # other formats of the same weights
_HUB_FOLDER = "models--"  # before an id in the Hugging Face cache
WAYS = "Give `default`, a model folder, a .gguf file or a Hugging Face hub id such as org/name"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine; `resolve(name)` returns `path`."""

    name: str
    path: Path
    model_type: str
    parameters: int | None
    bytes: int
    dtype: str


def resolve(name: str, progress: Progress | None = None, *, trust_remote_code: bool = False, ways: str = WAYS) -> Path:
    """The folder of the model called `name`; fetched or converted first if need be.

    trust_remote_code: also fetch the Python code of a hub model. ways: the remedy in an error about the name.
    """
    path = find_local(name, ways)
    if path is None:
        return default_model(progress) if name == DEFAULT else _from_hub(name, progress, trust_remote_code, ways)
    return path if path.is_dir() else convert_once(path, progress)


def find_local(name: str, ways: str = WAYS) -> Path | None:
    """The model folder or GGUF file called `name`; None if the model must be fetched.

    Raises `ModelError` for a name that is neither. Needs neither torch nor the network: commands call it first, so that
    a typing error is reported at once.
    """
    if name == DEFAULT:
        return None
    path = Path(name).expanduser()
    if name.strip() and path.is_dir():
        _check_folder(path, ways)
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{name}: a file, but not a .gguf one. {ways}")
        check_gguf(path)
        return path
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(name):
        raise ModelNotFound(f"{name!r}: no such folder or file. {ways}")
    return None


def shown_name(folder: Path) -> str:
    """What people call the model in `folder`: `default`, a hub id, a GGUF file's name, or the folder's own name."""
    if folder == default_folder():
        return DEFAULT
    snapshots = folder.parent
    if snapshots.name == "snapshots" and snapshots.parent.name.startswith(_HUB_FOLDER):  # its own name is a hash
        return _hub_id(snapshots.parent)
    source = _converted_from(folder)
    return folder.name if source is None else source.name


def _hub_id(repository: Path) -> str:
    return repository.name.removeprefix(_HUB_FOLDER).replace("--", "/")


def _converted_from(folder: Path) -> Path | None:
    """The GGUF file that `folder` was converted from; None if there is none, or if its note cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Path(json.loads((folder / ORIGIN).read_bytes())["source"])
    return None


def local_models() -> list[LocalModel]:
    """The models on this machine: the default if it was fetched, converted GGUF files, the Hugging Face cache."""
    found = []
    for name, path in _local_paths():
        with contextlib.suppress(
            ModelError, OSError, ValueError, AttributeError
        ):  # a broken model must not hide the others
            _check_folder(path)
            model_type = json.loads((path / "config.json").read_bytes()).get("model_type", "unknown")
            weights = summarize(path)
            found.append(LocalModel(name, path, model_type, weights.parameters, weights.bytes, weights.dtype))
    return found


def _local_paths() -> Iterator[tuple[str, Path]]:
    default = default_folder()
    if default.is_dir():
        yield DEFAULT, default
    for origin in sorted(models_folder().glob(f"[!.]*/{ORIGIN}")):
        source = _converted_from(origin.parent)
        current = source is not None and source.is_file() and converted_folder(source) == origin.parent
        yield str(source if current else origin.parent), origin.parent
    from huggingface_hub.constants import HF_HUB_CACHE

    for repository in sorted(Path(HF_HUB_CACHE).glob(f"{_HUB_FOLDER}*")):
        main = repository / "refs" / "main"
        if main.is_file():
            yield _hub_id(repository), repository / "snapshots" / main.read_text().strip()


def _check_folder(folder: Path, ways: str = WAYS) -> None:
    """Raise `ModelNotFound` unless all files of a model are there."""
    if not (folder / "config.json").is_file():
        hint = ways
        if (folder / "adapter_config.json").is_file():
            hint = "It holds an adapter: merge it into its base model and give the merged folder"
        elif ggufs := sorted(folder.glob("*.gguf")):
            hint = f"It holds GGUF files: name one of them, such as {ggufs[0]}"
        raise ModelNotFound(f"{folder}: not a model folder, config.json is missing. {hint}")
    if (folder / "adapter_config.json").is_file():
        raise ModelNotFound(
            f"{folder}: it holds an adapter beside the model (adapter_config.json), which Slipstream does not apply. "
            "Merge it into the model (peft's merge_and_unload) and give the merged folder, or move the adapter's files "
            "out of the folder to run the model without it"
        )
    files = weight_files(folder)
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelNotFound(f"{folder}: weights are missing: {', '.join(missing)}. Fetch the model again")
    if not files and not has_pickles(folder) and not has_head(folder):
        raise ModelNotFound(f"{folder}: no weights, model.safetensors (or its index and parts) is missing")


def _from_hub(name: str, progress: Progress | None, trust_remote_code: bool, ways: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if progress:
        progress(f"looking for {name} on the Hugging Face hub")
    wanted = _HUB_FILES + _HUB_CODE if trust_remote_code else _HUB_FILES
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=_HUB_EXTRAS))
    except GatedRepoError as error:
        raise DownloadError(
            f"{name}: its owner must grant access. Ask for it at https://huggingface.co/{name}, "
            "then run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"{name!r}: no such folder or file here, and no such model on the hub (a private one needs "
            f"`hf auth login`). {ways}"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "the hub cannot be reached"
        raise ModelNotFound(
            f"{name!r}: no such folder or file here, it is not (wholly) in the Hugging Face cache, and {offline}. "
            "Download it first on a machine with a network, or name a local folder"
        ) from error
    except Exception as error:  # any failure of the network, the disk or the hub
        raise DownloadError(f"{name}: download failed ({type(error).__name__}: {error}). Try again") from error
    if not weight_files(folder) and not has_head(folder):
        raise ModelNotFound(
            f"{name}: no safetensors weights on the hub; pickled ones are not fetched, because loading them can run "
            "code. Convert the model to safetensors and give its folder. A head may be fetched by hand: it is loaded "
            "as tensors and nothing else"
        )
    _check_folder(folder, ways)
    return folder
