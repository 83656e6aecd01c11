"""Inside transformers' `generate`: the tokens of plain generation, in fewer passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    EosTokenCriteria,
    GPT2Config,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteriaList,
)

from conftest import save_model
from slipstream import hf
from slipstream.core.draft import Tree
from slipstream.core.errors import ConfigError, InvalidRequest
from slipstream.drafters.base import DraftRequest, HostDrafter

PROMPT = torch.tensor([[5, 6, 7, 8] * 6])


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_target)


class Oracle(HostDrafter):
    """Knows the answer, and now and then not."""

    name = "oracle"
    bounded = True

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = list(answer)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> list[Tree]:
        (request,), (most,) = requests, budget
        at = len(request.tokens) - request.prompt_length
        guess = [token if (at + i) % 7 else token ^ 1 for i, token in enumerate(self._answer[at : at + most])]
        branch = (
            Tree((guess[0], guess[0] ^ 3, *guess[1:]), (-1, -1, 0, *range(2, len(guess)))) if len(guess) > 1 else None
        )
        return [branch if branch is not None and len(branch) <= most else Tree.chain(guess)]


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "oracle"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"do_sample": True, "top_k": 5, "min_new_tokens": 40},
    ],
)
def test_the_tokens_are_those_of_plain_generation(model: Any, drafter: str, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    plain = model.generate(PROMPT, max_new_tokens=60, **options)
    made: Any = Oracle(plain[0, PROMPT.shape[1] :].tolist()) if drafter == "oracle" else drafter
    torch.manual_seed(3)
    ours = model.generate(PROMPT, max_new_tokens=60, custom_generate=hf.generate, drafter=made, **options)
    assert ours.tolist() == plain.tolist()


def test_it_takes_fewer_passes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": None}
    plain = model.generate(PROMPT, **options)
    answer = plain[0, PROMPT.shape[1] :].tolist()
    passes: list[int] = []
    forward = type(model).forward

    def counted(self: Any, input_ids: Any = None, **more: Any) -> Any:
        passes.append(input_ids.shape[1])
        return forward(self, input_ids, **more)

    monkeypatch.setattr(type(model), "forward", counted)
    ours = model.generate(PROMPT, custom_generate=hf.generate, drafter="prediction", prediction=answer, **options)
    assert ours.tolist() == plain.tolist()
    assert len(passes) < 50


def test_scores_streams_and_padding(model: Any) -> None:
    padded = torch.cat([torch.zeros((1, 3), dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    told: list[int] = []

    class Streamer:
        def put(self, value: Any) -> None:
            told.extend(value.flatten().tolist())

        def end(self) -> None:
            told.append(-1)

    out = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=20,
        custom_generate=hf.generate,
        stream_to=Streamer(),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    plain = model.generate(padded, attention_mask=mask, max_new_tokens=20)
    assert out.sequences.tolist() == plain.tolist()
    new = plain[0, padded.shape[1] :].tolist()
    assert told == [*padded[0].tolist(), *new, -1]
    assert [int(scores.argmax()) for scores in out.scores] == new
    assert len(out.logits) == len(new)


def test_a_criterion_ends_an_accepted_run(model: Any) -> None:
    plain = model.generate(PROMPT, max_new_tokens=60, eos_token_id=None)
    answer = plain[0, PROMPT.shape[1] :].tolist()
    criteria = StoppingCriteriaList([EosTokenCriteria(answer[20])])
    options: dict[str, Any] = {
        "max_new_tokens": 60,
        "eos_token_id": None,
        "pad_token_id": 0,
        "stopping_criteria": criteria,
    }
    expected = model.generate(PROMPT, **options)
    ours = model.generate(PROMPT, custom_generate=hf.generate, drafter=Oracle(answer), **options)
    assert ours.tolist() == expected.tolist()
    assert ours.shape[1] < plain.shape[1]


def test_another_family(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
    other: Any = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "gpt2", config))
    plain = other.generate(PROMPT, max_new_tokens=30)
    assert other.generate(PROMPT, max_new_tokens=30, custom_generate=hf.generate).tolist() == plain.tolist()


def test_caches_that_give_nothing_back(model: Any) -> None:
    with pytest.raises(InvalidRequest, match="StaticCache"):
        model.generate(PROMPT, max_new_tokens=5, custom_generate=hf.generate, cache_implementation="static")
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    config = MistralConfig(vocab_size=300, hidden_size=16, intermediate_size=16, sliding_window=128, **sizes)
    windowed: Any = MistralForCausalLM(config).eval()
    plain = windowed.generate(PROMPT, max_new_tokens=20)
    assert windowed.generate(PROMPT, max_new_tokens=20, custom_generate=hf.generate).tolist() == plain.tolist()
    with pytest.raises(InvalidRequest, match="a window of 128 tokens, and prompt and answer may have 124"):
        windowed.generate(PROMPT, max_new_tokens=100, custom_generate=hf.generate)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        (PROMPT.repeat(2, 1), {}, InvalidRequest, "2 prompts: give one at a time"),
        (PROMPT, {"num_beams": 2}, InvalidRequest, "num_beams=2: must be 1"),
        (PROMPT, {"drafter": "lookahead"}, ConfigError, "must be ngram, suffix, prediction"),
        (PROMPT, {"drafter": "bogus"}, ConfigError, r"drafter='bogus': must be ngram, .* HostDrafter here$"),
        (PROMPT, {"drafter": "eagle3"}, ConfigError, r"'eagle3': must be ngram, .*LLM\(drafter='eagle3'\) has it"),
        (PROMPT, {"drafter": "draft:some/where"}, ConfigError, "must be ngram, suffix, prediction"),
        (PROMPT, {"drafter": "ngram+suffix"}, ConfigError, "must be ngram, suffix, prediction"),
        (PROMPT, {"drafter": Oracle}, ConfigError, r"an object \(no class\) of a HostDrafter"),
        (PROMPT, {"draft_tokens": -1}, ConfigError, "draft_tokens=-1: must be 0 to 64"),
        (PROMPT, {"prompt_lookup_num_tokens": 4}, InvalidRequest, "give drafter='ngram', draft_tokens=4"),
        (PROMPT, {"use_cache": False}, InvalidRequest, "use_cache=False"),
        (PROMPT, {"output_router_logits": True}, InvalidRequest, "output_router_logits=True: the model is given token"),
        (PROMPT, {"inputs_embeds": torch.zeros(1, 24, 32)}, InvalidRequest, r"inputs_embeds=<\[1, 24, 32\]>"),
        (
            PROMPT,
            {"position_ids": torch.arange(24)[None] * 2},
            InvalidRequest,
            r"position_ids=<\[1, 24\]>: must be 0, 1",
        ),
    ],
)
def test_what_it_cannot_do_is_said(
    model: Any, prompt: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model.generate(prompt, max_new_tokens=5, custom_generate=hf.generate, **options)


def test_what_generate_prepares_by_itself_is_no_wish(model: Any) -> None:
    """A prompt of which the beginning is cached, padding, and positions as they would be anyway."""
    plain = model.generate(PROMPT, max_new_tokens=8)
    for more in ({"position_ids": torch.arange(24)[None]}, {"logits_to_keep": 1}, {"use_cache": True}):
        assert model.generate(PROMPT, max_new_tokens=8, custom_generate=hf.generate, **more).tolist() == plain.tolist()
    cache = model(PROMPT[:, :10], use_cache=True).past_key_values
    mask = torch.ones_like(PROMPT)
    told = {"max_new_tokens": 8, "attention_mask": mask, "past_key_values": cache}
    assert model.generate(PROMPT, custom_generate=hf.generate, **told).tolist() == plain.tolist()
