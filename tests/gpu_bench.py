"""The benchmarks of `tools/` that need a GPU, and stand-ins for clocks and vLLM. Not a test file."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import VOCAB
from medusa_checkpoints import head_tensors, save_heads
from slipstream.models.heads.eagle_files import EagleCheckpoint, EagleShape, save_eagle3
from slipstream.models.taps import Taps

ROOT_FOLDER = Path(__file__).parent.parent
sys.path.append(str(ROOT_FOLDER / "tools"))
_KERNELS = ("kernel_table", "kernel_clock", "results", "vllm_peer", "widen", "work")
kernels, clocks, results, vllm_peer, widen, work = map(import_module, _KERNELS)
_CURVE = ("curve", "curve_ours", "curve_peers")
curve, curve_ours, curve_peers = map(import_module, _CURVE)

_CELLS = ("cells", "cells_ours", "cells_peers", "cells_work")
cells, cells_ours, cells_peers, cells_work = map(import_module, _CELLS)

WIDE = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 4, "inner": 80}
"""A large target for the tiny model's drafters."""
CPU = torch.device("cpu")


class FakeClock:
    """Does each work once, keeps what came out, and says that it took as long as it was told to say."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds = seconds or {}
        self.seen: list[dict[str, Any]] = []

    def __call__(self, works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        assert repeats >= 3
        with torch.inference_mode():
            self.seen.append({name: work() for name, work in works.items()})
        return {name: self.seconds.get(name, 0.5) for name in works}


class FakeTime:
    """Seconds that pass only where work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def install_vllm(monkeypatch: pytest.MonkeyPatch, llm: type) -> None:
    """This class is vLLM's."""
    fake = SimpleNamespace(LLM=llm, SamplingParams=SimpleNamespace, __version__="0.26")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for key in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.setenv(key, "0")


def measure_here(
    monkeypatch: pytest.MonkeyPatch, command: Any, its_peers: Any, check: Callable[[str, str | None, float], None]
) -> None:
    """Peers run in this process, where the command would start another one; check: script, path and limit."""

    def apart(script: str, arguments: Sequence[str], peer_path: str | None, timeout: float) -> dict[str, Any]:
        check(script, peer_path, timeout)
        said: list[dict[str, Any]] = []
        options = command.parser().parse_args(arguments)
        its_peers.measure(its_peers.Task.read(options.as_peer), lambda found: said.append(dict(found)))
        return said[-1]

    monkeypatch.setattr(its_peers, "apart", apart)


def write_prompts(folder: Path) -> Path:
    """Categories in Spec-Bench's sizes: 8 of 10 prompts, which are one group, and two of 80."""
    categories = [*(name for name in sorted(work.MULTI_TURN) for _ in range(10)), *["qa"] * 80, *["rag"] * 80]
    rows = [{"category": name, "turns": [f"{name} {i}?", f"and then {i}"]} for i, name in enumerate(categories)]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def write_heads(folder: Path, tiny_draft: Path) -> Path:
    """The three drafters with weights, for the tiny target. What they guess is seldom right."""
    shape = EagleShape(
        generation=3,
        hidden=32,
        target_hidden=32,
        inner=48,
        heads=4,
        kv_heads=4,
        head_dim=8,
        num_layers=1,
        norm_eps=1e-5,
        vocab=VOCAB,
        draft_vocab=100,
        taps=Taps((0, 1, 2)),
        max_positions=256,
        trained_positions=256,
        rope={"rope_type": "default", "rope_theta": 10_000.0},
        norm_before_residual=True,
    )
    dice = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(size, generator=dice) * 0.2 for name, size in shape.wanted.items()}
    tensors["d2t"] = torch.ones(100, dtype=torch.int64)
    save_eagle3(EagleCheckpoint(shape, tensors, folder), folder / "eagle3")
    save_heads(
        folder / "medusa",
        head_tensors("original", 3, 1),
        "medusa_lm_head.safetensors",
        medusa_num_heads=3,
        medusa_num_layers=1,
    )
    shutil.copytree(tiny_draft, folder / "draft")
    return folder
