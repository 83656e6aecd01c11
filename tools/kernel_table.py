"""What passes of a target, drafts of an EAGLE-3 head and the choice of a token take on one GPU, down to the kernels.

    python tools/kernel_table.py --target DIR --json FILE [--parts tree,heads] [--requests 16,64] [--add]
    python tools/kernel_table.py --show FILE

    tree       passes over 1 to 128 requests and over a tree of 64 rows, and the plain step over its bytes
    long       the plain step at 8,000 and 32,000 tokens of context
    heads      the draft of an EAGLE-3 head, in 16 and in 8 bits, and its bytes
    kernels    kernel by kernel: a plain step, trees and a head's draft; with --requests 16,64 those of that many
               requests, whose trees have 256 rows together
    sampling   the step with the choice of its token

The weights are random, in the target's shape. The JSON file is written after every part. Parts that fail are named in
it, and the others go on. The table is printed before the last line, which is the JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kernel_clock import Clock, KernelTime, Work, by_kernel, clock_of, copy_bandwidth
from results import Report, chosen, first_results, sizes
from slipstream.core.draft import Draft, Tree
from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import DraftRound, Services
from slipstream.drafters.eagle import EagleDrafter
from slipstream.engine.rounds import RoundShape
from slipstream.kernels.gpu.jit import has_kernels
from slipstream.kernels.gpu.rows import RECENT, LaneState, PassRows, pack_rows
from slipstream.kv.cache import KVCache
from slipstream.kv.pages import PagePool, PageTable
from slipstream.models import attention, build
from slipstream.models.heads.base import Weights
from slipstream.models.heads.eagle import EagleHead
from slipstream.models.heads.eagle_files import EagleCheckpoint, EagleShape
from slipstream.models.load import load_config
from slipstream.models.resolve import resolve
from slipstream.models.runner import Runner
from slipstream.models.taps import Taps, TapView
from slipstream.sampling.choose import choose
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable

PARTS = ("tree", "long", "heads", "kernels", "sampling")
TREES = (16, 32, 64)
"""Rows of the trees, roots included."""
CROWD_ROWS = 256
"""Rows of a pass of many requests, all trees together."""
_SHOWN = 12
"""Kernels of a work that are listed by name."""


PAGE = 16
CONTEXT = 300
TREE_ROWS = 64
REQUESTS = (1, 8, 32, 128)
LONG_CONTEXTS = (8_000, 32_000)
LONG_POSITIONS = 40_960
LARGE_VOCABULARY = 151_936
REPEATS = 20
DRAFT_VOCABULARY = 32_000
DEPTH, WIDTH, NODES = 6, 8, 63
OPENED_DEPTH = 10
"""Levels that a head may draft if its options do not say (`EagleDrafter`)."""
HEAD_REQUESTS = (1, 8)
CHOICES = {
    "greedy": SamplingParams(temperature=0),
    "T=1": SamplingParams(temperature=1, seed=1),
    "T=1 top-p 0.95": SamplingParams(temperature=1, top_p=0.95, seed=1),
}


@dataclass(frozen=True, slots=True)
class FixedPass:
    """A pass over fixed rows, which can be run and captured repeatedly."""

    runner: Runner
    cache: KVCache
    state: LaneState
    lanes: Tensor  # [B] int64
    rows: PassRows
    max_keys: int

    def run(self) -> Tensor:  # [N, V] fp32
        layout = self.rows.layout(self.state, self.lanes, self.cache.page_size, self.max_keys)
        return self.runner.run(self.rows.ids, layout, self.cache)


def binary_tree(rows: int, vocab_size: int) -> Tree:
    """A balanced tree of `rows` rows, root included: row r hangs from row (r - 1) // 2."""
    nodes = range(rows - 1)
    return Tree(tuple((31 * node + 7) % vocab_size for node in nodes), tuple(node // 2 - 1 for node in nodes))


@torch.inference_mode()
def random_cache(runner: Runner, requests: int, tokens: int) -> KVCache:
    """A cache of random numbers with room for `tokens` of each request, and one unused page."""
    cache = runner.new_cache(requests * -(-tokens // PAGE) + 1, PAGE)
    for plane in cache.planes:
        plane.normal_()
    return cache


class LanesAt(NamedTuple):
    """The state of requests, with one unused lane behind them, and their lanes."""

    state: LaneState
    lanes: Tensor  # [B] int64


def lane_state(runner: Runner, requests: int, context: int, reach: int) -> LanesAt:
    """The state of `requests` requests with `context` tokens in the cache and `reach` pages each, and an unused
    lane."""
    ids = torch.arange(requests + 1, device=runner.device)
    state = LaneState(
        last=(17 * ids + 5) % runner.vocab_size,
        previous=torch.zeros_like(ids),
        length=torch.full_like(ids, context),
        generated=torch.zeros_like(ids),
        pages=torch.arange((requests + 1) * reach, dtype=torch.int32, device=runner.device).view(-1, reach),
        recent=torch.zeros((requests + 1, RECENT), dtype=torch.int64, device=runner.device),
    )
    return LanesAt(state, ids[:requests])


@torch.inference_mode()
def lay_out(runner: Runner, cache: KVCache, trees: Sequence[Tree], context: int) -> FixedPass:
    """The pass of one round: one request for each tree, with `context` tokens in the cache before it."""
    device, requests = runner.device, len(trees)
    reach = (cache.num_pages - 1) // requests  # pages of each
    widest = max(map(len, trees))
    assert context + 1 + widest <= reach * PAGE, f"{context} tokens and {1 + widest} rows in {reach} pages of {PAGE}"
    shape = RoundShape.of(
        [len(tree) for tree in trees],
        context,
        is_tree=any(not tree.is_chain for tree in trees),
        features=Features(),
        version=0,
        keeps_logits=False,
    )
    state, lanes = lane_state(runner, requests, context, reach)
    draft = Draft.pack(trees, device)
    rows = PassRows.empty(requests, draft.width, shape.rows, tree=shape.is_tree, device=device)
    trash_slot = (cache.num_pages - 1) * PAGE
    pack_rows(state, lanes, draft, rows, page_size=PAGE, trash_slot=trash_slot)
    return FixedPass(runner, cache, state, lanes, rows, shape.keys)


def step_bytes(runner: Runner, context: int, requests: int = 1) -> int:
    """Bytes that a plain step must read: each weight once, and the cache. The lines of an embedding that is not the LM
    head do not count; windows are ignored."""
    weights = runner.weights_bytes
    if not getattr(runner.config, "tie_word_embeddings", False):
        embedding = cast(Tensor, runner.model.get_input_embeddings().weight)
        weights -= embedding.numel() * embedding.element_size()
    per_token = sum(layer.numel for layer in runner.layers) * runner.dtype.itemsize
    return weights + per_token * context * requests


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Milliseconds of one model's passes, and the plain pass relative to its bytes at copy bandwidth."""

    context: int
    rows_ms: dict[str, float]  # by requests of one row each
    tree_rows: int
    tree_ms: float
    tree_over_plain: float
    step_bytes: int
    step_over_bytes: float


def tree_part(
    runner: Runner,
    bandwidth: float,
    clock: Clock,
    *,
    context: int = CONTEXT,
    tree_rows: int = TREE_ROWS,
    requests: Sequence[int] = REQUESTS,
) -> PassTimes:
    """Passes over one request's tree, and over requests without drafts."""
    assert requests[0] == 1
    cache = random_cache(runner, max(requests), context + tree_rows)
    passes = {str(n): lay_out(runner, cache, [Tree()] * n, context) for n in requests}
    passes["tree"] = lay_out(runner, cache, [binary_tree(tree_rows, runner.vocab_size)], context)
    seconds = clock({name: one.run for name, one in passes.items()}, REPEATS)
    plain, size = seconds["1"], step_bytes(runner, context)
    return PassTimes(
        context=context,
        rows_ms={str(n): seconds[str(n)] * 1e3 for n in requests},
        tree_rows=tree_rows,
        tree_ms=seconds["tree"] * 1e3,
        tree_over_plain=seconds["tree"] / plain,
        step_bytes=size,
        step_over_bytes=plain / (size / bandwidth),
    )


def random_runner(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, positions: int = LONG_POSITIONS
) -> Runner:
    """A model of this shape with random weights, fused as a loaded one; no files are read."""
    config = copy.deepcopy(config)
    config.max_position_embeddings = positions
    attention.register()
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    runner = Runner(cast(PreTrainedModel, model.eval().requires_grad_(False)), config)
    runner.swap(fused=True)
    return runner


@dataclass(frozen=True, slots=True)
class LongStep:
    """A plain step at one context length."""

    context: int
    ms: float
    step_bytes: int
    over_bytes: float


def long_part(
    runner: Runner, bandwidth: float, clock: Clock, contexts: Sequence[int] = LONG_CONTEXTS
) -> tuple[LongStep, ...]:
    """The plain step of one request at long contexts."""
    cache = random_cache(runner, 1, max(contexts) + 1)
    works = {str(context): lay_out(runner, cache, [Tree()], context).run for context in contexts}
    seconds = clock(works, REPEATS)
    sizes = {context: step_bytes(runner, context) for context in contexts}
    return tuple(
        LongStep(context, seconds[str(context)] * 1e3, size, seconds[str(context)] / (size / bandwidth))
        for context, size in sizes.items()
    )


@dataclass(frozen=True, slots=True)
class SamplingStep:
    """A plain step with sampling, at one vocabulary size."""

    vocab_size: int
    ms: dict[str, float]  # by `CHOICES`
    over_greedy: dict[str, float]


def sampling_part(
    runner: Runner, clock: Clock, *, context: int = CONTEXT, large: int = LARGE_VOCABULARY
) -> tuple[SamplingStep, ...]:
    """The step with every kind of sampling, for the model's vocabulary and a larger one. Changes the model's LM
    head."""
    cache = random_cache(runner, 1, context + 1)
    found = []
    for vocab_size in (runner.vocab_size, large):
        if vocab_size != runner.vocab_size:
            set_vocabulary(runner, vocab_size)
        step = lay_out(runner, cache, [Tree()], context)
        table = SamplingTable(len(CHOICES), vocab_size, runner.device)
        for slot, params in enumerate(CHOICES.values()):
            table.add(slot, params, seed=1)
        seconds = clock({name: ChosenStep(step, table, slot).run for slot, name in enumerate(CHOICES)}, REPEATS)
        found.append(
            SamplingStep(
                vocab_size,
                {name: taken * 1e3 for name, taken in seconds.items()},
                {name: taken / seconds["greedy"] for name, taken in seconds.items()},
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """A pass with sampling by the settings in a slot of the table."""

    step: FixedPass
    table: SamplingTable
    slot: int

    def run(self) -> Tensor:  # [N]
        rows = self.step.rows
        wanted = SampleRows(torch.full_like(rows.lanes, self.slot), rows.positions + 1, rows.generated)
        return choose(self.step.run(), wanted, self.table, self.table.features([self.slot]))


@torch.inference_mode()
def set_vocabulary(runner: Runner, size: int) -> None:
    """Replace the LM head by a random one for another vocabulary size. The embedding stays."""
    embedding = cast(Tensor, runner.model.get_input_embeddings().weight)
    head = nn.Linear(embedding.shape[1], size, bias=False, dtype=runner.dtype, device=runner.device)
    head.weight.normal_(std=getattr(runner.config, "initializer_range", 0.02))
    head.requires_grad_(False)
    runner.model.lm_head = head
    if has_kernels(runner.device):
        build.install(runner.model, runner.max_positions)
    runner.vocab_size = size


@dataclass(frozen=True, slots=True)
class HeadTimes:
    """Milliseconds of one head's drafts by requests, and one request's relative to its bytes at copy bandwidth."""

    depth: int
    width: int
    nodes: int
    context: int
    bytes: int  # of one draft: the head and its LM head once for each level, what brings the taps together once
    ms: dict[str, float]
    over_bytes: float


@torch.inference_mode()
def random_head(runner: Runner, kept: Weights, draft_vocabulary: int = DRAFT_VOCABULARY) -> EagleHead:
    """A head of the usual size for this target: one layer like the target's, and a vocabulary of its own."""
    config, count = runner.config, len(runner.layers)
    hidden, heads = config.hidden_size, config.num_attention_heads
    shape = EagleShape(
        generation=3,
        hidden=hidden,
        target_hidden=hidden,
        inner=config.intermediate_size,
        heads=heads,
        kv_heads=runner.layers[0].kv_heads,
        head_dim=runner.layers[0].key_dim,
        num_layers=1,
        norm_eps=config.rms_norm_eps,
        vocab=runner.vocab_size,
        draft_vocab=min(draft_vocabulary, runner.vocab_size - 1),
        taps=Taps(tuple(sorted({min(2, count), count // 2, max(count - 3, 0)}))),
        max_positions=runner.max_positions,
        trained_positions=runner.max_positions,
        rope={"rope_type": "default", "rope_theta": 10_000.0},
    )
    numbers = torch.Generator(runner.device).manual_seed(1)
    tensors = {
        name: torch.randn(size, generator=numbers, device=runner.device, dtype=runner.dtype) * size[-1] ** -0.5
        for name, size in shape.wanted.items()
        if name != "d2t"
    }
    tensors["d2t"] = torch.ones(shape.draft_vocab, dtype=torch.int64)
    given = EagleCheckpoint(shape, tensors, Path("random"))
    return EagleHead(given, runner.model.get_input_embeddings(), runner.model.get_output_embeddings(), kept)


@torch.inference_mode()
def head_part(
    runner: Runner,
    bandwidth: float,
    clock: Clock,
    *,
    context: int = CONTEXT,
    depth: int = DEPTH,
    width: int = WIDTH,
    nodes: int = NODES,
    requests: Sequence[int] = HEAD_REQUESTS,
    kept: Weights = "plain",
) -> HeadTimes:
    """Greedy drafts of trees at one context length. kept: the format of the head's weights."""
    assert requests[0] == 1
    head = random_head(runner, kept)
    size = draft_bytes(head, depth, context)
    works = {str(n): draft_work(runner, head, n, context, depth, width, nodes) for n in requests}
    seconds = clock(works, REPEATS)
    return HeadTimes(
        depth, width, nodes, context, size, {n: s * 1e3 for n, s in seconds.items()}, seconds["1"] / (size / bandwidth)
    )


def draft_bytes(head: EagleHead, depth: int, context: int) -> int:
    """Bytes that a draft for one request must read: `fc` once; the layer, the LM head and the cache at each level."""
    weights = head.shape.wanted
    width = 1 if head.narrow else head.dtype.itemsize
    once = _numel(weights["fc.weight"])
    level = sum(_numel(size) for name, size in weights.items() if name not in ("fc.weight", "d2t"))
    keys = sum(layer.numel for layer in head.layers) * context
    return width * (once + depth * level) + head.dtype.itemsize * depth * keys


def _numel(size: Sequence[int]) -> int:
    return int(torch.Size(size).numel())


def draft_work(
    runner: Runner,
    head: EagleHead,
    requests: int,
    context: int,
    depth: int,
    width: int,
    nodes: int,
    deepest: int | None = None,
    recent: int = RECENT,
) -> Callable[[], object]:
    """The work of one draft for `requests` requests with `context` tokens in the cache each.

    deepest: levels that the drafter may draft, if more than `depth`. The same number of rows is read again, up to
    `recent` in trees.
    """
    device = runner.device
    reach = -(-(context + nodes + 1) // PAGE)
    state, lanes = lane_state(runner, requests, context, reach)
    pages = reach * (requests + 1)
    table = SamplingTable(requests + 1, runner.vocab_size, device)
    for slot in range(requests):
        table.add(slot, SamplingParams(temperature=0), seed=1)
    plane = torch.randn(pages * PAGE, head.taps.width(head.shape.target_hidden), device=device).to(runner.dtype)
    drafter = EagleDrafter(head, depth=max(depth, deepest or 0), width=width, nodes=nodes)
    drafter.attach(
        Services(
            pool=PagePool(pages, PAGE),
            page_table=_no_tables,
            sampling=table,
            max_rows=2048,
            cache_pages=pages,
            taps=TapView.of(head.taps, head.taps, plane),
        )
    )
    features = Features()
    shape = RoundShape.of([nodes] * requests, context, is_tree=True, features=features, version=0, keeps_logits=False)
    return partial(drafter.draft, DraftRound(state, lanes, depth, shape.keys, features, nodes, recent))


def _no_tables(request_id: str) -> PageTable:
    raise KeyError(request_id)


def measure(
    target: str,
    parts: Sequence[str],
    requests: Sequence[int],
    device: torch.device,
    report: Report,
    clock: Clock | None = None,
) -> None:
    """Measure all parts. One that fails is noted, and the others go on."""
    clock = clock or clock_of(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    runner = random_runner(load_config(resolve(target)), dtype, device)
    report.say(f"a model of random weights: {runner.swaps}")
    bandwidth = copy_bandwidth(device, clock)
    report.put(bandwidth, "copy_bytes_per_s")
    report.put(runner.weights_bytes, "weights_bytes")
    if "tree" in parts:
        with report.part("tree"):
            context = min(CONTEXT, runner.max_positions - TREE_ROWS)
            report.put(asdict(tree_part(runner, bandwidth, clock, context=context)), "tree")
    if "long" in parts:
        with report.part("long"):
            report.put([asdict(step) for step in long_part(runner, bandwidth, clock)], "long")
    if "heads" in parts:
        with report.part("heads"):
            report.put(asdict(head_part(runner, bandwidth, clock)), "heads")
            report.put(asdict(head_part(runner, bandwidth, clock, kept="fp8")), "heads_fp8")
    if "kernels" in parts and device.type == "cuda":
        with report.part("kernels"):
            report.put(report.results.get("kernels", {}) | kernel_part(runner, requests=requests), "kernels")
    if "sampling" in parts:  # last: it changes the LM head
        with report.part("sampling"):
            report.put([asdict(step) for step in sampling_part(runner, clock)], "sampling")


@torch.inference_mode()
def works(runner: Runner, context: int = CONTEXT, trees: Sequence[int] = TREES) -> dict[str, Work]:
    """The works of one request, by name."""
    cache = random_cache(runner, 1, context + max(trees))
    found = {"plain step": lay_out(runner, cache, [Tree()], context).run}
    for rows in trees:
        found[f"tree of {rows} rows"] = lay_out(runner, cache, [binary_tree(rows, runner.vocab_size)], context).run
    draft = draft_work(runner, random_head(runner, "fp8"), 1, context, DEPTH, WIDTH, NODES)
    return {**found, "EAGLE-3 draft in 8 bits": draft}


@torch.inference_mode()
def crowd_works(runner: Runner, requests: Sequence[int], context: int = CONTEXT) -> dict[str, Work]:
    """The works of many requests: a plain step, a pass over trees of 256 rows together, and the draft of these trees.

    The head is opened as usual, so it may draft deeper, after a round of such trees.
    """
    head = random_head(runner, "fp8")
    found: dict[str, Work] = {}
    for n in requests:
        rows = max(2, CROWD_ROWS // n)
        cache = random_cache(runner, n, context + rows)
        tree = binary_tree(rows, runner.vocab_size)
        nodes = rows - 1
        found[f"{n} requests: plain step"] = lay_out(runner, cache, [Tree()] * n, context).run
        found[f"{n} requests: trees of {rows} rows"] = lay_out(runner, cache, [tree] * n, context).run
        depth = min(DEPTH, nodes)
        recent = 4 if depth < 4 else 8  # as rounds of many have it, `engine/draft_loops.py`
        size = (depth, WIDTH, max(nodes, 4))
        draft = draft_work(runner, head, n, context, *size, deepest=OPENED_DEPTH, recent=recent)
        found[f"{n} requests: EAGLE-3 draft of {nodes} nodes in 8 bits"] = draft
    return found


@torch.inference_mode()
def kernel_part(
    runner: Runner,
    watch: Callable[[Work, int], Sequence[KernelTime]] = by_kernel,
    context: int = CONTEXT,
    requests: Sequence[int] = (1,),
) -> dict[str, list[dict[str, Any]]]:
    """The kernels of each work."""
    crowds = [n for n in requests if n > 1]
    wanted = works(runner, context) if 1 in requests else {}
    wanted |= crowd_works(runner, crowds, context) if crowds else {}
    return {name: [one._asdict() for one in fewer(watch(work, REPEATS))] for name, work in wanted.items()}


def fewer(times: Sequence[KernelTime]) -> list[KernelTime]:
    rest = times[_SHOWN:]
    others = [KernelTime("others", sum(one.launches for one in rest), sum(one.us for one in rest))] if rest else []
    return [*times[:_SHOWN], *others]


def markdown(results: Mapping[str, Any]) -> str:
    rows = [*_pass_rows(results), *_long_rows(results), *_head_rows(results), *_sampling_rows(results)]
    lines = ["| | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]
    lines += kernel_lines(results.get("kernels", {}))
    return "\n".join(
        [*lines, *(f"\n{name} failed: {why.splitlines()[-1]}" for name, why in results.get("failed", {}).items())]
    )


def kernel_lines(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """A table of kernels for each work."""
    told: list[str] = []
    for work, kernels in found.items():
        total = sum(one["us"] for one in kernels)
        told += ["", f"**{work}**: {total / 1e3:.3f} ms", "", "| kernel | launches | us | % |", "|---|---|---|---|"]
        told += [
            f"| `{one['name'][:60]}` | {one['launches']:g} | {one['us']:.1f} | {100 * one['us'] / total:.1f} |"
            for one in kernels
        ]
    return told


Row = tuple[str, str]
"""A label and its measured value."""


def _pass_rows(results: Mapping[str, Any]) -> list[Row]:
    found = results.get("tree")
    if not found:
        return []
    where = f"at {found['context']} tokens"
    rows = [(f"pass over {n} rows, a request each, {where}, ms", f"{ms:.3f}") for n, ms in found["rows_ms"].items()]
    tree = f"{found['tree_ms']:.3f} ({found['tree_over_plain']:.3f} plain steps)"
    rows.append((f"pass over a tree of {found['tree_rows']} rows, {where}, ms", tree))
    return [*rows, ("plain step over its bytes at copy bandwidth", f"{found['step_over_bytes']:.3f}")]


def _long_rows(results: Mapping[str, Any]) -> list[Row]:
    return [
        (f"step at {step['context']:,} tokens, ms", f"{step['ms']:.3f} ({step['over_bytes']:.3f} times its bytes)")
        for step in results.get("long", ())
    ]


def _head_rows(results: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for key, how in (("heads", ""), ("heads_fp8", " in 8 bits")):
        if found := results.get(key):
            what = f"draft of an EAGLE-3 head{how}, depth {found['depth']}, {found['nodes']} nodes"
            rows += [(f"{what}, {n} at once, ms", f"{ms:.3f}") for n, ms in found["ms"].items()]
            rows.append((f"{what}, over its bytes at copy bandwidth", f"{found['over_bytes']:.3f}"))
    return rows


def _sampling_rows(results: Mapping[str, Any]) -> list[Row]:
    rows = []
    for step in results.get("sampling", ()):
        for name, ms in step["ms"].items():
            over = "" if name == "greedy" else f" ({step['over_greedy'][name]:.3f} greedy steps)"
            what = f"step with its choice, {name}, {step['vocab_size']:,} tokens to choose from, ms"
            rows.append((what, f"{ms:.3f}{over}"))
    return rows


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", help="the model whose shape is measured")
    made.add_argument("--parts", default=",".join(PARTS), help=f"by comma; all of them: {', '.join(PARTS)}")
    made.add_argument("--requests", default="1", help="of `kernels`, by comma")
    made.add_argument("--json", type=Path, help="where the results go")
    made.add_argument("--add", action="store_true", help="keep what the JSON file has of other parts, of this machine")
    made.add_argument("--show", type=Path, help="print the table of this JSON file, and measure nothing")
    made.add_argument("--device", default="cuda", help="cpu: only to try the command, with tiny models")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.show:
        print(markdown(json.loads(options.show.read_text())))
        return
    if not options.target:
        parser().error("--target is needed (or --show FILE)")
    try:
        parts, requests = chosen("--parts", options.parts, PARTS), sizes("--requests", options.requests)
    except ConfigError as error:
        parser().error(str(error))
    report = Report(first_results(options), options.json)
    measure(options.target, parts, requests, torch.device(options.device), report)
    print(markdown(report.results))
    print(json.dumps(report.results))


if __name__ == "__main__":
    main()
