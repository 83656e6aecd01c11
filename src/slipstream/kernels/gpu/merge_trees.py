"""Merged trees on the device: a device drafter's guesses are added to the drafts that are there already.

The host knows its own drafters' trees when it queues a step, but not what device drafters will guess in it. So one
launch between the draft and the pass makes the union; one program handles one request, node by node in registers. The
rule is that of `core/draft.py`: equal paths become one, and nodes without room are cut with all nodes below them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draft import CUT, ROOT
from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton

_REACH = 64
"""Nodes in the registers of a program: fixed, because each new size would be compiled while a step waits."""
HOST = 1
"""The owner bit of nodes from the host, which knows their drafters itself."""


@dataclass(frozen=True, slots=True)
class Union:
    """Drafts under construction, in static tensors. Entries behind `counts` are undefined."""

    tokens: Tensor  # [B, K] int64
    parents: Tensor  # [B, K] int64
    counts: Tensor  # [B] int64
    owners: Tensor  # [B, K] int64: one bit a drafter, `HOST` for the first nodes; 0 behind `counts`
    room: Tensor  # [B] int64: the largest number of nodes, at most K


def merge_guesses(
    union: Union,
    tokens: Tensor,  # [B, M] int64: one device drafter's guesses
    parents: Tensor | None,  # [B, M] int64, below `ROOT` for entries without a node; None: chains
    drafters: Tensor,  # [B] int64: one bit for each drafter that guesses for the request
    number: int,  # the number of this drafter, from 1 on
    *,
    nodes: int,  # the guesses that are used: more would take the room of later drafters
    first: bool,  # the union has only the host's nodes so far
) -> None:
    """Add the guesses to the drafts of the requests that want them. Writes all of `union` except `room`."""
    merge = _launch if on_gpu(tokens) else _twin
    merge(union, tokens, parents, drafters, number, nodes, first)


def prepare_merges(device: torch.device, trees: Iterable[bool]) -> None:
    """Compile the merging of chains (False) or trees (True) before a step needs it."""
    one = torch.zeros((1, 1), dtype=torch.int64, device=device)
    if on_gpu(one):
        union = Union(one.clone(), one.clone(), one[0].clone(), one.clone(), one[0].clone())
        for is_tree in trees:
            for first in (True, False):
                merge_guesses(union, one, one if is_tree else None, one[0], 1, nodes=1, first=first)


def _launch(
    union: Union, tokens: Tensor, parents: Tensor | None, drafters: Tensor, number: int, nodes: int, first: bool
) -> None:
    (requests, width), guesses = union.tokens.shape, tokens.shape[1]
    _merge_kernel[(requests,)](
        union.tokens,
        union.parents,
        union.counts,
        union.owners,
        union.room,
        tokens,
        tokens if parents is None else parents,  # unused for chains
        drafters,
        number,
        min(nodes, guesses),
        union.tokens.stride(0),
        union.parents.stride(0),
        union.owners.stride(0),
        tokens.stride(0),
        tokens.stride(1),
        0 if parents is None else parents.stride(0),
        0 if parents is None else parents.stride(1),
        width,
        guesses,
        TREE=parents is not None,
        FIRST=first,
        REACH=max(_REACH, triton.next_power_of_2(width)),
        GUESSED=max(_REACH, triton.next_power_of_2(guesses)),
        num_warps=1,  # reductions are then a few instructions, and the loop consists of them
    )


_STRIDES = ("own_stride", "own_parents_stride", "owners_stride", "line", "column", "parents_line", "parents_column")


@jit(
    sizes=["number", "nodes", "width", "guesses", *_STRIDES],
    pointers=["own_tokens", "own_parents", "counts", "owners", "room", "tokens", "parents", "drafters"],
)
def _merge_kernel(
    own_tokens: tl.tensor,
    own_parents: tl.tensor,
    counts: tl.tensor,
    owners: tl.tensor,
    room: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    drafters: tl.tensor,
    number: tl.tensor,
    nodes: tl.tensor,
    own_stride: tl.tensor,
    own_parents_stride: tl.tensor,
    owners_stride: tl.tensor,
    line: tl.tensor,
    column: tl.tensor,
    parents_line: tl.tensor,
    parents_column: tl.tensor,
    width: tl.tensor,  # K
    guesses: tl.tensor,  # M
    TREE: tl.constexpr,
    FIRST: tl.constexpr,
    REACH: tl.constexpr,  # power of two >= K
    GUESSED: tl.constexpr,  # power of two >= M
) -> None:
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + request).to(tl.int32)
    most = tl.load(room + request).to(tl.int32)
    wanted = (tl.load(drafters + request) >> number) & 1
    reach = tl.arange(0, REACH)
    is_node = reach < count
    token = tl.load(own_tokens + request * own_stride + reach, mask=is_node, other=-1)
    parent = tl.load(own_parents + request * own_parents_stride + reach, mask=is_node, other=-3).to(tl.int32)
    owner = is_node.to(tl.int64)
    if not FIRST:
        owner = tl.load(owners + request * owners_stride + reach, mask=is_node, other=0)
    bit = tl.full([], 1, tl.int64) << number
    guess = tl.arange(0, GUESSED)
    is_guess = guess < guesses
    guessed = tl.load(tokens + request * line + guess * column, mask=is_guess, other=-1)
    above = guess - 1
    if TREE:
        above = tl.load(parents + request * parents_line + guess * parents_column, mask=is_guess, other=-2)
        above = above.to(tl.int32)
    place = tl.full([GUESSED], -2, tl.int32)  # the node of each guess; -2: none
    steps = tl.where(wanted == 1, nodes, 0)
    for i in range(steps):
        here = guess == i
        value = tl.sum(tl.where(here, guessed, 0))
        up = tl.sum(tl.where(here, above, 0))
        at = tl.where(up == -1, -1, tl.sum(tl.where(guess == up, place, 0)))
        at = tl.where(up < -1, -2, at)
        same = (parent == at) & (token == value)  # entries without a node have a parent that no guess has
        node = tl.min(tl.where(same, reach, REACH))
        fits = (at >= -1) & (count < most)
        is_new = (node == REACH) & fits
        node = tl.where(is_new, count, node)
        token = tl.where(is_new & (reach == node), value, token)
        parent = tl.where(is_new & (reach == node), at, parent)
        owner = tl.where(reach == node, owner | bit, owner)
        place = tl.where(here, tl.where(node == REACH, -2, node), place)
        count += is_new.to(tl.int32)
    kept = reach < count
    tl.store(own_tokens + request * own_stride + reach, token, mask=kept)
    tl.store(own_parents + request * own_parents_stride + reach, parent.to(tl.int64), mask=kept)
    tl.store(owners + request * owners_stride + reach, owner, mask=reach < width)
    tl.store(counts + request, count.to(tl.int64))


def _twin(
    union: Union, tokens: Tensor, parents: Tensor | None, drafters: Tensor, number: int, nodes: int, first: bool
) -> None:
    width, guesses = union.tokens.shape[1], tokens.shape[1]
    reach = torch.arange(width, device=tokens.device)
    if first:
        union.owners.copy_(reach < union.counts[:, None])
    wanted = (drafters >> number) & 1 == 1  # [B]
    place = torch.full_like(tokens, CUT)  # [B, M]
    for i in range(min(nodes, guesses)):
        if parents is None:
            at = place[:, i - 1] if i else torch.full_like(drafters, ROOT)  # [B]
        else:
            up = parents[:, i]
            at = torch.where(up >= 0, place.gather(1, up.clamp(0, guesses - 1)[:, None])[:, 0], up.clamp_min(CUT))
        is_node = reach < union.counts[:, None]  # [B, K]
        same = is_node & (union.parents == at[:, None]) & (union.tokens == tokens[:, i, None])
        node = torch.where(same, reach, width).amin(1)  # [B]
        is_new = wanted & (node == width) & (at >= ROOT) & (union.counts < union.room)
        node = torch.where(is_new, union.counts, node)
        here = reach == node[:, None]  # [B, K]
        fresh = here & is_new[:, None]
        union.tokens.copy_(torch.where(fresh, tokens[:, i, None], union.tokens))
        union.parents.copy_(torch.where(fresh, at[:, None], union.parents))
        union.owners.copy_(torch.where(here & wanted[:, None], union.owners | (1 << number), union.owners))
        union.counts.add_(is_new)
        place[:, i] = torch.where(node == width, CUT, node)
