"""How far guesses are from the target's distribution, without ever holding the logits of a whole batch.

A pass of 32,000 rows and seven steps would have 30 GB of logits. Here some rows at a time go through the LM heads, all
steps of a row together because they share the target's distribution; loss and gradient are made on the spot
(`kernels/gpu/soft_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.gpu.soft_rows import Wanted, Wish, judge_, row_totals

_NUMBERS = {"cpu": 1 << 23}
"""Logits at a time, by device: on others as follows."""
_MANY = 1 << 27


@dataclass(frozen=True, slots=True)
class Aim:
    """What is to be approached."""

    logits: Callable[[Tensor], Tensor]  # [n, H] -> [n, V] fp32: the target's, of its normed states
    vocab: int  # V
    ids: Tensor | None = None  # [Vd] int64: the target's id of each guessable id; None: all are, in order
    variation: float = 0.0  # weight of the total variation, beside a divergence of weight 1
    sharpen: float = 0.0  # share of the aim that is the target's best token, the rest its distribution
    keyed: float = 0.0  # weight of the chance that a keyed draw misses the text's token


@dataclass(frozen=True, slots=True)
class SoftLoss:
    """Sums over rows, for S steps; but for the total, over the rows that count."""

    total: Tensor  # scalar fp32 with a gradient: divergence, variation and misses, by the weights that were given
    divergence: Tensor  # [S]
    accepted: Tensor  # [S]: sum of min(p, q), what sampling accepts
    agreed: Tensor  # [S]: rows whose best token is the target's


def soft_loss(
    hidden: Tensor,  # [S, N, H]: behind the last norm
    lm_head: Tensor,  # [Vd, H]
    states: Tensor,  # [N, H]: the target's, behind its last norm
    weights: Tensor,  # [S, N] fp32: of each row in the loss
    counted: Tensor,  # [S, N] bool: rows that the other sums are over
    aim: Aim,
    said: Tensor | None = None,  # [N] int64: the text's tokens, by the target's ids; where `aim.keyed` asks for them
) -> SoftLoss:
    """Kullback-Leibler divergence of the guesses from the target. What the guesses cannot name, they need not."""
    if said is None:
        if aim.keyed:
            raise ValueError(f"keyed={aim.keyed} needs the text's tokens: give `said`")
        said = torch.zeros_like(states[:, 0], dtype=torch.int64)
    return SoftLoss(*_Soft.apply(hidden, lm_head, states, weights, counted, aim, said))  # type: ignore[no-untyped-call]


class _Soft(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        states: Tensor,
        weights: Tensor,
        counted: Tensor,
        aim: Aim,
        said: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        steps, rows, _ = hidden.shape
        device = hidden.device
        known = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if known else hidden.dtype
        head = lm_head.to(dtype)
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_head = torch.zeros(head.shape, device=device) if wants_head else None
        total = torch.zeros((), device=device)
        sums = torch.zeros((3, steps), device=device)
        ours = _inverse(aim, device)
        wish = Wish(aim.variation, aim.sharpen, aim.keyed)
        few = max(_NUMBERS.get(device.type, _MANY) // aim.vocab, 1)
        with torch.autocast(device.type, enabled=False):
            for at in range(0, rows, few):
                part = slice(at, at + few)
                wanted = _wanted(aim, states[part], ours, said[part])
                weight = weights[:, part].flatten()  # [S * n]
                read = hidden[:, part].to(dtype).flatten(0, 1)  # [S * n, H]
                logits = read @ head.T
                found = judge_(logits, wanted, weight, wish)  # and now they are the gradient
                missed = aim.variation * (1 - found.shared) + aim.keyed * (1 - found.met)
                total += (weight * (found.divergence + missed)).sum()
                counts = counted[:, part].float()
                sums += (torch.stack(found[:3]).view(3, steps, -1) * counts).sum(2)
                if grad_hidden is not None:
                    grad_hidden[:, part] = (logits @ head).view(steps, -1, hidden.shape[2]).to(hidden.dtype)
                if grad_head is not None:
                    grad_head += logits.T @ read
        ctx.save_for_backward(grad_hidden, None if grad_head is None else grad_head.to(lm_head.dtype))
        divergences, accepted, agreed = sums.unbind(0)
        ctx.mark_non_differentiable(divergences, accepted, agreed)
        return total, divergences, accepted, agreed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        found = (None if grad is None else grad * scale.to(grad.dtype) for grad in ctx.saved_tensors)
        return (*found, None, None, None, None, None)


def _wanted(aim: Aim, states: Tensor, ours: Tensor, said: Tensor) -> Wanted:
    """What the target says behind these states [n, H], and what it said there [n]. ours: see `_inverse`."""
    seen = aim.logits(states)
    total, best = row_totals(seen)
    return Wanted(seen if aim.ids is None else seen[:, aim.ids], total, ours[best], ours[said])


def _inverse(aim: Aim, device: torch.device) -> Tensor:  # [V] int64
    """The guesses' id of each of the target's; -1: none."""
    if aim.ids is None:
        return torch.arange(aim.vocab, device=device)
    found = torch.full((aim.vocab,), -1, device=device)
    found[aim.ids] = torch.arange(len(aim.ids), device=device)
    return found
