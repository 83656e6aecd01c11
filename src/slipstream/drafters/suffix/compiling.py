"""Compiling the suffix drafter's loops with numba, if it is installed.

Compiled code is kept in the user's cache folder: only the first start on a machine compiles. These files are loaded as
code, so nothing is kept in a folder that others could write to.
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
    """A function for calls from compiled code. Each combination of types is compiled: pass arrays and int64."""
    if numba is None:
        return function
    return cast(F, numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


@inner
def wide(number: int) -> int:
    """Any integer as int64: in compiled code constants and int32 numbers have other types."""
    return number + 0


def compiled(function: F) -> F:
    """Compile the function when it is first called, or load what an earlier start compiled."""
    if numba is None:
        return function
    folder, before = _folder(), numba.config.CACHE_DIR
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
    options = {"error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
    try:
        return cast(F, numba.njit(cache=folder is not None, **options)(function))
    except RuntimeError:  # the folder is not writable
        return cast(F, numba.njit(**options)(function))
    finally:
        numba.config.CACHE_DIR = before


def _folder() -> Path | None:
    """The folder for compiled code; None if it would not be safe."""
    folder = cache_folder() / "compiled-suffix" / _digest()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours = all(map(is_ours, (folder.parent.parent, folder.parent, folder)))
    except OSError:
        return None
    return folder if ours else None


def is_kept(name: str) -> bool:
    """True if an earlier start compiled this function, or nothing is compiled at all."""
    folder = None if numba is None else _folder()
    return numba is None or (folder is not None and any(folder.rglob(f"*.{name}-*.nbi")))  # numba's file names


@cache
def _digest() -> str:
    """Hash of the sources and the machine.

    numba notices changes only in the kept function's own file, and a home folder may be shared by several machines.
    """
    content = hashlib.sha256(f"{np.__version__} {MAX_NODES} {platform.machine()}".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
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
