"""Every error that Slipstream raises on purpose, and files that an option names (`read_named`).

    SlipstreamError
    ├── ConfigError         an option has a wrong name or value (also a ValueError)
    ├── ModelError          a model cannot be used
    │   ├── ModelNotFound       no such folder, file or hub id
    │   ├── DownloadError       fetching or checking it failed; nothing half-written is left
    │   └── UnsupportedModel    it loads, but we would not compute what it computes
    ├── CapacityError       it does not fit: memory budget, context limit
    ├── RequestError        one request is wrong or failed; the others go on
    │   ├── InvalidRequest      refused before it started (also a ValueError)
    │   ├── QueueFull           too many wait already; it says when to try again
    │   ├── NumericError        the model gave NaN or no possible token
    │   ├── TimedOut            its time limit passed first
    │   ├── Aborted             cancelled by its owner
    │   └── EngineDied          the engine's process ended, and every request with it
    └── DrafterError        a drafter cannot be used with this target

A message names the key, the value, and the remedy.
"""

from __future__ import annotations

import re
from pathlib import Path

_OF_THE_DEVICE = re.compile(r"CUDA error:|Triton Error \[CUDA\]|CU(BLAS|DNN)_STATUS_")


def install(extra: str) -> str:
    """The command that installs the packages of an extra; Slipstream itself is on no package index."""
    return f"pip install -e '.[{extra}]' in the clone, or pip install 'WHEEL[{extra}]' for a wheel that was built"


class SlipstreamError(Exception):
    """The root of all errors raised on purpose."""


class ConfigError(SlipstreamError, ValueError):
    """An option has a wrong name or value."""


class ModelError(SlipstreamError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, file or hub id."""


class DownloadError(ModelError):
    """Fetching or checking a model failed; nothing half-written is left."""


class UnsupportedModel(ModelError):
    """The model loads, but running it would not compute what it computes."""


class CapacityError(SlipstreamError):
    """Something does not fit into the memory budget or the context."""


class RequestError(SlipstreamError):
    """One request is wrong or failed; the others go on."""


class InvalidRequest(RequestError, ValueError):
    """The request was refused before it started."""


class QueueFull(RequestError):
    """Too many requests wait already. retry_after_s: estimated seconds until there is room."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[QueueFull], tuple[str, float]]:
        """Pickle both arguments; by default an exception is made of its message alone."""
        return type(self), (str(self), self.retry_after_s)


class NumericError(RequestError):
    """The model gave NaN, or left no possible token."""


class TimedOut(RequestError):
    """The request's time limit passed before its answer ended."""


class Aborted(RequestError):
    """The request was cancelled by its owner."""


class EngineDied(RequestError):
    """The engine's process ended, and every request with it. A new one must be started."""


def device_failed(error: BaseException | None) -> bool:
    """The error is one of the device, or was caused by one. After it every call to the GPU fails; only a new process
    can use it again."""
    while error is not None:
        known = type(error).__name__ == "AcceleratorError"  # torch's; nothing here imports it
        if known or (isinstance(error, RuntimeError) and _OF_THE_DEVICE.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


class DrafterError(SlipstreamError):
    """A drafter cannot be used with this target."""


def read_named(path: Path, option: str, remedy: str = "") -> str:
    """The text of the file that `option` names. remedy: more for the error message than that the file is missing."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        wrong = f"there is no file {path.absolute()}" if missing else f"cannot be read as text ({error})"
        raise ConfigError(f"{option} {path}: {wrong}" + (f"; {remedy}" if remedy else "")) from error
