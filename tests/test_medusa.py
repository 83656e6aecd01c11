"""Medusa: what its heads compute, how its trees follow what is accepted, and the same tokens as without it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exactness import FEW, cases, differences, plain, run
from families import CPU
from medusa_checkpoints import (
    HIDDEN,
    VOCAB,
    chained_medusa,
    counting_target,
    head_tensors,
    knowing_medusa,
    said,
    said_in_chain,
    save_heads,
    tiny_medusa,
)
from planning import Scripted
from queueing import Queue
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import ROOT, Draft, Tree
from slipstream.core.errors import ConfigError, DrafterError, ModelError
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.medusa import (
    ChainedMedusaDrafter,
    HeadAcceptance,
    MedusaDrafter,
    StaticTree,
    Table,
    best_tree,
    check_table,
)
from slipstream.models.heads.medusa import load_medusa
from slipstream.models.runner import Runner, open_unchecked
from slipstream.plan.types import Offer
from stepping import Arrival, Stepper, prefill

OFF = SpeculationParams(enabled=False)


ROUNDS = ["eager", "queued"]


@pytest.fixture(scope="module")
def knowing(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return knowing_medusa(tmp_path_factory.mktemp("heads") / "knowing", tiny_target)


def drafter_of(bench: Stepper) -> MedusaDrafter:
    drafter = bench.engine.drafting.drafters["medusa"]
    assert isinstance(drafter, MedusaDrafter)
    return drafter


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_smaller_vocabulary(open_llm: Callable[..., LLM], tmp_path: Path, rounds: str) -> None:
    """The heads know few tokens, and only those are guessed."""
    ids = torch.tensor([40, 10, 30, 20, 5])
    tensors = head_tensors("vllm", heads=2, layers=1, vocab=5) | {"token_map": ids}
    folder = save_heads(tmp_path / "heads", tensors, "model.safetensors", num_heads=2, num_hidden_layers=1)
    llm = open_llm(drafter=f"medusa:{folder}", planner="fixed", rounds=rounds)
    batch = [case for case in cases() if case.few]
    got = run(llm, batch, "medusa", draft_tokens=63)  # all that five tokens twice can be: 30
    assert not differences(batch, plain(llm, batch), got)
    assert sum(output.speculation.accepted for output in got) > 0
    assert llm.engine.drafting.drafters["medusa"].most_nodes == 30  # type: ignore[attr-defined]


def test_its_guesses_are_what_its_heads_say(tiny_target: Path, knowing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the hidden state at the token before the last one, computed afresh: so what the cache keeps is right."""
    bench = Stepper(tiny_target, f"medusa:{knowing}", max_num_seqs=3, draft_tokens=12)
    drafter = drafter_of(bench)
    propose, checked = drafter.propose, []

    def propose_and_compare(requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        draft = propose(requests, budget)
        for i, request in enumerate(requests):
            logits = prefill(bench.engine.target, request.tokens[:-1])[1][-1]  # these heads say what the target says
            best = logits.topk(10).indices.tolist()
            count = int(draft.counts[i])
            assert draft.tokens[i, :count].tolist() == [best[rank] for rank in drafter.tree.ranks[:count]]
            assert draft.parents[i, :count].tolist() == list(drafter.tree.parents[:count])
            checked.append(count)
        return draft

    monkeypatch.setattr(drafter, "propose", propose_and_compare)
    bench.run([Arrival(4 + i, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), 2 * i) for i in range(4)])
    assert sum(checked) > 100


