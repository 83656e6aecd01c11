"""The public face: samples, log probabilities, parameters, drafters, and what it says to mistakes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream import LLM, RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Tree
from slipstream.core.errors import (
    ConfigError,
    InvalidRequest,
    ModelNotFound,
)
from slipstream.drafters.base import DraftRequest, HostDrafter

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


class TestSamples:
    def test_n_answers(self, llm: LLM) -> None:
        params = SamplingParams(n=5, seed=3, max_tokens=10, ignore_eos=True)
        (output,) = llm.generate([[4] * 21], params)
        assert [answer.index for answer in output.outputs] == [0, 1, 2, 3, 4]
        assert len({tuple(answer.token_ids) for answer in output.outputs}) == 5
        (again,) = llm.generate([[4] * 21], params)
        assert [a.token_ids for a in again.outputs] == [a.token_ids for a in output.outputs]
        (fewer,) = llm.generate([[4] * 21], SamplingParams(n=2, seed=3, max_tokens=10, ignore_eos=True))
        assert [a.token_ids for a in fewer.outputs] == [a.token_ids for a in output.outputs[:2]]

    def test_more_answers_than_run_at_once(self, llm: LLM) -> None:
        (output,) = llm.generate([[9] * 40], SamplingParams(n=20, max_tokens=5, seed=1, ignore_eos=True))
        assert all(len(answer.token_ids) == 5 for answer in output.outputs)
        assert output.finished

    def test_greedy_answers_are_all_the_same(self, llm: LLM) -> None:
        (output,) = llm.generate([[9] * 40], SamplingParams(n=3, max_tokens=20, temperature=0, ignore_eos=True))
        assert output.outputs[0].token_ids == output.outputs[1].token_ids == output.outputs[2].token_ids

    def test_without_a_seed_each_time_another_answer(self, llm: LLM) -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        assert len({tuple(ids(output)) for output in llm.generate([[1]] * 4, params)}) == 4


class TestLogprobs:
    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(logprobs=5, temperature=0),
            SamplingParams(logprobs=3, temperature=1.7, seed=1),
            SamplingParams(logprobs=0, seed=2),
            SamplingParams(
                logprobs=4, seed=3, presence_penalty=2, repetition_penalty=3, logit_bias={7: 4.0}, top_k=9, min_tokens=9
            ),
        ],
    )
    def test_they_are_the_raw_models(
        self, llm: LLM, reference: Callable[[list[int]], torch.Tensor], params: SamplingParams
    ) -> None:
        prompt = [3, 1, 4, 1, 5, 9, 2, 6]
        (output,) = llm.generate(prompt, params)
        answer = output.outputs[0]
        expected = reference(prompt + answer.token_ids)
        assert params.logprobs is not None
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        for i, (token, entries) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            right = expected[len(prompt) - 1 + i]
            order = right.argsort(descending=True).tolist()
            assert list(entries)[: params.logprobs] == order[: params.logprobs]
            assert len(entries) == params.logprobs + (token not in order[: params.logprobs])
            for known, entry in entries.items():
                assert entry.logprob == pytest.approx(right[known].item(), abs=1e-4)
                assert entry.rank == 1 + order.index(known)
                assert entry.decoded_token == llm.tokenizer.decode([known])

    def test_only_for_those_who_ask(self, llm: LLM) -> None:
        params = [SamplingParams(max_tokens=4, logprobs=n, ignore_eos=True) for n in (None, 2, 0)]
        outputs = llm.generate([[1], [2], [3]], params)
        assert outputs[0].outputs[0].logprobs is None
        assert [len(x) for x in outputs[2].outputs[0].logprobs or ()] == [1] * 4
        assert all(len(x) in (2, 3) for x in outputs[1].outputs[0].logprobs or ())


class TestParameters:
    def test_bias_forces_and_forbids(self, llm: LLM) -> None:
        forced = llm.generate([[1]], SamplingParams(logit_bias={77: 100.0}, max_tokens=6, seed=1))[0]
        assert ids(forced) == [77] * 6
        free = ids(llm.generate([[1]], GREEDY)[0])
        forbidden = dict.fromkeys(free, -100.0)
        other = ids(llm.generate([[1]], SamplingParams(temperature=0, max_tokens=12, logit_bias=forbidden))[0])
        assert not set(other) & set(free)

    def test_bad_words_do_not_come(self, llm: LLM) -> None:
        letters = dict.fromkeys(llm.tokenizer.encode("abc"), 100.0)
        params: dict[str, Any] = {"max_tokens": 80, "seed": 4, "temperature": 3.0, "logit_bias": letters}
        free = llm.generate("x", SamplingParams(**params))[0].outputs[0].text
        assert "ab" in free
        assert "ca" in free
        text = llm.generate("x", SamplingParams(**params, bad_words=["ab", "ca"]))[0].outputs[0].text
        assert len(text) == 80
        assert "ab" not in text
        assert "ca" not in text
        assert "c" in text
        none = llm.generate("x", SamplingParams(**params, bad_words="a"))[0].outputs[0].text
        assert "a" not in none

    def test_a_prediction_is_drafted_from_and_never_trusted(self, llm: LLM) -> None:
        letters = dict.fromkeys(llm.tokenizer.encode("abcdefgh"), 30.0)
        plain = llm.generate("x", SamplingParams(max_tokens=60, seed=4, logit_bias=letters))[0].outputs[0]
        for prediction in (plain.text, plain.text[:20] + "wrong" + plain.text[20:], "zzz"):
            params = SamplingParams(max_tokens=60, seed=4, logit_bias=letters, prediction=prediction)
            assert llm.generate("x", params)[0].outputs[0].token_ids == plain.token_ids

    def test_timing_and_counts(self, llm: LLM) -> None:
        for output in llm.generate([[1], [2, 3]] * 8, GREEDY):
            answer = output.outputs[0]
            timing, stats = answer.timing, answer.speculation
            assert 0 <= timing.queued_s <= timing.first_token_s <= timing.total_s
            assert timing.decode_tokens_per_s(12) > 0
            assert stats.emitted == 12
            assert 1 <= stats.rounds <= 12
            assert stats.tau == 12 / stats.rounds
            assert stats.verify_s > 0

    def test_the_models_folder_is_told(self, llm: LLM, tiny_target: Path) -> None:
        assert llm.model_path == tiny_target
        assert llm.get_tokenizer() is llm.tokenizer


class TestDrafters:
    def test_the_same_tokens_whoever_drafts(self, open_llm: Callable[..., LLM], tiny_draft: Path) -> None:
        params = SamplingParams(max_tokens=30, seed=9, ignore_eos=True)
        choices: list[Any] = [None, "none", "ngram", f"model:{tiny_draft}", ["ngram", "prediction"], []]
        answers = [ids(open_llm(drafter=choice).generate([[7, 8, 9]], params)[0]) for choice in choices]
        assert answers == [answers[0]] * len(choices)

    def test_speculative_config_as_vllm_has_it(self, open_llm: Callable[..., LLM], tiny_draft: Path) -> None:
        ngram = open_llm(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
        assert ngram.engine.drafting.default == "ngram"
        assert ngram.engine.config.draft_tokens == 4
        model = open_llm(speculative_config={"model": str(tiny_draft), "num_speculative_tokens": 3})
        assert model.engine.drafting.default == "model"
        params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
        assert ids(model.generate("a", params)[0]) == ids(ngram.generate("a", params)[0])

    @pytest.mark.parametrize(
        "more", [{"drafter": "auto"}, {"drafter": "ngram"}, {"drafter": None}, {"draft_tokens": 3}]
    )
    def test_one_way_to_name_a_drafter(self, open_llm: Callable[..., LLM], more: dict[str, Any]) -> None:
        """Also where what is named is what would be taken anyway."""
        with pytest.raises(ConfigError, match="speculative_config: give either it, or drafter and draft_tokens"):
            open_llm(speculative_config={"method": "ngram"}, **more)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"method": "psychic"}, "method='psychic'"),
            ({}, "method=None"),
            ({"method": "draft_model"}, "with a model draft_model"),
            ({"method": "ngram", "draft_size": 3}, r"unknown keys \['draft_size'\]; known are"),
        ],
    )
    def test_other_speculative_configs(self, open_llm: Callable[..., LLM], config: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=f"speculative_config: .*{message}"):
            open_llm(speculative_config=config)

    @pytest.mark.parametrize("drafter", ["oracle", "ngram:x", "model", ["ngram", "ngram"]])
    def test_unknown_drafters(self, open_llm: Callable[..., LLM], drafter: Any) -> None:
        with pytest.raises(ConfigError, match="drafter '"):
            open_llm(drafter=drafter)

    def test_a_draft_model_that_is_not_there(self, open_llm: Callable[..., LLM], tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound):
            open_llm(drafter=f"model:{tmp_path / 'nowhere'}")

    def test_one_request_without_speculation(self, llm: LLM) -> None:
        off = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, speculation=SpeculationParams(enabled=False)
        )
        outputs = llm.generate([[5] * 20] * 2, [off, GREEDY])
        assert outputs[0].outputs[0].speculation.drafted == 0
        assert outputs[0].outputs[0].speculation.rounds == 12
        assert ids(outputs[0]) == ids(outputs[1])


@pytest.fixture(scope="module")
def default_llm() -> Iterator[LLM]:
    with LLM("default", memory="256MiB", max_model_len=512) as llm:
        yield llm


@pytest.mark.slow
def test_the_default_model_talks(default_llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    (output,) = default_llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.slow
def test_the_default_models_text_streams_in_whole(default_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=["\n\n"])
    prompt = default_llm.chat_prompt([{"role": "user", "content": "Say three words in Japanese, with emoji."}])
    texts = [output.outputs[0].text for output in default_llm.stream(prompt, params)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    (whole,) = default_llm.generate(prompt, params)
    assert texts[-1] == whole.outputs[0].text
    assert default_llm.tokenizer.decode(whole.outputs[0].token_ids, skip_special_tokens=True).startswith(texts[-1])


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda llm: llm.generate("a\udcff"), "not UTF-8 at character 1"),
        (lambda llm: llm.chat([{"role": "user", "content": "\udcff"}]), "not UTF-8 at character 0"),
        (lambda llm: llm.chat("Hi"), "messages='Hi': must be a list of messages"),
        (lambda llm: llm.chat([{"role": "user"}]), "must be a mapping with role and content"),
        (lambda llm: llm.generate("Hi", {"max_tokens": 3}), "must be a SamplingParams"),
        (lambda llm: llm.generate(5), "must be a text, token ids, or a list of these"),
    ],
)
def test_mistakes_explain_themselves(open_llm: Callable[..., LLM], call: Callable[[LLM], Any], remedy: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(remedy)):
        call(open_llm(drafter=None))


def test_a_drafter_without_a_name_is_refused(open_llm: Callable[..., LLM]) -> None:
    class Nameless(HostDrafter):
        def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
            return [Tree()] * len(requests)

    with pytest.raises(ConfigError, match="drafter Nameless: it has no name"):
        open_llm(drafter=Nameless())


def test_what_there_is_to_import_is_listed() -> None:
    assert set(slipstream.__all__) < set(dir(slipstream))
    assert "importlib" not in dir(slipstream)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_answers_may_part_says_so(open_llm: Callable[..., LLM], dtype: str) -> None:
    told: list[str] = []
    llm = open_llm(dtype=dtype, on_progress=told.append)
    answer = llm.generate("Hi", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0]
    said = "LlamaForCausalLM in bfloat16 on cpu has no row-independent passes"
    found = [said in text for text in ("".join(told), "".join(llm.remarks), answer.speculation.why)]
    assert found == [dtype == "bfloat16"] * 3
