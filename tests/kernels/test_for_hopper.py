"""What runs on an H200 is compiled for one here: whether the compiler takes it, and what it makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import slipstream
from slipstream.kernels.gpu.jit import shared_bytes

TESTS = Path(__file__).parents[1]


def test_kernels_of_drafts_compile(tmp_path: Path) -> None:
    """Heads in 8 bits and growing trees: within shared memory, nothing spilled, no slow conversions."""
    paths = os.pathsep.join((str(Path(slipstream.__file__).parents[1]), str(TESTS)))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, str(TESTS / "hopper.py")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    most = shared_bytes(torch.device("cpu"))
    for name, made in (found["products"] | found["trees"]).items():
        assert made["shared"] <= most, name
        assert not made["slow_casts"], name
    for name, made in found["products"].items():
        assert not made["spills"], name
        assert made["products"], f"{name}: not by the tensor cores"
