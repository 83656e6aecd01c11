"""`LLM` as its callers see it: prompts, parameters, samples, log probabilities, drafters."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slipstream
from conftest import VOCAB
from slipstream import LLM, RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Tree
from slipstream.core.errors import (
    CapacityError,
    ConfigError,
    InvalidRequest,
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


def greedy_answer(logprobs: Callable[[list[int]], torch.Tensor], prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logprobs(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def token_ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


class TestPrompts:
    def test_every_way_to_give_one(self, llm: LLM) -> None:
        text = "hello you"
        tokens = llm.tokenizer.encode(text)
        ways: list[Any] = [
            text,
            [text],
            tokens,
            [tokens],
            tuple(tokens),
            {"prompt": text},
            [{"prompt_token_ids": tokens}],
            [np.array(tokens)],
        ]
        outputs = [llm.generate(way, GREEDY) for way in ways]
        assert all(len(output) == 1 for output in outputs)
        assert all(output[0].prompt_token_ids == tokens for output in outputs)
        assert [output[0].prompt for output in outputs] == [text, text, None, None, None, text, None, None]
        assert len({tuple(token_ids(output[0])) for output in outputs}) == 1
        assert all(type(token) is int for output in outputs for token in output[0].prompt_token_ids)

    def test_it_is_the_models_answer(self, llm: LLM, reference: Callable[[list[int]], torch.Tensor]) -> None:
        prompt = [5, 80, 3, 200, 9]
        (output,) = llm.generate(prompt, GREEDY)
        assert token_ids(output) == greedy_answer(reference, prompt, 12)

    def test_order_is_kept_and_each_has_its_own_parameters(self, llm: LLM) -> None:
        prompts = [[i + 1] * (1 + 3 * i) for i in range(20)]  # more than run at once, of all lengths
        params = [SamplingParams(max_tokens=20 - i, temperature=i / 10, seed=i, ignore_eos=True) for i in range(20)]
        together = llm.generate(prompts, params)
        assert [output.prompt_token_ids for output in together] == prompts
        assert [len(token_ids(output)) for output in together] == [20 - i for i in range(20)]
        alone = [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]
        assert [token_ids(output) for output in together] == [token_ids(output) for output in alone]
        assert len({output.request_id for output in together + alone}) == 40

    def test_nothing_to_do(self, llm: LLM) -> None:
        assert llm.generate([]) == []
        assert llm.chat([]) == []

    def test_on_output_hears_of_each_as_it_finishes(self, llm: LLM) -> None:
        heard: list[RequestOutput] = []
        threads = set()

        def hear(output: RequestOutput) -> None:
            heard.append(output)
            threads.add(threading.current_thread())

        plain = SpeculationParams(enabled=False)
        params = [SamplingParams(max_tokens=n, ignore_eos=True, speculation=plain) for n in (30, 3, 15)]
        outputs = llm.generate([[1], [2], [3]], params, on_output=hear)
        assert heard == [outputs[1], outputs[2], outputs[0]]
        assert threads == {threading.current_thread()}

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", "the prompt is empty: it must have at least one token"),
            ([[]], "the prompt is empty"),
            ([[1, VOCAB]], f"prompt_token_ids: token id {VOCAB} must be a whole number, 0 to {VOCAB - 1}"),
            ([[-1]], "prompt_token_ids: token id -1"),
            ([[1, "a"]], "prompt_token_ids: token id 'a'"),
            ([[1.5]], "prompt_token_ids: token id 1.5"),
            ({}, "give one of prompt, prompt_token_ids"),
            ({"text": "a"}, r"the keys \['text'\]: give one of prompt, prompt_token_ids"),
            ({"prompt": "a", "prompt_token_ids": [1]}, "give one of prompt, prompt_token_ids"),
            ({"prompt": 7}, "prompt=7: must be a text, or a sequence of token ids"),
            ([None], "prompt=None: must be a text"),
        ],
    )
    def test_wrong_prompts(self, llm: LLM, prompt: Any, message: str) -> None:
        with pytest.raises(InvalidRequest, match=message):
            llm.generate(prompt)
        with pytest.raises(InvalidRequest, match=message):
            llm.generate(["right", prompt[0]] if isinstance(prompt, list) else ["right", prompt])
        assert not llm.engine.busy

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            (SamplingParams(logit_bias={VOCAB: 1.0}), f"logit_bias: token id {VOCAB} must be"),
            (SamplingParams(logit_bias={"5": 1.0}), "logit_bias: token id '5' must be"),  # type: ignore[dict-item]
            (SamplingParams(stop_token_ids=[-1]), "stop_token_ids: token id -1 must be"),
            (
                SamplingParams(speculation=SpeculationParams(drafter="oracle")),
                "speculation.drafter='oracle' is not loaded: must be one of auto, suffix, prediction",
            ),
        ],
    )
    def test_wrong_parameters(self, llm: LLM, params: SamplingParams, message: str) -> None:
        with pytest.raises(InvalidRequest, match=message):
            llm.generate("a", params)

    def test_bad_words_beyond_the_models_vocabulary(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm()
        llm.tokenizer.add_tokens(["zyx" + str(i) for i in range(60)])  # ids that the model has no row for
        with pytest.raises(InvalidRequest, match=r"bad_words: token id 3\d\d must be"):
            llm.generate("a", SamplingParams(bad_words=["zyx59"]))

    def test_as_many_parameters_as_prompts(self, llm: LLM) -> None:
        with pytest.raises(InvalidRequest, match="2 sampling_params for 3 prompts: give one, or one for each"):
            llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


class TestLengths:
    def test_a_context_longer_than_the_models(self, open_llm: Callable[..., LLM]) -> None:
        with pytest.raises(CapacityError, match="max_model_len=257: the model has only 256 positions"):
            open_llm(max_model_len=257)

    def test_less_memory_makes_a_shorter_context(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm(memory=256 * VOCAB * 4 * 3 + 3 * 6144)
        assert llm.max_model_len == 48
        plan = llm.memory_plan
        assert plan.num_pages == 3
        assert plan.cache_bytes + plan.workspace_bytes <= 256 * VOCAB * 4 * 3 + 3 * 6144


class TestChat:
    def test_the_template_is_followed(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "hi"}]
        prompt = llm.chat_prompt(messages)
        assert llm.tokenizer.decode(prompt) == "<|user|>hi\n<|assistant|>"
        (output,) = llm.chat(messages, GREEDY)
        assert output.prompt_token_ids == prompt
        assert token_ids(output) == token_ids(llm.generate(prompt, GREEDY)[0])

    def test_a_batch_of_conversations(self, llm: LLM) -> None:
        talks = [
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            [{"role": "user", "content": "bye"}],
        ]
        outputs = llm.chat(talks, [GREEDY, SamplingParams(max_tokens=3, ignore_eos=True)])
        assert [output.prompt_token_ids for output in outputs] == [llm.chat_prompt(talk) for talk in talks]
        assert [len(token_ids(output)) for output in outputs] == [12, 3]

    def test_a_model_without_a_template(self, llm: LLM) -> None:
        llm.tokenizer.chat_template = None
        prompt = llm.chat_prompt([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
        assert llm.tokenizer.decode(prompt) == "a\n\nb"
