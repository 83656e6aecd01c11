"""Prompts, corpora and rows: made once, found again, in an order that depends on the seed alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from conftest import EOS
from slipstream import LLM, SamplingParams
from slipstream.core.errors import ConfigError
from slipstream.models.load import load_tokenizer
from slipstream.models.parity import open_model
from slipstream.models.runner import Runner
from slipstream.train import data as data_module
from slipstream.train.batch import RowPlan
from slipstream.train.bulk import Bulk, BulkAnswer, BulkRequest
from slipstream.train.config import TrainConfig, read_options
from slipstream.train.data import (
    Corpus,
    CorpusWriter,
    Data,
    TrainPrompt,
    answer_requests,
    as_tokens,
    gather,
    load_corpus,
    self_prompts,
)
from slipstream.train.ranks import Ranks
from tiny_recipe import TinyOptions


def nothing(_: str) -> None:
    pass


def sequences(lengths: list[int]) -> Corpus:
    starts = np.concatenate(([0], np.cumsum(lengths)))
    return Corpus(
        np.arange(starts[-1], dtype=np.uint32), starts, np.array(lengths) // 2, np.arange(len(lengths), dtype=np.int64)
    )


class Scripted:
    """Stands in for `Bulk`: writes what the script says, in any order."""

    unfinished_tokens = 0

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.headers: list[list[int]] = []

    def write(self, asks: Iterable[tuple[int, BulkRequest]], end_ids: Iterable[int]) -> Iterator[BulkAnswer]:
        wanted = list(asks)
        self.headers += [list(ask.prompt) for _, ask in wanted]
        for number, _ in reversed(wanted):
            yield BulkAnswer(number, np.array(self.texts[number % len(self.texts)], dtype=np.int32))


def test_a_chat_model_writes_user_turns(tiny_target: Path) -> None:
    tokenizer: Any = load_tokenizer(tiny_target)
    turns = ["What is up?", "What is up?", "Hi", "Tell me more", "Who are you?", "Never ended"]
    ids = [list(tokenizer.encode(text)) for text in turns]
    end = tokenizer.encode("\n")
    bulk = Scripted([text + end for text in ids[:5]] + [ids[5]])
    lines: list[str] = []
    found = self_prompts(cast(Bulk, bulk), tokenizer, 3, seed=1, max_tokens=20, end_ids=[257], say=lines.append)
    assert any(line.startswith("prompts: ") and "tok/s" in line for line in lines)
    assert [prompt.text for prompt in found] == ["What is up?", "Tell me more", "Who are you?"]
    assert bulk.headers[0] == list(tokenizer.encode("<|user|>"))
    bulk.headers.clear()
    wish = {"seed": 1, "max_tokens": 20, "end_ids": [257], "say": nothing}
    two = self_prompts(cast(Bulk, bulk), tokenizer, 3, systems=["", "Be brief"], **cast(Any, wish))
    assert [prompt.system for prompt in two] == ["", "Be brief", "Be brief"]
    assert bulk.headers[1] == list(tokenizer.encode("<|system|>Be brief\n<|user|>"))
    assert as_tokens(tokenizer, two[1]) == list(
        tokenizer.encode("<|system|>Be brief\n<|user|>What is up?\n<|assistant|>")
    )
    bulk.headers.clear()
    begun = self_prompts(cast(Bulk, bulk), tokenizer, 2, openings=["Now,", ""], **cast(Any, wish))
    assert [prompt.text for prompt in begun] == ["Now,What is up?", "What is up?"]
    assert bulk.headers[0] == list(tokenizer.encode("<|user|>Now,"))
    with pytest.raises(ConfigError, match="only 3 different user turns"):
        self_prompts(cast(Bulk, bulk), tokenizer, 50, seed=1, max_tokens=20, end_ids=[257], say=nothing)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        self_prompts(cast(Bulk, bulk), tokenizer, 3, seed=1, max_tokens=20, end_ids=[257], say=nothing)


def test_temperatures_are_dealt_and_seeds_differ() -> None:
    every = [ask for _, ask in answer_requests([(1,), (2,)], seed=0, samples=2, temperatures=(0.0, 1.0), max_tokens=5)]
    assert [ask.temperature for ask in every] == [0.0, 1.0, 1.0, 0.0]
    assert len({ask.seed for ask in every}) == 4


def test_a_corpus_is_read_back_in_order(tmp_path: Path) -> None:
    first, second = CorpusWriter(tmp_path, 49152, rank=0), CorpusWriter(tmp_path, 49152, rank=1)
    first.add(2, [1, 2], np.array([3, 60000 - 20000], dtype=np.int32))
    first.flush()
    second.add(1, [7], np.array([8], dtype=np.int32))
    second.flush()
    CorpusWriter(tmp_path, 49152, rank=0).add(5, [9], np.array([9], dtype=np.int32))  # killed before it was flushed
    later = CorpusWriter(tmp_path, 49152, rank=0)
    later.add(0, [5, 5, 5], np.array([6], dtype=np.int32))
    later.flush()
    found = load_corpus(tmp_path)
    assert found.numbers.tolist() == [0, 1, 2]
    assert [found.at(i).tolist() for i in range(3)] == [[5, 5, 5, 6], [7, 8], [1, 2, 3, 40000]]
    assert found.prompt_lengths.tolist() == [3, 1, 2]
    assert found.answer_tokens == 4
    counts = found.counts(49152)
    assert counts.sum() == 4
    assert counts[[3, 6, 8, 40000]].tolist() == [1, 1, 1, 1]
    (tmp_path / "part-000-00000.npz").write_bytes(b"not a zip file")
    with pytest.raises(ConfigError, match="part-000-00000"):
        load_corpus(tmp_path)


def test_rows_hold_every_sequence_once_an_epoch() -> None:
    lengths = np.random.default_rng(0).integers(2, 40, size=600).tolist()
    plan = RowPlan(sequences(lengths), 64, seed=3)
    per_epoch = len(plan._epoch(0))
    rows = plan.batch(0, per_epoch)
    real = rows.ids[rows.real]
    assert sorted(real.tolist()) == list(range(sum(lengths)))
    assert rows.real.float().mean() > 0.95  # little is padding
    assert int(rows.answers.sum()) == sum(n - n // 2 for n in lengths)
    begins = rows.positions == 0
    assert int((begins & rows.real).sum()) == len(lengths)
    assert plan.epoch_of(per_epoch) == 1.0
    again = RowPlan(sequences(lengths), 64, seed=3)
    torch.testing.assert_close(again.batch(per_epoch + 3, 2).ids, plan.batch(per_epoch + 3, 2).ids)
    assert not torch.equal(plan.batch(per_epoch, 4).ids, plan.batch(0, 4).ids)


def test_longer_sequences_are_cut() -> None:
    rows = RowPlan(sequences([100]), 16, seed=0).batch(0, 1)
    assert rows.ids.tolist() == [list(range(16))]
    assert not rows.answers.any()


@pytest.fixture
def config(tiny_target: Path, tmp_path: Path) -> TrainConfig:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Question {i}?"}) + "\n" for i in range(12)))
    return TrainConfig(
        recipe="tiny",
        target=str(tiny_target),
        out=tmp_path / "run",
        prompts=(str(file),),
        held_out=3,
        samples=2,
        max_tokens=12,
        max_prompt_tokens=60,
        lanes=4,
        temperatures=(0.0, 1.0),
        device="cpu",
    )


def test_data_are_made_once(config: TrainConfig, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    made = gather(config, tiny_target, Ranks(), lines.append)
    assert len(made.corpus) == (12 - 3) * 2
    assert len(made.held_out) == 3
    assert any("18 of 18" in line and "tok/s" in line for line in lines)
    tokenizer = load_tokenizer(tiny_target)
    asked_for = {tuple(as_tokens(tokenizer, TrainPrompt(f"Question {i}?"))) for i in range(12)}
    learnt = {tuple(made.corpus.at(i)[:n].tolist()) for i, n in enumerate(made.corpus.prompt_lengths)}
    assert learnt | set(made.held_out) == asked_for
    assert not learnt & set(made.held_out)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the target must not be opened again")

    monkeypatch.setattr(data_module, "open_model", fail)
    assert _same(gather(config, tiny_target, Ranks(), nothing), made)
    shared = replace(config, out=config.out.parent / "other", prompts=(), data=str(config.out / "data"))
    assert _same(gather(shared, tiny_target, Ranks(), nothing), made)
    with pytest.raises(ConfigError, match=r"samples=3: the data in .* was made with 2"):
        gather(replace(config, samples=3), tiny_target, Ranks(), nothing)


def test_data_go_on_where_they_were_stopped(
    config: TrainConfig, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = gather(replace(config, out=tmp_path / "whole"), tiny_target, Ranks(), nothing)
    write = Bulk.write

    def killed(self: Bulk, asks: Any, end_ids: Any = None) -> Iterator[BulkAnswer]:
        for count, answer in enumerate(write(self, asks, end_ids)):
            if count == 7:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr("slipstream.train.data._PART", 3)
    with monkeypatch.context() as patch:
        patch.setattr(Bulk, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            gather(config, tiny_target, Ranks(), nothing)
    assert len(load_corpus(config.data_folder)) == 7
    assert _same(gather(config, tiny_target, Ranks(), nothing), whole)


def _same(one: Data, other: Data) -> bool:
    tokens = np.array_equal(one.corpus.tokens, other.corpus.tokens)
    return tokens and np.array_equal(one.corpus.starts, other.corpus.starts) and one.held_out == other.held_out


def test_too_few_prompts(config: TrainConfig, tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="held_out=12: only 12 prompts"):
        gather(replace(config, held_out=12), tiny_target, Ranks(), nothing)


def test_settings_are_checked(config: TrainConfig) -> None:
    for wrong, message in (
        ({"rows": 0}, "rows=0: must be 1 or more"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"temperatures": ()}, "at least one"),
        ({"precision": "int8"}, "precision='int8': must be one of auto, bf16, fp32"),
        ({"prompts": ()}, "nothing to learn from"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(config, **cast(Any, wrong))
    assert TrainConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config
    with pytest.raises(ConfigError, match=r"steps=7: the run in .* was begun with 1000"):
        replace(config, steps=7).check_same_run(config)
    replace(config, out=Path("moved")).check_same_run(config)


def test_options_of_a_recipe() -> None:
    assert read_options(TinyOptions, {"decay": "0.5"}) == TinyOptions(0.5)
    with pytest.raises(ConfigError, match="option 'bogus' is unknown: this recipe has decay"):
        read_options(TinyOptions, {"bogus": 1})
    with pytest.raises(ConfigError, match="option decay='much': must be float"):
        read_options(TinyOptions, {"decay": "much"})


PROMPTS = [[5, 6, 7], [40], [9] * 30, [80, 81], [1, 2, 3, 4, 5], [200, 7], [11, 12, 13]]


def asks(max_tokens: int) -> list[BulkRequest]:
    return [
        BulkRequest(prompt, 2**64 - 1 - i, (0.0, 1.0, 1.6)[i % 3], max_tokens - i % 2)
        for i, prompt in enumerate(PROMPTS + PROMPTS[::-1])
    ]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Runner:
    return open_model(tiny_target, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("lanes", "max_tokens"), [(1, 5), (4, 40), (64, 33)])
def test_answers_are_the_engines(
    target: Runner, open_llm: Callable[..., LLM], lanes: int, max_tokens: int, tiny_target: Path
) -> None:
    wanted = asks(max_tokens)
    bulk = Bulk(target, lanes=lanes, max_len=80, end_ids=[EOS])
    written = {answer.number: answer.tokens.tolist() for answer in bulk.write(enumerate(wanted))}
    assert sorted(written) == list(range(len(wanted)))
    llm = open_llm(tiny_target, drafter=None)
    params = [SamplingParams(temperature=a.temperature, seed=a.seed, max_tokens=a.max_tokens) for a in wanted]
    outputs = llm.generate([{"prompt_token_ids": list(a.prompt)} for a in wanted], params)
    for number, output in enumerate(outputs):
        assert written[number] == output.outputs[0].token_ids, number


def test_answers_end_at_any_of_the_ends(target: Runner) -> None:
    ask = BulkRequest([5, 6, 7], 3, 1.0, 40)
    free = next(iter(Bulk(target, lanes=2, max_len=80, end_ids=[]).write([(7, ask)])))
    assert free.number == 7
    assert len(free.tokens) == 40
    end = int(free.tokens[11])
    first = free.tokens.tolist().index(end)
    cut = next(iter(Bulk(target, lanes=2, max_len=80, end_ids=[299, end]).write([(0, ask)])))
    assert cut.tokens.tolist() == free.tokens[: first + 1].tolist()


def test_a_bulk_can_be_used_again(target: Runner) -> None:
    bulk = Bulk(target, lanes=3, max_len=80, end_ids=[EOS])
    first = [answer.tokens.tolist() for answer in bulk.write(enumerate(asks(9)))]
    assert [answer.tokens.tolist() for answer in bulk.write(enumerate(asks(9)))] == first


def test_what_is_being_written_is_counted(target: Runner) -> None:
    """When the first of three answers ends, the others have about equally many tokens: steps come in batches."""
    bulk = Bulk(target, lanes=3, max_len=80, end_ids=[])
    assert bulk.unfinished_tokens == 0
    counts = []
    for _ in bulk.write((i, BulkRequest([5, 6 + i], i, 1.0, 17 + 20 * i)) for i in range(3)):
        counts.append(bulk.unfinished_tokens)
    assert counts[0] >= 2 * 17
    assert 37 <= counts[1] <= 57
    assert counts[2] == bulk.unfinished_tokens == 0


def test_what_does_not_fit_is_refused(target: Runner) -> None:
    with pytest.raises(ConfigError, match="256 positions"):
        Bulk(target, lanes=1, max_len=250, end_ids=[])
    bulk = Bulk(target, lanes=1, max_len=20, end_ids=[])
    with pytest.raises(ConfigError, match="at most 20"):
        list(bulk.write([(0, BulkRequest([1] * 15, 0, 0.0, 10))]))
