"""Attention for training-time test, where a head trains on its own guesses: over the text, then along its chain.

At step k the row at p stands k guesses behind a text that ends at p - k. It sees the step-0 rows up to there, and of
each step i from 1 to k the one row of its own chain, at p - k + i. One dense product over all steps would be mostly
mask. So the text's part is causal attention by the fast kernels, the chain's part is k products a row, and the two are
joined by the logarithms of their sums. The kernels' backward pass gives the right gradients of its part from the joined
output and sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from slipstream.train.batch import Rows

_NEVER = 1e4  # log-sum of a row that must get no gradient: every share is 0
_CLOSE = 0.05


@dataclass(frozen=True, slots=True)
class Sequences:
    """Maps packed rows [N] to one padded row per sequence [S, L], and back."""

    source: Tensor  # [S, L] int64: index of the packed token; arbitrary behind a sequence's end
    filled: Tensor  # [S, L] bool: False behind a sequence's end
    place: Tensor  # [N] int64: index of each packed token in S * L; 0 for padding
    real: Tensor  # [N] bool: False for padding
    offset: Tensor  # [N] int64: position in its sequence

    @staticmethod
    def of(rows: Rows) -> Sequences:
        """Build the maps. Waits for the device once: shapes depend on the sequences."""
        before = torch.roll(rows.segments, 1, dims=1)
        column = torch.arange(rows.ids.shape[1], device=rows.ids.device).expand_as(rows.ids)
        first = (column == 0) | (rows.segments != before)  # [B, T]
        offset = (column - torch.where(first, column, 0).cummax(dim=1).values).flatten()
        real = rows.real.flatten()
        number = (first.flatten() & real).cumsum(0) - 1
        count, longest = torch.stack((number[-1] + 1, torch.where(real, offset, 0).max() + 1)).tolist()
        count = max(count, 1)
        place = torch.where(real, number * longest + offset, 0)
        filled = torch.zeros(count * longest, dtype=torch.bool, device=rows.ids.device)
        source = torch.zeros(count * longest, dtype=torch.int64, device=rows.ids.device)
        tokens = real.nonzero()[:, 0]
        source[place[tokens]] = tokens
        filled[place[tokens]] = True
        return Sequences(source.view(count, longest), filled.view(count, longest), place, real, offset)

    def unpack(self, packed: Tensor) -> Tensor:  # [N, h, D] -> [S, h, L, D]
        return packed[self.source].transpose(1, 2)

    def shifted(self, query: Tensor, key: Tensor, value: Tensor, by: int) -> tuple[Tensor, Tensor, Tensor]:
        """Unpack to [S, h, L - by, D], such that causal attention sees keys up to `by` positions before its own."""
        read = self.source.shape[1] - by
        return self.unpack(query)[:, :, by:], self.unpack(key)[:, :, :read], self.unpack(value)[:, :, :read]

    def pack(self, unpacked: Tensor, skipped: int, fill: float) -> Tensor:  # [S, h, L - skipped, ...] -> [N, h, ...]
        """Pack rows. skipped: rows missing at the front of each sequence, set to `fill`."""
        count, longest = self.source.shape
        whole = unpacked.new_full((count, longest, unpacked.shape[1], *unpacked.shape[3:]), fill)
        whole[:, skipped:] = unpacked.transpose(1, 2)
        return whole.flatten(0, 1)[self.place]


def attend_chain(
    query: Tensor,  # [N, h, D], of this step
    key: Tensor,  # [N, h, D], of step 0
    value: Tensor,  # [N, h, D], of step 0
    chain_keys: Tensor,  # [k, N, h, D]: of steps 1 to k, each rolled to the row that sees it
    chain_values: Tensor,  # [k, N, h, D]
    sequences: Sequences,
) -> Tensor:  # [N, h, D]
    """Attention at step k. Padding and rows with fewer than k tokens before them give finite, meaningless numbers."""
    out = _Chain.apply(query, key, value, chain_keys, chain_values, sequences)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


class TextAttention(NamedTuple):
    """Causal attention over the text, with what its backward pass needs."""

    out: Tensor  # [S, h, R, D]
    total: Tensor  # [S, h, R] fp32: log of the sum of exponentials
    kept: tuple[Any, ...]


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chain_keys: Tensor, chain_values: Tensor, where: Sequences
    ) -> Tensor:
        skipped, longest = chain_keys.shape[0], where.source.shape[1]
        scale = float(query.shape[-1]) ** -0.5
        read = max(longest - skipped, 0)
        text, kept = query.new_zeros(query.shape), ()
        sums = torch.full(query.shape[:2], -torch.inf, device=query.device)
        with torch.autocast(query.device.type, enabled=False):
            if read:
                laid = where.shifted(query, key, value, skipped)
                part = (_flash if _uses_flash(query) else _reference)(*laid, scale)
                kept = part.kept
                text = where.pack(part.out, skipped, 0.0)
                sums = where.pack(part.total, skipped, -torch.inf)
            scores = _dot(query, chain_keys) * scale  # [k, N, h] fp32
            total = torch.cat((sums[None], scores)).logsumexp(0)  # [N, h]
            out = text * (sums - total).exp()[..., None]
            out = out + ((scores - total).exp()[..., None] * chain_values).sum(0)
        joined: Tensor = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, chain_keys, chain_values, joined, total)
        ctx.where, ctx.kept, ctx.scale, ctx.read = where, kept, scale, read
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, chain_keys, chain_values, out, total = ctx.saved_tensors
        where: Sequences = ctx.where
        grad, scale, read, skipped = grads[0].to(query.dtype), ctx.scale, ctx.read, chain_keys.shape[0]
        shares = (_dot(query, chain_keys) * scale - total).exp()  # [k, N, h]
        pull = scale * shares * (_dot(grad, chain_values) - _dot(grad, out))
        grad_query = (pull[..., None] * chain_keys).sum(0)
        grad_chain_keys = (pull[..., None] * query).to(query.dtype)
        grad_chain_values = (shares[..., None] * grad).to(query.dtype)
        grad_key = grad_value = None
        if read:
            missing = ~where.filled[:, None, skipped:]  # [S, 1, R]
            back = (_flash_back if _uses_flash(query) else _reference_back)(
                where.unpack(grad)[:, :, skipped:].masked_fill(missing[..., None], 0.0),
                *where.shifted(query, key, value, skipped),
                where.unpack(out)[:, :, skipped:],
                total[where.source].transpose(1, 2)[:, :, skipped:].masked_fill(missing, _NEVER),
                ctx.kept,
                scale,
            )
            padding = ~where.real[:, None, None]
            grad_query = grad_query + where.pack(back[0], skipped, 0.0).masked_fill(padding, 0.0)
            longer = [torch.nn.functional.pad(part, (0, 0, 0, skipped)) for part in back[1:]]
            grad_key, grad_value = (where.pack(part, 0, 0.0).masked_fill(padding, 0.0) for part in longer)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_chain_keys, grad_chain_values, None


def _dot(one: Tensor, many: Tensor) -> Tensor:  # [..., D], [..., D] -> [...] fp32
    return (one * many).sum(-1, dtype=torch.float32)


def _reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> TextAttention:
    scores = _scores(q, k, scale)
    return TextAttention((scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1), ())


def _reference_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, kept: tuple[Any, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    shares = (_scores(q, k, scale) - total[..., None]).exp()
    wide = grad.float()
    pull = scale * shares * (wide @ v.float().mT - (wide * out).sum(-1, keepdim=True))
    return (pull @ k.float()).to(q.dtype), (pull.mT @ q.float()).to(q.dtype), (shares.mT @ wide).to(q.dtype)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:  # [S, h, R, R] fp32
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (q.float() @ k.float().mT * scale).masked_fill(later, -torch.inf)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> TextAttention:
    found = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True, False, scale=scale)
    out, total, *kept = found
    return TextAttention(out, total, tuple(kept[:6]))


def _flash_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, kept: tuple[Any, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    starts_q, starts_k, most_q, most_k, state, unused = kept
    back = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    ranges = (starts_q, starts_k, most_q, most_k)
    grads = back(grad, q, k, v, out, total.contiguous(), *ranges, 0.0, True, state, unused, scale=scale)
    return cast("tuple[Tensor, Tensor, Tensor]", grads)


def _uses_flash(query: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and half and _flash_is_right(query.device, query.dtype, query.shape[-1])


@lru_cache
def _flash_is_right(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Compare torch's flash kernels with the reference: they are private, and joining their sums is undocumented."""
    made = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 80, dim, generator=made).to(device, dtype) for _ in range(4))
    scale = float(dim) ** -0.5
    try:
        ours, theirs = _reference(q, k, v, scale), _flash(q, k, v, scale)
        more = ours.total + 0.5  # as if there were a chain
        args = (grad, q, k, v, ours.out * 0.6, more)
        pairs = zip(_reference_back(*args, (), scale), _flash_back(*args, theirs.kept, scale), strict=True)
        found = [(ours.out, theirs.out), (ours.total, theirs.total), *pairs]
    except (RuntimeError, ValueError, TypeError):
        return False
    return all(bool((a.float() - b.float()).abs().max() <= _CLOSE * a.float().abs().max()) for a, b in found)
