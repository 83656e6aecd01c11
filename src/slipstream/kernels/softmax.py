"""What the attention kernels share: scores to base 2, running softmaxes, and their end."""

from __future__ import annotations

from slipstream.kernels.jit import jit, tl

LOG2_E = 1.4426950408889634
"""Scores are powers of 2: it is in their scale, unless they are capped first."""


@jit
def capped(scores: tl.tensor, softcap: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """softcap * tanh(scores / softcap), to base 2; or the scores as they are."""
    if SOFTCAP:
        x = scores / softcap
        scores = softcap * (1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)) * 1.4426950408889634
    return scores


@jit
def finite(top: tl.tensor) -> tl.tensor:
    """A maximum that can be subtracted also where nothing was seen."""
    return tl.where(top == -float("inf"), 0.0, top)


@jit
def add_block(
    q: tl.tensor,  # [Q, D]
    k: tl.tensor,  # [K, D]
    v: tl.tensor,
    seen: tl.tensor,  # [Q, K], or not read
    top: tl.tensor,  # [Q]
    total: tl.tensor,
    acc: tl.tensor,  # [Q, D]
    scale: tl.tensor,
    softcap: tl.tensor,
    MASKED: tl.constexpr,  # else every row sees every key
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One block of keys into the running softmax (to base 2: `scale` has log2 e in it)."""
    scores = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    safe = finite(new) if MASKED else new
    p = tl.exp2(scores - safe[:, None])
    keep = tl.exp2(top - safe)
    total = total * keep + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return new, total, acc


@jit
def join(
    top: tl.tensor,  # [Q]
    total: tl.tensor,
    acc: tl.tensor,  # [Q, D]
    next_top: tl.tensor,
    next_total: tl.tensor,
    next_acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax over the keys of both."""
    new = tl.maximum(top, next_top)
    ours = tl.exp2(top - finite(new))
    theirs = tl.exp2(next_top - finite(new))
    # by name, so that it is rounded alike wherever it is compiled
    total = tl.fma(total, ours, next_total * theirs)
    return new, total, tl.fma(acc, tl.broadcast_to(ours[:, None], acc.shape), next_acc * theirs[:, None])


@jit
def divided(acc: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The mean that a softmax stands for; nothing where nothing was seen."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@jit
def finish(
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    place: tl.tensor,  # [Q] of each row's head in `out`
    d_range: tl.tensor,
    mask: tl.tensor,  # [Q, D]
    head: tl.tensor,
    real: tl.tensor,  # [Q]
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    SINKS: tl.constexpr,
) -> None:
    """Divide by the total, sinks counted, and store."""
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(top, sink)
        total = total * tl.exp2(top - new) + tl.exp2(sink - new)
        acc = acc * tl.exp2(top - new)[:, None]
    out = divided(acc, total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] + d_range[None, :], out, mask=mask)
