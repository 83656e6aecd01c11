"""Small heads on the target's hidden states, for tests: one that knows, and one that only computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from conftest import VOCAB, save_tokenizer, tiny_llama
from slipstream.kv.cache import LayerShape
from slipstream.models.attention import AttentionTraits, PassContext
from slipstream.models.heads.base import HeadStates
from slipstream.models.taps import Taps

HIDDEN = 32
_HEADS, _DIM = 2, 8


class RandomHead(nn.Module):
    """Random weights, but everything that a head can have: taps, attention, positions, a vocabulary of its own."""

    taps = Taps((1,), normed=True)
    layers: Sequence[LayerShape] = (LayerShape(_HEADS, _DIM, _DIM),)
    dtype = torch.float32

    def __init__(self, *, ids: Sequence[int] | None = None, max_positions: int = 256, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).div(float(shape[-1]) ** 0.5)

        self.vocab = None if ids is None else torch.tensor(ids)
        self.max_positions = max_positions
        self.weights_bytes = 1234
        self.fc, self.embedding = weight(HIDDEN, 2 * HIDDEN), weight(VOCAB, HIDDEN)
        self.turns = 0.5 * weight(2 * max_positions, HIDDEN)
        self.qkv, self.out = 2 * weight(3 * _HEADS * _DIM, HIDDEN), weight(HIDDEN, _HEADS * _DIM)
        self.lm_head = 6 * weight(VOCAB if ids is None else len(ids), HIDDEN)

    def combine(self, taps: Tensor) -> Tensor:
        return taps @ self.fc.T

    def run(
        self,
        ids: Tensor,
        features: Tensor,
        context: PassContext,
        positions: Tensor,
        step: int,
        *,
        behind: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> HeadStates:
        hidden = self.hidden(ids, features if behind is None else features[behind], context, positions)
        hidden = hidden if wanted is None else hidden[wanted]
        return HeadStates(hidden, hidden)

    def hidden(self, ids: Tensor, features: Tensor, context: PassContext, positions: Tensor) -> Tensor:
        x = torch.tanh(features) + 3 * self.embedding[ids] + self.turns[positions]
        q, k, v = (x @ self.qkv.T).view(-1, 3, _HEADS, _DIM).unbind(1)
        attended = context.attend(0, q, k, v, AttentionTraits(_DIM**-0.5, None, None, None))
        return torch.tanh(x + attended.flatten(1) @ self.out.T)

    def logits(self, read: Tensor) -> Tensor:
        return read @ self.lm_head.T

    def plain(self, ids: Sequence[int], features: Tensor) -> Tensor:  # [N, HIDDEN]
        """The rows of one text from its second token on, each over those before it: no cache, no pages."""
        context = cast(PassContext, _Plain())
        return self.hidden(torch.tensor(ids), features, context, torch.arange(len(ids)))


class _Plain:
    """Attention written out."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: AttentionTraits) -> Tensor:
        scores = torch.einsum("nhd,mhd->hnm", q, k) * traits.scaling
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).tril().logical_not()
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


class KnowingHead(RandomHead):
    """For a target whose next token depends on the last one alone: knows its logits by heart."""

    def __init__(self, target: Path, **options: Any) -> None:
        super().__init__(**options)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        with torch.inference_mode():
            every = torch.arange(VOCAB)[:, None]
            self.table = torch.tensor(model(every, use_cache=False).logits[:, 0].numpy())  # [V, V]
            self.states = torch.nn.functional.one_hot(every[:, 0], VOCAB).float()

    def hidden(self, ids: Tensor, features: Tensor, context: PassContext, positions: Tensor) -> Tensor:
        hidden = super().hidden(ids, features[:, :HIDDEN], context, positions)
        return torch.cat((hidden, self.states[ids]), dim=1)

    def logits(self, read: Tensor) -> Tensor:
        return self.table[read[:, HIDDEN:].argmax(1)]


class DoubtingHead(KnowingHead):
    """Knows, but listens to its random part as well: right now and then, and every row that it reads matters."""

    def logits(self, read: Tensor) -> Tensor:
        return super().logits(read) + 0.2 * read[:, :HIDDEN] @ self.lm_head.T


def save_forgetful(folder: Path) -> Path:
    """A target whose next token depends on the last one alone: what its attention finds is thrown away."""
    torch.manual_seed(3)
    folder.mkdir(parents=True)
    model = AutoModelForCausalLM.from_config(tiny_llama(), dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@torch.inference_mode()
def target_features(target: Path, tokens: Sequence[int]) -> Tensor:  # [N, 2 * HIDDEN]
    """What `RandomHead` reads, from transformers itself."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    out: Any = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    return torch.cat((out.hidden_states[1], out.hidden_states[-1]), dim=-1)[0]
