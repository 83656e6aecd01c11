"""Before a model serves: does our path compute what transformers computes?

Two prompts and one branching tree go through transformers itself, through our attention, and through our attention
with the faster modules swapped in. A model that differs is refused; a swap that differs is undone. The verdict is
cached, by everything it could depend on, so that only the first load pays for it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import slipstream
from slipstream.core.errors import UnsupportedModel
from slipstream.models import attention
from slipstream.models.batch import PassBatch
from slipstream.models.paths import cache_folder
from slipstream.models.runner import Progress, Runner, open_unchecked

_PROMPTS = (23, 14)
_TREE_PARENTS = (-1, -1, 0, 0, 1, 2, 5)
"""A tree of 7 nodes with branches at two depths, on top of the first prompt."""
_PAGE = 8
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 6e-2}
"""Largest relative error of the logits, ‖ours - theirs‖ / ‖theirs‖. A wrong forward is off by far more."""


def open_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Runner:
    """Load a model, check it against transformers (or recall that it was checked), swap in what holds."""
    note = _Note(path, dtype, device)
    swaps = note.read()
    if swaps is not None:
        runner = open_unchecked(path, dtype, device, trust_remote_code)
        runner.swap(fused=swaps == "fused")
        return runner
    if progress:
        progress("checking the model against transformers (once)")
    runner = open_unchecked(path, dtype, device, trust_remote_code)
    theirs = _reference(runner)
    _demand(theirs, _ours(runner), runner)
    for swaps in ("fused", "packed"):
        runner.swap(fused=swaps == "fused")
        if _error(theirs, _ours(runner)) <= _TOLERANCE[dtype]:
            note.write(swaps)
            return runner
        del runner  # the swap let the old weights go: load them again
        runner = open_unchecked(path, dtype, device, trust_remote_code)
    raise UnsupportedModel(f"{path}: packed products differ from plain ones on this machine; please report this")


def _demand(theirs: Tensor, ours: Tensor, runner: Runner) -> None:
    error = _error(theirs, ours)
    if not error <= _TOLERANCE[runner.dtype]:
        raise UnsupportedModel(
            f"{type(runner.model).__name__}: our logits differ from transformers' by {error:.1e} (relative; at most "
            f"{_TOLERANCE[runner.dtype]:.0e} is rounding). It does something that Slipstream does not know; "
            "run it with transformers instead"
        )


def _error(theirs: Tensor, ours: Tensor) -> float:
    theirs, ours = theirs.double(), ours.double()
    return float((ours - theirs).norm() / theirs.norm())


def _material(vocab_size: int) -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(7)
    low = min(10, vocab_size - 1)  # ids below are often padding, which some models embed as nothing
    draw = lambda n: torch.randint(low, vocab_size, (n,), generator=generator).tolist()
    return [draw(n) for n in _PROMPTS], draw(len(_TREE_PARENTS))


def _path(node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = _TREE_PARENTS[node]
    return path


@torch.inference_mode()
def _reference(runner: Runner) -> Tensor:
    """transformers' own logits: every row of both prompts, then every node of the tree. [R, V]"""
    model, (prompts, tree) = runner.model, _material(runner.vocab_size)
    model.set_attn_implementation("eager")
    try:
        rows = [_plain(runner, prompt) for prompt in prompts]
        rows += [_plain(runner, prompts[0] + [tree[n] for n in _path(node)])[-1:] for node in range(len(tree))]
    finally:
        model.set_attn_implementation(attention.NAME)
    return torch.cat(rows)


def _plain(runner: Runner, tokens: list[int]) -> Tensor:
    logits: Tensor = runner.model(input_ids=torch.tensor([tokens], device=runner.device), use_cache=False).logits
    return logits[0].float()


@torch.inference_mode()
def _ours(runner: Runner) -> Tensor:
    """The same rows by our path: both prompts in one flat batch, the first in two chunks, then the tree."""
    prompts, tree = _material(runner.vocab_size)
    pages_each = -(-(max(_PROMPTS) + len(tree)) // _PAGE)
    # pages out of order, so that the check also sees a cache that lies scattered
    pages = [tuple(reversed(range(pages_each))), tuple(range(pages_each, 2 * pages_each))]
    cache = runner.new_cache(2 * pages_each, _PAGE)
    cut = 9

    def run(parts: list[tuple[int, int, list[int], list[int]]], masks: list[int] | None = None) -> Tensor:
        """parts: request, tokens already in the cache, tokens, positions."""
        starts = [0]
        for _, _, tokens, _ in parts:
            starts.append(starts[-1] + len(tokens))
        slots = [
            pages[r][at // _PAGE] * _PAGE + at % _PAGE
            for r, prefix, tokens, _ in parts
            for at in range(prefix, prefix + len(tokens))
        ]
        tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=runner.device)
        batch = PassBatch(
            input_ids=tensor([t for _, _, tokens, _ in parts for t in tokens]),
            positions=tensor([p for _, _, _, positions in parts for p in positions]),
            slots=tensor(slots),
            row_starts=tuple(starts),
            prefix_lengths=tuple(prefix for _, prefix, _, _ in parts),
            pages=tuple(pages[r] for r, _, _, _ in parts),
            is_tree=tuple(masks is not None for _ in parts),
            masks=None if masks is None else tensor(masks),
            logit_rows=None,
        )
        return runner.forward(batch, cache)

    first, second = prompts
    span = lambda start, end: list(range(start, end))
    head = run([(0, 0, first[:cut], span(0, cut)), (1, 0, second, span(0, len(second)))])
    tail = run([(0, cut, first[cut:], span(cut, len(first)))])
    depth = [len(_path(node)) - 1 + len(first) for node in range(len(tree))]
    words = [sum(1 << n for n in _path(node)) for node in range(len(tree))]
    nodes = run([(0, len(first), tree, depth)], words)
    return torch.cat((head[:cut], tail, head[cut:], nodes))


class _Note:
    """The cached verdict on one model: which swaps hold."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        files = sorted(f for f in path.iterdir() if f.suffix in (".json", ".safetensors", ".bin", ".py"))
        depends: dict[str, Any] = {
            "files": [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files],
            "path": str(path.resolve()),
            "versions": [slipstream.__version__, transformers.__version__, torch.__version__],
            "code": [_digest(Path(__file__).parent), _digest(Path(__file__).parents[1] / "kernels")],
            "where": [str(dtype), torch.cuda.get_device_name(device) if device.type == "cuda" else device.type],
        }
        key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]
        self.file = cache_folder() / "checked" / f"{key}.json"

    def read(self) -> str | None:
        try:
            swaps = json.loads(self.file.read_text())["swaps"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return swaps if swaps in ("fused", "packed") else None

    def write(self, swaps: str) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({"swaps": swaps}))


def _digest(folder: Path) -> str:
    """Of the code that the check vouches for: a changed kernel is checked again."""
    content = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()
