"""The draft of an EAGLE-3 head by itself: its whole loop, beside the bytes that it must read.

The head has the shape of one made for the target, and random weights: what it guesses does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gpu_clock import Clock
from gpu_passes import CONTEXT, PAGE, REPEATS, lane_state

from slipstream.core.params import SamplingParams
from slipstream.drafters.base import DraftRound, Services
from slipstream.drafters.eagle import EagleDrafter
from slipstream.engine.round_shape import RoundShape
from slipstream.kernels.gpu.rows import RECENT
from slipstream.kv.pages import PagePool, PageTable
from slipstream.models.heads.base import Weights
from slipstream.models.heads.eagle import EagleHead
from slipstream.models.heads.eagle_files import EagleCheckpoint, EagleShape
from slipstream.models.runner import Runner
from slipstream.models.taps import Taps, TapView
from slipstream.sampling.table import Features, SamplingTable

DRAFT_VOCABULARY = 32_000
DEPTH, WIDTH, NODES = 6, 8, 63
OPENED_DEPTH = 10
"""Levels that a head may guess where nothing is said of it (`EagleDrafter`)."""
REQUESTS = (1, 8)


@dataclass(frozen=True, slots=True)
class HeadTimes:
    """One head's drafts: milliseconds by requests, and one request's over its bytes at copy bandwidth."""

    depth: int
    width: int
    nodes: int
    context: int
    bytes: int  # of one draft: the head and its LM head once for each level, what brings the taps together once
    ms: dict[str, float]
    over_bytes: float


@torch.inference_mode()
def random_head(runner: Runner, kept: Weights, draft_vocabulary: int = DRAFT_VOCABULARY) -> EagleHead:
    """A head for this target, as large as such heads are: one layer of the target's, and a vocabulary of its own."""
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
    requests: Sequence[int] = REQUESTS,
    kept: Weights = "plain",
) -> HeadTimes:
    """Drafts of trees, greedy, at one length of context, by a head whose weights are kept so."""
    assert requests[0] == 1
    head = random_head(runner, kept)
    size = draft_bytes(head, depth, context)
    works = {str(n): draft_work(runner, head, n, context, depth, width, nodes) for n in requests}
    seconds = clock(works, REPEATS)
    return HeadTimes(
        depth, width, nodes, context, size, {n: s * 1e3 for n, s in seconds.items()}, seconds["1"] / (size / bandwidth)
    )


def draft_bytes(head: EagleHead, depth: int, context: int) -> int:
    """What the loop must read for one request: `fc` once, and at each level the layer, the LM head and the cache."""
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
    """The work of one draft for so many requests, each with so many tokens in the cache.

    deepest: levels that the drafter may guess, where they are more than these; as many tokens are read again, but no
    more than were recent, in trees.
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
