"""What is known of a model without torch: its files and safetensors headers, and names of precisions and devices.

Fast to import, so that a wrong name is refused before torch is imported, and a damaged file before it is mapped.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError, ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
HEAD_SAFETENSORS = ("medusa_lm_head.safetensors",)
HEAD_PICKLES = ("medusa_lm_head.pt",)
"""File names of a head's weights, beside those of a model's."""

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER = 100_000_000  # the format's limit

AUTO = "auto"
DTYPE_NAMES = ("float32", "fp32", "bfloat16", "bf16", "float16", "fp16")


@dataclass(frozen=True, slots=True)
class WeightsSummary:
    """The weights of a model as stored. `parameters` is None if they are packed and cannot be counted."""

    parameters: int | None
    bytes: int
    dtype: str


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model in `folder`, as its index names them; empty if there are none."""
    index = folder / INDEX
    if index.is_file():
        parts = _read_json(index).get("weight_map")
        if not isinstance(parts, dict) or not parts:
            raise ModelError(f"{index}: names no files of weights (weight_map={parts!r:.80}). Fetch the model again")
        names = sorted({str(name) for name in parts.values()})
        if strange := [name for name in names if Path(name).name != name]:
            raise ModelError(f"{index}: {strange[0]!r} is no name of a file in this folder. Fetch the model again")
        return [folder / name for name in names]
    single = folder / SINGLE
    return [single] if single.is_file() else []


def has_pickles(folder: Path) -> bool:
    return any((folder / name).is_file() for name in PICKLES)


def has_head(folder: Path) -> bool:
    """Whether `folder` has weights under a file name of a head."""
    return any((folder / name).is_file() for name in (*HEAD_SAFETENSORS, *HEAD_PICKLES))


def read_header(file: Path) -> dict[str, Any]:
    """The tensors of a safetensors file: name -> dtype, shape, data_offsets. Raises `ModelError` if it is damaged."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            start = handle.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
            if length > min(_MAX_HEADER, size - 8):
                raise ModelError(_damaged(file, "its header is not one"))
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(_damaged(file, "its header is not one")) from error
    if 8 + length + end != size:
        raise ModelError(_damaged(file, f"{size} bytes, but its header promises {8 + length + end}"))
    return dict(header)


def stored_names(folder: Path) -> set[str]:
    """The names of all tensors in `folder`'s safetensors; empty if it has other files."""
    return {name for file in (weight_files(folder) or _head_files(folder)) for name in read_header(file)}


def _head_files(folder: Path) -> list[Path]:
    return [folder / name for name in HEAD_SAFETENSORS if (folder / name).is_file()]


def summarize(folder: Path) -> WeightsSummary:
    """The sizes and dtype of the weights in `folder`."""
    count = total = 0
    by_dtype: Counter[str] = Counter()
    for file in weight_files(folder):
        for tensor in read_header(file).values():
            first, last = tensor["data_offsets"]
            count += math.prod(tensor["shape"])
            total += last - first
            by_dtype[tensor["dtype"]] += last - first
    dtype = by_dtype.most_common(1)[0][0] if by_dtype else "none"
    return WeightsSummary(count if dtype in DTYPES else None, total, DTYPES.get(dtype, dtype.lower()))


def weights_bytes(folder: Path) -> int:
    """The bytes of weights in `folder` as stored; pickled files count whole."""
    files = weight_files(folder)
    return summarize(folder).bytes if files else sum(f.stat().st_size for f in folder.glob("pytorch_model*.bin"))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error}); fetch the file again") from error


def _damaged(file: Path, why: str) -> str:
    return f"{file}: damaged or cut short ({why}); fetch the file again"


def check_dtype_name(name: str) -> None:
    if name != AUTO and name not in DTYPE_NAMES:
        raise ConfigError(f"dtype={name!r}: must be auto or one of {', '.join(DTYPE_NAMES)}")


def check_device_name(name: str) -> None:
    kind, colon, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    numbered = kind == "cuda" and (index.isdecimal() if colon else True)
    if name not in (AUTO, "cpu") and not numbered:
        raise ConfigError(f"device={name!r}: must be auto, cpu, cuda or cuda:N")
