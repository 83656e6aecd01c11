"""Where answers end, also in the middle of a run of accepted guesses: as plain decoding ends them, to the token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from conftest import EOS
from scripted import Answers, Right
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams

PROMPT = list(range(40, 52))
LETTERS = dict.fromkeys(range(40, 90), 8.0)  # tokens that are text, so that stop strings can be found
PLAIN = SpeculationParams(enabled=False)


class Eager(Right):
    """Always right, and many tokens at once."""

    name: ClassVar[str] = "eager"
    default_draft_tokens: ClassVar[int] = 30


@dataclass(frozen=True)
class Stage:
    """An engine whose drafter knows how answers go on when nothing ends them."""

    llm: LLM
    answers: Answers
    known: dict[str, CompletionOutput] = field(default_factory=dict)

    def unbounded(self) -> CompletionOutput:
        """60 tokens of text, whatever they are; the drafter hears of them."""
        if "whole" not in self.known:
            params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias=LETTERS, seed=1, speculation=PLAIN)
            output = self.llm.generate(PROMPT, params)[0].outputs[0]
            assert len(output.token_ids) == 60
            self.answers.tell(PROMPT, 1, output.token_ids)
            self.known["whole"] = output
        return self.known["whole"]

    def both(self, params: SamplingParams) -> CompletionOutput:
        """The answer with guesses, after a check that it is the one without."""
        params = replace(params, logit_bias={**LETTERS, **params.logit_bias}, logprobs=2)
        plain = self.llm.generate(PROMPT, replace(params, speculation=PLAIN))[0].outputs[0]
        drafted = self.llm.generate(PROMPT, params)[0].outputs[0]
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text
        assert (drafted.finish_reason, drafted.stop_reason) == (plain.finish_reason, plain.stop_reason)
        assert (drafted.error, plain.error) == (None, None)
        for output in (drafted, plain):
            stats = output.speculation
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids) == stats.emitted
            assert all(token in at for token, at in zip(output.token_ids, output.logprobs, strict=True))
            assert stats.accepted <= min(stats.drafted, stats.emitted)
            assert stats.tau == stats.emitted / stats.rounds
        assert plain.speculation.rounds == len(plain.token_ids)
        assert drafted.logprobs is not None
        assert plain.logprobs is not None
        for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
            assert list(ours) == list(theirs)
            assert [x.logprob for x in ours.values()] == pytest.approx([x.logprob for x in theirs.values()], abs=1e-4)
        return drafted


@pytest.fixture(scope="module")
def stage(tiny_target: Path) -> Iterator[Stage]:
    answers = Answers()
    with LLM(tiny_target, drafter=Eager(answers), planner="fixed", memory="64MiB", max_num_seqs=8) as llm:
        yield Stage(llm, answers)
    assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


def first_at(values: list[Any], low: int) -> int:
    """The first place from `low` on of a value that did not come before: somewhere inside an accepted run."""
    return next(i for i in range(low, len(values)) if values[i] not in values[:i])


def test_a_long_run_is_accepted_at_once(stage: Stage) -> None:
    whole = stage.unbounded()
    output = stage.both(SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    assert output.token_ids == whole.token_ids
    assert output.finish_reason == "length"
    assert output.speculation.rounds == 3  # 1 + 31 + 28
    assert output.speculation.tau == 20
    assert output.speculation.accepted == 57
    assert output.speculation.by_drafter["eager"].accepted == 57


@pytest.mark.parametrize("limit", [1, 2, 3, 31, 32, 33, 59])
def test_max_tokens(stage: Stage, limit: int) -> None:
    whole = stage.unbounded()
    output = stage.both(SamplingParams(max_tokens=limit, ignore_eos=True, seed=1))
    assert output.token_ids == whole.token_ids[:limit]
    assert (output.finish_reason, output.stop_reason) == ("length", None)


@pytest.mark.parametrize("low", [0, 3, 12, 20])
@pytest.mark.parametrize("keep", [False, True])
def test_stop_ids(stage: Stage, low: int, keep: bool) -> None:
    whole = stage.unbounded()
    at = first_at(whole.token_ids, low)
    token = whole.token_ids[at]
    output = stage.both(
        SamplingParams(max_tokens=60, ignore_eos=True, seed=1, stop_token_ids=[token], include_stop_str_in_output=keep)
    )
    assert output.token_ids == whole.token_ids[: at + 1]
    assert output.text == whole.text[: at + keep]  # one letter a token
    assert (output.finish_reason, output.stop_reason) == ("stop", token)


@pytest.mark.parametrize("low", [1, 8, 16])
@pytest.mark.parametrize("ignored", [False, True])
def test_end_of_text(stage: Stage, low: int, ignored: bool) -> None:
    """The drafter goes on behind the end, and is right about it: nothing of that may come out."""
    common = SamplingParams(max_tokens=60, logit_bias={**LETTERS, EOS: 13.0}, temperature=2)
    tries = [replace(common, ignore_eos=True, seed=seed, speculation=PLAIN) for seed in range(24)]
    found = [output.outputs[0] for output in stage.llm.generate([PROMPT] * 24, tries)]
    seed, whole = next(
        (i, o) for i, o in enumerate(found) if EOS in o.token_ids[low:50] and EOS not in o.token_ids[:low]
    )
    at = whole.token_ids.index(EOS)
    stage.answers.tell(PROMPT, seed, whole.token_ids)
    output = stage.both(replace(common, seed=seed, ignore_eos=ignored))
    if ignored:
        assert output.token_ids == whole.token_ids
        assert output.finish_reason == "length"
    else:
        assert output.token_ids == whole.token_ids[: at + 1]
        assert output.text == stage.llm.tokenizer.decode(whole.token_ids[:at])
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert output.speculation.emitted == at + 1


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("at", [0, 25, 40])
def test_stop_strings(stage: Stage, at: int, length: int, keep: bool) -> None:
    whole = stage.unbounded()
    stop = whole.text[at : at + length]
    found = whole.text.find(stop)
    output = stage.both(
        SamplingParams(
            max_tokens=60, ignore_eos=True, seed=1, stop=["never this", stop], include_stop_str_in_output=keep
        )
    )
    assert output.text == whole.text[: found + length * keep]
    assert output.token_ids == whole.token_ids[: found + length]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_the_end_of_the_context(open_llm: Callable[..., LLM]) -> None:
    answers = Answers()
    stage = Stage(open_llm(drafter=Eager(answers), planner="fixed", max_model_len=40), answers)
    params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias=LETTERS, seed=1, speculation=PLAIN)
    whole = stage.llm.generate(PROMPT, params)[0].outputs[0]
    assert len(whole.token_ids) == 40 - len(PROMPT)
    answers.tell(PROMPT, 1, whole.token_ids + [50] * 40)  # guesses beyond the end
    output = stage.both(SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert output.token_ids == whole.token_ids


@pytest.mark.parametrize("least", [1, 7, 30, 60])
def test_min_tokens_keeps_ends_away(stage: Stage, least: int) -> None:
    """End-of-text and stop ids are not chosen before, however likely; a stop string before is only text."""
    bias = {EOS: 15.0, 60: 15.0}
    params = SamplingParams(
        max_tokens=61, min_tokens=least, seed=2, logit_bias={**LETTERS, **bias}, stop_token_ids=[60], speculation=PLAIN
    )
    whole = stage.llm.generate(PROMPT, params)[0].outputs[0]
    stage.answers.tell(PROMPT, 2, whole.token_ids + [EOS] * 60)
    output = stage.both(replace(params, speculation=SpeculationParams(), logit_bias=bias))
    assert not {EOS, 60} & set(output.token_ids[:least])
    assert len(output.token_ids) == least + 1  # the first that may end it does
    assert output.finish_reason == "stop"
    assert output.stop_reason == (None if output.token_ids[-1] == EOS else 60)


@pytest.mark.parametrize("least", [0, 1, 9, 40])
def test_min_tokens_and_stop_strings(stage: Stage, least: int) -> None:
    whole = stage.unbounded()
    common = max(set(whole.text), key=whole.text.count)
    output = stage.both(SamplingParams(max_tokens=60, min_tokens=least, ignore_eos=True, seed=1, stop=common))
    end = whole.text.find(common, max(0, least - 1))
    if end < 0:
        assert output.finish_reason == "length"
        end = 60
    else:
        assert output.stop_reason == common
        assert len(output.token_ids) == end + 1 >= least
    assert output.text == whole.text[:end]


def test_a_stop_that_nobody_meets_changes_nothing(stage: Stage) -> None:
    whole = stage.unbounded()
    output = stage.both(SamplingParams(max_tokens=60, ignore_eos=True, seed=1, stop=["nowhere"], stop_token_ids=[299]))
    assert (output.text, output.token_ids, output.finish_reason) == (whole.text, whole.token_ids, "length")


def test_streamed_outputs_never_show_what_is_cut(stage: Stage) -> None:
    whole = stage.unbounded()
    stop = whole.text[33:38]
    at = whole.text.find(stop)
    for speculation in (SpeculationParams(), PLAIN):
        params = SamplingParams(
            max_tokens=60, ignore_eos=True, seed=1, stop=stop, logit_bias=LETTERS, speculation=speculation, logprobs=0
        )
        outputs = [output.outputs[0] for output in stage.llm.stream(PROMPT, params)]
        assert outputs[-1].text == whole.text[:at]
        assert all(whole.text[:at].startswith(output.text) for output in outputs)
        for output in outputs:
            assert output.token_ids == whole.token_ids[: len(output.token_ids)]
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids) == output.speculation.emitted
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["stop"]


def test_siblings_end_each_in_its_own_way(stage: Stage) -> None:
    """Samples of one request stop at different places; each has its own counts."""
    params = SamplingParams(n=4, max_tokens=30, temperature=2, seed=5, logit_bias={**LETTERS, EOS: 8.5}, logprobs=0)
    (plain,) = stage.llm.generate(PROMPT, replace(params, speculation=PLAIN))
    for output in plain.outputs:
        stage.answers.tell(PROMPT, 5, output.token_ids + [50] * 40, output.index)
    (drafted,) = stage.llm.generate(PROMPT, params)
    assert [o.token_ids for o in drafted.outputs] == [o.token_ids for o in plain.outputs]
    assert len({len(o.token_ids) for o in drafted.outputs}) > 1
    assert [o.speculation.emitted for o in drafted.outputs] == [len(o.token_ids) for o in plain.outputs]
    assert [o.text for o in drafted.outputs] == [o.text for o in plain.outputs]
