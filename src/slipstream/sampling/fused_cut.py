"""The end of `fused.py`: a row's list of tokens near the cut is searched for the cut, and its best token is drawn.

The list has no order, so the cut is found by halving: first the logit at the cut, then, where only some of the tokens
with that very logit are kept, the id of the last of them. The list is a part of a small interval, and an interval of
2^n floats takes n steps.
"""

from __future__ import annotations

from slipstream.kernels.jit import jit, tl
from slipstream.sampling.fused_rule import NO_ID, fine_cut, first_best, gumbel_noise, mass_of


@jit
def _load_listed(
    logits: tl.tensor, listed: tl.tensor, start: tl.tensor, count: tl.tensor, LIST: tl.constexpr
) -> tl.tensor:
    """A block of the list: ids, logits (-inf beyond the end), and order keys int64, larger for a larger logit."""
    at = start + tl.arange(0, LIST)
    ids = tl.load(listed + at, mask=at < count, other=0)
    x = tl.load(logits + ids, mask=at < count, other=float("-inf"))
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is the same as 0
    return ids, x, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def _is_kept(order: tl.tensor, ids: tl.tensor, cut: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Before the cut: larger than its logit, or equal to it with an id up to `last`."""
    return (order > cut) | ((order == cut) & (ids <= last))


@jit
def _sum_from(
    logits: tl.tensor, listed: tl.tensor, count: tl.tensor, largest: tl.tensor, t: tl.tensor,
    lowest: tl.tensor, cut: tl.tensor, last: tl.tensor, BY_MASS: tl.constexpr, LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """How many listed tokens are kept by a cut and have at least the order key `lowest`, or their mass."""
    total = tl.zeros([LIST], tl.int64)
    start = tl.zeros([], tl.int32)
    while start < count:
        ids, x, order = _load_listed(logits, listed, start, count, LIST)
        worth = mass_of(tl.div_rn(x - largest, t)) if BY_MASS else 1
        total += tl.where((x > float("-inf")) & (order >= lowest) & _is_kept(order, ids, cut, last), worth, 0)
        start += LIST
    return tl.sum(total)


@jit
def _last_id(
    logits: tl.tensor, listed: tl.tensor, count: tl.tensor, vocab_size: tl.tensor,
    cut: tl.tensor, keep: tl.tensor, LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The id of the `keep`-th token, by id, of those whose order key is `cut`."""
    low, high = tl.full([], -1, tl.int32), tl.zeros([], tl.int32) + vocab_size  # too low, high enough
    while high - low > 1:
        middle = (low + high) // 2
        total = tl.zeros([LIST], tl.int32)
        start = tl.zeros([], tl.int32)
        while start < count:
            ids, x, order = _load_listed(logits, listed, start, count, LIST)
            total += ((x > float("-inf")) & (order == cut) & (ids <= middle)).to(tl.int32)
            start += LIST
        enough = tl.sum(total) >= keep
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return high


@jit
def _find_cut(
    logits: tl.tensor, listed: tl.tensor, count: tl.tensor, vocab_size: tl.tensor, largest: tl.tensor, t: tl.tensor,
    low: tl.tensor, high: tl.tensor, cut: tl.tensor, last: tl.tensor, base: tl.tensor, need: tl.tensor,
    BY_MASS: tl.constexpr, LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where `base` and the first kept tokens of the list together reach `need`: order key and last id.

    Holds with all from order key `low` on, not with those from `high` on.
    """
    while high - low > 1:
        middle = (low + high) >> 1
        total = base + _sum_from(logits, listed, count, largest, t, middle, cut, last, BY_MASS, LIST)
        enough = total.to(tl.float64) >= need
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    beyond = _sum_from(logits, listed, count, largest, t, high, cut, last, BY_MASS, LIST)
    worth = _sum_from(logits, listed, count, largest, t, low, cut, last, BY_MASS, LIST) - beyond
    equals = _sum_from(logits, listed, count, largest, t, low, cut, last, False, LIST)
    equals -= _sum_from(logits, listed, count, largest, t, high, cut, last, False, LIST)
    each, before = worth // equals, base + beyond  # equal logits have equal mass
    keep = ((need - before.to(tl.float64)) / each.to(tl.float64)).to(tl.int64)
    keep = tl.maximum(keep - 1, 1)
    for _ in tl.static_range(3):  # the quotient is off by less
        keep += ((before + keep * each).to(tl.float64) < need).to(tl.int64)
    last = tl.where(low == cut, last, vocab_size)
    if keep < equals:
        last = _last_id(logits, listed, count, vocab_size, low, keep, LIST)
    return low, last


@jit
def settle_listed(
    logits: tl.tensor, vocab_size: tl.tensor, tally: tl.tensor, listed: tl.tensor, count: tl.tensor,
    largest: tl.tensor, t: tl.tensor, k: tl.tensor, p: tl.tensor, min_p: tl.tensor, key: tl.tensor,
    LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The best score with noise among the listed tokens that are kept, and its id."""
    low, high = tl.full([LIST], 2**40, tl.int64), tl.full([LIST], -(2**40), tl.int64)
    start = tl.zeros([], tl.int32)
    while start < count:
        ids, x, order = _load_listed(logits, listed, start, count, LIST)
        low = tl.where(x > float("-inf"), tl.minimum(low, order), low)
        high = tl.maximum(high, order)
        start += LIST
    lowest, highest = tl.min(low), tl.max(high) + 1
    cut, last = tl.full([], -(2**40), tl.int64), tl.zeros([], tl.int32) + vocab_size  # nothing cut off
    _, sure_count, sure_mass, need = fine_cut(tally, k, p)
    if k > 0:
        base = tl.where(p < 1, 0, sure_count)  # with both, all that top-k may keep is listed
        wanted = tl.minimum(k, base + count).to(tl.float64)
        cut, last = _find_cut(
            logits, listed, count, vocab_size, largest, t, lowest, highest, cut, last, base, wanted, False, LIST
        )
    if p < 1:
        base = tl.where(k > 0, 0, sure_mass)
        if k > 0:
            need = p * _sum_from(logits, listed, count, largest, t, lowest, cut, last, True, LIST).to(tl.float64)
        cut, last = _find_cut(
            logits, listed, count, vocab_size, largest, t, lowest, highest, cut, last, base, need, True, LIST
        )
    best, token = tl.full([], float("-inf"), tl.float32), tl.full([], NO_ID, tl.int32)
    start = tl.zeros([], tl.int32)
    while start < count:
        ids, x, order = _load_listed(logits, listed, start, count, LIST)
        scores = tl.div_rn(x - largest, t)
        kept = (x > float("-inf")) & (scores >= min_p) & _is_kept(order, ids, cut, last)
        value, own = first_best(tl.where(kept, scores + gumbel_noise(key, ids), float("-inf")), ids)
        better = (value > best) | ((value == best) & (own < token))
        best, token = tl.where(better, value, best), tl.where(better, own, token)
        start += LIST
    return best, token
