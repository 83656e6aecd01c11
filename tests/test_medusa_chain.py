"""Chained Medusa heads in the engine: the same tokens as without, and trees of what the heads say on each path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exactness import FEW, Case, cases, check_exact, differences, plain, run
from families import CPU
from fresh import prefill
from medusa_checkpoints import (
    HIDDEN,
    VOCAB,
    chained_medusa,
    counting_target,
    head_tensors,
    said_in_chain,
    save_heads,
    tiny_medusa,
)
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import Draft
from slipstream.core.errors import ConfigError, ModelError
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.drafters.medusa_chain import ChainedMedusaDrafter
from slipstream.models.heads.medusa import load_medusa
from slipstream.models.runner import Runner, open_unchecked
from stepping import Arrival, Stepper

OFF = SpeculationParams(enabled=False)
ROUNDS = ["eager", "queued"]
NOISE = 0.05
WEIGHTS = "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chained_medusa(tmp_path_factory.mktemp("heads") / "chained", noise=NOISE)


def drafter_of(bench: Stepper | LLM) -> ChainedMedusaDrafter:
    drafter = bench.engine.drafting.drafters["medusa"]
    assert isinstance(drafter, ChainedMedusaDrafter)
    return drafter


@pytest.mark.parametrize("rounds", ROUNDS)
def test_the_same_tokens_as_without(open_llm: Callable[..., LLM], chained: Path, rounds: str) -> None:
    llm = open_llm(drafter=f"medusa:{chained}", planner="fixed", rounds=rounds)
    check_exact(llm, "medusa")
    assert (drafter_of(llm).width, drafter_of(llm).most_nodes) == (16, 63)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(("options", "most"), [("?depth=2&width=3", 12), ("?width=1", 3), ("?nodes=5", 5)])
def test_trees_of_other_sizes(
    open_llm: Callable[..., LLM], chained: Path, rounds: str, options: str, most: int
) -> None:
    llm = open_llm(drafter=f"medusa:{chained}{options}", planner="fixed", rounds=rounds)
    assert drafter_of(llm).most_nodes == most
    batch = [case for case in cases() if case.few][:6]
    expected = plain(llm, batch)
    for draft_tokens in (1, 4, 63):
        got = run(llm, batch, "medusa", draft_tokens=draft_tokens)
        assert not differences(batch, expected, got)
        assert sum(output.speculation.drafted for output in got) > 0


@pytest.mark.parametrize("rounds", ROUNDS)
def test_different_budgets_in_one_batch(open_llm: Callable[..., LLM], chained: Path, rounds: str) -> None:
    llm = open_llm(drafter=f"medusa:{chained}", planner="fixed", rounds=rounds)
    batch = [case for case in cases() if case.few]
    expected = plain(llm, batch)
    hows = [SpeculationParams(draft_tokens=(1, 3, 20, 63)[i % 4], enabled=i % 5 > 0) for i in range(len(batch))]
    params = [replace(case.params, speculation=how) for case, how in zip(batch, hows, strict=True)]
    got = [o.outputs[0] for o in llm.generate([list(case.prompt) for case in batch], params)]
    assert not differences(batch, expected, got)
    assert sum(answer.speculation.accepted for answer in got) > 0


@pytest.mark.parametrize("rounds", ROUNDS)
def test_merged_with_another_drafter(open_llm: Callable[..., LLM], chained: Path, rounds: str) -> None:
    llm = open_llm(drafter=f"suffix+medusa:{chained}?width=4", planner="fixed", rounds=rounds)
    batch = [case for case in cases() if case.few]
    got = run(llm, batch, "suffix+medusa")
    assert not differences(batch, plain(llm, batch), got)
    assert sum(a.speculation.by_drafter["medusa"].accepted for a in got) > 0


@pytest.mark.parametrize("rounds", ROUNDS)
def test_preempted_and_forked_requests(tiny_target: Path, chained: Path, rounds: str) -> None:
    bench = Stepper(
        tiny_target,
        f"medusa:{chained}",
        pages=18,
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=48,
        draft_tokens=6,
        rounds=rounds,
    )
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, logit_bias=FEW, n=3)
    together = [Arrival(5 + 3 * i, replace(params, seed=i, temperature=i % 2)) for i in range(5)]
    on = bench.run(together)
    assert bench.engine.scheduler.preemptions > 0
    off = [replace(a, params=replace(a.params, speculation=OFF)) for a in together]
    assert [a.token_ids for a in on] == [a.token_ids for a in bench.run(off)]
    assert sum(a.speculation.accepted for a in on) > 20


def test_a_prompt_of_one_token(open_llm: Callable[..., LLM], chained: Path) -> None:
    llm = open_llm(drafter=f"medusa:{chained}", planner="fixed")
    batch = [Case("one", (7,), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))]
    assert not differences(batch, plain(llm, batch), run(llm, batch, "medusa"))


class Written:
    """Chained heads by hand, on a tiny target whose last states are seen from its own logits' side."""

    def __init__(self, folder: Path, target: Path, layers: int = 1) -> None:
        self.tensors, self.layers = load_file(folder / WEIGHTS), layers
        model = load_file(target / "model.safetensors")
        self.words, self.lm_head = model["model.embed_tokens.weight"], model["lm_head.weight"]

    def said(self, x: Tensor, tokens: Sequence[int]) -> Tensor:  # [V]
        return said_in_chain(self.tensors, self.layers, x, [self.words[token] for token in tokens], self.lm_head)

    def tree(self, x: Tensor, last: int, width: int, depth: int, nodes: int) -> list[tuple[tuple[int, ...], float]]:
        """Paths of the tree with how sure each is: of all that the beam of each level offers, the surest."""
        beam: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        offered: list[tuple[tuple[int, ...], float]] = []
        for _ in range(depth):
            level = []
            for path, sure in beam:
                best = self.said(x, (last, *path)).log_softmax(0).topk(width)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                level += [((*path, token), sure + share) for token, share in pairs]
            offered += level
            beam = sorted(level, key=lambda one: -one[1])[:width]
        return sorted(offered, key=lambda one: -one[1])[:nodes]


