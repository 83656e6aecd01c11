"""Draft models that are stored without embeddings, and the same with those of their target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from conftest import save_model, tiny_llama

WORDS = ("model.embed_tokens.weight", "lm_head.weight")


def tiny_shared(folder: Path, seed: int = 4, **changes: Any) -> Path:
    """A random draft of one layer for `tiny_target`; no tokenizer, as `slipstream train draft` writes it."""
    save_model(folder, tiny_llama(**{"num_hidden_layers": 1, "tie_word_embeddings": False, **changes}), seed)
    file = folder / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n not in WORDS}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "shares_embeddings": True}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


def with_words(shared: Path, target: Path, folder: Path) -> Path:
    """The same draft as a model that stands alone: with the target's embedding and LM head written into it."""
    changes = {k: v for k, v in json.loads((shared / "config.json").read_text()).items() if k in _KEPT}
    save_model(folder, tiny_llama(**changes, tie_word_embeddings=False))
    theirs = load_file(target / "model.safetensors")
    embedding = theirs[WORDS[0]]
    words = {WORDS[0]: embedding, WORDS[1]: theirs.get(WORDS[1], embedding).clone()}
    own = load_file(shared / "model.safetensors")
    save_file(own | words, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_KEPT = ("num_hidden_layers", "hidden_size", "intermediate_size", "max_position_embeddings")
