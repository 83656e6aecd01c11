"""A draft model with another tokenizer: exact all the same, right where it can be, and its own pages given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from conftest import save_model, tiny_llama
from exactness import Case, differences, plain, run
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.drafters.translated import GrowingText, Recut, Shared, TranslatedDrafter, decode, meanings, translate
from slipstream.models.batch import PassBatch
from tokenizers_of_two_kinds import byte_level, permuted, save, with_marks

TARGET, OTHER, MARKED = byte_level(380), byte_level(320), with_marks(400)
WORDS = [token for text in (" the", " sea", " shells", " sat", ",", " on") for token in TARGET.encode(text)]
BIAS = dict.fromkeys(WORDS, 12.0)
"""Under which random weights say nothing but words."""

KINDS = {"bytes": OTHER, "marks": MARKED}
rounds = pytest.mark.parametrize("rounds", ["eager", "queued"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target, drafts with other tokenizers, and the target itself with other ids for its tokens."""
    base = tmp_path_factory.mktemp("translated")
    target = save_model(base / "target", tiny_llama(vocab_size=384))
    save(TARGET, target)
    found = {"target": target}
    for name, tokenizer in KINDS.items():
        config = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=128)
        found[name] = save_model(base / name, config, seed=1)
        save(tokenizer, found[name])
    order = torch.randperm(384, generator=torch.Generator().manual_seed(3))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        weights = cast(torch.Tensor, layer.weight.data)
        moved = torch.empty_like(weights)
        moved[order] = weights
        layer.weight.data = moved
    found["same"] = base / "same"
    model.save_pretrained(found["same"])
    save(permuted(TARGET, order.tolist()), found["same"])
    return found


@pytest.fixture
def open_pair(folders: dict[str, Path]) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def open_one(draft: str, **options: Any) -> LLM:
        how = {"planner": "fixed", "device": "cpu", "memory": "64MiB", "max_num_seqs": 4, **options}
        opened.append(LLM(folders["target"], drafter=f"model:{folders[draft]}", **how))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()
        drafter = translated(llm)
        assert drafter._pool is not None
        assert drafter._pool.free_pages == drafter._pool.num_pages
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


def translated(llm: LLM) -> TranslatedDrafter:
    drafter = llm.engine.drafting.drafters["model"]
    assert isinstance(drafter, TranslatedDrafter)
    return drafter


def cases(temperature: float, **more: Any) -> list[Case]:
    prompts = ["the cat sat on", "sea shells, the sea", "to be or not", "déjà vu 🙂", "日本語の the"]
    params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True, logit_bias=BIAS, **more)
    return [
        Case(prompt, tuple(TARGET.encode(prompt)), replace(params, seed=50 + i)) for i, prompt in enumerate(prompts)
    ]


