"""Compiled CPU code, loaded or compiled: the only module that decides whether it can run here.

It needs numba, AVX-512 or an ARM CPU, and torch's own team of threads (libgomp): a second team on the same cores would
put the first to sleep after every product. Without one of these, passes are slower and otherwise the same.

numba keeps compiled code in a folder of the user's cache, named by a hash of the sources and the kind of machine, so
that only the first start compiles. The files are pickles: they are loaded only from folders that no other user can
write to.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.core import interpreter
from slipstream.kernels.cpu.arena import Arena
from slipstream.kernels.cpu.interface import BLOCK, PANEL, STAGE, TILE, Codes, block_bytes

_COMPILE_TIMEOUT_S = 120
"""The time limit of compiling in a separate process."""
_SYMBOLS = {"member": "omp_get_thread_num", "size": "omp_get_num_threads"}


class Compiled:
    """The compiled functions, run by torch's own threads. Made by `compiled`."""

    def __init__(self, folder: Path | None) -> None:
        gomp = ctypes.CDLL(str(_gomp()))
        from llvmlite import binding

        for name, symbol in _SYMBOLS.items():
            binding.add_symbol(f"slipstream_team_{name}", ctypes.cast(getattr(gomp, symbol), ctypes.c_void_p).value)
        from slipstream.kernels.cpu import decoder

        try:
            self._code = decoder.load(folder)  # keeps the machine code alive
        except Exception:  # the folder cannot be written, or holds damaged files: compile without it
            self._code = decoder.load(None)
        self._parallel: Any = gomp.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run_pass(self, job: np.ndarray[Any, np.dtype[np.void]]) -> None:
        """Run some consecutive layers of a pass, described by a record `PASS`."""
        self._parallel(self._code.run_pass, job.ctypes.data, torch.get_num_threads(), 0)

    def linear(self, x: Tensor, weight: Tensor | Codes, bias: Tensor | None) -> Tensor:  # [M, K] -> [M, N]
        """The result of `F.linear` for contiguous x. `tiled.py` says which weights [N, K] fit."""
        n, k = (weight.n, weight.k) if isinstance(weight, Codes) else weight.shape
        out, stage = torch.empty((x.shape[0], n), dtype=torch.float32), (ctypes.c_int64 * (STAGE // 8))()
        size = panel_size(weight)
        panels = torch.empty(torch.get_num_threads() * size)
        addresses = x.data_ptr(), x.shape[0], out.data_ptr(), panels.data_ptr(), size, ctypes.addressof(stage)
        given = address(weight), bits_of(weight), 0 if bias is None else bias.data_ptr(), n, k
        self._run(self._code.run_product, *given, *addresses)
        return out

    def encode(self, weights: Sequence[Tensor], arena: Arena) -> Codes | None:
        """Weights of one input, rows end to end, as codes in the arena; None if codes do not reproduce them."""
        k = weights[0].shape[1]
        if k % BLOCK:
            return None
        rows = sum(len(weight) for weight in weights)
        for bits in (4, 8):
            data = arena.bytes(rows * k // BLOCK * block_bytes(bits)).view(rows, k // BLOCK, block_bytes(bits))
            parts = data.split([len(weight) for weight in weights])
            if all(self._encode(weight.contiguous(), bits, part) for weight, part in zip(weights, parts, strict=True)):
                return Codes(data, bits)
            arena.take_back(data)
        return None

    def _encode(self, weight: Tensor, bits: int, out: Tensor) -> bool:
        failed = torch.zeros(torch.get_num_threads(), dtype=torch.int64)
        given = weight.data_ptr(), *weight.shape, bits, out.data_ptr(), failed.data_ptr()
        self._run(self._code.run_encode, *given)
        return not failed.any()

    def _run(self, function: int, *record: int) -> None:
        self._parallel(function, (ctypes.c_int64 * len(record))(*record), torch.get_num_threads(), 0)


def address(weight: Tensor | Codes) -> int:
    return weight.data.data_ptr() if isinstance(weight, Codes) else weight.data_ptr()


def panel_size(weight: Tensor | Codes) -> int:
    """The scratch of each thread for a product with this weight, in numbers."""
    return max(PANEL, TILE * weight.k) if isinstance(weight, Codes) else 0


def bits_of(weight: Tensor | Codes) -> int:
    return weight.bits if isinstance(weight, Codes) else 32


@cache
def compiled() -> Compiled | None:
    """The compiled code, or None if it cannot run. The first call loads it, and compiles it if need be."""
    if not can_compile():
        return None
    try:
        return Compiled(_folder)
    except Exception:  # any failure of the compiler: passes run without it
        return None


def can_compile() -> bool:
    """Whether everything that the compiled code needs is there. Fast: loads nothing."""
    return (
        sys.platform == "linux"
        and (platform.machine() == "aarch64" or torch.backends.cpu.get_cpu_capability() == "AVX512")
        and _gomp().exists()
        and importlib.util.find_spec("numba") is not None
    )


def make_apart() -> None:
    """Compile in a separate process, which leaves the code in the cache, if the first call of `compiled` would compile.

    A process never returns a compiler's memory: a tenth of the default model's weights. If this fails, `compiled`
    compiles.
    """
    if _folder is None or not needs_compiling():
        return
    program = "import sys; from pathlib import Path; from slipstream.kernels.cpu import compiled as c; "
    program += "c.keep_in(Path(sys.argv[1])); c.compiled()"
    with suppress(OSError, subprocess.SubprocessError):
        command = interpreter.command("-c", program, str(_folder.parent))
        subprocess.run(command, env=interpreter.surroundings(), capture_output=True, timeout=_COMPILE_TIMEOUT_S)


def keep_in(folder: Path) -> None:
    """Keep compiled code in `folder` between runs. Called before the first call of `compiled`.

    The files are loaded as code, so nothing is kept in a folder that others can write to.
    """
    global _folder
    wanted = folder / _digest()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _folder = wanted if all(is_ours(part) for part in (folder.parent, folder, wanted) if part.exists()) else None


def is_ours(folder: Path) -> bool:
    """True if no other user can write to `folder`."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def needs_compiling() -> bool:
    """Whether the first call of `compiled` will compile, because neither this run nor an earlier one did."""
    kept = _folder is not None and _folder.is_dir()
    return can_compile() and not kept and compiled.cache_info().currsize == 0


_folder: Path | None = None


def _gomp() -> Path:
    return Path(torch.__file__).parent / "lib" / "libgomp.so.1"


def _digest() -> str:
    """A hash of the sources and the kind of machine.

    numba notices a change in the file of a cached function, but not in the files of functions that it calls.
    """
    content = hashlib.sha256(f"{np.__version__} {platform.machine()}".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()[:16]
