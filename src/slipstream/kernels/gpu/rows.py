"""The rows of passes, laid out on the device: of a step's draft, and of the tokens that a drafter reads again.

The host does not know what the last step emitted when it queues the next one, so the device lays out its rows: each
running request has a lane of `LaneState`, and the draft and the lane determine its rows. Each layout is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.kernels.gpu.jit import jit, on_gpu, room_for, tl, triton
from slipstream.kernels.gpu.layout import RowLayout

RECENT = 64
"""Last tokens of each request that the device knows: the largest number that a step can commit."""

_PADDING_ROWS = 64
"""Rows that one padding program fills."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """The device's state of every running request, one row a lane. The last lane is the trash lane.

    Padding requests use the trash lane, whose values are never read. Only `accept` advances the state, except for the
    pages, which only the scheduler writes.
    """

    last: Tensor  # [S + 1] int64: the last committed token, whose K and V are not in the cache yet
    previous: Tensor  # [S + 1] int64: the token before the last one
    length: Tensor  # [S + 1] int64: tokens in the cache
    generated: Tensor  # [S + 1] int64: tokens emitted
    pages: Tensor  # [S + 1, P] int32: the page table
    recent: Tensor  # [S + 1, RECENT] int64: its last tokens, the one at position p in column p % RECENT

    @property
    def trash(self) -> int:
        return self.last.shape[0] - 1


def ring(tokens: Sequence[int]) -> list[int]:
    """A row of `LaneState.recent`: a request's last tokens, each in the column of its position."""
    last = list(tokens[-RECENT:])
    last += [0] * (RECENT - len(last))
    turn = len(tokens) % RECENT if len(tokens) > RECENT else 0
    return last[RECENT - turn :] + last[: RECENT - turn]


