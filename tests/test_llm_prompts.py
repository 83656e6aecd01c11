"""What callers ask: prompts of every kind, alone, in batches and from many threads; how long they may be; chats."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from conftest import VOCAB
from slipstream import LLM, RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.errors import (
    CapacityError,
    ConfigError,
    InvalidRequest,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def greedy_answer(logprobs: Callable[[list[int]], torch.Tensor], prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logprobs(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def ids(output: RequestOutput) -> list[int]:
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
        assert len({tuple(ids(output[0])) for output in outputs}) == 1
        assert all(type(token) is int for output in outputs for token in output[0].prompt_token_ids)

    def test_it_is_the_models_answer(self, llm: LLM, reference: Callable[[list[int]], torch.Tensor]) -> None:
        prompt = [5, 80, 3, 200, 9]
        (output,) = llm.generate(prompt, GREEDY)
        assert ids(output) == greedy_answer(reference, prompt, 12)

    def test_order_is_kept_and_each_has_its_own_parameters(self, llm: LLM) -> None:
        prompts = [[i + 1] * (1 + 3 * i) for i in range(20)]  # more than run at once, of all lengths
        params = [SamplingParams(max_tokens=20 - i, temperature=i / 10, seed=i, ignore_eos=True) for i in range(20)]
        together = llm.generate(prompts, params)
        assert [output.prompt_token_ids for output in together] == prompts
        assert [len(ids(output)) for output in together] == [20 - i for i in range(20)]
        alone = [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]
        assert [ids(output) for output in together] == [ids(output) for output in alone]
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
    def test_a_prompt_that_leaves_no_room(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm(max_model_len=32)
        assert llm.max_model_len == 32
        assert len(ids(llm.generate([[1] * 31], GREEDY)[0])) == 1
        with pytest.raises(InvalidRequest, match="the prompt has 32 tokens and the context 32: shorten the prompt"):
            llm.generate([[1] * 32])
        with pytest.raises(InvalidRequest, match="the prompt has 33 tokens"):
            llm.generate([[1], [1] * 33], GREEDY)  # the first of them is taken back

    def test_a_context_longer_than_the_models(self, open_llm: Callable[..., LLM]) -> None:
        with pytest.raises(CapacityError, match="max_model_len=257: the model has only 256 positions"):
            open_llm(max_model_len=257)

    @pytest.mark.parametrize("memory", [2048, "1MB"])
    def test_too_little_memory(self, open_llm: Callable[..., LLM], memory: str | int) -> None:
        with pytest.raises(CapacityError, match=r"bytes: a context of 256 tokens needs .* give memory=1MiB or more"):
            open_llm(memory=memory, max_model_len=256)

    def test_less_memory_makes_a_shorter_context(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm(memory=256 * VOCAB * 4 * 3 + 3 * 6144)
        assert llm.max_model_len == 48
        plan = llm.memory_plan
        assert plan.num_pages == 3
        assert plan.cache_bytes + plan.workspace_bytes <= 256 * VOCAB * 4 * 3 + 3 * 6144

    @pytest.mark.parametrize("memory", ["lots", "0"])
    def test_wrong_memory(self, open_llm: Callable[..., LLM], memory: str) -> None:
        with pytest.raises(ConfigError, match="memory="):
            open_llm(memory=memory)


class TestChat:
    def test_the_template_is_followed(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "hi"}]
        prompt = llm.chat_prompt(messages)
        assert llm.tokenizer.decode(prompt) == "<|user|>hi\n<|assistant|>"
        (output,) = llm.chat(messages, GREEDY)
        assert output.prompt_token_ids == prompt
        assert ids(output) == ids(llm.generate(prompt, GREEDY)[0])

    def test_a_batch_of_conversations(self, llm: LLM) -> None:
        talks = [
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            [{"role": "user", "content": "bye"}],
        ]
        outputs = llm.chat(talks, [GREEDY, SamplingParams(max_tokens=3, ignore_eos=True)])
        assert [output.prompt_token_ids for output in outputs] == [llm.chat_prompt(talk) for talk in talks]
        assert [len(ids(output)) for output in outputs] == [12, 3]

    def test_a_model_without_a_template(self, llm: LLM) -> None:
        llm.tokenizer.chat_template = None
        prompt = llm.chat_prompt([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
        assert llm.tokenizer.decode(prompt) == "a\n\nb"
