"""Logits without history: the same tokens once more as a fresh prompt, by our passes and by transformers itself.

Whatever was drafted, accepted, rejected and moved in the cache before an answer's token was chosen, here there is
nothing of it. So these rows are what an answer's own log probabilities, and two answers that part, are judged by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from slipstream.engine.memory import available_bytes
from slipstream.kv.cache import KVCache
from slipstream.models.batch import PassBatch
from slipstream.models.load import load_weights, quiet_transformers
from slipstream.models.parity import TOLERANCE

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.engine.llm import LLM

_CHUNK = 512  # rows of a pass: attention over more would take much memory
_SPARE = 1.3  # times the weights: what a second copy of the model needs while it is loaded and run


class Source(Protocol):
    """Something that computes a model's logits from the tokens alone."""

    name: str

    def stray(self, logits: Tensor) -> float:
        """How far a logit of a row [V] may be from ours beyond what the order of summation explains."""
        ...

    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:
        """The rows behind these places of `tokens`, in rising order."""  # [R, V] fp32, on the CPU
        ...


class FreshPrompt:
    """The engine's own model, over a cache that was never used."""

    name = "a fresh prompt"

    def stray(self, logits: Tensor) -> float:
        return 0.0

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:  # [R, V] fp32, on the CPU
        return self._llm.between_rounds(lambda engine: _prefill(engine, tokens, rows))


@torch.inference_mode()
def _prefill(engine: Engine, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:
    size = engine.config.page_size
    pages = -(-len(tokens) // size)
    cache = engine.target.new_cache(pages, size)
    parts = [_chunk(engine, cache, tokens, start, rows) for start in range(0, len(tokens), _CHUNK)]
    return torch.cat(parts)


def _chunk(engine: Engine, cache: KVCache, tokens: Sequence[int], start: int, rows: Sequence[int]) -> Tensor:
    device, end = engine.target.device, min(start + _CHUNK, len(tokens))
    places = torch.arange(start, end, device=device)  # positions, and as the pages lie in order also slots
    wanted = [row - start for row in rows if start <= row < end]
    batch = PassBatch(
        input_ids=torch.tensor(tokens[start:end], device=device),
        positions=places,
        slots=places,
        row_starts=(0, end - start),
        prefix_lengths=(start,),
        pages=(tuple(range(cache.num_pages)),),
        is_tree=(False,),
        masks=None,
        logit_rows=torch.tensor([*wanted, end - start - 1], device=device),  # a pass has one row at least
    )
    return engine.target.forward(batch, cache)[: len(wanted)].cpu()


class Transformers:
    """transformers' own model with its own attention: nothing of ours between the checkpoint and the logits.

    It is loaded when it is first asked.
    """

    name = "transformers"

    def stray(self, logits: Tensor) -> float:
        """Its functions round in other ways than ours as well: what the check at load allows."""
        return TOLERANCE[self._llm.engine.target.dtype] * float(logits.square().mean().sqrt())

    def __init__(self, llm: LLM, trust_remote_code: bool = False) -> None:
        self._llm = llm
        self._trust_remote_code = trust_remote_code
        self._model: torch.nn.Module | None = None

    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:  # [R, V] fp32, on the CPU
        @torch.inference_mode()
        def run(engine: Engine) -> Tensor:
            if self._model is None:
                self._model = self._load(engine)
            ids = torch.tensor([list(tokens)], device=engine.target.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
            return logits[0, list(rows)].float().cpu()

        return self._llm.between_rounds(run)

    def _load(self, engine: Engine) -> torch.nn.Module:
        with quiet_transformers():
            return load_weights(
                self._llm.model_path,
                dtype=engine.target.dtype,
                device=engine.target.device,
                attention="eager",
                trust_remote_code=self._trust_remote_code,
            )


def fits_twice(llm: LLM) -> bool:
    """Is there memory for a second copy of the weights?"""
    return available_bytes(llm.engine.target.device) > _SPARE * llm.memory_plan.weights_bytes
