"""How the suffix drafter's loops are compiled and kept: by numba where it is there, else not at all.

What numba compiled lies in a folder of the user's own cache, so that only the first start on a machine compiles. Those
files are loaded as code: where somebody else could write there, nothing is kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from slipstream.core.draft import MAX_NODES
from slipstream.kernels.cpu.compiled import is_ours
from slipstream.models.paths import cache_folder

Numbers = NDArray[np.int32]
F = TypeVar("F", bound=Callable[..., Any])

try:
    import numba
except ImportError:
    numba = None


def inner(function: F) -> F:
    """A function that only compiled ones call. Each kind of argument has a version: hand it arrays and int64."""
    if numba is None:
        return function
    return cast(F, numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


@inner
def wide(number: int) -> int:
    """An int64 of any integer: in compiled code a constant and an int32 are other kinds of numbers."""
    return number + 0


def compiled(function: F) -> F:
    """The function, compiled when it is first called, or loaded if it was compiled before."""
    if numba is None:
        return function
    folder, before = _folder(), numba.config.CACHE_DIR
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
    options = {"error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
    try:
        return cast(F, numba.njit(cache=folder is not None, **options)(function))
    except RuntimeError:  # the folder cannot be written after all
        return cast(F, numba.njit(**options)(function))
    finally:
        numba.config.CACHE_DIR = before


def _folder() -> Path | None:
    """Where compiled code is kept; None where that would not be safe."""
    folder = cache_folder() / "compiled-suffix" / _digest()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours = all(map(is_ours, (folder.parent.parent, folder.parent, folder)))
    except OSError:
        return None
    return folder if ours else None


def is_kept(name: str) -> bool:
    """Was this function compiled at an earlier start? True, too, where nothing is compiled."""
    folder = None if numba is None else _folder()
    return numba is None or (folder is not None and any(folder.rglob(f"*.{name}-*.nbi")))  # as numba calls them


@cache
def _digest() -> str:
    """Of the sources: numba notices a change in the file of the function that it keeps, but not in those it calls.

    And of the kind of machine: a home may be shared between several.
    """
    content = hashlib.sha256(f"{np.__version__} {MAX_NODES} {platform.machine()}".encode())
    for file in sorted(Path(__file__).parent.glob("suffix_*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()[:16]


if numba is None:

    def numbers_at(address: int, size: int) -> Numbers:
        """The int32 numbers that lie at an address."""
        array: Numbers = np.ctypeslib.as_array((ctypes.c_int32 * int(size)).from_address(int(address)))
        return array
else:
    from slipstream.kernels.cpu.llvm import anything

    @inner
    def numbers_at(address: int, size: int) -> Numbers:
        """The int32 numbers that lie at an address."""
        array: Numbers = numba.carray(anything(address), size, np.int32)
        return array
