"""Bulk generation gives the answers that the engine gives, whatever the number of lanes and their order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import EOS
from slipstream import LLM, SamplingParams
from slipstream.core.errors import ConfigError
from slipstream.models.parity import open_model
from slipstream.models.runner import Runner
from slipstream.train.bulk import Ask, Bulk

PROMPTS = [[5, 6, 7], [40], [9] * 30, [80, 81], [1, 2, 3, 4, 5], [200, 7], [11, 12, 13]]


def asks(max_tokens: int) -> list[Ask]:
    return [
        Ask(prompt, 2**64 - 1 - i, (0.0, 1.0, 1.6)[i % 3], max_tokens - i % 2)
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
    ask = Ask([5, 6, 7], 3, 1.0, 40)
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
    """Of three answers the first ends when the others have as many tokens, or nearly so: rounds come in batches."""
    bulk = Bulk(target, lanes=3, max_len=80, end_ids=[])
    assert bulk.unended == 0
    counts = []
    for _ in bulk.write((i, Ask([5, 6 + i], i, 1.0, 17 + 20 * i)) for i in range(3)):
        counts.append(bulk.unended)
    assert counts[0] >= 2 * 17
    assert 37 <= counts[1] <= 57
    assert counts[2] == bulk.unended == 0


def test_what_does_not_fit_is_refused(target: Runner) -> None:
    with pytest.raises(ConfigError, match="256 positions"):
        Bulk(target, lanes=1, max_len=250, end_ids=[])
    bulk = Bulk(target, lanes=1, max_len=20, end_ids=[])
    with pytest.raises(ConfigError, match="at most 20"):
        list(bulk.write([(0, Ask([1] * 15, 0, 0.0, 10))]))
