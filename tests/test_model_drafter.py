"""A model as drafter: its cache, context and vocabulary, and one that shares the target's embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import VOCAB, save_model, save_tokenizer, tiny_llama
from exactness import FEW, Case, cases, differences, plain, run
from families import CPU, Passes, random_tokens
from shared_drafts import tiny_shared, with_words
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import Draft
from slipstream.core.errors import ConfigError, ModelError, UnsupportedModel
from slipstream.drafters import opening
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.model import ModelDrafter
from slipstream.kernels.cpu.compiled import can_compile
from slipstream.kernels.cpu.interface import Codes
from slipstream.kernels.cpu.tiled import CODES_PAY, TiledLinear
from slipstream.models.parity import open_model
from slipstream.models.runner import Runner
from slipstream.train.teacher import Teacher
from stepping import Arrival, Stepper, cache_error, prefill
from test_linear import quantized

ON = SpeculationParams()


OFF = SpeculationParams(enabled=False)


def drafter_of(bench: Stepper) -> ModelDrafter:
    drafter = bench.engine.drafting.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    return drafter


def draft_error(bench: Stepper) -> float:
    """How far the draft's cache is from a fresh prefill, of all that it takes as read."""
    drafter, engine = drafter_of(bench), bench.engine
    assert drafter._cache is not None
    return max(
        (
            cache_error(drafter.runner, drafter._cache, a.table, a.tokens[: drafter._progress[a.id].length])
            for a in engine.scheduler.running
            if a.table is not None
        ),
        default=0.0,
    )


def arrivals(speculation: SpeculationParams = ON, n: int = 1) -> list[Arrival]:
    params = SamplingParams(
        temperature=1.0, max_tokens=20, ignore_eos=True, logit_bias=FEW, n=n, speculation=speculation
    )
    return [Arrival(5 + 3 * i, replace(params, seed=i, temperature=i % 2), 2 * i) for i in range(5)]


def test_its_cache_stays_right(tiny_target: Path, tiny_draft: Path) -> None:
    """Over accepted, partly accepted and rejected drafts, of requests that come and go."""
    bench = Stepper(tiny_target, f"model:{tiny_draft}", max_num_seqs=3, max_num_batched_tokens=16)
    errors: list[float] = []
    on = bench.run(arrivals(), lambda: errors.append(draft_error(bench)))
    assert max(errors) < 1e-5
    rounds = sum(answer.speculation.rounds for answer in on)
    accepted = sum(answer.speculation.accepted for answer in on)
    assert 0 < accepted < sum(answer.speculation.drafted for answer in on)
    assert rounds + accepted == sum(len(answer.token_ids) for answer in on)
    assert [a.token_ids for a in on] == [a.token_ids for a in bench.run(arrivals(OFF))]


def greedy_run(runner: Runner, tokens: Sequence[int], count: int) -> list[int]:
    """What the model says by itself, without a cache to get wrong."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(prefill(runner, text)[1][-1].argmax()))
    return text[len(tokens) :]


def test_its_guesses_are_its_own_greedy_run(
    tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Stepper(tiny_target, f"model:{tiny_draft}", max_num_seqs=3)
    drafter = drafter_of(bench)
    propose = drafter.propose
    checked: list[int] = []

    def propose_and_compare(requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        draft = propose(requests, budget)
        for i, request in enumerate(requests):
            count = int(draft.counts[i])
            assert draft.tokens[i, :count].tolist() == greedy_run(drafter.runner, request.tokens, count)
            checked.append(count)
        return draft

    monkeypatch.setattr(drafter, "propose", propose_and_compare)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    bench.run([Arrival(4 + i, params, 2 * i) for i in range(4)])
    assert sum(checked) > 50


@pytest.fixture
def twins(open_llm: Callable[..., LLM], tiny_target: Path) -> LLM:
    """A model that drafts for itself."""
    return open_llm(drafter=f"model:{tiny_target}", planner="fixed")


def test_a_model_agrees_with_itself(twins: LLM) -> None:
    """With the same noise, penalties and masks, at any temperature: every guess is accepted."""
    batch = cases()
    expected = plain(twins, batch)
    got = run(twins, batch, "model")
    assert not differences(batch, expected, got)
    for output in got:
        inner = len(output.token_ids) - 1
        assert output.speculation.rounds == 1 + -(-inner // (ModelDrafter.default_draft_tokens + 1))
        if output.finish_reason == "length":  # one that stops may do so before the end of its last draft
            assert output.speculation.accepted == output.speculation.drafted


def test_n_samples_share_a_prompt_and_a_draft(twins: LLM) -> None:
    prompt = list(range(30, 67))
    params = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=14, ignore_eos=True)
    on = twins.generate([prompt], params)[0].outputs
    off = twins.generate([prompt], replace(params, speculation=OFF))[0].outputs
    assert [a.token_ids for a in on] == [a.token_ids for a in off]
    assert all(a.speculation.accepted == a.speculation.drafted > 0 for a in on)


@pytest.mark.parametrize("n", [1, 2])
def test_preempted_requests_draft_again(tiny_target: Path, n: int) -> None:
    """Pages that change hands hold the draft's entries too; both caches are filled again."""
    bench = Stepper(
        tiny_target,
        f"model:{tiny_target}",
        pages=14,
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=48,
        draft_tokens=5,
    )
    errors: list[float] = []
    together = [replace(arrival, joins=0) for arrival in arrivals(n=n)]
    on = bench.run(together, lambda: errors.append(draft_error(bench)))
    assert bench.engine.scheduler.preemptions > 0
    assert max(errors) < 1e-5
    assert [a.token_ids for a in on] == [a.token_ids for a in bench.run(arrivals(OFF, n))]
    assert sum(a.speculation.accepted for a in on) == sum(a.speculation.drafted for a in on) > 50