def test_its_first_guess_is_drawn_with_the_targets_noise(
    tiny_target: Path, knowing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where head and target have one distribution, the first rank is the token that the target draws."""
    bench = Stepper(tiny_target, f"medusa:{knowing}", draft_tokens=1)
    # one bias for all: what is likely does not depend on what came before
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, logit_bias=dict.fromkeys(FEW, 60.0)
    )
    (answer,) = bench.run([Arrival(4, params)])
    assert answer.speculation.accepted > 10
    assert len(set(answer.token_ids)) == 4


@pytest.mark.parametrize("rounds", ROUNDS)
def test_the_tree_follows_what_the_heads_are_right_about(tiny_target: Path, knowing: Path, rounds: str) -> None:
    """Always the same token: the first rank of every head is right, and the tree becomes a chain first."""
    drafter = f"medusa:{knowing}"
    bench = Stepper(tiny_target, drafter, max_num_seqs=4, draft_tokens=8, rounds=rounds)
    before = drafter_of(bench).tree
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, logit_bias={10: 1000.0})
    answers = bench.run([Arrival(3 + i, params, i) for i in range(24)])
    after = drafter_of(bench)
    assert after.tree != before
    assert after.tree.ranks[:3] == (0, 0, 0)
    assert after.tree.parents[:3] == (-1, 0, 1)
    assert all(row[0] > 0.8 for row in after.acceptance)
    assert all(a.token_ids == [10] * 150 for a in answers)
    assert sum(a.speculation.accepted for a in answers) > 24 * 100


def test_a_table_that_is_given(tiny_target: Path, tmp_path: Path) -> None:
    table = [[0.9, 0.0], [0.1, 0.8], [0.2, 0.2]]
    bench = Stepper(tiny_target, f"medusa:{tiny_medusa(tmp_path / 'heads', medusa_acceptance=table)}")
    assert drafter_of(bench).tree == best_tree(tuple(map(tuple, table)))
    wrong = tiny_medusa(tmp_path / "wrong", medusa_acceptance=[[2.0], [1.0], [1.0]])
    with pytest.raises(ConfigError, match=r"medusa_acceptance\[0\]=\[2\.0\]"):
        Stepper(tiny_target, f"medusa:{wrong}")


@pytest.mark.parametrize("rounds", ROUNDS)
def test_fewer_nodes_in_the_tree_than_a_round_has(tiny_target: Path, tmp_path: Path, rounds: str) -> None:
    """One head has ten guesses, and 20 were asked for."""
    bench = Stepper(tiny_target, f"medusa:{tiny_medusa(tmp_path / 'heads', 1)}", draft_tokens=20, rounds=rounds)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=12, ignore_eos=True)
    (on,) = bench.run([Arrival(5, params)])
    (off,) = bench.run([Arrival(5, replace(params, speculation=OFF))])
    assert on.token_ids == off.token_ids


def test_it_misses_nothing_where_it_rests(tiny_target: Path, knowing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps no state, so it need not catch up."""

    class Moody(Scripted):
        rounds = 0

        def nodes(self, offer: Offer) -> list[int]:
            self.rounds += 1
            return [0 if self.rounds % 4 else cap for cap in offer.caps]

    monkeypatch.setattr(MedusaDrafter, "catch_up", lambda *_: pytest.fail("there was nothing to read"))
    bench = Queue(tiny_target, f"medusa:{knowing}", draft_tokens=6)
    bench.engine.drafting.planner = Moody()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias={10: 1000.0})
    (answer,) = bench.run([Arrival(4, params)])
    assert answer.speculation.accepted > 8


NOISE = 0.05


WEIGHTS = "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chained_medusa(tmp_path_factory.mktemp("heads") / "chained", noise=NOISE)


def chained_of(bench: Stepper | LLM) -> ChainedMedusaDrafter:
    drafter = bench.engine.drafting.drafters["medusa"]
    assert isinstance(drafter, ChainedMedusaDrafter)
    return drafter


@pytest.mark.parametrize("rounds", ["queued"])
@pytest.mark.parametrize(("options", "most"), [("?depth=2&width=3", 12), ("?width=1", 3), ("?nodes=5", 5)])
def test_trees_of_other_sizes(
    open_llm: Callable[..., LLM], chained: Path, rounds: str, options: str, most: int
) -> None:
    llm = open_llm(drafter=f"medusa:{chained}{options}", planner="fixed", rounds=rounds)
    assert chained_of(llm).most_nodes == most
    batch = [case for case in cases() if case.few][:6]
    got = run(llm, batch, "medusa")
    assert not differences(batch, plain(llm, batch), got)
    assert sum(output.speculation.drafted for output in got) > 0


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
    drafter, written, checked = chained_of(bench), Written(chained, tiny_target), []
    propose = drafter.propose_trees
    inverse = torch.linalg.pinv(written.lm_head)  # [H, V]

    def propose_and_compare(requests: Sequence[DraftRequest], budget: Sequence[int], levels: int) -> Draft:
        draft = propose(requests, budget, levels)
        for i, request in enumerate(requests):
            count = int(draft.counts[i])
            x = inverse @ prefill(bench.engine.target, request.tokens[:-1])[1][-1]
            wanted = written.tree(x, request.tokens[-1], 3, min(levels, max(budget)), count)
            found: list[tuple[int, ...]] = []
            for token, parent in zip(draft.tokens[i].tolist(), draft.parents[i].tolist(), strict=True):
                found.append((*(found[parent] if parent >= 0 else ()), token))
            assert found[:count] == [path for path, _ in wanted]
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