@dataclass(frozen=True, slots=True)
class PassRows:
    """The N rows of a pass of B requests, in static tensors. Rows of no request are padding.

    A request's root row stands first, then its nodes in order; a padding request has no rows.
    """

    ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64: absolute position, depth in the tree counted
    slots: Tensor  # [N] int64: where this row's K and V go in the cache
    lanes: Tensor  # [N] int64: the trash lane for padding
    generated: Tensor  # [N] int64: tokens emitted before the one that this row chooses
    requests: Tensor  # [N] int32: -1 for padding
    starts: Tensor  # [B + 1] int32: the first row of each request, then the number of rows without padding
    ancestors: (
        Tensor | None
    )  # [N, K + 1] int32: the ancestor at each relative depth, itself last, then -1; None: chains

    @staticmethod
    def empty(requests: int, width: int, rows: int, *, tree: bool, device: torch.device) -> PassRows:
        """Room for `rows` rows of `requests` requests with at most `width` nodes each."""

        def new(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return PassRows(
            ids=new(rows),
            positions=new(rows),
            slots=new(rows),
            lanes=new(rows),
            generated=new(rows),
            requests=new(rows, value=-1, dtype=torch.int32),
            starts=new(requests + 1, dtype=torch.int32),
            ancestors=new(rows, width + 1, value=-1, dtype=torch.int32) if tree else None,
        )

    @property
    def is_tree(self) -> bool:
        return self.ancestors is not None

    def layout(self, state: LaneState, lanes: Tensor, page_size: int, max_keys: int) -> RowLayout:
        """The layout for attention. A new one for each pass, because it caches the pass's tiles."""
        return RowLayout(
            positions=self.positions,
            slots=self.slots,
            starts=self.starts,
            lanes=lanes,
            lengths=state.length,
            pages=state.pages,
            ancestors=self.ancestors,
            page_size=page_size,
            max_keys=max_keys,
        )


def pack_rows(
    state: LaneState,
    lanes: Tensor,  # [B] int64, padded with the trash lane
    draft: Draft,  # of these B requests
    out: PassRows,
    *,
    page_size: int,
    trash_slot: int,
) -> None:
    """Write all rows of this step's pass to `out`. Does not change the state.

    `out` must have room for the rows of all requests, and each request's pages must reach as far as its rows.
    `out.is_tree` says whether parents are read; without it every draft must be a chain.
    """
    assert out.is_tree or draft.is_chain
    lay_out = _launch_pack if on_gpu(out.ids) else _twin_pack
    lay_out(state, lanes, draft, out, page_size, trash_slot)


def _launch_pack(state: LaneState, lanes: Tensor, draft: Draft, out: PassRows, page_size: int, trash_slot: int) -> None:
    requests, width = draft.tokens.shape
    rows = out.ids.shape[0]
    reach = triton.next_power_of_2(width + 1)
    _pack_kernel[(requests + triton.cdiv(rows, _PADDING_ROWS),)](
        state.last,
        state.length,
        state.generated,
        state.pages,
        lanes,
        draft.tokens,
        draft.parents,
        draft.counts,
        out.ids,
        out.positions,
        out.slots,
        out.lanes,
        out.generated,
        out.requests,
        out.starts,
        out.starts if out.ancestors is None else out.ancestors,  # unused unless TREE
        requests,
        rows,
        state.trash,
        trash_slot,
        state.pages.stride(0),
        draft.tokens.stride(0),
        draft.parents.stride(0),
        WIDTH=width,
        PAGE=page_size,
        TREE=out.is_tree,
        DOUBLINGS=width.bit_length(),
        REQUESTS=room_for(requests),
        REACH=reach,
        PADDING=_PADDING_ROWS,
        num_warps=1 if reach == 32 else 2,  # measured: for trees other numbers take up to twice as long
    )


@jit(
    sizes=["num_requests", "num_rows", "pages_stride", "tokens_stride", "parents_stride"],
    pointers=["lanes", "tokens", "parents", "counts"],
)
def _pack_kernel(
    last: tl.tensor,
    length: tl.tensor,
    generated: tl.tensor,
    pages: tl.tensor,
    lanes: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    counts: tl.tensor,
    out_ids: tl.tensor,
    out_positions: tl.tensor,
    out_slots: tl.tensor,
    out_lanes: tl.tensor,
    out_generated: tl.tensor,
    out_requests: tl.tensor,
    out_starts: tl.tensor,
    out_ancestors: tl.tensor,
    num_requests: tl.tensor,
    num_rows: tl.tensor,
    trash: tl.tensor,
    trash_slot: tl.tensor,
    pages_stride: tl.tensor,
    tokens_stride: tl.tensor,
    parents_stride: tl.tensor,
    WIDTH: tl.constexpr,  # K
    PAGE: tl.constexpr,  # slots a page
    TREE: tl.constexpr,
    DOUBLINGS: tl.constexpr,  # 2^DOUBLINGS > K, the largest depth of a tree
    REQUESTS: tl.constexpr,  # power of two >= B
    REACH: tl.constexpr,  # power of two >= K + 1
    PADDING: tl.constexpr,  # rows of a padding program
) -> None:
    program = tl.program_id(0)
    # all counts at once, so that every program computes its own start
    request = tl.arange(0, REQUESTS)
    lane_of = tl.load(lanes + request, mask=request < num_requests, other=trash)
    drafted = tl.load(counts + request, mask=request < num_requests, other=0)
    brings = tl.where(lane_of == trash, 0, drafted + 1).to(tl.int32)  # [B]
    start = tl.sum(tl.where(request < program, brings, 0))
    reach = tl.arange(0, REACH)  # row 0 is the root, row 1 + i is node i
    if program < num_requests:
        lane = tl.sum(tl.where(request == program, lane_of, 0))
        count = tl.sum(tl.where(request == program, brings, 0))
        tl.store(out_starts + program, start)
        real = reach < count
        is_node = real & (reach > 0)
        ids = tl.load(tokens + program * tokens_stride + reach - 1, mask=is_node, other=0)
        depth = reach
        if TREE:
            up = tl.load(parents + program * parents_stride + reach - 1, mask=is_node, other=-1).to(tl.int32) + 1
            # pointer doubling; a row's jump target and distance travel in one word
            word = tl.where(is_node, 64 + up, 0)  # 64 * distance + the row that it leads to
            above = tl.full([REACH], 1, tl.int64) << reach  # bit j: row j is this row or above it
            for _ in tl.static_range(DOUBLINGS):
                above = above | tl.gather(above, word & 63, 0)
                word = (word & ~63) + tl.gather(word, word & 63, 0)
            depth = word >> 6
            # the row above at depth d is the ancestor whose own depth is d
            is_above = ((above[:, None] >> reach[None, :]) & 1) == 1  # [K + 1, K + 1]
            line = (start + reach).to(tl.int64)[:, None] * (WIDTH + 1)
            name = tl.zeros([REACH, REACH], tl.int32) + start + reach[None, :]
            tl.store(out_ancestors + line + depth[None, :], name, mask=real[:, None] & is_above)
            beyond = (reach[None, :] > depth[:, None]) & (reach[None, :] <= WIDTH)
            missing = tl.full([REACH, REACH], -1, tl.int32)
            tl.store(out_ancestors + line + reach[None, :], missing, mask=real[:, None] & beyond)
        prefix = tl.load(length + lane)
        emitted = tl.load(generated + lane)
        root = tl.load(last + lane)
        place = prefix + reach  # slots follow the rows, positions the depth
        page = tl.load(pages + lane * pages_stride + place // PAGE, mask=real, other=0).to(tl.int64)
        row = start + reach
        tl.store(out_ids + row, tl.where(reach == 0, root, ids), mask=real)
        tl.store(out_positions + row, prefix + depth, mask=real)
        tl.store(out_slots + row, page * PAGE + place % PAGE, mask=real)
        tl.store(out_lanes + row, tl.zeros([REACH], tl.int64) + lane, mask=real)
        tl.store(out_generated + row, emitted + depth, mask=real)
        tl.store(out_requests + row, tl.zeros([REACH], tl.int32) + program, mask=real)
    else:
        total = start  # of all requests
        if program == num_requests:
            tl.store(out_starts + num_requests, total)
        spare = (program - num_requests) * PADDING + tl.arange(0, PADDING)
        empty = (spare >= total) & (spare < num_rows)
        nothing = tl.zeros([PADDING], tl.int64)
        tl.store(out_ids + spare, nothing, mask=empty)
        tl.store(out_positions + spare, nothing, mask=empty)
        tl.store(out_slots + spare, nothing + trash_slot, mask=empty)
        tl.store(out_lanes + spare, nothing + trash, mask=empty)
        tl.store(out_generated + spare, nothing, mask=empty)
        tl.store(out_requests + spare, tl.full([PADDING], -1, tl.int32), mask=empty)
        if TREE:
            cell = spare.to(tl.int64)[:, None] * (WIDTH + 1) + reach[None, :]
            none = tl.full([PADDING, REACH], -1, tl.int32)
            tl.store(out_ancestors + cell, none, mask=empty[:, None] & (reach[None, :] <= WIDTH))


def _twin_pack(state: LaneState, lanes: Tensor, draft: Draft, out: PassRows, page_size: int, trash_slot: int) -> None:
    brings = torch.where(lanes == state.trash, 0, draft.counts + 1)  # [B]
    ends = brings.cumsum(0)
    out.starts[0] = 0
    out.starts[1:] = ends
    row = torch.arange(out.ids.shape[0], device=lanes.device)  # [N]
    real = row < ends[-1]
    request = torch.searchsorted(ends, row, right=True).clamp_max(lanes.shape[0] - 1)
    start = (ends - brings)[request]
    own = torch.where(real, row - start, 0)  # [N]: the row's place among its request's rows
    lane = lanes[request]
    place = state.length[lane] + own
    page = torch.where(real, place // page_size, 0)
    ids = torch.cat((state.last[lanes][:, None], draft.tokens), dim=1)  # [B, K + 1]
    depth = own
    if out.ancestors is not None:
        is_above = _above(draft)  # [B, K + 1, K + 1]
        depth = is_above.sum(-1)[request, own] - 1
        order = is_above.logical_not().to(torch.int8).argsort(dim=-1, stable=True)  # the rows above first, in order
        beyond = torch.arange(draft.width + 1, device=lanes.device) > depth[:, None]  # [N, K + 1]
        named = start[:, None] + order[request, own]
        out.ancestors.copy_(torch.where(beyond | ~real[:, None], -1, named))
    out.ids.copy_(torch.where(real, ids[request, own], 0))
    out.positions.copy_(torch.where(real, state.length[lane] + depth, 0))
    out.slots.copy_(torch.where(real, state.pages[lane, page].long() * page_size + place % page_size, trash_slot))
    out.lanes.copy_(torch.where(real, lane, state.trash))
    out.generated.copy_(torch.where(real, state.generated[lane] + depth, 0))
    out.requests.copy_(torch.where(real, request, -1))


def _above(draft: Draft) -> Tensor:  # [B, K + 1, K + 1] bool
    """The ancestors of each row of a request, itself included."""
    reach = torch.arange(draft.width + 1, device=draft.tokens.device)
    is_node = reach[1:] <= draft.counts[:, None]  # [B, K]: padding may hold anything
    jump = torch.cat((torch.zeros_like(draft.counts)[:, None], torch.where(is_node, draft.parents + 1, 0)), dim=1)
    above = (reach[:, None] == reach).expand(jump.shape[0], -1, -1)
    for _ in range(draft.width.bit_length()):  # pointer doubling, as in the verifier
        above = above | above.gather(1, jump[..., None].expand_as(above))
        jump = jump.gather(1, jump)
    return above


@dataclass(frozen=True, slots=True)
class LastRows:
    """The last `count` rows of each request, in order; a short text has fewer, and the others are padding."""

    tokens: Tensor  # [B * count] int64: positions of the tokens that are read
    ids: Tensor  # [B * count] int64: those tokens
    places: Tensor  # [B * count] int64: place among the drafter's own entries (a head's: one before its token)
    seen: Tensor  # [B * count] int64: slots of the target's hidden states there
    slots: Tensor  # [B * count] int64: slots of the drafter's K and V
    last: Tensor  # [B] int64: the row of each request's last token
    positions: Tensor  # [B] int64: of the token that this row guesses
    generated: Tensor  # [B] int64: tokens emitted before that one

    @staticmethod
    def empty(requests: int, count: int, device: torch.device) -> LastRows:
        rows = torch.empty((5, requests * count), dtype=torch.int64, device=device)
        tokens, ids, places, seen, slots = rows.unbind(0)
        return LastRows(tokens, ids, places, seen, slots, *rows.new_empty((3, requests)).unbind(0))


@jit(sizes=["P"], pointers=["lanes_ptr"])
def _last_rows_kernel(
    length_ptr: tl.tensor,  # [S]
    generated_ptr: tl.tensor,  # [S]
    pages_ptr: tl.tensor,  # [S, P]
    recent_ptr: tl.tensor,  # [S, RING]
    lanes_ptr: tl.tensor,  # [B]
    tokens_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    places_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    last_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    emitted_ptr: tl.tensor,
    P: tl.tensor,
    last_place: tl.tensor,
    trash_slot: tl.tensor,
    COUNT: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    lane = tl.load(lanes_ptr + request)
    length = tl.load(length_ptr + lane)
    first = tl.maximum(length - (COUNT - 1), SHIFT)
    row = tl.arange(0, BLOCK)
    wanted = row < COUNT
    token = first + row
    real = token <= length
    place = tl.minimum(tl.maximum(tl.minimum(token, length) - SHIFT, 0), last_place)
    page = tl.load(pages_ptr + lane * P + place // PAGE, mask=wanted, other=0).to(tl.int64)
    seen = page * PAGE + place % PAGE
    at = request * COUNT + row
    tl.store(tokens_ptr + at, token, mask=wanted)
    tl.store(ids_ptr + at, tl.load(recent_ptr + lane * RING + token % RING, mask=wanted, other=0), mask=wanted)
    tl.store(places_ptr + at, place, mask=wanted)
    tl.store(seen_ptr + at, seen, mask=wanted)
    tl.store(slots_ptr + at, tl.where(real, seen, trash_slot), mask=wanted)
    tl.store(last_ptr + request, request * COUNT + length - first)
    tl.store(positions_ptr + request, length + 1)
    tl.store(emitted_ptr + request, tl.load(generated_ptr + lane))


def last_rows(
    state: LaneState, lanes: Tensor, count: int, *, page_size: int, trash_slot: int, last_place: int, shift: int = 1
) -> LastRows:
    """The last `count` tokens of these requests [B].

    last_place: the last place at which a row may stand; longer texts are not drafted for. trash_slot: a slot that no
    request uses. shift: how many places a token's entry stands before the token.
    """
    if not on_gpu(lanes):
        return last_rows_twin(
            state, lanes, count, page_size=page_size, trash_slot=trash_slot, last_place=last_place, shift=shift
        )
    rows = LastRows.empty(lanes.shape[0], count, lanes.device)
    _launch_last(state, lanes, count, page_size, trash_slot, last_place, shift, rows)
    return rows


def _launch_last(
    state: LaneState,
    lanes: Tensor,
    count: int,
    page_size: int,
    trash_slot: int,
    last_place: int,
    shift: int,
    rows: LastRows,
) -> None:
    _last_rows_kernel[(lanes.shape[0],)](
        state.length, state.generated, state.pages, state.recent, lanes, rows.tokens, rows.ids, rows.places, rows.seen,
        rows.slots, rows.last, rows.positions, rows.generated, state.pages.shape[1], last_place, trash_slot,
        COUNT=count, SHIFT=shift, BLOCK=triton.next_power_of_2(count), PAGE=page_size, RING=RECENT, num_warps=1,
    )  # fmt: skip


def last_rows_twin(
    state: LaneState, lanes: Tensor, count: int, *, page_size: int, trash_slot: int, last_place: int, shift: int = 1
) -> LastRows:
    length = state.length[lanes, None]  # [B, 1]
    first = (length - (count - 1)).clamp_min(shift)
    token = first + torch.arange(count, device=lanes.device)  # [B, count]
    real = token <= length
    place = torch.where(real, token, length).sub_(shift).clamp_(0, last_place)
    seen = state.pages[lanes[:, None], place // page_size].long() * page_size + place % page_size
    own = torch.where(real, seen, trash_slot)
    ids = state.recent[lanes[:, None], token % RECENT]
    last = count * torch.arange(lanes.shape[0], device=lanes.device) + (length - first)[:, 0]
    per_request = (last, length[:, 0] + 1, state.generated[lanes])
    return LastRows(token.flatten(), ids.flatten(), place.flatten(), seen.flatten(), own.flatten(), *per_request)
