"""Parts of decoder layers for training, with fp32 weights, checkpoint tensor names and packed rows [N, H]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Norm(nn.Module):
    """RMS norm, always in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Projections(nn.Module):
    """Queries, keys and values, both repeated for all query heads. The caller applies `o_proj`."""

    def __init__(self, read: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        """read: width of the input; hidden: width of the output."""
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
        return rotate(query, cos, sin), rotate(key, cos, sin), value


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [N, h, D]; cos, sin [N, 1, R]
    """Apply rotary embedding to the first R numbers of each head."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    first, second = part.chunk(2, dim=-1)
    found = (part * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((found, rest), dim=-1) if rest.shape[-1] else found


class Rotary:
    """A Llama's rotary frequencies; not a module, since it has no weights."""

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
        """cos and sin at positions [B, T], N = B * T, with the dtype and device of `like`."""
        found = self._made.to(like.device)(like, positions.reshape(1, -1))
        cos, sin = (part[0][:, None] for part in found)
        return cos, sin


def rope_of(config: Any) -> dict[str, Any]:
    """The target's rotary parameters if a Llama can have them, else plain ones: drafters run as Llamas."""
    found = getattr(config, "rope_parameters", None) or {}
    found = found.get("full_attention", found)  # some families have one entry a layer kind
    plain = {"rope_type": "default", "rope_theta": float(found.get("rope_theta") or 10000.0)}
    whole = found.get("rope_type") in ("linear", "llama3") and not found.get("partial_rotary_factor")
    return dict(found) if whole else plain


def init_matrices(module: nn.Module, generator: torch.Generator) -> None:
    """Random matrices that keep the size of their input; those that add to the residual stream, half of it."""
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            fresh = torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5
            weight.copy_(fresh * (0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0))


Given = ParamSpec("Given")
Found = TypeVar("Found")


class Compiled(Generic[Given, Found]):
    """A function compiled by torch on its first call, which takes seconds; uncompiled where torch cannot.

    size: compile only for calls whose first tensor begins with these dimensions; others run uncompiled. None: always.
    """

    def __init__(self, function: Callable[Given, Found], size: tuple[int, ...] | None = None) -> None:
        self._plain, self._size = function, size
        self._fast: Any = torch.compile(function, dynamic=False)

    def __call__(self, *args: Given.args, **named: Given.kwargs) -> Found:
        if self._fast is not None and self._fits(args):
            try:
                found: Found = self._fast(*args, **named)
                return found
            except (TorchDynamoException, InductorError):  # no compiler, or it failed
                self._fast = None
        return self._plain(*args, **named)

    def _fits(self, args: tuple[Any, ...]) -> bool:
        return self._size is None or tuple(args[0].shape[: len(self._size)]) == self._size
