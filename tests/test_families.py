"""Our passes give transformers' logits, family by family: as loaded, and with the faster modules swapped in."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from families import (
    CPU,
    FAMILIES,
    WINDOW,
    Passes,
    load_reference,
    path_to,
    plain_logits,
    random_tokens,
    save_random,
    tiny_config,
)
from slipstream.kernels.attention import paged_attention
from slipstream.models import attention
from slipstream.models.parity import open_model
from slipstream.models.runner import Runner, open_unchecked

TOLERANCE = 1e-4
SEEN = 1e-3
"""What a mistake must amount to, so that the tolerance is sure to see it."""
PARENTS = (-1, 0, 0, 1, 1, 2, 5, 5)
"""A root, as the engine's last committed token, and branches at three depths."""

Opened = Callable[[str], Runner]


class Zoo:
    """Each family saved and opened once for the whole file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path: Callable[[str], Path] = cache(lambda f: save_random(folder / f, tiny_config(f)))
        self.reference: Callable[[str], PreTrainedModel] = cache(lambda f: load_reference(self.path(f)))
        self.unswapped: Opened = cache(lambda f: open_unchecked(self.path(f), torch.float32, CPU))
        self.served: Opened = cache(lambda f: open_model(self.path(f), torch.float32, CPU))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("zoo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(folder / "cache"))
        yield Zoo(folder)


def worst(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def whole(passes: Passes, model: PreTrainedModel) -> float:
    tokens = random_tokens(19, seed=1)
    return worst(passes.run([(0, tokens)]), plain_logits(model, tokens))


def chunked(passes: Passes, model: PreTrainedModel) -> float:
    tokens = random_tokens(23, seed=2)
    cuts = (0, 5, 6, 14, 23)
    ours = [passes.run([(0, tokens[a:b])]) for a, b in pairwise(cuts)]
    return worst(torch.cat(ours), plain_logits(model, tokens))


def decoding(passes: Passes, model: PreTrainedModel) -> float:
    tokens = random_tokens(21, seed=3)
    ours = [passes.run([(1, tokens[:9])])] + [passes.run([(1, [token])]) for token in tokens[9:]]
    return worst(torch.cat(ours), plain_logits(model, tokens))


def tree(passes: Passes, model: PreTrainedModel) -> float:
    """A tree behind a committed prefix, with another request's prompt in the same pass."""
    prefix, nodes, other = random_tokens(11, seed=4), random_tokens(len(PARENTS), seed=5), random_tokens(6, seed=6)
    passes.run([(0, prefix)])
    ours = passes.run([(0, nodes), (1, other)], parents=PARENTS)
    theirs = [
        plain_logits(model, prefix + [nodes[n] for n in path_to(PARENTS, node)])[-1] for node in range(len(nodes))
    ]
    return worst(ours, torch.cat((torch.stack(theirs), plain_logits(model, other))))


def two_requests(passes: Passes, model: PreTrainedModel) -> float:
    """A prompt and another request's next tokens side by side; only some rows reach the LM head."""
    first, second = random_tokens(17, seed=7), random_tokens(13, seed=8)
    passes.run([(1, second[:10])])
    ours = passes.run([(0, first), (1, second[10:])], rows=[16, 17, 19])
    return worst(ours, torch.cat((plain_logits(model, first)[-1:], plain_logits(model, second)[[10, 12]])))


SHAPES = [whole, chunked, decoding, tree, two_requests]


@pytest.mark.parametrize("shape", [chunked, tree], ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_unswapped(zoo: Zoo, family: str, shape: Callable[[Passes, PreTrainedModel], float]) -> None:
    runner = zoo.unswapped(family)
    assert runner.swaps == "none"
    assert shape(Passes(runner), zoo.reference(family)) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_as_served(zoo: Zoo, family: str, shape: Callable[[Passes, PreTrainedModel], float]) -> None:
    assert shape(Passes(zoo.served(family)), zoo.reference(family)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_at_the_far_end_of_the_context(zoo: Zoo, family: str) -> None:
    runner, tokens = zoo.served(family), random_tokens(12, seed=9)
    start = runner.max_positions - len(tokens)
    ours = Passes(runner).run([(0, tokens)], start=start)
    assert worst(ours, plain_logits(zoo.reference(family), tokens, start)) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "ignored"),
    [
        ("mistral", "window"),
        ("qwen2-moe", "window"),
        ("gemma2", "softcap"),
        ("gemma2", "scaling"),
        ("gpt-oss", "window"),
        ("gpt-oss", "sinks"),
    ],
)
def test_ignoring_a_trait_would_be_seen(zoo: Zoo, family: str, ignored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = paged_attention

    def without(*args: Any, **traits: Any) -> Tensor:
        plain = args[0].shape[-1] ** -0.5 if ignored == "scaling" else None
        return true(*args, **{**traits, ignored: plain})

    runner = zoo.unswapped(family)
    monkeypatch.setattr(attention, "paged_attention", without)
    assert chunked(Passes(runner), zoo.reference(family)) > SEEN


def test_ignoring_the_tree_would_be_seen(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "visible_rows", lambda words, rows: torch.ones(rows, rows, dtype=torch.bool).tril())
    assert tree(Passes(zoo.unswapped("llama")), zoo.reference("llama")) > SEEN


def test_windows_are_read_where_only_the_mask_has_them(zoo: Zoo) -> None:
    """Qwen2-MoE's layers do not hand their window on."""
    runner = zoo.unswapped("qwen2-moe")
    windows = [runner._traits[layer].window for layer in range(len(runner.layers))]
    wanted = [WINDOW if kind == "sliding_attention" else None for kind in runner.config.layer_types]
    assert windows == wanted
    assert WINDOW in windows


def test_keys_and_values_may_differ_in_size(zoo: Zoo) -> None:
    (shape,) = set(zoo.served("deepseek-v3").layers)
    assert (shape.kv_heads, shape.key_dim, shape.value_dim) == (4, 16, 12)


def test_longrope_ends_where_its_frequencies_would_change(zoo: Zoo) -> None:
    """Beyond, transformers turns the whole sequence by other angles: what is in the cache would be wrong."""
    assert zoo.served("phi3-longrope").config.max_position_embeddings == 96
    assert zoo.served("phi3-longrope").max_positions == 40
    tokens = random_tokens(41, seed=1)
    model = zoo.reference("phi3-longrope")
    assert worst(plain_logits(model, tokens)[:40], plain_logits(model, tokens[:40])) > SEEN


def test_a_request_does_not_feel_its_neighbours(zoo: Zoo) -> None:
    """The same rows alone and in company: at most rounding apart."""
    runner, tokens, other = zoo.served("llama"), random_tokens(9, seed=1), random_tokens(20, seed=2)
    alone = Passes(runner).run([(1, tokens)])
    together = Passes(runner).run([(0, other), (1, tokens)])
    assert worst(together[20:], alone) < 1e-5


def test_no_row_may_ask_for_logits(zoo: Zoo) -> None:
    """A chunk that does not complete its prompt brings no row to the LM head."""
    passes = Passes(zoo.served("llama"))
    assert passes.run([(0, random_tokens(5, seed=1))], rows=[]).shape == (0, 97)
