"""Put a trained drafter of the default model into the package, with its model card.

    python tools/ship.py runs/eagle3 [--acceptance acceptance.json] [--into src/slipstream/heads/default]

Copies the weights and the configuration of RUN/drafter, and writes README.md from RUN/run.json and, by task, from what
`tools/acceptance.py` measured. Run again with a later measurement, it writes the card anew. All drafters together must
have at most 64 MiB, in fp16 or smaller.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from slipstream.drafters.opening import HEADS
from slipstream.train.record import model_card

MOST_BYTES = 64 * 2**20
FILES = ("config.json", "*.safetensors")
WIDE = ("F32", "F64")
LICENCE = "Apache-2.0, as the target's"


def ship(run: Path, into: Path, acceptance: Path | None) -> Path:
    """The drafter's folder in the package. Raises `ValueError` for one that is not whole, too large or too precise."""
    record: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    name: str = record["config"]["recipe"]
    found = [file for pattern in FILES for file in sorted((run / "drafter").glob(pattern))]
    if missing := [pattern for pattern in FILES if not any(file.match(pattern) for file in found)]:
        raise ValueError(
            f"{run / 'drafter'}: has no {missing[0]}; RUN must be a folder that `slipstream train` finished"
        )
    if wide := [file.name for file in found if file.suffix == ".safetensors" and _is_wide(file)]:
        raise ValueError(f"{wide[0]}: has fp32 weights; train with --set kept=fp16")
    folder = into / name
    others = sum(file.stat().st_size for file in into.rglob("*") if file.is_file() and folder not in file.parents)
    size = others + sum(file.stat().st_size for file in found)
    if size > MOST_BYTES:
        raise ValueError(f"{folder}: all drafters would have {size / 2**20:.1f} MiB, at most 64 are shipped")
    measured = json.loads(acceptance.read_text(encoding="utf-8")) if acceptance else None
    record["config"]["target"] = into.name  # as users call it, wherever it lay when the drafter was trained
    card = model_card(record, name, acceptance=measured, licence=LICENCE)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in found:
        shutil.copyfile(file, folder / file.name)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return folder


def _is_wide(file: Path) -> bool:
    with safe_open(file, "pt") as tensors:
        return any(tensors.get_slice(name).get_dtype() in WIDE for name in tensors.keys())  # noqa: SIM118


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--acceptance", type=Path)
    parser.add_argument("--into", type=Path, default=HEADS)
    options = parser.parse_args(arguments)
    try:
        folder = ship(options.run, options.into, options.acceptance)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    size = sum(file.stat().st_size for file in options.into.rglob("*") if file.is_file())
    print(f"{folder}; all drafters together: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