def test_a_long_prompt_is_read_in_chunks(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the draft has no more rows than the target's. Until it has read all, the request goes on undrafted."""
    bench = Stepper(tiny_target, f"model:{tiny_target}", max_num_seqs=2, max_num_batched_tokens=16)
    drafter = drafter_of(bench)
    forward, sizes = drafter.runner.forward, []

    def forward_and_note(batch: object, cache: object) -> torch.Tensor:
        sizes.append(batch.num_rows)  # type: ignore[attr-defined]
        return forward(batch, cache)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter.runner, "forward", forward_and_note)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    short, long = Arrival(3, params), Arrival(100, params, 1)
    on = bench.run([short, long])
    assert max(sizes) == 16
    off = replace(params, speculation=OFF)
    assert [a.token_ids for a in on] == [
        a.token_ids for a in bench.run([replace(short, params=off), replace(long, params=off)])
    ]
    # the short one does not wait for the long one: it always drafts, and is always right
    assert on[0].speculation.rounds == 1 + -(-39 // (ModelDrafter.default_draft_tokens + 1))
    # the long one goes undrafted for the 6 or 7 rounds that its prompt takes, then is always right
    assert 6 <= on[1].speculation.rounds - -(-33 // (ModelDrafter.default_draft_tokens + 1)) <= 9
    assert on[1].speculation.accepted == on[1].speculation.drafted > 20


def test_a_shorter_context_stops_drafting_where_it_ends(
    open_llm: Callable[..., LLM], tiny_draft: Path, tmp_path: Path
) -> None:
    target = save_model(tmp_path / "target", tiny_llama())
    short = save_model(tmp_path / "short", tiny_llama(max_position_embeddings=32))  # the same weights
    llm = open_llm(target, drafter=f"model:{short}", planner="fixed")
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    batch = [
        Case("grows out of it", tuple(range(12)), params),
        Case("just fits", tuple(range(31)), params),
        Case("never fits", tuple(range(40)), params),
    ]
    expected = plain(llm, batch)
    got = run(llm, batch, "model")
    assert not differences(batch, expected, got)
    assert [len(a.token_ids) for a in got] == [40, 40, 40]
    # a draft reads all tokens before its last guess: the last one may stand behind the end of its context
    assert 32 - 12 - 6 <= got[0].speculation.accepted + got[0].speculation.by_drafter["model"].drafts <= 32 - 12 + 1
    assert got[0].speculation.accepted == got[0].speculation.drafted
    assert got[1].speculation.drafted <= 1
    assert got[2].speculation.drafted == 0


@pytest.mark.parametrize(("target_width", "draft_width"), [(320, 300), (300, 320)])
def test_vocabularies_padded_to_other_widths(
    open_llm: Callable[..., LLM], tmp_path: Path, target_width: int, draft_width: int
) -> None:
    """The tokenizer has 261 tokens; models pad. An id that only the target has must not break the draft."""
    target = save_model(tmp_path / "target", tiny_llama(vocab_size=target_width))
    draft = save_model(tmp_path / "draft", tiny_llama(vocab_size=draft_width, num_hidden_layers=1), seed=1)
    llm = open_llm(target, drafter=f"model:{draft}", planner="fixed")
    likely = dict.fromkeys((*FEW, target_width - 1), 6.0)
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, logit_bias=likely)
    batch = [Case(f"seed {seed}", (1, 2, target_width - 1, 3), replace(params, seed=seed)) for seed in range(4)]
    expected = plain(llm, batch)
    assert any(target_width - 1 in answer.token_ids for answer in expected)
    got = run(llm, batch, "model")
    assert not differences(batch, expected, got)
    assert sum(answer.speculation.accepted for answer in got) > 0


def test_a_model_drafter_needs_a_model(tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="draft:PATH"):
        LLM(tiny_target, drafter="model")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_shared(tmp_path_factory.mktemp("shared") / "draft")


def shared_drafter_of(llm: LLM, name: str = "model") -> ModelDrafter:
    return cast(ModelDrafter, llm.engine.drafting.drafters[name])


def words_of(runner: Runner) -> Tensor:
    return cast(Tensor, runner.model.get_input_embeddings().weight)


def test_it_has_the_targets_own_tensors(tiny_target: Path, draft: Path, open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter=f"model:{draft}")
    drafter, target = shared_drafter_of(llm), llm.engine.target
    assert words_of(drafter.runner).data_ptr() == words_of(target).data_ptr()
    assert drafter.runner.model.get_output_embeddings() is target.model.get_output_embeddings()
    own = sum(t.numel() * 4 for t in load_file(draft / "model.safetensors").values())
    assert drafter.weights_bytes == own  # planned beside the target: what is shared is counted once
    assert "fused" in drafter.runner.swaps


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_the_model_with_the_words_written_out(tied: bool, draft: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "target", tiny_llama(tie_word_embeddings=tied), seed=2)
    target = open_model(folder, torch.float32, CPU)
    shared = open_model(draft, torch.float32, CPU, target=target)
    whole = open_model(with_words(draft, folder, tmp_path / "whole"), torch.float32, CPU)
    assert shared.vocab_size == whole.vocab_size
    first, second = random_tokens(20, 1), random_tokens(80, 2)
    for parts in ([(0, first)], [(1, second[:70])], [(0, first[:3]), (1, second[70:])]):
        found = [Passes(runner, 2, 40).run(parts) for runner in (shared, whole)]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_target_in_codes_lends_its_codes(draft: Path, tmp_path: Path) -> None:
    """An LM head that is kept in codes is read in codes by the draft, too."""
    folder = save_model(tmp_path / "target", tiny_llama(tie_word_embeddings=False), seed=2)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": quantized(VOCAB, 32, 4)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    target = open_model(folder, torch.float32, CPU)
    head = target.model.get_output_embeddings()
    assert (isinstance(head, TiledLinear) and isinstance(head.tiles, Codes)) == (can_compile() and CODES_PAY)
    shared = open_model(draft, torch.float32, CPU, target=target)
    whole = open_model(with_words(draft, folder, tmp_path / "whole"), torch.float32, CPU)
    assert shared.model.get_output_embeddings() is head
    found = [Passes(runner).run([(0, random_tokens(9, 1))]) for runner in (shared, whole)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_the_tokens_are_plain_decodings(rounds: str, draft: Path, open_llm: Callable[..., LLM]) -> None:
    """In rounds that wait and in those that are queued, where the draft's whole loop is one piece."""
    llm = open_llm(drafter=f"model:{draft}", planner="fixed", rounds=rounds)
    batch = [case for case in cases() if not case.params.min_tokens]
    got = run(llm, batch, "model")
    assert not differences(batch, plain(llm, batch), got)
    assert sum(output.speculation.drafted for output in got) > 0


def test_another_target_is_refused(tiny_target: Path, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    draft = tiny_shared(tmp_path / "wide", hidden_size=48)
    with pytest.raises(ModelError, match=r"embed_tokens.weight \(300, 48\).*this target's is \(300, 32\)") as told:
        open_llm(drafter=f"model:{draft}")
    assert "slipstream train draft" in str(told.value)
    draft = tiny_shared(tmp_path / "more", vocab_size=301)
    with pytest.raises(ModelError, match=r"embed_tokens.weight \(301, 32\).*this target's is \(300, 32\)"):
        open_llm(drafter=f"model:{draft}")


def test_it_is_no_target(draft: Path, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    """Said before a tokenizer is missed, by everything that opens targets."""
    said = "shares its target's embeddings .* Name it as the drafter of the target"
    with pytest.raises(UnsupportedModel, match=said):
        open_llm(draft)
    with pytest.raises(UnsupportedModel, match=said):
        open_model(draft, torch.float32, CPU)
    with pytest.raises(UnsupportedModel, match=said):
        Teacher.open(draft, "cpu")


def test_other_tensors_must_be_there(draft: Path, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    folder = tiny_shared(tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.norm\.weight"):
        open_llm(drafter=f"model:{folder}")


def test_a_tokenizer_beside_it_is_not_asked(draft: Path, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    """Its vocabulary is the target's by being the target's tensors."""
    folder = tiny_shared(tmp_path / "draft")
    save_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert json.loads((folder / "config.json").read_text())["shares_embeddings"]
    assert isinstance(shared_drafter_of(open_llm(drafter=f"model:{folder}")), ModelDrafter)


def test_it_is_found_by_its_bare_name(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_llm: Callable[..., LLM]
) -> None:
    """As the default model's is: without a tokenizer or a path."""
    monkeypatch.setattr(opening, "HEADS", tmp_path)
    monkeypatch.setattr(opening, "default_folder", lambda: tiny_target)
    tiny_shared(tmp_path / "draft")
    assert isinstance(shared_drafter_of(open_llm(tiny_target, drafter="draft"), "draft"), ModelDrafter)
