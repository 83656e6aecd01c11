"""Small tokenizers that cut the same text differently: byte-level ones, and one with marks for spaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the cat sat on the mat, and the dog sat on the cat.",
    "to be or not to be: that is the question that is asked",
    "she sells sea shells on the sea shore; the shells she sells are sea shells",
    "déjà vu, naïve café — 日本語の文字 and emoji 🙂 too",
] * 4

SPECIAL = ["<bos>", "<eos>"]


def byte_level(vocab: int, corpus: list[str] | None = None) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(corpus or CORPUS, trainer)
    return fast(tokenizer)


def with_marks(vocab: int) -> Any:
    """As sentencepiece has them: a mark for a space, one before the text, and bytes where it knows no character."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz .,:;\u2581"))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=letters, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    spec = json.loads(tokenizer.to_str())  # bytes are no special tokens: they have a text
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in bytes_]
    return fast(Tokenizer.from_str(json.dumps(spec)))


def fast(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def permuted(tokenizer: Any, order: list[int]) -> Any:
    """The same tokens with other ids: what was i becomes order[i]."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec["model"]["vocab"] = {text: order[token] for text, token in spec["model"]["vocab"].items()}
    for added in spec["added_tokens"]:
        added["id"] = order[added["id"]]
    spec["added_tokens"].sort(key=lambda added: added["id"])
    return fast(Tokenizer.from_str(json.dumps(spec)))


def save(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
