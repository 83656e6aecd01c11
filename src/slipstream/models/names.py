"""What precisions and devices may be called, known without torch: a wrong name is refused before its slow import.

`load.py` turns the names into torch's own, and refuses what this machine does not have.
"""

from __future__ import annotations

from slipstream.core.errors import ConfigError

AUTO = "auto"
DTYPE_NAMES = ("float32", "fp32", "bfloat16", "bf16", "float16", "fp16")


def check_dtype_name(name: str) -> None:
    if name != AUTO and name not in DTYPE_NAMES:
        raise ConfigError(f"dtype={name!r}: must be auto or one of {', '.join(DTYPE_NAMES)}")


def check_device_name(name: str) -> None:
    kind, colon, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    numbered = kind == "cuda" and (index.isdecimal() if colon else True)
    if name not in (AUTO, "cpu") and not numbered:
        raise ConfigError(f"device={name!r}: must be auto, cpu, cuda or cuda:N")