@rounds
@pytest.mark.parametrize("draft", ["bytes", "marks", "same"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_tokens_with_and_without(
    open_pair: Callable[..., LLM], draft: str, rounds: str, temperature: float
) -> None:
    """Five requests on four seats; penalties count what is guessed as well."""
    llm = open_pair(draft, rounds=rounds)
    for batch in (cases(temperature), cases(temperature, repetition_penalty=1.3, bad_words=[" sea"])):
        expected = plain(llm, batch)
        got = run(llm, batch, "model")
        assert not differences(batch, expected, got)
        assert sum(output.speculation.drafted for output in got) > 0


@rounds
@pytest.mark.parametrize("draft", ["bytes", "marks"])
def test_text_that_is_no_text(open_pair: Callable[..., LLM], draft: str, rounds: str) -> None:
    """Random bytes: halves of characters, and what is no character at all."""
    llm = open_pair(draft, rounds=rounds)
    batch = [
        Case(
            str(seed), (5 + seed, 150, 200), SamplingParams(temperature=1.5, seed=seed, max_tokens=40, ignore_eos=True)
        )
        for seed in range(6)
    ]
    assert not differences(batch, plain(llm, batch), run(llm, batch, "model"))


@rounds
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_with_other_ids_is_always_right(
    open_pair: Callable[..., LLM], rounds: str, temperature: float
) -> None:
    """Ids are mapped, the cache follows what was accepted, and both sides draw by the same noise."""
    said: list[str] = []
    llm = open_pair("same", rounds=rounds, on_progress=said.append)
    assert any("same has another vocabulary than the target: ids are mapped" in line for line in said)
    batch = cases(temperature)
    for output in run(llm, batch, "model"):
        stats = output.speculation
        assert stats.drafted == stats.accepted > 0


@rounds
@pytest.mark.parametrize("draft", ["bytes", "marks"])
def test_a_draft_that_knows_the_text_is_right_in_the_targets_tokens(
    open_pair: Callable[..., LLM], draft: str, rounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is made to say the plain answer, token by token as its own tokenizer cuts it."""
    said: list[str] = []
    llm = open_pair(draft, rounds=rounds, on_progress=said.append)
    assert any("it drafts through the text" in line for line in said)
    drafter, own = translated(llm), KINDS[draft]
    read: list[int] = []
    for case in cases(0.0):
        expected = plain(llm, [case])[0]
        text = decode(TARGET, [*case.prompt, *expected.token_ids])
        known = own.encode(text, add_special_tokens=False)

        def speak(batch: PassBatch, cache: Any, known: list[int] = known) -> torch.Tensor:
            read.append(batch.num_rows)
            logits = torch.zeros((1, drafter.runner.vocab_size))
            position = int(batch.positions[-1]) + 1
            logits[0, known[position] if position < len(known) else 0] = 50.0
            return logits

        monkeypatch.setattr(drafter.runner, "forward", speak)
        got = run(llm, [case], "model", draft_tokens=8)[0]
        assert got.token_ids == expected.token_ids
        assert got.speculation.accepted >= 0.8 * got.speculation.drafted > 0
        assert got.speculation.tau > 2.5
    assert max(read[1:]) < 20  # only what is new is read


def test_several_samples_and_preemption(open_pair: Callable[..., LLM]) -> None:
    """Few pages: requests are taken back and computed again, and read again by the draft."""
    llm = open_pair("bytes", max_num_seqs=6, memory="2500KB", max_model_len=128)
    params = SamplingParams(n=3, temperature=1.0, seed=9, max_tokens=60, ignore_eos=True, logit_bias=BIAS)
    prompts = [TARGET.encode(text) for text in ("the cat sat on the mat", "sea shells")]
    off = replace(params, speculation=SpeculationParams(enabled=False))
    plainly = [[o.token_ids for o in out.outputs] for out in llm.generate(prompts, off)]
    assert [[o.token_ids for o in out.outputs] for out in llm.generate(prompts, params)] == plainly


def test_a_draft_whose_context_ends_stops_drafting(open_pair: Callable[..., LLM]) -> None:
    """128 of its own tokens; the target goes on."""
    llm = open_pair("marks")
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, logit_bias=BIAS)
    batch = [Case("long", tuple(TARGET.encode("the cat")), replace(params, seed=1))]
    expected = plain(llm, batch)
    got = run(llm, batch, "model")
    assert not differences(batch, expected, got)
    stats = got[0].speculation
    assert 0 < stats.by_drafter["model"].drafts < stats.rounds - 20


SMALL, LARGE, MARKS = byte_level(300), byte_level(420), with_marks(400)
CUTS = {"small": SMALL, "large": LARGE, "marked": MARKS}
pairs = pytest.mark.parametrize(
    ("target", "own"), [("small", "large"), ("large", "small"), ("small", "marked"), ("marked", "large")]
)

words = st.sampled_from(
    ["the", " cat", " sat", "sea", " shells", "é", "日本", "🙂", "\n", "  ", ", ", "x", " question"]
)
texts = st.lists(words | st.text(max_size=4).filter(lambda text: "\ufffd" not in text), min_size=1, max_size=60)


@pytest.mark.parametrize("kind", CUTS)
@settings(deadline=None, max_examples=60)
@given(parts=texts)
def test_a_growing_text_is_cut_as_a_whole_one(kind: str, parts: list[str]) -> None:
    """Not always at the same places, but it says the same, and what is called unchanged is."""
    tokenizer = CUTS[kind]
    recut = Recut(tokenizer)
    text = ""
    for part in parts:
        text += part
        before = list(recut.ids)
        same = recut.update(text)
        assert recut.ids[:same] == before[:same]
        assert decode(tokenizer, recut.ids) == decode(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    again = tokenizer.encode(text, add_special_tokens=False)
    assert len(recut.ids) <= 2 * len(again) + 8


@pytest.mark.parametrize("kind", CUTS)
@settings(deadline=None, max_examples=60)
@given(parts=texts, data=st.data())
def test_text_grows_with_its_tokens_and_never_by_half_a_character(
    kind: str, parts: list[str], data: st.DataObject
) -> None:
    tokenizer = CUTS[kind]
    tokens = tokenizer.encode("".join(parts), add_special_tokens=False)
    growing = GrowingText(tokenizer)
    at = 0
    while at < len(tokens):
        at += data.draw(st.integers(1, 5))
        growing.update(tokens[:at])
        if growing.whole:
            assert growing.text == decode(tokenizer, tokens[:at])
            assert growing.tokens == min(at, len(tokens))
        assert "\ufffd" not in growing.text
    assert growing.text == decode(tokenizer, tokens)


@pairs
@settings(deadline=None, max_examples=80)
@given(said=texts, parts=texts)
def test_a_guess_means_the_same_in_the_targets_tokens(target: str, own: str, said: list[str], parts: list[str]) -> None:
    theirs, mine = CUTS[target], CUTS[own]
    text, guess = "".join(said).strip() + "\n", "".join(parts)
    tail = theirs.encode(text, add_special_tokens=False)
    context = mine.encode(text, add_special_tokens=False)
    ids = mine.encode(text + guess, add_special_tokens=False)[len(context) :]
    spoken = decode(mine, [*context, *ids])
    got = translate(ids, context, mine, theirs, tail)
    if got is not None and spoken.startswith(text) and spoken == text + guess:
        assert decode(theirs, [*tail, *got]) == decode(theirs, theirs.encode(spoken, add_special_tokens=False))


def test_a_guess_that_ends_in_half_a_character_is_cut_there() -> None:
    context = SMALL.encode("ok", add_special_tokens=False)
    ids = SMALL.encode(" the 🙂", add_special_tokens=False)
    assert decode(LARGE, translate(ids[:-1], context, SMALL, LARGE, LARGE.encode("ok")) or []) == " the "


def test_a_guess_that_goes_on_a_word_is_not_cut_across_the_end() -> None:
    context, tail = SMALL.encode("she", add_special_tokens=False), LARGE.encode("she", add_special_tokens=False)
    assert "shells" in LARGE.get_vocab() or "Ġshells" in LARGE.get_vocab()
    whole = LARGE.encode("a shells", add_special_tokens=False)
    half = LARGE.encode("a she", add_special_tokens=False)
    assert whole[: len(half)] != half  # the target has one token for what is said in two
    assert translate(SMALL.encode("lls"), [*SMALL.encode("a "), *context], SMALL, LARGE, half) is None
    assert tail


@pairs
def test_shared_tokens_have_the_same_bytes(target: str, own: str) -> None:
    theirs, mine = CUTS[target], CUTS[own]
    shared = Shared.of(mine, theirs, len(mine), len(theirs))
    mine_mean, theirs_mean = meanings(mine), meanings(theirs)
    found = [(token, their) for token, their in enumerate(shared.target_of.tolist()) if their >= 0]
    assert all(mine_mean[token] == theirs_mean[their] for token, their in found)
    assert (shared.target_of >= 0).sum() >= 250  # every byte, at least
    assert shared.target_of[mine.eos_token_id] == theirs.eos_token_id
    assert not shared.alike
    the = [tokenizer.encode("a the", add_special_tokens=False)[-1] for tokenizer in (mine, theirs)]
    if b" the" in mine_mean.values() and b" the" in theirs_mean.values():
        assert shared.own_of[the[1]] == the[0]


def test_other_ids_for_the_same_tokens_are_alike() -> None:
    order = [(7 * token + 3) % len(LARGE) for token in range(len(LARGE))]
    assert sorted(order) == list(range(len(LARGE)))
    other: Any = permuted(LARGE, order)
    shared = Shared.of(other, LARGE, len(LARGE), len(LARGE) + 5)
    assert shared.alike
    assert shared.own_of.tolist() == [*order, *[-1] * 5]
