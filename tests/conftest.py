"""Tiny models with random weights and a byte-level tokenizer: the whole engine in milliseconds, without a network."""

from __future__ import annotations

import os

import torch

# Triton chooses its interpreter while it is imported: so before anything that may import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig

from slipstream import LLM
from slipstream.constrain.compiler import Grammars
from slipstream.models import paths

collect_ignore_glob = [] if torch.cuda.is_available() else ["gpu/*"]

# A busy machine is no fault of the code: tests are not timed by the example.
settings.register_profile("slipstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slipstream")

VOCAB = 300
EOS = 257

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """Tiny tensors only lose by being divided."""
    torch.set_num_threads(1)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return paths.cache_folder()


def tiny_llama(**changes: Any) -> LlamaConfig:
    """Large enough to have heads in groups and several layers, small enough to run in a millisecond."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "eos_token_id": EOS,
        "bos_token_id": 256,
        "initializer_range": 0.3,
    }
    return LlamaConfig(**{**shape, **changes})


def save_tokenizer(folder: Path) -> None:
    """One token a byte, then a few words and special tokens, as a Hugging Face fast tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )


def save_model(folder: Path, config: PreTrainedConfig, seed: int = 0) -> Path:
    """A folder as the hub has them: random weights, configuration, tokenizer."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "target", tiny_llama())


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the same vocabulary and a shorter context; it is right now and then, by luck."""
    config = tiny_llama(num_hidden_layers=1, hidden_size=16, intermediate_size=16, max_position_embeddings=64)
    return save_model(tmp_path_factory.mktemp("models") / "draft", config, seed=1)


@pytest.fixture
def open_llm(tiny_target: Path) -> Iterator[Callable[..., LLM]]:
    """Open tiny engines that are closed, and found whole, when the test ends."""
    opened: list[LLM] = []

    def open_one(model: Path = tiny_target, **options: Any) -> LLM:
        opened.append(LLM(model, **{"device": "cpu", "max_num_seqs": 8, "memory": "64MiB", **options}))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()
        assert not llm.engine.scheduler.running
        llm.engine.scheduler.check_integrity()
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm()


@pytest.fixture(scope="session")
def reference(tiny_target: Path) -> Callable[[list[int]], torch.Tensor]:
    """transformers' own log probabilities at every position of a sequence, by the tiny target."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()

    def logprobs(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)  # [N, V]

    return logprobs


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Of the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Grammars(AutoTokenizer.from_pretrained(folder), VOCAB, [EOS])
