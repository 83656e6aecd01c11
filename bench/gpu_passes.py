"""Passes by themselves, without an engine around them: trees, many requests, long contexts, the choice of a token.

Rows are laid out as a round lays them out (`engine/rounds.py`), over a cache of random numbers: zeros
would take less power than a real one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from gpu_clock import Clock
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from slipstream.core.draft import Draft, Tree
from slipstream.core.params import SamplingParams
from slipstream.engine.round_shape import RoundShape
from slipstream.kernels.gpu.jit import has_kernels
from slipstream.kernels.gpu.rows import RECENT, LaneState, PassRows, pack_rows
from slipstream.kv.cache import KVCache
from slipstream.models import attention, build
from slipstream.models.runner import Runner
from slipstream.sampling.choose import choose
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable

PAGE = 16
CONTEXT = 300
TREE_ROWS = 64
REQUESTS = (1, 8, 32, 128)
LONG_CONTEXTS = (8_000, 32_000)
LONG_POSITIONS = 40_960
LARGE_VOCABULARY = 151_936
REPEATS = 20
CHOICES = {
    "greedy": SamplingParams(temperature=0),
    "T=1": SamplingParams(temperature=1, seed=1),
    "T=1 top-p 0.95": SamplingParams(temperature=1, top_p=0.95, seed=1),
}


@dataclass(frozen=True, slots=True)
class FixedPass:
    """A pass over rows that were laid out once: it can be run, and captured, any number of times."""

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
    """A balanced tree of so many rows, its root included: row r hangs from row (r - 1) // 2."""
    nodes = range(rows - 1)
    return Tree(tuple((31 * node + 7) % vocab_size for node in nodes), tuple(node // 2 - 1 for node in nodes))


@torch.inference_mode()
def random_cache(runner: Runner, requests: int, tokens: int) -> KVCache:
    """Room for so many tokens of each request, full of numbers, and one page for nobody."""
    cache = runner.new_cache(requests * -(-tokens // PAGE) + 1, PAGE)
    for plane in cache.planes:
        plane.normal_()
    return cache


class LanesAt(NamedTuple):
    """Requests that stand somewhere in their texts, and the one that stands for nobody behind them."""

    state: LaneState
    lanes: Tensor  # [B] int64


def lane_state(runner: Runner, requests: int, context: int, reach: int) -> LanesAt:
    """So many requests, each with so many tokens in the cache and so many pages. The last one's are not there."""
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
    """The pass of one round: a request a tree, each with so many tokens in the cache before it."""
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
    """What a plain step must read: each weight once, and the cache. Of an embedding that is not also the LM head it
    reads one line a request, which does not count. A layer with a window would read less than is said here."""
    weights = runner.weights_bytes
    if not getattr(runner.config, "tie_word_embeddings", False):
        embedding = cast(Tensor, runner.model.get_input_embeddings().weight)
        weights -= embedding.numel() * embedding.element_size()
    per_token = sum(layer.numel for layer in runner.layers) * runner.dtype.itemsize
    return weights + per_token * context * requests


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Passes of one model: milliseconds by what was in them, and the plain one over its bytes at copy bandwidth."""

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
    """A verify pass over one request's tree, beside passes over requests without drafts: first of all over one."""
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
    """A model of this shape with random weights and so many positions, as a loaded one runs: fused, no files."""
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
    """A plain step at one length of context."""

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
    """A plain step with the choice of its token, at one size of vocabulary."""

    vocab_size: int
    ms: dict[str, float]  # by `CHOICES`
    over_greedy: dict[str, float]


def sampling_part(
    runner: Runner, clock: Clock, *, context: int = CONTEXT, large: int = LARGE_VOCABULARY
) -> tuple[SamplingStep, ...]:
    """The step with every way to choose, by the model's vocabulary and by a larger one. Changes the model's LM head."""
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
    """A pass and the choice of its token; how it is chosen stands in a slot of the table."""

    step: FixedPass
    table: SamplingTable
    slot: int

    def run(self) -> Tensor:  # [N]
        rows = self.step.rows
        wanted = SampleRows(torch.full_like(rows.lanes, self.slot), rows.positions + 1, rows.generated)
        return choose(self.step.run(), wanted, self.table, self.table.features([self.slot]))


@torch.inference_mode()
def set_vocabulary(runner: Runner, size: int) -> None:
    """Another LM head, of random numbers, for so many tokens. The embedding stays as it is."""
    embedding = cast(Tensor, runner.model.get_input_embeddings().weight)
    head = nn.Linear(embedding.shape[1], size, bias=False, dtype=runner.dtype, device=runner.device)
    head.weight.normal_(std=getattr(runner.config, "initializer_range", 0.02))
    head.requires_grad_(False)
    runner.model.lm_head = head
    if has_kernels(runner.device):
        build.install(runner.model, runner.max_positions)
    runner.vocab_size = size
