"""Acceptance and commit on the device: from the target's choices to the next step's state, and the moves in the cache.

`accept` is the exact verifier, the verdict and the commit of a step in one launch, so that a captured step ends with
the state that the next one begins with; the host reads the verdict later from one small table. One program handles one
request: it reads the draft and the choices once, and walks down the tree in registers. After that the accepted nodes'
cache entries lie scattered among the rejected ones; `compact` moves them together in all layers, in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton
from slipstream.kernels.gpu.rows import RECENT, LaneState, PassRows

_MOVED = 8192
"""Numbers that one program of `compact` holds: a piece of the cache entries of all moves of a request."""


@dataclass(frozen=True, slots=True)
class VerdictTable:
    """The verdicts on B requests in one table, which the host reads by one copy.

    emitted is 0 if the step does not count: the logits were unusable and something had been drafted.
    """

    table: Tensor  # [B, 2 + (K + 1) + K] int64

    @staticmethod
    def empty(requests: int, width: int, device: torch.device) -> VerdictTable:
        return VerdictTable(torch.zeros((requests, 3 + 2 * width), dtype=torch.int64, device=device))

    @property
    def width(self) -> int:
        return (self.table.shape[1] - 3) // 2

    @property
    def emitted(self) -> Tensor:  # [B]: number of tokens
        return self.table[:, 0]

    @property
    def accepted(self) -> Tensor:  # [B]: number of nodes
        return self.table[:, 1]

    @property
    def tokens(self) -> Tensor:  # [B, K + 1]: the emitted tokens, then -1
        return self.table[:, 2 : 3 + self.width]

    @property
    def path(self) -> Tensor:  # [B, K]: the accepted nodes, then 0
        return self.table[:, 3 + self.width :]


@dataclass(frozen=True, slots=True)
class PathMoves:
    """The moves that bring each request's accepted nodes together in the cache; src == dst means no move.

    A request's moves are in ascending order of rows, and no source stands before its destination.
    """

    src: Tensor  # [B, K] int64 slots
    dst: Tensor  # [B, K] int64 slots

    @staticmethod
    def empty(requests: int, width: int, device: torch.device) -> PathMoves:
        none = torch.zeros((requests, width), dtype=torch.int64, device=device)
        return PathMoves(none, none.clone())


def accept(
    chosen: Tensor,  # [N] int64: the target's token at each row, -1 if its logits are unusable
    draft: Draft,
    rows: PassRows,  # laid out by `pack_rows` for this draft and this state
    state: LaneState,
    told: VerdictTable,
    moves: PathMoves | None,  # None for chains, whose entries need no move
) -> None:
    """Follow the choices through each draft, write the verdicts, and advance the state by the emitted tokens.

    From the root on, the child that equals the token chosen at its parent is accepted (the first of several). If a
    token on the path is unusable and something was drafted, the step does not count. If nothing was drafted, the
    verdict contains the unusable token. In both cases the state stays.
    """
    assert rows.is_tree == (moves is not None)
    assert rows.is_tree or draft.is_chain
    follow = _launch_accept if on_gpu(chosen) else _twin_accept
    follow(chosen, draft, rows, state, told, moves)


def _launch_accept(
    chosen: Tensor, draft: Draft, rows: PassRows, state: LaneState, told: VerdictTable, moves: PathMoves | None
) -> None:
    requests, width = draft.tokens.shape
    _accept_kernel[(requests,)](
        chosen,
        draft.tokens,
        draft.parents,
        rows.starts,
        rows.lanes,
        rows.slots,
        state.last,
        state.previous,
        state.length,
        state.generated,
        state.recent,
        told.table,
        told.table if moves is None else moves.src,  # unused unless TREE
        told.table if moves is None else moves.dst,
        draft.tokens.stride(0),
        draft.parents.stride(0),
        WIDTH=width,
        RING=RECENT,
        TREE=moves is not None,
        REACH=triton.next_power_of_2(width + 1),
        num_warps=1,  # reductions are then a few instructions, and the walk consists of them
    )


@jit(sizes=["tokens_stride", "parents_stride"], pointers=["tokens", "parents"])
def _accept_kernel(
    chosen: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    starts: tl.tensor,
    lanes: tl.tensor,
    slots: tl.tensor,
    last: tl.tensor,
    previous: tl.tensor,
    length: tl.tensor,
    generated: tl.tensor,
    recent: tl.tensor,
    told: tl.tensor,
    src: tl.tensor,
    dst: tl.tensor,
    tokens_stride: tl.tensor,
    parents_stride: tl.tensor,
    WIDTH: tl.constexpr,  # K
    RING: tl.constexpr,  # known tokens of a lane
    TREE: tl.constexpr,
    REACH: tl.constexpr,  # power of two >= K + 1
) -> None:
    request = tl.program_id(0)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start - 1  # nodes; -1: a padding request
    is_real = count >= 0
    # load early what is needed last, so that the walk hides the latency
    lane = tl.load(lanes + start, mask=is_real, other=0)
    cached = tl.load(length + lane, mask=is_real, other=0)
    before = tl.load(generated + lane, mask=is_real, other=0)
    root = tl.load(last + lane, mask=is_real, other=0)
    reach = tl.arange(0, REACH)  # node i, depth i or row i of the request
    is_node = reach < count
    token = tl.load(tokens + request * tokens_stride + reach, mask=is_node, other=-1)
    parent_row = reach
    if TREE:
        parent_row = tl.load(parents + request * parents_stride + reach, mask=is_node, other=-1).to(tl.int32) + 1
    choice = tl.load(chosen + start + parent_row, mask=is_node, other=-1)
    right = is_node & (token == choice) & (choice >= 0)
    if TREE:
        accepted = 0
        row_at = tl.zeros([REACH], tl.int32)  # the row of the path at depth d
        node = tl.min(tl.where(right & (parent_row == 0), reach, REACH))
        while node < REACH:  # at most K times: each node has one parent, so none repeats
            accepted += 1
            row_at = tl.where(reach == accepted, node + 1, row_at)
            node = tl.min(tl.where(right & (parent_row == node + 1), reach, REACH))
    else:
        accepted = tl.min(tl.where(right, REACH, reach))  # the last element of REACH is no node, so it is never right
        row_at = reach
    emits = tl.load(chosen + start + row_at, mask=(reach <= accepted) & is_real, other=-1)  # [K + 1]
    own = tl.sum(tl.where(reach == accepted, emits, 0))
    usable = own >= 0
    counts = usable | (count == 0)  # whether the step counts
    accepted = tl.where(counts, accepted, 0)
    emitted = tl.where(counts & is_real, accepted + 1, 0)

    line = told + request * (3 + 2 * WIDTH)
    tl.store(line, emitted.to(tl.int64))
    tl.store(line + 1, accepted.to(tl.int64))
    tl.store(line + 2 + reach, tl.where(reach < emitted, emits, -1), mask=reach <= WIDTH)
    # the path lies one place left of the rows: depth d > 0 goes to column d - 1
    is_depth = (reach > 0) & (reach <= WIDTH)
    kept = is_depth & (reach <= accepted)
    tl.store(line + 2 + WIDTH + reach, tl.where(kept, row_at - 1, 0).to(tl.int64), mask=is_depth)
    if TREE:
        # a root row is never the destination of a move, so an unused move rewrites it; a padding request, which has no
        # row of its own, uses the pass's first row
        first = tl.where(is_real, start, 0)
        source = tl.load(slots + first + tl.where(kept, row_at, 0))
        target = tl.load(slots + first + tl.where(kept, reach, 0))
        move = request * WIDTH + reach - 1
        tl.store(src + move, source, mask=is_depth)
        tl.store(dst + move, target, mask=is_depth)
    advances = is_real & usable
    second = tl.sum(tl.where(reach == accepted - 1, emits, 0))
    tl.store(previous + lane, tl.where(accepted > 0, second, root), mask=advances)
    tl.store(last + lane, own, mask=advances)
    tl.store(length + lane, cached + emitted, mask=advances)
    tl.store(generated + lane, before + emitted, mask=advances)
    place = (cached + 1 + reach) % RING  # the last committed token stands at position `cached`
    tl.store(recent + lane * RING + place, emits, mask=advances & (reach < emitted))


def _twin_accept(
    chosen: Tensor, draft: Draft, rows: PassRows, state: LaneState, told: VerdictTable, moves: PathMoves | None
) -> None:
    starts = rows.starts.long()
    brings = starts[1:] - starts[:-1]  # [B]
    is_real = brings > 0
    first = torch.where(is_real, starts[:-1], 0)
    reach = torch.arange(draft.width + 1, device=chosen.device)
    row_of = torch.where(reach < brings[:, None], first[:, None] + reach, first[:, None])  # [B, K + 1]
    choices = torch.where(is_real[:, None], chosen[row_of], -1)  # [B, K + 1]
    parent_row = draft.parents + 1 if rows.is_tree else reach[:-1].expand_as(draft.tokens)  # [B, K]
    is_node = reach[1:] < brings[:, None]  # [B, K]

    path = torch.zeros_like(draft.tokens)  # [B, K]
    tokens = torch.full_like(choices, -1)  # [B, K + 1]
    accepted = torch.zeros_like(brings)
    at = torch.zeros_like(brings)  # [B]: the row at the end of the path
    for depth in range(draft.width):
        choice = choices.gather(1, at[:, None])  # [B, 1]
        fits = is_node & (parent_row == at[:, None]) & (draft.tokens == choice) & (choice >= 0)  # [B, K]
        node = torch.where(fits, reach[:-1], draft.width).amin(1)  # [B]
        goes_on = (node < draft.width) & (accepted == depth)
        path[:, depth] = torch.where(goes_on, node, 0)
        tokens[:, depth] = torch.where(goes_on, choice[:, 0], -1)
        accepted += goes_on
        at = torch.where(goes_on, node + 1, at)
    own = choices.gather(1, at[:, None])[:, 0]  # [B]
    tokens.scatter_(1, accepted[:, None], own[:, None])

    usable = own >= 0
    counts = is_real & (usable | (brings == 1))  # whether the step counts
    accepted = torch.where(counts, accepted, 0)
    emitted = torch.where(counts, accepted + 1, 0)
    kept = reach[:-1] < accepted[:, None]  # [B, K]
    told.emitted.copy_(emitted)
    told.accepted.copy_(accepted)
    told.tokens.copy_(torch.where(reach < emitted[:, None], tokens, -1))
    told.path.copy_(torch.where(kept, path, 0))
    if moves is not None:
        slots = rows.slots[row_of]  # [B, K + 1]; for a padding request the pass's first
        moves.src.copy_(slots.gather(1, torch.where(kept, path + 1, 0)))
        moves.dst.copy_(slots.gather(1, torch.where(kept, reach[1:], 0)))
    lane = torch.where(is_real & usable, rows.lanes[first], state.trash)  # requests that stay use the trash lane
    second = tokens.gather(1, (accepted - 1).clamp_min(0)[:, None])[:, 0]
    place = (state.length[lane, None] + 1 + reach) % RECENT  # [B, K + 1]
    ring = state.recent[lane]  # [B, RECENT]
    state.recent[lane] = ring.scatter(1, place, torch.where(reach < emitted[:, None], tokens, ring.gather(1, place)))
    state.previous[lane] = torch.where(accepted > 0, second, state.last[lane])
    state.last[lane] = own
    state.length.index_add_(0, lane, emitted)
    state.generated.index_add_(0, lane, emitted)


def compact(planes: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy slots src [B, K] to slots dst [B, K] in all of planes [L, slots, heads, dim]; src == dst means no move.

    A program takes a piece of one layer's entries and reads its sources before it writes, so a request's moves may
    overlap. No slot may be the destination of two moves, nor belong to the moves of two requests.
    """
    assert planes.stride()[2:] == (planes.shape[3], 1)  # an entry is contiguous
    move = _launch_compact if on_gpu(planes) else _twin_compact
    move(planes, src, dst)


