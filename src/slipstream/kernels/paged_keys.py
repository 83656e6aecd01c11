"""How attention's kernels for decoding read keys and values: those on pages, and a tree's own."""

from __future__ import annotations

from slipstream.kernels.jit import jit, tl
from slipstream.kernels.softmax import add_block


@jit
def read_pages(
    q: tl.tensor,  # [Q, D]
    keys: tl.tensor,  # [1, D]: of a head
    values: tl.tensor,
    pages: tl.tensor,  # of a request
    position: tl.tensor,  # [Q]: padding rows stand before all keys
    begin: tl.tensor,
    end: tl.tensor,
    end_key: tl.tensor,  # keys from here on do not exist
    d_real: tl.tensor,  # [D]
    top: tl.tensor,  # [Q]
    total: tl.tensor,
    acc: tl.tensor,  # [Q, D]
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The keys that lie on pages, block by block, into the running softmax."""
    for key in tl.range(begin, end, BLOCK_KEYS, num_stages=STAGES):
        at = key + tl.arange(0, BLOCK_KEYS)
        page = tl.load(pages + at // PAGE, mask=at < end_key, other=0).to(INDEX)
        place = (page * PAGE + at % PAGE) * (H_KV * D)
        there = (at < end_key)[:, None]
        if D < BLOCK_D:
            there = there & d_real[None, :]
        k = tl.load(keys + place[:, None], mask=there, other=0.0)
        v = tl.load(values + place[:, None], mask=there, other=0.0)
        seen = at[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (at[None, :] > position[:, None] - window)
        top, total, acc = add_block(q, k, v, seen, top, total, acc, scale, softcap, True, SOFTCAP, PRECISION)
    return top, total, acc


@jit
def read_run(
    q: tl.tensor,  # [Q, D]
    keys: tl.tensor,  # [1, D]: of a head
    values: tl.tensor,
    pages: tl.tensor,  # of a request
    own_ptr: tl.tensor,
    position: tl.tensor,  # [Q]
    row: tl.tensor,  # [Q]
    q_real: tl.tensor,  # [Q]
    row_start: tl.tensor,
    row_end: tl.tensor,
    run: tl.tensor,
    end_key: tl.tensor,  # of all runs
    length: tl.tensor,  # where a tree's own keys begin
    d_real: tl.tensor,  # [D]
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    W: tl.tensor,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    TREE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax over one run of the keys."""
    begin = run * SPLIT
    end_key = tl.minimum(end_key, begin + SPLIT)
    if WINDOW:
        # whole blocks that no row of the tile sees are left out; masked ones change nothing
        lowest = tl.min(tl.where(q_real, position, 2147483647), 0) - window + 1
        begin = tl.maximum(begin, (lowest // BLOCK_KEYS) * BLOCK_KEYS)
    shared_end = end_key
    if TREE:
        shared_end = tl.minimum(end_key, (length // BLOCK_KEYS) * BLOCK_KEYS)
    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    top, total, acc = read_pages(
        q, keys, values, pages, position, begin, shared_end, end_key, d_real, top, total, acc, scale, softcap,
        window, H_KV, D, BLOCK_D, PAGE, BLOCK_KEYS, WINDOW, SOFTCAP, PRECISION, INDEX, STAGES,
    )  # fmt: skip
    if TREE:
        # from the block on in which the draft begins, each row has keys of its own
        own = length // BLOCK_KEYS * BLOCK_KEYS
        for key in range(tl.maximum(begin, own), end_key, BLOCK_KEYS):
            at = key + tl.arange(0, BLOCK_KEYS)
            for r in tl.range(row_start, row_end, num_stages=3):
                slot = tl.load(own_ptr + r * W + at - own, mask=at < end_key, other=-1)
                known = slot >= 0
                place = slot.to(INDEX) * (H_KV * D)
                there = known[:, None]
                if D < BLOCK_D:
                    there = there & d_real[None, :]
                k = tl.load(keys + place[:, None], mask=there, other=0.0)
                v = tl.load(values + place[:, None], mask=there, other=0.0)
                seen = (row == r)[:, None] & known[None, :] & (at[None, :] <= position[:, None])
                if WINDOW:
                    seen = seen & (at[None, :] > position[:, None] - window)
                top, total, acc = add_block(q, k, v, seen, top, total, acc, scale, softcap, True, SOFTCAP, PRECISION)
    return top, total, acc
