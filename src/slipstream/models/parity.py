"""The check at load: our path must compute what transformers computes.

Two prompts, one branching tree, and a prompt at the far end of the context go through transformers itself, through our
attention, and through our attention with the faster modules swapped in. All are compared with transformers' pass over
the same weights in fp32: in 16 bits ours may be off by up to `_WORSE` times the error of transformers' own pass. A
model that differs is refused; a swap that differs is undone. The verdict is cached by everything that it depends on, so
only the first load takes the time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.core.errors import ModelError, UnsupportedModel, device_failed
from slipstream.kernels.cpu.compiled import can_compile
from slipstream.kernels.gpu.jit import has_kernels, triton
from slipstream.models import attention
from slipstream.models.batch import PassBatch
from slipstream.models.build import prepare
from slipstream.models.load import names_model
from slipstream.models.paths import Progress, cache_folder
from slipstream.models.runner import Parity, Runner, open_unchecked

_PROMPTS = (23, 14)
_TREE_PARENTS = (-1, -1, 0, 0, 1, 2, 5)
"""A tree of 7 nodes with branches at two depths, on top of the first prompt."""
_PARTS = (*_PROMPTS, len(_TREE_PARENTS), _PROMPTS[1])
"""Rows of logits in each part: both prompts, the tree, the second prompt far away."""
_PAGE = 8
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative errors of a row of logits, ‖ours - exact‖ / ‖exact‖, that are rounding in any model. The error of
transformers' bf16 passes over random weights of real shapes is 0.009 (four layers) to 0.057 (Llama-3.1-8B)."""
_WORSE = 1.5
"""Larger errors are rounding too, up to this multiple of the error of transformers' own pass in that dtype."""


@names_model
def open_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    target: Runner | None = None,
) -> Runner:
    """Load a model, check it against transformers (or recall the verdict), and keep the swaps that hold.

    target: lends its embeddings to a draft that is stored without.
    """
    note = _Note(path, dtype, device)
    remembered = note.read()
    if device.type == "cpu" and dtype == torch.float32:
        prepare(progress)  # before the weights, because a compiler takes memory
    runner = open_unchecked(path, dtype, device, trust_remote_code, target)
    if remembered is not None:
        swaps, runner.parity = remembered
        runner.swap(fused=swaps == "fused")
        return runner
    if progress:
        progress("checking the model against transformers (once)")
    _check_finite(runner.model, path)
    judge = _Judge.of(runner)
    runner.parity = judge.verdict(_ours(runner))
    if not runner.parity.holds:
        raise UnsupportedModel(
            f"{type(runner.model).__name__}: our logits differ from transformers' in fp32 by {runner.parity}. It does "
            "something that Slipstream does not know; run it with transformers instead"
        )
    runner.swap(fused=True)
    usual, runner.wide_rows = runner.wide_rows, 0
    long = judge.verdict(_swapped(runner))  # by the products for long prompts on a GPU
    runner.wide_rows = usual
    runner.parity = judge.verdict(_swapped(runner))
    if long.holds and runner.parity.holds:
        note.write("fused", runner.parity)
        return runner
    del runner  # the swap freed the old weights: load them again
    runner = open_unchecked(path, dtype, device, trust_remote_code, target)
    runner.swap(fused=False)
    runner.parity = judge.verdict(_ours(runner))
    if runner.parity.holds:
        note.write("packed", runner.parity)
        return runner
    raise UnsupportedModel(
        f"{path}: packed products differ on this machine from transformers' in fp32 by {runner.parity}; please report "
        "this"
    )


def _swapped(runner: Runner) -> Tensor:
    """Our logits with swaps in place; NaN if a swapped module cannot run (Ernie's rotary angles are fp32).

    Triton's own errors, for a kernel that does not compile or exceeds the GPU, are no RuntimeErrors.
    """
    try:
        return _ours(runner)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if device_failed(error):
            raise
        return torch.full((sum(_PARTS), 1), torch.nan, device=runner.device)


def _check_finite(model: nn.Module, path: Path) -> None:
    for name, weight in model.named_parameters():
        if (
            weight.numel()
            and weight.is_floating_point()
            and weight.element_size() > 1
            and not torch.stack(torch.aminmax(weight.detach())).isfinite().all()
        ):
            raise ModelError(
                f"{path}: {name} holds NaN or infinite numbers in {str(weight.dtype).removeprefix('torch.')}. Fetch or "
                "train the model again, or choose a dtype with a wider range if it is whole"
            )


