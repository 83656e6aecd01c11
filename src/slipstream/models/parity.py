"""Before a model serves: does our path compute what transformers computes?

Two prompts, one branching tree, and a prompt at the far end of the context go through transformers itself, through our
attention, and through our attention with the faster modules swapped in. A model that differs is refused; a swap that
differs is undone. The verdict is cached, by everything it could depend on, so that only the first load pays for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import slipstream
from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.compiled import can_compile
from slipstream.kernels.jit import has_kernels, triton
from slipstream.models import attention
from slipstream.models.batch import PassBatch
from slipstream.models.fuse import in_torch, prepare
from slipstream.models.paths import Progress, cache_folder
from slipstream.models.runner import Runner, open_unchecked

_PROMPTS = (23, 14)
_TREE_PARENTS = (-1, -1, 0, 0, 1, 2, 5)
"""A tree of 7 nodes with branches at two depths, on top of the first prompt."""
_PARTS = (*_PROMPTS, len(_TREE_PARENTS), _PROMPTS[1])
"""Rows of logits that are compared: both prompts, the tree, the second prompt far away."""
_PAGE = 8
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 6e-2}
"""Largest relative error of a row of logits, ‖ours - theirs‖ / ‖theirs‖. A wrong forward is off by far more."""


def open_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    target: Runner | None = None,
) -> Runner:
    """Load a model, check it against transformers (or recall that it was checked), swap in what holds.

    target: what a draft that is stored without embeddings shares them with.
    """
    note = _Note(path, dtype, device)
    remembered = note.read()
    if device.type == "cpu" and dtype == torch.float32:
        prepare(progress)  # before the weights: a compiler takes memory while it works
    runner = open_unchecked(path, dtype, device, trust_remote_code, target)
    if remembered is not None:
        runner.swap(fused=remembered == "fused")
        return runner
    if progress:
        progress("checking the model against transformers (once)")
    theirs = _reference(runner)
    _demand(theirs, _ours(runner), runner)
    runner.swap(fused=True)
    usual, runner.wide_rows = runner.wide_rows, 0
    with in_torch(runner.model):  # the way of long prompts, on the CPU and on a GPU
        long = _error(theirs, _ours(runner), dtype)
    runner.wide_rows = usual
    if long <= TOLERANCE[dtype] and _error(theirs, _ours(runner), dtype) <= TOLERANCE[dtype]:
        note.write("fused")
        return runner
    del runner  # the swap let the old weights go: load them again
    runner = open_unchecked(path, dtype, device, trust_remote_code, target)
    runner.swap(fused=False)
    if _error(theirs, _ours(runner), dtype) <= TOLERANCE[dtype]:
        note.write("packed")
        return runner
    raise UnsupportedModel(f"{path}: packed products differ from plain ones on this machine; please report this")


def _demand(theirs: Tensor, ours: Tensor, runner: Runner) -> None:
    error = _error(theirs, ours, runner.dtype)
    if not error <= TOLERANCE[runner.dtype]:
        raise UnsupportedModel(
            f"{type(runner.model).__name__}: our logits differ from transformers' by {error:.1e} (relative; at most "
            f"{TOLERANCE[runner.dtype]:.0e} is rounding). It does something that Slipstream does not know; "
            "run it with transformers instead"
        )


def _error(theirs: Tensor, ours: Tensor, dtype: torch.dtype) -> float:
    rows = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)  # [R]
    if dtype == torch.float32:
        return float(rows.max())
    # in 16 bits rounding alone may send a token to another expert: the middle row of the worst part
    return float(torch.stack([part.median() for part in rows.split(_PARTS)]).max())


def _material(vocab_size: int) -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(7)
    low = min(10, vocab_size - 1)  # ids below are often padding, which some models embed as nothing

    def draw(count: int) -> list[int]:
        return torch.randint(low, vocab_size, (count,), generator=generator).tolist()

    return [draw(n) for n in _PROMPTS], draw(len(_TREE_PARENTS))


def _path(node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = _TREE_PARENTS[node]
    return path


@torch.inference_mode()
def _reference(runner: Runner) -> Tensor:
    """transformers' own logits: both prompts, every node of the tree, the second prompt far away. [R, V]"""
    model, (prompts, tree) = runner.model, _material(runner.vocab_size)
    model.set_attn_implementation("eager")
    try:
        rows = [_plain(runner, prompt) for prompt in prompts]
        rows += [_plain(runner, prompts[0] + [tree[n] for n in _path(node)])[-1:] for node in range(len(tree))]
        rows.append(_plain(runner, prompts[1], _far(runner)))
    finally:
        model.set_attn_implementation(attention.NAME)
    return torch.cat(rows)