def _launch_compact(planes: Tensor, src: Tensor, dst: Tensor) -> None:
    requests, width = src.shape
    entry = planes.shape[2] * planes.shape[3]
    if not width:
        return
    moves = triton.next_power_of_2(width)
    piece = min(triton.next_power_of_2(entry), _MOVED // moves)
    _compact_kernel[(requests, planes.shape[0], triton.cdiv(entry, piece))](
        planes,
        src,
        dst,
        planes.stride(0),
        src.stride(0),
        dst.stride(0),
        WIDTH=width,
        ENTRY=entry,
        SLOT=planes.stride(1),
        MOVES=moves,
        PIECE=piece,
        num_warps=8,
    )


@jit(sizes=["src_stride", "dst_stride"])
def _compact_kernel(
    planes: tl.tensor,
    src: tl.tensor,
    dst: tl.tensor,
    plane_stride: tl.tensor,
    src_stride: tl.tensor,
    dst_stride: tl.tensor,
    WIDTH: tl.constexpr,  # K
    ENTRY: tl.constexpr,  # heads * dim
    SLOT: tl.constexpr,  # from one entry to the next
    MOVES: tl.constexpr,  # power of two >= K
    PIECE: tl.constexpr,  # power of two: numbers of an entry
) -> None:
    request = tl.program_id(0)
    plane = planes + tl.program_id(1).to(tl.int64) * plane_stride
    move = tl.arange(0, MOVES)
    source = tl.load(src + request * src_stride + move, mask=move < WIDTH, other=0)
    target = tl.load(dst + request * dst_stride + move, mask=move < WIDTH, other=0)
    number = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    moving = (source != target)[:, None] & (number < ENTRY)[None, :]
    held = tl.load(plane + source[:, None] * SLOT + number[None, :], mask=moving)
    tl.debug_barrier()  # another thread's destination may be this one's source
    tl.store(plane + target[:, None] * SLOT + number[None, :], held, mask=moving)


def _twin_compact(planes: Tensor, src: Tensor, dst: Tensor) -> None:
    moving = src != dst  # [B, K]
    planes.index_copy_(1, dst[moving], planes.index_select(1, src[moving]))