def test_a_smaller_vocabulary_of_chained_heads(open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    tensors = head_tensors("vllm", heads=2, layers=1, vocab=5) | {"token_map": torch.tensor([40, 10, 30, 20, 5])}
    tensors |= {f"{head}.token.weight": 0.1 * torch.randn(HIDDEN, HIDDEN) for head in range(2)}
    config = {"num_heads": 2, "num_hidden_layers": 1, "medusa_chained": True}
    folder = save_heads(tmp_path / "heads", tensors, "model.safetensors", **config)
    llm = open_llm(drafter=f"medusa:{folder}", planner="fixed")
    batch = [case for case in cases() if case.few][:6]
    got = run(llm, batch, "medusa")
    assert not differences(batch, plain(llm, batch), got)
    assert sum(output.speculation.accepted for output in got) > 0
    assert chained_of(llm).most_nodes == 30  # five tokens, and five behind each


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
        ("depth=4", "depth=4: must be 1 to 3, the number of heads"),
        ("width=64", "width=64, nodes=63: each must be 1 to 63"),
        ("weights=fp8", "'weights' is unknown: must be one of depth, width, nodes"),
        ("nodes=0", "nodes='0': must be a whole number of at least 1"),
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


def paths(tree: StaticTree) -> list[tuple[int, ...]]:
    """Of each node the ranks from the root on."""
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(tree.parents):
        above = () if parent == ROOT else found[parent]
        assert tree.heads[node] == len(above)
        found.append((*above, tree.ranks[node]))
    return found


def random_table(seed: int, heads: int = 3, ranks: int = 4) -> Table:
    dice = random.Random(seed)
    return tuple(tuple(dice.random() for _ in range(ranks)) for _ in range(heads))


@pytest.mark.parametrize("seed", range(8))
def test_it_takes_the_likeliest_paths(seed: int) -> None:
    """Against all paths there are, of ranks in any order."""
    table = random_table(seed)
    every = [p for depth in (1, 2, 3) for p in itertools.product(range(4), repeat=depth)]
    chance = {p: math.prod(table[head][rank] for head, rank in enumerate(p)) for p in every}
    best = sorted(chance.values(), reverse=True)
    for nodes in (1, 5, 20, 63):
        tree = best_tree(table, nodes)
        assert len(set(paths(tree))) == nodes
        assert [chance[p] for p in paths(tree)] == pytest.approx(best[:nodes])
        assert tree.chances == pytest.approx(best[:nodes])
        Tree(tuple(range(nodes)), tree.parents).check(nodes, nodes)  # parents stand before their children


def test_its_first_nodes_are_the_best_smaller_tree() -> None:
    whole = best_tree(random_table(3))
    small = best_tree(random_table(3), 9)
    assert (whole.heads[:9], whole.ranks[:9], whole.parents[:9]) == (small.heads, small.ranks, small.parents)


def test_sure_heads_make_a_chain_and_unsure_ones_a_bush() -> None:
    sure = best_tree(((0.9, 0.05), (0.9, 0.05), (0.9, 0.05)), 3)
    assert paths(sure) == [(0,), (0, 0), (0, 0, 0)]
    unsure = best_tree(((0.3, 0.25, 0.2), (0.3, 0.25, 0.2)), 3)
    assert paths(unsure) == [(0,), (1,), (2,)]


def verdict(tree: StaticTree, path: tuple[int, ...], drafted: int) -> Verdict:
    return Verdict("a", (0,) * (len(path) + 1), drafted, len(path), path)


def test_it_learns_what_was_offered_under_a_right_path() -> None:
    prior: Table = ((0.5, 0.5), (0.5, 0.5))
    tree = best_tree(prior, 6)
    assert paths(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    learnt = HeadAcceptance(prior)
    for _ in range(10_000):
        learnt.observe(tree, verdict(tree, (1, 4), 6))  # rank 1, then rank 0
    (a, b), (c, d) = learnt.table
    assert a == pytest.approx(0, abs=0.02)
    assert b == pytest.approx(1, abs=0.02)
    assert c == pytest.approx(1, abs=0.02)
    assert d == pytest.approx(0, abs=0.02)


def test_it_learns_nothing_of_what_was_not_offered() -> None:
    prior: Table = ((0.5, 0.4), (0.3, 0.2))
    tree = best_tree(prior, 6)
    learnt = HeadAcceptance(prior)
    for _ in range(1000):
        learnt.observe(tree, verdict(tree, (), 1))  # only the first node was offered, and wrong
    assert learnt.table[0][0] < 0.1
    assert (learnt.table[0][1], *learnt.table[1]) == pytest.approx((0.4, 0.3, 0.2))


def test_it_follows_texts_that_change() -> None:
    prior: Table = ((0.5,),)
    tree = best_tree(prior, 1)
    learnt = HeadAcceptance(prior)
    for _ in range(20_000):
        learnt.observe(tree, verdict(tree, (0,), 1))
    for _ in range(8_000):
        learnt.observe(tree, verdict(tree, (), 1))
    assert learnt.table[0][0] < 0.3  # over all that it saw: 0.71


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0.5]], "one row for each of the 2 heads"),
        ([[0.5], []], r"acceptance\[1\]=\[\]: must be 1 to 10 numbers from 0 to 1"),
        ([[0.5], [1.5]], r"acceptance\[1\]=\[1\.5\]"),
        ([[0.5], ["a"]], r"acceptance\[1\]=\['a'\]"),
        ([[0.5], [0.1] * 11], r"acceptance\[1\]"),
        ("nonsense", "one row for each"),
        (7, "one row for each"),
    ],
)
def test_tables_that_cannot_be(table: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_table(table, 2, "acceptance")  # type: ignore[arg-type]


FILES = {
    "original": ("medusa_lm_head.pt", "medusa_lm_head.safetensors"),
    "vllm": ("model.safetensors", "pytorch_model.bin"),
}


CONFIGS: dict[str, dict[str, Any]] = {
    "original": {"medusa_num_heads": 3, "medusa_num_layers": 2},
    "vllm": {"num_heads": 3, "num_hidden_layers": 2, "model_type": "medusa"},
}


TOKENS = torch.arange(4)


@pytest.fixture(scope="module")
def fused_target(tiny_target: Path) -> Runner:
    runner = open_unchecked(tiny_target, torch.float32, CPU)
    runner.swap(fused=True)
    return runner


def features(rows: int = 4) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(("layout", "file"), [(layout, file) for layout, files in FILES.items() for file in files])
def test_unchained_heads_say_what_the_reference_says(
    fused_target: Runner, tmp_path: Path, layout: str, file: str
) -> None:
    tensors = head_tensors(layout)
    heads = load_medusa(save_heads(tmp_path / "heads", tensors, file, **CONFIGS[layout]), fused_target)
    got = heads.logits(features(), TOKENS)
    assert got.shape == (3, 4, VOCAB)
    assert got.dtype == torch.float32
    for head in range(3):
        own = tensors[f"{head}.2.weight" if layout == "original" else f"lm_heads.{head}.weight"]
        for row, x in enumerate(features()):
            wanted = said(tensors, layout, head, 2, x, own)
            torch.testing.assert_close(got[head, row], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["original", "vllm"])
def test_heads_may_share_the_targets_lm_head(
    fused_target: Runner, tiny_target: Path, tmp_path: Path, layout: str
) -> None:
    tensors = head_tensors(layout, own_heads=False)
    heads = load_medusa(save_heads(tmp_path / "heads", tensors, FILES[layout][0], **CONFIGS[layout]), fused_target)
    lm_head = load_file(tiny_target / "model.safetensors")["lm_head.weight"]
    got = heads.logits(features(), TOKENS)
    for head in range(3):
        wanted = said(tensors, layout, head, 2, features()[1], lm_head)
        torch.testing.assert_close(got[head, 1], wanted, atol=1e-4, rtol=1e-4)
    assert heads.weights_bytes == sum(t.numel() for t in tensors.values()) * 4 + (layout == "vllm") * 3 * 2 * HIDDEN * 4


def test_names_of_a_whole_model(fused_target: Runner, tmp_path: Path) -> None:
    tensors = {f"medusa_head.{name}": tensor for name, tensor in head_tensors("original").items()}
    folder = save_heads(tmp_path / "heads", tensors, "medusa_lm_head.pt", **CONFIGS["original"])
    assert load_medusa(folder, fused_target).heads == 3


def test_more_heads_than_the_configuration_says(fused_target: Runner, tmp_path: Path) -> None:
    """The first published checkpoints have 5, and say 2."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2}
    folder = save_heads(tmp_path / "heads", head_tensors("original"), "medusa_lm_head.pt", **config)
    assert load_medusa(folder, fused_target).logits(features(), TOKENS).shape == (3, 4, VOCAB)


def test_one_lm_head_for_all_and_a_smaller_vocabulary(fused_target: Runner, tmp_path: Path) -> None:
    """As vLLM's variant may have them."""
    tensors = head_tensors("vllm", own_heads=False)
    dice = torch.Generator().manual_seed(1)
    tensors["lm_head.weight"] = torch.randn(40, HIDDEN, generator=dice)
    tensors["token_map"] = torch.randperm(VOCAB, generator=dice)[:40]
    heads = load_medusa(save_heads(tmp_path / "heads", tensors, "model.safetensors", **CONFIGS["vllm"]), fused_target)
    got = heads.logits(features(), TOKENS)
    assert got.shape == (3, 4, 40)
    assert heads.vocab is not None
    assert heads.vocab.tolist() == tensors["token_map"].tolist()
    wanted = said(tensors, "vllm", 2, 2, features()[3], tensors["lm_head.weight"])
    torch.testing.assert_close(got[2, 3], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("1.0.linear.weight"), ModelError, r"missing: 1\.0\.linear\.weight \[32, 32\]"),
        (
            lambda t: t.update({"1.1.linear.bias": torch.zeros(31)}),
            ModelError,
            r"wrong shape: 1\.1\.linear\.bias \[31\] instead of \[32\]",
        ),
        (
            lambda t: t.update({f"{h}.2.weight": torch.zeros(200, 32) for h in range(3)}),
            DrafterError,
            r"a vocabulary of 200, this one has 300",
        ),
        (
            lambda t: t.update({"0.0.linear.weight": torch.zeros(48, 48)}),
            DrafterError,
            r"a hidden size of 48, this one has 32",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    fused_target: Runner, tmp_path: Path, change: Any, error: type[Exception], message: str
) -> None:
    tensors = head_tensors("original")
    change(tensors)
    folder = save_heads(tmp_path / "heads", tensors, "medusa_lm_head.safetensors", **CONFIGS["original"])
    with pytest.raises(error, match=message):
        load_medusa(folder, fused_target)


@pytest.mark.parametrize("ids", [[0, 300], [-1, 5], [0.5, 1.0]])
def test_a_token_map_out_of_range_is_refused(fused_target: Runner, tmp_path: Path, ids: list[float]) -> None:
    tensors = head_tensors("vllm", vocab=2) | {"token_map": torch.tensor(ids)}
    folder = save_heads(tmp_path / "heads", tensors, "model.safetensors", **CONFIGS["vllm"])
    with pytest.raises(ModelError, match="token_map must hold the target's token ids, 0 to 299"):
        load_medusa(folder, fused_target)


def test_a_token_map_needs_heads(fused_target: Runner, tmp_path: Path) -> None:
    tensors = head_tensors("vllm", own_heads=False) | {"token_map": torch.arange(5)}
    folder = save_heads(tmp_path / "heads", tensors, "model.safetensors", **CONFIGS["vllm"])
    with pytest.raises(ModelError, match="token_map without LM heads of its own"):
        load_medusa(folder, fused_target)


@pytest.mark.parametrize("count", [None, 0, "3", True])
def test_the_number_of_heads_must_be_one(fused_target: Runner, tmp_path: Path, count: object) -> None:
    folder = save_heads(tmp_path / "heads", head_tensors("original"), "medusa_lm_head.pt", medusa_num_heads=count)
    with pytest.raises(ModelError, match=r"medusa_num_heads=.*must be a positive whole number"):
        load_medusa(folder, fused_target)


def test_heads_without_end_are_refused(fused_target: Runner, tmp_path: Path) -> None:
    tensors = head_tensors("original")
    folder = save_heads(tmp_path / "many", tensors, "medusa_lm_head.pt", medusa_num_heads=10**12)
    with pytest.raises(ModelError, match="medusa_num_heads=1000000000000, must be at most 256"):
        load_medusa(folder, fused_target)
    tensors["1000000000000.0.linear.weight"] = torch.zeros(32, 32)
    folder = save_heads(tmp_path / "far", tensors, "medusa_lm_head.pt", **CONFIGS["original"])
    with pytest.raises(ModelError, match=r"unknown: 1000000000000\.0"):
        load_medusa(folder, fused_target)
