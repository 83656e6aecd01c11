"""The loss of guesses against the target's distribution, without holding the logits of a whole batch.

A pass of 32,000 rows and seven steps would have 30 GB of logits. Instead a few rows at a time go through the LM heads,
with all their steps, which share the target's distribution. `kernels/gpu/soft_rows.py` computes loss and gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.gpu.soft_rows import Wanted, Wish, judge_, row_totals
from slipstream.train.recipe import Losses

_CPU_LOGITS = 1 << 23  # computed at a time
_GPU_LOGITS = 1 << 27


@dataclass(frozen=True, slots=True)
class Aim:
    """The target of the loss, and its terms."""

    logits: Callable[[Tensor], Tensor]  # [n, H] -> [n, V] fp32: the target's logits of its normed states
    vocab: int  # V
    ids: Tensor | None = None  # [Vd] int64: the target's id of each draft id; None: the same ids
    variation: float = 0.0  # weight of the total variation; the divergence has weight 1
    sharpen: float = 0.0  # weight of the target's best token in the reference distribution
    keyed: float = 0.0  # weight of the probability that a keyed draw misses the text's token


@dataclass(frozen=True, slots=True)
class SoftLoss:
    """Sums over rows, for S steps. All but `total` cover the counted rows only."""

    total: Tensor  # scalar fp32 with a gradient: divergence, variation and keyed misses, weighted
    divergence: Tensor  # [S]
    accepted: Tensor  # [S]: sum of min(p, q), the acceptance of sampling
    agreed: Tensor  # [S]: rows whose best token is the target's best

    def losses(self, positions: Tensor, count: Tensor) -> Losses:
        """Results of a pass with S depths. positions [S]: counted rows of each; count: divisor of the loss."""
        mean = self.agreed / positions.clamp_min(1) * count  # the loop divides parts by the count
        parts = {f"agreed_{depth + 1}": value for depth, value in enumerate(mean)}
        return Losses(self.total, count, self.accepted, positions, parts)


def soft_loss(
    hidden: Tensor,  # [S, N, H]: the drafter's normed states
    lm_head: Tensor,  # [Vd, H]
    states: Tensor,  # [N, H]: the target's normed states
    weights: Tensor,  # [S, N] fp32: weight of each row in the loss
    counted: Tensor,  # [S, N] bool: rows of the other sums
    aim: Aim,
    text: Tensor | None = None,  # [N] int64: the text's tokens, as target ids; required by `aim.keyed`
) -> SoftLoss:
    """Kullback-Leibler divergence of the guesses from the target, over the tokens that the drafter can name."""
    if text is None:
        if aim.keyed:
            raise ValueError(f"keyed={aim.keyed} needs the text's tokens: pass `text`")
        text = torch.zeros_like(states[:, 0], dtype=torch.int64)
    return SoftLoss(*_Soft.apply(hidden, lm_head, states, weights, counted, aim, text))  # type: ignore[no-untyped-call]


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
        text: Tensor,
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
        draft_ids = _inverse(aim, device)
        wish = Wish(aim.variation, aim.sharpen, aim.keyed)
        few = max((_CPU_LOGITS if device.type == "cpu" else _GPU_LOGITS) // aim.vocab, 1)
        with torch.autocast(device.type, enabled=False):
            for at in range(0, rows, few):
                part = slice(at, at + few)
                wanted = _wanted(aim, states[part], draft_ids, text[part])
                weight = weights[:, part].flatten()  # [S * n]
                read = hidden[:, part].to(dtype).flatten(0, 1)  # [S * n, H]
                logits = read @ head.T
                found = judge_(logits, wanted, weight, wish)  # overwrites the logits with their gradient
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


def _wanted(aim: Aim, states: Tensor, draft_ids: Tensor, text: Tensor) -> Wanted:
    """The target's distribution and best token after these states [n, H], and the text's token [n]."""
    seen = aim.logits(states)
    total, best = row_totals(seen)
    return Wanted(seen if aim.ids is None else seen[:, aim.ids], total, draft_ids[best], draft_ids[text])


def _inverse(aim: Aim, device: torch.device) -> Tensor:  # [V] int64
    """The draft id of each target id; -1: none."""
    if aim.ids is None:
        return torch.arange(aim.vocab, device=device)
    found = torch.full((aim.vocab,), -1, device=device)
    found[aim.ids] = torch.arange(len(aim.ids), device=device)
    return found
