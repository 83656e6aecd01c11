"""The end of `fused.py`: a row's list of tokens near the cut is searched for the cut, and its best token is drawn.

The list has no order, so the cut is found by halving: first the logit at the cut, then, where only some of the tokens
with that very logit are kept, the id of the last of them. An interval of 2^n floats takes n steps, or fewer where a
single token is left before. The list's first block stays in registers all the while, and is the whole list as a rule;
what lies behind it is read in every step.
"""

from __future__ import annotations

from slipstream.kernels.gpu.jit import jit, tl
from slipstream.sampling.fused_rule import fine_cut, first_best, gumbel_noise, mass_of, scores_of


@jit
def _load_listed(
    logits: tl.tensor, listed: tl.tensor, start: tl.tensor, count: tl.tensor, largest: tl.tensor, t: tl.tensor,
    LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A block of the list: ids (-1 beyond the end), scores, mass, and order keys int32, larger for a larger logit."""
    at = start + tl.arange(0, LIST)
    ids = tl.load(listed + at, mask=at < count, other=-1)
    x = tl.load(logits + ids, mask=at < count, other=float("-inf"))
    scores = scores_of(x, largest, t)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is the same as 0
    return ids, scores, mass_of(scores).to(tl.int64), bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _is_kept(order: tl.tensor, ids: tl.tensor, cut: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Before the cut: larger than its logit, or equal to it with an id up to `last`. Nothing beyond the list's end."""
    return (ids >= 0) & ((order > cut) | ((order == cut) & (ids <= last)))


@jit
def _worth(
    ids: tl.tensor, mass: tl.tensor, order: tl.tensor, cut: tl.tensor, last: tl.tensor, BY_MASS: tl.constexpr
) -> tl.tensor:
    """The mass of tokens that a cut keeps, or 1 each; 0 for others."""
    return tl.where(_is_kept(order, ids, cut, last), mass if BY_MASS else 1, 0).to(tl.int64)


@jit
def _sum_from(
    logits: tl.tensor, listed: tl.tensor, count: tl.tensor, largest: tl.tensor, t: tl.tensor,
    order: tl.tensor, worth: tl.tensor,
    lowest: tl.tensor, cut: tl.tensor, last: tl.tensor, BY_MASS: tl.constexpr, LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The `_worth` of all listed tokens that have at least the order key `lowest`. order, worth: of the first block."""
    total = tl.where(order >= lowest, worth, 0)
    start = tl.full([], LIST, tl.int32)
    while start < count:
        more, _, masses, orders = _load_listed(logits, listed, start, count, largest, t, LIST)
        total += tl.where(orders >= lowest, _worth(more, masses, orders, cut, last, BY_MASS), 0)
        start += LIST
    return tl.sum(total)


@jit
def _last_id(
    logits: tl.tensor, listed: tl.tensor, count: tl.tensor, vocab_size: tl.tensor,
    largest: tl.tensor, t: tl.tensor, ids: tl.tensor, order: tl.tensor,
    cut: tl.tensor, keep: tl.tensor, LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The id of the `keep`-th token, by id, of those whose order key is `cut`."""
    low, high = tl.full([], -1, tl.int32), tl.zeros([], tl.int32) + vocab_size  # too low, high enough
    while high - low > 1:
        middle = (low + high) // 2
        total = ((ids >= 0) & (order == cut) & (ids <= middle)).to(tl.int32)
        start = tl.full([], LIST, tl.int32)
        while start < count:
            more, _, _, orders = _load_listed(logits, listed, start, count, largest, t, LIST)
            total += ((more >= 0) & (orders == cut) & (more <= middle)).to(tl.int32)
            start += LIST
        enough = tl.sum(total) >= keep
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return high


@jit
def _find_cut(
    logits: tl.tensor, listed: tl.tensor, count: tl.tensor, vocab_size: tl.tensor, largest: tl.tensor, t: tl.tensor,
    ids: tl.tensor, mass: tl.tensor, order: tl.tensor,
    low: tl.tensor, high: tl.tensor, least: tl.tensor, cut: tl.tensor, last: tl.tensor,
    base: tl.tensor, whole: tl.tensor, need: tl.tensor, BY_MASS: tl.constexpr, LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where `base` and the first kept tokens of the list together reach `need`: order key and last id.

    Holds with all from order key `low` on, whose sum is `whole`, not with those from `high` on. `low` is not before
    the cut so far; no token counts less than `least`.
    """
    worth = _worth(ids, mass, order, cut, last, BY_MASS)
    beyond, within = tl.zeros([], tl.int64), whole  # the sums from `high` on, and from `low` on
    while (high - low > 1) & (within - beyond >= 2 * least):  # below that, one token is left
        middle = (low + high) >> 1
        total = _sum_from(
            logits, listed, count, largest, t, order, worth, middle.to(tl.int32), cut, last, BY_MASS, LIST
        )
        enough = (base + total).to(tl.float64) >= need
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        within, beyond = tl.where(enough, total, within), tl.where(enough, beyond, total)
    own = tl.where(low == cut, last, vocab_size)
    if within - beyond >= 2 * least:  # some with the same logit, so with the same mass
        start, end, one = low.to(tl.int32), high.to(tl.int32), _worth(ids, mass, order, cut, last, False)
        equals = _sum_from(logits, listed, count, largest, t, order, one, start, cut, last, False, LIST)
        equals -= _sum_from(logits, listed, count, largest, t, order, one, end, cut, last, False, LIST)
        each, before = (within - beyond) // equals, base + beyond
        keep = ((need - before.to(tl.float64)) / each.to(tl.float64)).to(tl.int64)
        keep = tl.maximum(keep - 1, 1)
        for _ in tl.static_range(3):  # the quotient is off by less
            keep += ((before + keep * each).to(tl.float64) < need).to(tl.int64)
        if keep < equals:
            own = _last_id(logits, listed, count, vocab_size, largest, t, ids, order, start, keep, LIST)
    return low.to(tl.int32), own


@jit
def settle_listed(
    logits: tl.tensor, vocab_size: tl.tensor, tally: tl.tensor, listed: tl.tensor, count: tl.tensor,
    largest: tl.tensor, t: tl.tensor, k: tl.tensor, p: tl.tensor, min_p: tl.tensor, key: tl.tensor,
    LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The best score with noise among the listed tokens that are kept, and its id."""
    ids, scores, mass, order = _load_listed(logits, listed, 0, count, largest, t, LIST)
    low, high = tl.where(ids >= 0, order, 2**31 - 1), order  # beyond the end, the key of -inf
    all_mass, least = mass, tl.where(ids >= 0, mass, 1 << 40)
    start = tl.full([], LIST, tl.int32)
    while start < count:
        more, _, masses, orders = _load_listed(logits, listed, start, count, largest, t, LIST)
        low, high = tl.minimum(low, tl.where(more >= 0, orders, 2**31 - 1)), tl.maximum(high, orders)
        all_mass, least = all_mass + masses, tl.minimum(least, tl.where(more >= 0, masses, 1 << 40))
        start += LIST
    lowest, highest = tl.min(low).to(tl.int64), tl.max(high).to(tl.int64) + 1
    cut, last = tl.full([], -(2**31), tl.int32), tl.zeros([], tl.int32) + vocab_size  # nothing cut off
    _place, sure, need = fine_cut(tally, k, p)
    if k > 0:
        base = tl.where(p < 1, 0, sure)  # with both, all that top-k may keep is listed
        wanted = tl.minimum(k, base + count).to(tl.float64)
        one = tl.full([], 1, tl.int64)
        cut, last = _find_cut(
            logits, listed, count, vocab_size, largest, t, ids, mass, order,
            lowest, highest, one, cut, last, base, count.to(tl.int64), wanted, False, LIST,
        )  # fmt: skip
    if p < 1:
        base, whole = sure, tl.sum(all_mass)
        if k > 0:
            base, lowest = tl.zeros([], tl.int64), cut.to(tl.int64)
            worth = _worth(ids, mass, order, cut, last, True)
            whole = _sum_from(logits, listed, count, largest, t, order, worth, cut, cut, last, True, LIST)
            need = p * whole.to(tl.float64)
        cut, last = _find_cut(
            logits, listed, count, vocab_size, largest, t, ids, mass, order,
            lowest, highest, tl.min(least), cut, last, base, whole, need, True, LIST,
        )  # fmt: skip
    kept = (scores >= min_p) & _is_kept(order, ids, cut, last)
    best, token = first_best(tl.where(kept, scores + gumbel_noise(key, ids), float("-inf")), ids)
    start = tl.full([], LIST, tl.int32)
    while start < count:
        more, scores, _, orders = _load_listed(logits, listed, start, count, largest, t, LIST)
        kept = (scores >= min_p) & _is_kept(orders, more, cut, last)
        value, own = first_best(tl.where(kept, scores + gumbel_noise(key, more), float("-inf")), more)
        better = (value > best) | ((value == best) & (own < token))
        best, token = tl.where(better, value, best), tl.where(better, own, token)
        start += LIST
    return best, token
