"""Losses of guesses against the target's distribution, row by row, with their gradients. Used in training only.

As torch operations each row of logits is read and written fifteen times; here it is read two or three times, and its
gradient is written in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import jit, on_gpu, tl

_BLOCK = 4096
_FAR = 30.0
"""The largest logarithm of a competing token's relative speed: beyond it nothing is gained, and squares overflow."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The target's distribution at some rows, over the tokens that guesses can name."""

    logits: Tensor  # [n, Vd] fp32
    total: Tensor  # [n] fp32: logarithm of the sum over all tokens, including those that guesses cannot name
    best: Tensor  # [n] int64: the guesses' id of its best token, or -1
    said: Tensor  # [n] int64: the guesses' id of the text's token, or -1


@dataclass(frozen=True, slots=True)
class Wish:
    """Weights of the parts of the loss, beside the divergence with weight 1."""

    variation: float = 0.0  # of the total variation
    sharpen: float = 0.0  # share of the aim that is the target's best token; the rest is its distribution
    keyed: float = 0.0  # of the probability that a keyed draw misses the text's token


class Judged(NamedTuple):
    """Measures of each row, fp32."""

    divergence: Tensor  # [m]
    shared: Tensor  # [m]: sum of min(p, q): the acceptance of rejection sampling
    hit: Tensor  # [m]: 1 if the best guess is the target's best token
    met: Tensor  # [m]: probability that a guess drawn with the target's noise is the text's token; 0 if not asked for


class Total(NamedTuple):
    """Of each row of logits."""

    total: Tensor  # [n] fp32: logarithm of the sum of exponentials
    best: Tensor  # [n] int64


def row_totals(logits: Tensor) -> Total:  # [n, V]
    """In one reading of the logits."""
    return _launch_totals(logits) if on_gpu(logits) else Total(logits.float().logsumexp(1), logits.argmax(1))


def judge_(logits: Tensor, wanted: Wanted, weight: Tensor, wish: Wish) -> Judged:
    """Judge guesses [m, Vd], and overwrite each logit with its gradient of the loss.

    Row r is compared with row r modulo n of `wanted`; `weight` [m] fp32 is its weight in the loss.

    Draws with the same noise are a race: token j arrives at an exponential time divided by its probability. If the
    target drew i, the guess is i too with probability 1 / sum over j of max(p_j, q_j p_i / q_i): the others must come
    later in both races. The sum is 1 + the sum of q_j p_i / q_i - p_j over the tokens j that the guesses favour against
    i.
    """
    run = _launch_judge if on_gpu(logits) else judge_twin_
    return run(logits, wanted, weight, wish)


def judge_twin_(logits: Tensor, wanted: Wanted, weight: Tensor, wish: Wish) -> Judged:
    p = (wanted.logits - wanted.total[:, None]).exp()  # [n, Vd]
    goal = p * (1 - wish.sharpen)
    if wish.sharpen:
        known = (wanted.best >= 0).to(p.dtype)[:, None] * wish.sharpen
        goal = goal.scatter_add_(1, wanted.best.clamp_min(0)[:, None], known)
    mass, entropy = goal.sum(1), torch.special.entr(goal).sum(1)
    logq = logits.float().view(-1, *p.shape)  # [m / n, n, Vd]
    hit = (logq.argmax(2) == wanted.best).float()
    logq = logq - logq.logsumexp(2, keepdim=True)
    divergence = -(goal * logq).sum(2) - entropy
    q = logq.exp_()
    shared = torch.minimum(p, q).sum(2)
    pull = q * mass[:, None] - goal
    if wish.variation:
        short = q * (q < p)
        pull -= wish.variation * (short - q * short.sum(2, keepdim=True))
    met = torch.zeros_like(shared)
    if wish.keyed:
        said, known = wanted.said.clamp_min(0)[:, None], wanted.said >= 0  # [n, 1], [n]
        mine = logits.float().view(-1, *p.shape)
        own = mine.gather(2, said.expand(len(mine), -1, 1)) - (wanted.logits.gather(1, said) - wanted.total[:, None])
        rival = (mine - own).clamp_max(_FAR).exp()
        rival *= (rival > p).scatter(2, said.expand(len(mine), -1, 1), False)
        met = known / (1 + (rival - p * (rival > 0)).sum(2))
        push = wish.keyed * met.square()[:, :, None] * rival
        pull += push.scatter_add(2, said.expand(len(mine), -1, 1), -push.sum(2, keepdim=True))
    logits.copy_(pull.flatten(0, 1).mul_(weight[:, None]))
    return Judged(divergence.flatten(), shared.flatten(), hit.flatten(), met.flatten())


@jit(sizes=["vocab", "stride"])
def _totals_kernel(
    logits_ptr: tl.tensor,  # [n, V]
    total_ptr: tl.tensor,  # [n]
    best_ptr: tl.tensor,  # [n]
    vocab: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    top = -float("inf")
    total = 0.0
    best = 0
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        high, where = tl.max(x, 0, return_indices=True)
        best = tl.where(high > top, begin + where, best)
        new = tl.maximum(top, high)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
    tl.store(total_ptr + row, top + tl.log(total))
    tl.store(best_ptr + row, best)


@jit(sizes=["rows", "vocab", "stride", "wanted_stride"])
def _judge_kernel(
    logits_ptr: tl.tensor,  # [m, Vd]: read, then overwritten with gradients
    wanted_ptr: tl.tensor,  # [n, Vd]
    total_ptr: tl.tensor,  # [n]
    best_ptr: tl.tensor,  # [n]
    said_ptr: tl.tensor,  # [n]
    weight_ptr: tl.tensor,  # [m]
    found_ptr: tl.tensor,  # [4, m]
    rows: tl.tensor,  # n
    vocab: tl.tensor,  # Vd
    stride: tl.tensor,
    wanted_stride: tl.tensor,
    sharpen: tl.tensor,
    variation: tl.tensor,
    keyed: tl.tensor,
    far: tl.tensor,
    VARIATION: tl.constexpr,
    KEYED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    count = tl.num_programs(0)
    like = row % rows
    total = tl.load(total_ptr + like)
    best = tl.load(best_ptr + like)
    weight = tl.load(weight_ptr + row)
    said = tl.load(said_ptr + like)
    met = 0.0
    own = 0.0  # the logit of the text's token minus the logarithm of its probability
    if KEYED:
        known = said >= 0
        own = tl.load(logits_ptr + row * stride + said, mask=known, other=0.0).to(tl.float32)
        own -= tl.load(wanted_ptr + like * wanted_stride + said, mask=known, other=0.0) - total
        met = tl.where(known, 1.0, 0.0)
    top = -float("inf")
    sums = 0.0
    guess = 0
    mass = 0.0
    inner = 0.0  # sum of goal * (log goal - logit)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        real = at < vocab
        x = tl.load(logits_ptr + row * stride + at, mask=real, other=-float("inf")).to(tl.float32)
        want = tl.load(wanted_ptr + like * wanted_stride + at, mask=real, other=-float("inf"))
        high, where = tl.max(x, 0, return_indices=True)
        guess = tl.where(high > top, begin + where, guess)
        new = tl.maximum(top, high)
        sums = sums * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
        goal = tl.exp(want - total) * (1.0 - sharpen) + tl.where(at == best, sharpen, 0.0)
        some = goal > 0.0
        mass += tl.sum(goal, 0)
        inner += tl.sum(tl.where(some, goal * (tl.log(tl.where(some, goal, 1.0)) - tl.where(real, x, 0.0)), 0.0), 0)
    ours = top + tl.log(sums)
    shared = 0.0
    short = 0.0
    rivals = 0.0
    ahead = 0.0
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        real = at < vocab
        x = tl.load(logits_ptr + row * stride + at, mask=real, other=-float("inf")).to(tl.float32)
        want = tl.load(wanted_ptr + like * wanted_stride + at, mask=real, other=-float("inf"))
        p = tl.exp(want - total)
        q = tl.exp(x - ours)
        shared += tl.sum(tl.minimum(p, q), 0)
        if VARIATION:
            short += tl.sum(tl.where(q < p, q, 0.0), 0)
        if KEYED:
            rival = tl.exp(tl.minimum(x - own, far))
            favoured = (rival > p) & (at != said) & real
            rivals += tl.sum(tl.where(favoured, rival, 0.0), 0)
            ahead += tl.sum(tl.where(favoured, rival - p, 0.0), 0)
        if not (VARIATION or KEYED):
            goal = p * (1.0 - sharpen) + tl.where(at == best, sharpen, 0.0)
            pull = (q * mass - goal) * weight
            tl.store(logits_ptr + row * stride + at, pull.to(logits_ptr.dtype.element_ty), mask=real)
    if KEYED:
        met = met / (1.0 + ahead)
    if VARIATION or KEYED:
        push = keyed * met * met
        for begin in range(0, vocab, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            real = at < vocab
            x = tl.load(logits_ptr + row * stride + at, mask=real, other=-float("inf")).to(tl.float32)
            want = tl.load(wanted_ptr + like * wanted_stride + at, mask=real, other=-float("inf"))
            p = tl.exp(want - total)
            q = tl.exp(x - ours)
            goal = p * (1.0 - sharpen) + tl.where(at == best, sharpen, 0.0)
            pull = q * mass - goal
            if VARIATION:
                pull -= variation * (tl.where(q < p, q, 0.0) - q * short)
            if KEYED:
                rival = tl.exp(tl.minimum(x - own, far))
                pull += push * tl.where(at == said, -rivals, tl.where(rival > p, rival, 0.0))
            tl.store(logits_ptr + row * stride + at, (pull * weight).to(logits_ptr.dtype.element_ty), mask=real)
    tl.store(found_ptr + row, inner + mass * ours)
    tl.store(found_ptr + count + row, shared)
    tl.store(found_ptr + 2 * count + row, tl.where(guess == best, 1.0, 0.0))
    tl.store(found_ptr + 3 * count + row, met)


def _launch_totals(logits: Tensor, block: int = _BLOCK) -> Total:
    count, vocab = logits.shape
    total = torch.empty(count, device=logits.device)
    best = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        _totals_kernel[(count,)](logits, total, best, vocab, logits.stride(0), BLOCK=block, num_warps=8)
    return Total(total, best)


def _launch_judge(logits: Tensor, wanted: Wanted, weight: Tensor, wish: Wish, block: int = _BLOCK) -> Judged:
    count, vocab = logits.shape
    found = torch.empty((4, count), device=logits.device)
    if count:
        _judge_kernel[(count,)](
            logits,
            wanted.logits,
            wanted.total,
            wanted.best,
            wanted.said,
            weight,
            found,
            wanted.logits.shape[0],
            vocab,
            logits.stride(0),
            wanted.logits.stride(0),
            float(wish.sharpen),
            float(wish.variation),
            float(wish.keyed),
            _FAR,
            VARIATION=wish.variation != 0,
            KEYED=wish.keyed != 0,
            BLOCK=block,
            num_warps=8,
        )
    return Judged(*found.unbind(0))