def test_its_trees_are_what_its_heads_say(tiny_target: Path, chained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every path, from the hidden state at the token before the last one, computed afresh."""
    bench = Stepper(tiny_target, f"medusa:{chained}?width=3", max_num_seqs=3, draft_tokens=12)
    drafter, written, checked = drafter_of(bench), Written(chained, tiny_target), []
    propose = drafter.propose_trees
    inverse = torch.linalg.pinv(written.lm_head)  # [H, V]

    def propose_and_compare(requests: Sequence[DraftRequest], budget: Sequence[int], levels: int) -> Draft:
        draft = propose(requests, budget, levels)
        for i, request in enumerate(requests):
            count = int(draft.counts[i])
            x = inverse @ prefill(bench.engine.target, request.tokens[:-1])[1][-1]
            wanted = written.tree(x, request.tokens[-1], 3, min(levels, max(budget)), count)
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(draft.tokens[i].tolist(), draft.parents[i].tolist(), strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            assert paths[:count] == [path for path, _ in wanted]
            checked.append(count)
        return draft

    monkeypatch.setattr(drafter, "propose_trees", propose_and_compare)
    bench.run([Arrival(4 + i, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), 2 * i) for i in range(4)])
    assert sum(checked) > 100


@pytest.mark.parametrize("rounds", ROUNDS)
def test_heads_read_what_was_guessed_before_them(tmp_path: Path, open_llm: Callable[..., LLM], rounds: str) -> None:
    """Where the next token follows from the last one alone, all of them are right; apart from one another only one."""
    target, heads = counting_target(tmp_path / "counting"), {}
    for head in range(3):
        heads[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        heads[f"{head}.token.weight"] = 100.0 ** (head + 1) * torch.eye(HIDDEN)  # the last token read is the loudest
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    taus = []
    for chained in (True, False):
        config: dict[str, Any] = {"medusa_num_heads": 3, "medusa_num_layers": 1, "medusa_chained": chained}
        folder = save_heads(tmp_path / f"heads_{chained}", heads, WEIGHTS, **config)
        llm = open_llm(target, drafter=f"medusa:{folder}", planner="fixed", rounds=rounds, draft_tokens=3)
        (answer,) = (output.outputs[0] for output in llm.generate([[3, 4]], params))
        assert list(answer.token_ids) == [(5 + i) % HIDDEN for i in range(40)]
        taus.append(40 / answer.speculation.rounds)
    assert taus[0] > 3.5
    assert taus[1] < 2.5


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Runner:
    return open_unchecked(tiny_target, torch.float32, CPU)


@pytest.mark.parametrize("own_heads", [False, True])
def test_heads_say_what_the_reference_says(target: Runner, tiny_target: Path, tmp_path: Path, own_heads: bool) -> None:
    written = Written(chained_medusa(tmp_path / "heads", layers=2, noise=0.2), tiny_target, 2)
    if own_heads:
        dice = torch.Generator().manual_seed(2)
        own = {f"{head}.2.weight": torch.randn(VOCAB, HIDDEN, generator=dice) for head in range(3)}
        config: dict[str, Any] = {"medusa_num_heads": 3, "medusa_num_layers": 2, "medusa_chained": True}
        save_heads(tmp_path / "heads", written.tensors | own, WEIGHTS, **config)
    heads = load_medusa(tmp_path / "heads", target)
    assert heads.chained
    x = states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(9))
    tokens = torch.randint(0, VOCAB, (3, 4), generator=torch.Generator().manual_seed(8))
    for head in range(3):
        x = heads.chained_hidden(head, x, tokens[head])
        written.lm_head = own[f"{head}.2.weight"] if own_heads else written.lm_head
        for row in range(4):
            wanted = written.said(states[row], tokens[: head + 1, row].tolist())
            torch.testing.assert_close(heads.head_logits(head, x)[row], wanted, atol=1e-4, rtol=1e-4)


def test_a_smaller_vocabulary(open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    tensors = head_tensors("vllm", heads=2, layers=1, vocab=5) | {"token_map": torch.tensor([40, 10, 30, 20, 5])}
    tensors |= {f"{head}.token.weight": 0.1 * torch.randn(HIDDEN, HIDDEN) for head in range(2)}
    config = {"num_heads": 2, "num_hidden_layers": 1, "medusa_chained": True}
    folder = save_heads(tmp_path / "heads", tensors, "model.safetensors", **config)
    llm = open_llm(drafter=f"medusa:{folder}", planner="fixed")
    batch = [case for case in cases() if case.few][:6]
    got = run(llm, batch, "medusa")
    assert not differences(batch, plain(llm, batch), got)
    assert sum(output.speculation.accepted for output in got) > 0
    assert drafter_of(llm).most_nodes == 30  # five tokens, and five behind each


def test_what_does_not_fit_is_refused(tiny_target: Path, chained: Path, target: Runner, tmp_path: Path) -> None:
    tensors = load_file(chained / WEIGHTS)
    del tensors["1.token.weight"]
    config: dict[str, Any] = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    folder = save_heads(tmp_path / "less", tensors, WEIGHTS, medusa_chained=True, **config)
    with pytest.raises(ModelError, match=r"missing: 1\.token\.weight \[32, 32\]"):
        load_medusa(folder, target)
    plain_heads = head_tensors("original", 3, 1, own_heads=False)
    folder = save_heads(tmp_path / "none", plain_heads, WEIGHTS, medusa_chained=True, **config)
    with pytest.raises(ModelError, match=r"missing: 0\.token\.weight \[32, 32\]"):
        Stepper(tiny_target, f"medusa:{folder}")
    folder = save_heads(tmp_path / "maybe", plain_heads, WEIGHTS, medusa_chained="yes", **config)
    with pytest.raises(ModelError, match="medusa_chained='yes', must be true or false"):
        load_medusa(folder, target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("depth=4", "depth=4: these heads guess 1 to 3 tokens in a row"),
        ("width=64", "width=64, nodes=63: each must be 1 to 63"),
        ("weights=fp8", "'weights' is unknown, must be one of depth, width, nodes"),
        ("nodes=0", "nodes='0', must be a whole number of at least 1"),
    ],
)
def test_wrong_sizes_are_refused(tiny_target: Path, chained: Path, options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Stepper(tiny_target, f"medusa:{chained}?{options}")


def test_sizes_are_for_chained_heads(tiny_target: Path, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "heads", medusa_chained=False)
    assert isinstance(Stepper(tiny_target, f"medusa:{folder}").engine.drafting.drafters["medusa"], MedusaDrafter)
    with pytest.raises(ConfigError, match="only chained heads grow trees by width; leave it out"):
        Stepper(tiny_target, f"medusa:{folder}?width=4")