def _plain(runner: Runner, tokens: list[int], start: int = 0) -> Tensor:
    ids = torch.tensor([tokens], device=runner.device)
    # at the start transformers counts the positions itself: the comparison sees whether it counts as we do
    positions = torch.arange(start, start + len(tokens), device=runner.device)[None] if start else None
    logits: Tensor = runner.model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits[0].float()


def _far(runner: Runner) -> int:
    """Where the second prompt stands the second time: some models change with the position (Ministral 3)."""
    return runner.max_positions - _PROMPTS[1]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one request brings to a pass of the check."""

    request: int
    prefix: int  # tokens that are in the cache already
    tokens: list[int]
    positions: Sequence[int]


@torch.inference_mode()
def _ours(runner: Runner) -> Tensor:
    """The same rows by our path: both prompts in one flat batch, the first in two chunks; then the others."""
    prompts, tree = _material(runner.vocab_size)
    pages_each = -(-(max(_PROMPTS) + len(tree)) // _PAGE)
    # pages out of order, so that the check also sees a cache that lies scattered
    pages = [tuple(reversed(range(pages_each))), tuple(range(pages_each, 2 * pages_each))]
    cache = runner.new_cache(2 * pages_each, _PAGE)
    cut = 9

    def run(parts: list[_Part], masks: list[int] | None = None) -> Tensor:
        starts = [0, *accumulate(len(part.tokens) for part in parts)]
        slots = [
            pages[part.request][at // _PAGE] * _PAGE + at % _PAGE
            for part in parts
            for at in range(part.prefix, part.prefix + len(part.tokens))
        ]
        batch = PassBatch(
            input_ids=torch.tensor([token for part in parts for token in part.tokens], device=runner.device),
            positions=torch.tensor([at for part in parts for at in part.positions], device=runner.device),
            slots=torch.tensor(slots, device=runner.device),
            row_starts=tuple(starts),
            prefix_lengths=tuple(part.prefix for part in parts),
            pages=tuple(pages[part.request] for part in parts),
            is_tree=tuple(masks is not None for _ in parts),
            masks=None if masks is None else torch.tensor(masks, device=runner.device),
            logit_rows=None,
        )
        return runner.forward(batch, cache)

    first, second = prompts
    paths = [_path(node) for node in range(len(tree))]
    head = run([_Part(0, 0, first[:cut], range(cut)), _Part(1, 0, second, range(len(second)))])
    tail = run([_Part(0, cut, first[cut:], range(cut, len(first)))])
    nodes = run(
        [_Part(0, len(first), tree, [len(first) + len(path) - 1 for path in paths])],
        masks=[sum(1 << node for node in path) for path in paths],
    )
    far = run([_Part(1, 0, second, range(_far(runner), runner.max_positions))])
    return torch.cat((head[:cut], tail, head[cut:], nodes, far))


class _Note:
    """The cached verdict on one model: which swaps hold."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        files = sorted(f for f in path.iterdir() if f.suffix in (".json", ".safetensors", ".bin", ".py"))
        depends: dict[str, Any] = {
            "files": [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files],
            "path": str(path.resolve()),
            "versions": [slipstream.__version__, transformers.__version__, torch.__version__],
            "code": code_digest(),
            "where": [
                str(dtype),
                chip_name(device),
                can_compile(),
                triton.__version__ if has_kernels(device) else None,
            ],
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
        with suppress(OSError):  # a cache that cannot be written costs the next load a check, and this one nothing
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps({"swaps": swaps}))


def code_digest(*layers: str) -> list[str]:
    """Of the code that passes are made of, and of other layers: a changed kernel is checked again."""
    return [_digest(Path(__file__).parents[1] / layer) for layer in ("models", "kernels", "kv", *layers)]


def _digest(folder: Path) -> str:
    content = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()


def chip_name(device: torch.device) -> str:
    """What computes: homes are shared between machines, and other instructions are other code."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
