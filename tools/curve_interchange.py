"""One EAGLE-3 head in two engines: how much of a chain of its guesses stands here, and in vLLM.

The default model itself answers, greedily, in bf16, all first turns of the file. The chains are
as long as vLLM's and always drafted, so that only the engine differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from acceptance import measured
from slipstream import LLM
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle_files import read_eagle, save_eagle3
from slipstream.models.load import load_config
from work import CONTEXT, PEER_DEPTH, encode, first_turns

AT_ONCE = 48


def for_vllm(head: Path, model: Path, out: Path, layout: Literal["original", "speculators"]) -> Path:
    """The head in a layout that vLLM reads, written anew: what is tried is what our writer writes."""
    config = load_config(model)
    shape = TargetShape(config.hidden_size, config.vocab_size, config.num_hidden_layers, config.max_position_embeddings)
    return save_eagle3(read_eagle(HeadFiles.read(head), shape), out, layout, target=str(model), depth=PEER_DEPTH)


def ours(model: Path, head: Path, prompts: Path, max_tokens: int, device: str, limit: int | None) -> dict[str, Any]:
    """Chains of this head in our engine."""
    with LLM(
        str(model),
        drafter=f"eagle:{head}?depth={PEER_DEPTH}&width=1",
        device=device,
        dtype="bfloat16" if device.startswith("cuda") else "float32",
        memory="8GiB" if device.startswith("cuda") else None,
        max_model_len=min(CONTEXT // 2, load_config(model).max_position_embeddings),
        max_num_seqs=AT_ONCE,
        max_draft_rows=AT_ONCE * (PEER_DEPTH + 1),
        planner="fixed",
        graphs=False,  # rounds of many sizes, few of each: recording them takes longer than it saves
    ) as llm:
        longest = llm.max_model_len - max_tokens - 1
        ids = [encode(llm.tokenizer, text, longest) for text in first_turns(prompts, limit)]
        found: dict[str, Any] = json.loads(json.dumps(measured(llm, ids, 0.0, max_tokens).as_dict()))
        return found
