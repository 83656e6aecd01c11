"""The rows that a draft begins with, laid out by one launch: the last tokens of each request again.

As many of each request, so that all shapes are fixed, though a short text has fewer. Step by step it would be some
twenty launches, and they would take as long as a level of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.jit import jit, on_gpu, tl, triton
from slipstream.kernels.pack_rows import RECENT, LaneState


@dataclass(frozen=True, slots=True)
class LastRows:
    """`count` rows of each request, the first tokens first; those that a short text has not are nobody's."""

    tokens: Tensor  # [B * count] int64: positions of the tokens that are read
    ids: Tensor  # [B * count] int64: those tokens
    places: (
        Tensor  # [B * count] int64: where each stands among the drafter's own entries: a head's one before its token
    )
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

    last_place: no row stands behind it; who is there is not drafted for. trash_slot: a slot that is nobody's. shift: a
    token's entry stands so many places before it.
    """
    if not on_gpu(lanes):
        return last_rows_twin(
            state, lanes, count, page_size=page_size, trash_slot=trash_slot, last_place=last_place, shift=shift
        )
    rows = LastRows.empty(lanes.shape[0], count, lanes.device)
    _launch(state, lanes, count, page_size, trash_slot, last_place, shift, rows)
    return rows


def _launch(
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
    whose = (last, length[:, 0] + 1, state.generated[lanes])
    return LastRows(token.flatten(), ids.flatten(), place.flatten(), seen.flatten(), own.flatten(), *whose)
