"""An EAGLE-3 head in training: the numbers of `models/heads/eagle.py`, over whole texts and with gradients.

Training-time test: the head first reads the target's states (step 0), then its own of the step before, as it will when
it guesses ahead, and learns at every step. Tensors have the names that the head is stored with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from slipstream.models.heads.eagle_files import EagleShape
from slipstream.train.batch import Batch
from slipstream.train.chain_attention import Sequences, attend_chain
from slipstream.train.hasten import Hastened
from slipstream.train.layers import Mlp, Norm, Projections, Rotary


class Eagle3Module(nn.Module):
    """The head's own weights, fp32. embedding: the target's, frozen, no part of the state dict."""

    def __init__(self, shape: EagleShape, embedding: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self._embedding = (embedding,)  # kept from being a child
        tapped = shape.num_taps * shape.target_hidden
        self.fc = nn.Linear(tapped, shape.hidden, bias=False)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(shape.target_hidden, shape.norm_eps) for _ in range(shape.num_taps))
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self._rotary = Rotary(shape.hidden, shape.heads, shape.head_dim, shape.trained_positions, shape.rope)
        self._read: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = self._before
        self._guess: Callable[..., tuple[Tensor, Tensor]] = self._behind

    def forward(self, batch: Batch, steps: int, sequences: Sequences) -> list[Tensor]:  # steps of [B * T, H], normed
        """What the LM head reads at each step. The row at p has the token at p + 1, and guesses the one at p + 2.

        At step k the row at p stands k guesses behind a text that ended with the token at p - k + 1; rows with fewer
        than k tokens before them in their sequence are meaningless, and so is the last row of a sequence.
        """
        rows, shape = batch.rows, self.shape
        token = torch.roll(rows.ids, -1, dims=1).flatten()  # [N]
        words = self._first.input_layernorm(self._embedding[0](token).float())  # [N, H]
        cos, sin = self._rotary(words, rows.positions)
        feature = self.combine(batch.taps.flatten(0, 1))
        text: tuple[Tensor, Tensor] | None = None  # K and V of step 0
        chain: list[tuple[Tensor, Tensor]] = []  # of steps 1 to k, at the rows that they belong to
        found = []
        for _ in range(steps):
            x, query, key, value = self._read(feature, words, cos, sin)
            if text is None:
                text = key, value
            else:
                chain.append((key, value))
            out = attend_chain(query, *text, *_moved(chain, key), sequences)
            x, last = self._guess(x, out)
            found.append(last)
            feature = torch.roll(last if shape.norm_output else x, 1, dims=0)
        return found

    def hasten(self) -> None:
        """Compile what stands before and behind attention: for passes of one size, on a GPU."""
        self._read, self._guess = Hastened(self._before), Hastened(self._behind)

    def _before(
        self, feature: Tensor, words: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What goes around attention [N, H], and its queries, keys and values [N, h, D]."""
        normed = self._first.hidden_norm(feature)
        query, key, value = self._first.self_attn(torch.cat((words, normed), dim=1), cos, sin)
        return normed if self.shape.norm_before_residual else feature, query, key, value

    def _behind(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:  # [N, H] each
        """The row's state, and what the LM head reads of it."""
        x = self._first.behind(x, attended)
        return x, self.norm(x)

    def combine(self, taps: Tensor) -> Tensor:  # [N, F] -> [N, H] fp32
        """What a row reads of the target's hidden states."""
        if self.shape.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return cast(Tensor, self.fc(taps.to(self.fc.weight.dtype))).float()

    @property
    def _first(self) -> Layer:
        return cast(Layer, self.layers[0])


def _moved(chain: list[tuple[Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:  # each [k, N, h, D]
    """K and V of the chain behind each row: its own step's where it stands, those before it as many rows further up."""
    if not chain:
        return like.new_zeros((0, *like.shape)), like.new_zeros((0, *like.shape))
    back = range(len(chain) - 1, -1, -1)
    keys = torch.stack([torch.roll(key, by, dims=0) for (key, _), by in zip(chain, back, strict=True)])
    values = torch.stack([torch.roll(value, by, dims=0) for (_, value), by in zip(chain, back, strict=True)])
    return keys, values


class Layer(nn.Module):
    """The head's decoder layer. Its attention reads a token and a feature side by side."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Projections(2 * shape.hidden, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim)
        self.mlp = Mlp(shape.hidden, shape.inner)

    def behind(self, x: Tensor, attended: Tensor) -> Tensor:  # [N, H], [N, h, D] -> [N, H]
        """The rest of the layer, behind its attention."""
        x = x + self.self_attn.o_proj(attended.flatten(1))
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))