@dataclass(frozen=True, slots=True)
class _Judge:
    """The logits that passes over a model are compared with."""

    exact: Tensor  # [R, V]: transformers' logits in fp32
    dtype: torch.dtype
    theirs: Tensor  # [R]: errors of transformers' own pass in that dtype

    @staticmethod
    def of(runner: Runner) -> _Judge:
        exact = _reference(runner)
        own = exact if runner.dtype == torch.float32 else _reference(runner, fp32=False)
        return _Judge(exact, runner.dtype, _errors(exact, own))

    def verdict(self, ours: Tensor) -> Parity:
        """In 16 bits each part is judged, then all rows: the median error of ours by `_WORSE` times theirs.

        Rounding alone sends some tokens to another expert, and such rows are far off. Medians leave them out. A part
        has few rows, so its median is compared with the 90th percentile of their errors in it.
        """
        rows, floor = _errors(self.exact, ours), TOLERANCE[self.dtype]
        if self.dtype == torch.float32:
            return Parity(float(rows.max()), 0.0, floor)

        def judged(own: Tensor, theirs: Tensor) -> Parity:
            return Parity(float(own.median()), float(theirs), max(floor, _WORSE * float(theirs)))

        parts = zip(rows.split(_PARTS), self.theirs.split(_PARTS), strict=True)
        found = [judged(own, theirs.quantile(0.9)) for own, theirs in parts]
        return next((part for part in found if not part.holds), judged(rows, self.theirs.median()))


def _errors(exact: Tensor, given: Tensor) -> Tensor:  # [R]
    rows: Tensor = (given - exact).norm(dim=-1) / exact.norm(dim=-1)
    return rows


def _material(vocab_size: int) -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(7)
    low = min(10, vocab_size - 1)  # lower ids are often padding, which some models embed as zeros

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
def _reference(runner: Runner, *, fp32: bool = True) -> Tensor:
    """transformers' own logits: both prompts, every node of the tree, the second prompt far away. [R, V]

    fp32: computed in fp32 for any dtype of the weights; False: in that dtype, as transformers serves the model.
    """
    model, (prompts, tree) = runner.model, _material(runner.vocab_size)
    paths = [prompts[0] + [tree[n] for n in _path(node)] for node in range(len(tree))]
    model.set_attn_implementation("eager")
    try:
        with _widened(model) if fp32 and runner.dtype != torch.float32 else nullcontext():
            # the first prompt begins every path, and later tokens do not change its logits in a causal model
            rows = _plain(runner, [prompts[1], *paths])
            far = _plain(runner, [prompts[1]], _far(runner))
    finally:
        model.set_attn_implementation(attention.NAME)
    return torch.cat((rows[1][: len(prompts[0])], rows[0], *(row[-1:] for row in rows[1:]), far[0]))


def _plain(runner: Runner, texts: list[list[int]], start: int = 0) -> list[Tensor]:  # [tokens, V] of each
    longest = max(map(len, texts))
    ids = torch.tensor([text + text[:1] * (longest - len(text)) for text in texts], device=runner.device)
    # at the start transformers counts the positions itself, so the comparison also covers how it counts
    positions = torch.arange(start, start + longest, device=runner.device)[None] if start else None
    logits: Tensor = runner.model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return [row[: len(text)].float() for row, text in zip(logits, texts, strict=True)]


@contextmanager
def _widened(model: nn.Module) -> Iterator[None]:
    """Run the model in fp32 inside, by its own weights; only one layer's are widened at a time."""
    layers = [layer for parent in model.modules() if isinstance(parent, nn.ModuleList) for layer in parent]
    inside = {module for layer in layers for module in layer.modules()}
    kept: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def widen(module: nn.Module, *_: Any) -> None:
        held = [*module.parameters(module in inside), *module.buffers(module in inside)]
        kept[module] = [(one, one.data) for one in held if one.is_floating_point() and one.dtype != torch.float32]
        for one, data in kept[module]:
            one.data = data.float()

    def restore(module: nn.Module, *_: Any) -> None:
        for one, data in kept.pop(module, ()):
            one.data = data

    hooks = []
    for module in {*layers, *(set(model.modules()) - inside)}:
        hooks += [module.register_forward_pre_hook(widen), module.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _far(runner: Runner) -> int:
    """The second prompt's second position: some models change with the position (Ministral 3)."""
    return runner.max_positions - _PROMPTS[1]


@dataclass(frozen=True, slots=True)
class _Part:
    """One request's rows in a pass of the check."""

    request: int
    prefix: int  # tokens that are in the cache already
    tokens: list[int]
    positions: Sequence[int]


@torch.inference_mode()
def _ours(runner: Runner) -> Tensor:
    """The same rows by our path: both prompts in one flat batch, the first in two chunks; then the others."""
    prompts, tree = _material(runner.vocab_size)
    pages_each = -(-(max(_PROMPTS) + len(tree)) // _PAGE)
    # pages out of order, so that the check also covers a scattered cache
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
    """The cached verdict on one model: the swaps that hold."""

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

    def read(self) -> tuple[str, Parity] | None:
        try:
            told = json.loads(self.file.read_text())
            swaps, found = told.pop("swaps"), Parity(**told)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return (swaps, found) if swaps in ("fused", "packed") else None

    def write(self, swaps: str, parity: Parity) -> None:
        with suppress(OSError):  # without a cache the next load checks again
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps({"swaps": swaps, **asdict(parity)}))


def code_digest(*layers: str) -> list[str]:
    """Hashes of the code of passes, and of other packages: a changed kernel is checked again."""
    return [_digest(Path(__file__).parents[1] / layer) for layer in ("models", "kernels", "kv", *layers)]


def _digest(folder: Path) -> str:
    content = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()


def chip_name(device: torch.device) -> str:
    """The name of the GPU, or the CPU's instruction set: a home may be shared by machines with other instructions."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
