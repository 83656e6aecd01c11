"""`slipstream models`: the models on this machine, and how to name others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from slipstream.cli.options import OUTPUT, DebugOption, option

if TYPE_CHECKING:
    from slipstream.models.resolve import LocalModel

NAMING = (
    "Name a model with --model: 'default' (a small one, fetched on first use), a folder with config.json and "
    "safetensors, a .gguf file, or a Hugging Face id such as org/name."
)


def find_models() -> Sequence[LocalModel]:
    from slipstream.models.resolve import local_models

    return local_models()


def short(count: float) -> str:
    """1234567 as 1.2M."""
    for unit in ("", "K", "M", "B"):
        if count < 1000:
            return f"{count:.0f}{unit}" if not unit or count >= 100 else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def models(
    as_json: Annotated[
        bool, option("--json", panel=OUTPUT, help="Print a JSON list, with paths and sizes, for scripts.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """List the models on this machine."""
    found = find_models()
    if as_json:
        print(json.dumps([model_json(model) for model in found], ensure_ascii=False))
        return
    console = Console()
    if found:
        table = Table(title="Models on this machine", title_justify="left")
        for column in ("name", "type", "parameters", "dtype", "size", "folder"):
            right = column in ("parameters", "size")
            table.add_column(column, justify="right" if right else "left", overflow="fold")
        for model in found:
            parameters = short(model.parameters) if model.parameters else "?"
            table.add_row(
                model.name, model.model_type, parameters, str(model.dtype), size(model.bytes), str(model.path)
            )
        console.print(table)
    else:
        console.print("No models on this machine yet.")
    console.print(NAMING, markup=False, highlight=False)


def model_json(model: LocalModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "model_type": model.model_type,
        "parameters": model.parameters,
        "bytes": model.bytes,
        "dtype": str(model.dtype),
    }
