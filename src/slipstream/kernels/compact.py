"""Bringing the accepted path's cache entries together, in all layers, by one launch.

After a tree was verified, the accepted nodes' entries lie scattered among the rejected ones. A program takes a piece of
one layer's entries and reads what moves in it before it writes any of it, so that moves of a request may overlap.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.jit import jit, on_gpu, tl, triton

_TILE = 8192
"""Numbers that a program holds: a piece of the entries of all moves of a request."""


def compact(planes: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy slots src [B, K] to slots dst [B, K] in all of planes [L, slots, heads, dim]; src == dst is nothing to do.

    No slot may be the destination of two moves that have something to do, nor a source or destination of two requests.
    """
    assert planes.stride()[2:] == (planes.shape[3], 1)  # an entry is one piece of memory
    move = _launch if on_gpu(planes) else _twin
    move(planes, src, dst)


def _launch(planes: Tensor, src: Tensor, dst: Tensor) -> None:
    requests, width = src.shape
    entry = planes.shape[2] * planes.shape[3]
    if not width:
        return
    moves = triton.next_power_of_2(width)
    piece = min(triton.next_power_of_2(entry), _TILE // moves)
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


def _twin(planes: Tensor, src: Tensor, dst: Tensor) -> None:
    moving = src != dst  # [B, K]
    planes.index_copy_(1, dst[moving], planes.index_select(1, src[moving]))
