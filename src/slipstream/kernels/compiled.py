"""Compiled CPU code, found or made: the one place that knows whether it can run here.

It needs numba, AVX-512 or an ARM CPU, and the team of threads that torch computes with (libgomp): a second team on the
same cores would put the first to sleep after every product. What is missing costs speed and nothing else.

numba keeps what it compiled in a folder of the user's own cache, named by the code that it was made from and the kind
of machine, so that only the first start compiles. (Those files are pickles: they must never come from anywhere else.)
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
from slipstream.kernels.arena import Arena
from slipstream.kernels.codes import BLOCK, PANEL, STAGE, TILE, Codes, block_bytes

_PATIENCE_S = 120
"""How long compiling may take in a process of its own."""
_SYMBOLS = {"member": "omp_get_thread_num", "size": "omp_get_num_threads"}


class Compiled:
    """The compiled functions, run by torch's own threads. Ask `compiled` for it."""

    def __init__(self, folder: Path | None) -> None:
        gomp = ctypes.CDLL(str(_gomp()))
        from llvmlite import binding

        for name, symbol in _SYMBOLS.items():
            binding.add_symbol(f"slipstream_team_{name}", ctypes.cast(getattr(gomp, symbol), ctypes.c_void_p).value)
        from slipstream.kernels import cpu_pass

        try:
            self._code = cpu_pass.load(folder)  # keeps the machine code alive
        except Exception:  # a folder that cannot be written, or holds rubbish: do without it
            self._code = cpu_pass.load(None)
        self._parallel: Any = gomp.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run_pass(self, job: np.ndarray[Any, np.dtype[np.void]]) -> None:
        """A pass through some layers in a row, by a record `PASS`."""
        self._parallel(self._code.run_pass, job.ctypes.data, torch.get_num_threads(), 0)

    def linear(self, x: Tensor, weight: Tensor | Codes, bias: Tensor | None) -> Tensor:  # [M, K] -> [M, N]
        """What `F.linear` gives; x lies in order; `tiled.py` says which weights [N, K]."""
        n, k = (weight.n, weight.k) if isinstance(weight, Codes) else weight.shape
        out, stage = torch.empty((x.shape[0], n), dtype=torch.float32), (ctypes.c_int64 * (STAGE // 8))()
        size = panel_size(weight)
        panels = torch.empty(torch.get_num_threads() * size)
        addresses = x.data_ptr(), x.shape[0], out.data_ptr(), panels.data_ptr(), size, ctypes.addressof(stage)
        given = address(weight), bits_of(weight), 0 if bias is None else bias.data_ptr(), n, k
        self._run(self._code.run_product, *given, *addresses)
        return out

    def encode(self, weights: Sequence[Tensor], arena: Arena) -> Codes | None:
        """Weights of one input, rows end to end, as codes in the arena; None where they are not made of codes."""
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
    """Numbers of scratch that each thread needs for a product with this weight."""
    return max(PANEL, TILE * weight.k) if isinstance(weight, Codes) else 0


def bits_of(weight: Tensor | Codes) -> int:
    return weight.bits if isinstance(weight, Codes) else 32


@cache
def compiled() -> Compiled | None:
    """The compiled code, or None where it cannot run. Loads it the first time, and compiles it where it must."""
    if not can_compile():
        return None
    try:
        return Compiled(_folder)
    except Exception:  # whatever is wrong with a compiler that we can do without
        return None


def can_compile() -> bool:
    """Is everything there that the compiled code needs? Quick: loads nothing."""
    return (
        sys.platform == "linux"
        and (platform.machine() == "aarch64" or torch.backends.cpu.get_cpu_capability() == "AVX512")
        and _gomp().exists()
        and importlib.util.find_spec("numba") is not None
    )


def make_apart() -> None:
    """Where the first call of `compiled` would compile, let a process of its own do it and leave the code in the cache.

    What a compiler takes, the process that ran it never gives back: a tenth of the default model's weights. Where this
    fails, `compiled` does it in the end.
    """
    if _folder is None or not needs_compiling():
        return
    program = "import sys; from pathlib import Path; from slipstream.kernels import compiled as c; "
    program += "c.keep_in(Path(sys.argv[1])); c.compiled()"
    with suppress(OSError, subprocess.SubprocessError):
        command = interpreter.command("-c", program, str(_folder.parent))
        subprocess.run(command, env=interpreter.surroundings(), capture_output=True, timeout=_PATIENCE_S)


def keep_in(folder: Path) -> None:
    """Where compiled code is kept between runs. Said before the first call of `compiled`.

    What lies there is loaded as code, so it is kept only where nobody else can write.
    """
    global _folder
    wanted = folder / _digest()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _folder = wanted if all(is_ours(part) for part in (folder.parent, folder, wanted) if part.exists()) else None


def is_ours(folder: Path) -> bool:
    """Can nobody else write there? What lies there is loaded as code."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def needs_compiling() -> bool:
    """Will the first call of `compiled` take long? Not where this code was compiled before, in this run or another."""
    kept = _folder is not None and _folder.is_dir()
    return can_compile() and not kept and compiled.cache_info().currsize == 0


_folder: Path | None = None


def _gomp() -> Path:
    return Path(torch.__file__).parent / "lib" / "libgomp.so.1"


def _digest() -> str:
    """Of the sources: numba notices a change in the file of the function that it keeps, but not in those it calls.

    And of the kind of machine, which numba knows as well: what another one keeps in the same home is nothing to find.
    """
    content = hashlib.sha256(f"{np.__version__} {platform.machine()}".encode())
    for file in sorted(Path(__file__).parent.glob("cpu_*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()[:16]
