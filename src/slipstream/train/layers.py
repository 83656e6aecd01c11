"""Parts of decoder layers in training: fp32 weights, tensors named as they are stored, packed rows [N, H]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Norm(nn.Module):
    """RMS norm, in fp32 whatever comes in."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Projections(nn.Module):
    """Queries, keys and values of a layer; its keys and values for all query heads. `o_proj` is for the caller."""

    def __init__(self, read: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        """read: width of what attention reads; hidden: of what it gives."""
        super().__init__()
        query, kv = heads * head_dim, kv_heads * head_dim
        self.q_proj = nn.Linear(read, query, bias=False)
        self.k_proj = nn.Linear(read, kv, bias=False)
        self.v_proj = nn.Linear(read, kv, bias=False)
        self.o_proj = nn.Linear(query, hidden, bias=False)
        self._dim, self._group = head_dim, heads // kv_heads

    def forward(self, read: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # each [N, h, D]
        query, key, value = (
            product(read).unflatten(1, (-1, self._dim)) for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        key, value = (x.repeat_interleave(self._group, dim=1) if self._group > 1 else x for x in (key, value))
        return turned(query, cos, sin), turned(key, cos, sin), value


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [N, h, D]; cos, sin [N, 1, R]
    """Rotary embedding of the first R numbers of each head."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    first, second = part.chunk(2, dim=-1)
    found = (part * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((found, rest), dim=-1) if rest.shape[-1] else found


class Rotary:
    """A Llama's rotary frequencies. No module: it has neither weights nor a state that belongs to a checkpoint."""

    def __init__(self, hidden: int, heads: int, head_dim: int, positions: int, rope: Mapping[str, Any]) -> None:
        config: Any = LlamaConfig(
            hidden_size=hidden,
            num_attention_heads=heads,
            head_dim=head_dim,
            max_position_embeddings=positions,
            rope_parameters=dict(rope),
        )
        self._made = LlamaRotaryEmbedding(config)

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # each [N, 1, R] fp32
        """cos and sin at these positions [B, T], N = B * T. like: of the dtype and device that is wanted."""
        found = self._made.to(like.device)(like, positions.reshape(1, -1))
        cos, sin = (part[0][:, None] for part in found)
        return cos, sin


def rope_of(config: Any) -> dict[str, Any]:
    """A target's rotary frequencies, where a Llama can have them: drafters are run as Llamas."""
    found = getattr(config, "rope_parameters", None) or {}
    found = found.get("full_attention", found)  # some families have one for each kind of layer
    plain = {"rope_type": "default", "rope_theta": float(found.get("rope_theta") or 10000.0)}
    whole = found.get("rope_type") in ("linear", "llama3") and not found.get("partial_rotary_factor")
    return dict(found) if whole else plain
