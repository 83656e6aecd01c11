"""Medusa in the engine: the same tokens as without, whatever its heads say, eager and queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exactness import FEW, Case, cases, check_exact, differences, plain, run
from fresh import prefill
from medusa_checkpoints import head_tensors, knowing_medusa, save_heads, tiny_medusa
from planning import Scripted
from queueing import Queue
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import Draft
from slipstream.core.errors import ConfigError, ModelNotFound
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.drafters.medusa_tree import best_tree
from slipstream.engine import build
from slipstream.models.resolve import resolve
from slipstream.plan.types import Offer
from stepping import Arrival, Stepper

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
def test_the_same_tokens_as_without(open_llm: Callable[..., LLM], knowing: Path, rounds: str) -> None:
    llm = open_llm(drafter=f"medusa:{knowing}", planner="fixed", rounds=rounds)
    check_exact(llm, "medusa")


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("draft_tokens", [1, 2, 7, 63])
def test_trees_of_any_size(open_llm: Callable[..., LLM], knowing: Path, rounds: str, draft_tokens: int) -> None:
    llm = open_llm(drafter=f"medusa:{knowing}", planner="fixed", rounds=rounds)
    batch = [case for case in cases() if case.few][:6]
    expected = plain(llm, batch)
    got = run(llm, batch, "medusa", draft_tokens=draft_tokens)
    assert not differences(batch, expected, got)
    assert sum(output.speculation.drafted for output in got) > 0


@pytest.mark.parametrize("rounds", ROUNDS)
def test_heads_that_know_nothing_cost_nothing_but_time(
    open_llm: Callable[..., LLM], tmp_path: Path, rounds: str
) -> None:
    llm = open_llm(drafter=f"medusa:{tiny_medusa(tmp_path / 'heads')}", planner="fixed", rounds=rounds)
    batch = cases()[::3]
    assert not differences(batch, plain(llm, batch), run(llm, batch, "medusa"))


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


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("n", [1, 3])
def test_preempted_and_forked_requests_keep_their_hidden_states(
    tiny_target: Path, knowing: Path, rounds: str, n: int
) -> None:
    bench = Stepper(
        tiny_target,
        f"medusa:{knowing}",
        pages=18,
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=48,
        draft_tokens=6,
        rounds=rounds,
    )
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, logit_bias=FEW, n=n)
    together = [Arrival(5 + 3 * i, replace(params, seed=i, temperature=i % 2)) for i in range(5)]
    on = bench.run(together)
    assert bench.engine.scheduler.preemptions > 0
    off = [replace(a, params=replace(a.params, speculation=OFF)) for a in together]
    assert [a.token_ids for a in on] == [a.token_ids for a in bench.run(off)]
    assert sum(a.speculation.accepted for a in on) > 20


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


def test_a_shape_that_is_no_better_stays() -> None:
    class Heads:
        heads, width, taps, weights_bytes = 2, 300, (), 0

    heads: Any = Heads()
    drafter = MedusaDrafter(heads, [[0.6, 0.1], [0.5, 0.1]])
    tree = drafter.tree
    for _ in range(600):
        drafter.observe([Verdict("a", (1, 2), 4, 1, (0,))])
    assert drafter.tree is tree


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


@pytest.mark.parametrize("rounds", ROUNDS)
def test_beside_another_drafter(open_llm: Callable[..., LLM], knowing: Path, rounds: str) -> None:
    llm = open_llm(drafter=[f"medusa:{knowing}", "ngram"], planner="fixed", rounds=rounds)
    batch = [case for case in cases() if case.few]
    expected = plain(llm, batch)
    params = [
        replace(case.params, speculation=SpeculationParams(drafter=("medusa", "ngram")[i % 2]))
        for i, case in enumerate(batch)
    ]
    got = [o.outputs[0] for o in llm.generate([list(case.prompt) for case in batch], params)]
    assert not differences(batch, expected, got)
    assert sum(a.speculation.accepted for a in got[::2]) > 0


@pytest.mark.parametrize("rounds", ROUNDS)
def test_merged_with_another_drafter(open_llm: Callable[..., LLM], knowing: Path, rounds: str) -> None:
    llm = open_llm(drafter=f"ngram+medusa:{knowing}", planner="fixed", rounds=rounds)
    batch = [case for case in cases() if case.few]
    expected = plain(llm, batch)
    got = run(llm, batch, "ngram+medusa")
    assert not differences(batch, expected, got)
    assert sum(a.speculation.by_drafter["medusa"].accepted for a in got) > 0


def test_it_misses_nothing_where_it_rests(tiny_target: Path, knowing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps nothing of its own, so nobody waits for it to catch up."""

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


def test_a_prompt_of_one_token(open_llm: Callable[..., LLM], knowing: Path) -> None:
    llm = open_llm(drafter=f"medusa:{knowing}", planner="fixed")
    batch = [Case("one", (7,), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))]
    assert not differences(batch, plain(llm, batch), run(llm, batch, "medusa"))


def test_heads_are_found_as_models_are(tiny_target: Path, knowing: Path, tmp_path: Path) -> None:
    """A folder with nothing but heads passes where a folder without any weights is refused."""
    assert resolve(str(knowing)) == knowing
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="no weights"):
        Stepper(tiny_target, f"medusa:{tmp_path}")
    with pytest.raises(ModelNotFound, match="no such folder"):
        Stepper(tiny_target, "medusa:no/such/folder/anywhere")


def test_what_is_not_there_is_said_before_weights_are_read(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "open_model", lambda *_, **__: pytest.fail("the target was loaded"))
    with pytest.raises(ModelNotFound, match="no such folder"):
        open_llm(drafter="medusa:no/such/folder/anywhere")
