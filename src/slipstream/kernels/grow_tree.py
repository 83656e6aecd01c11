"""Trees that grow by confidence (EAGLE-2), on the device: a launch a level, and one for the tree.

Level by level each row of a beam offers its best tokens, and the surest paths go on. What was offered on the way and
did not go on may still be surer than what lies deeper: so in the end all candidates are ranked together. A path is
never surer than what it begins with, so the best of them are a tree. Between two passes of a head there would be some
thirty small steps, and each would take as long as reading ten megabytes; so one program a request does all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.jit import jit, on_gpu, tl, triton
from slipstream.kernels.pack_rows import LaneState


@dataclass(frozen=True, slots=True)
class Level:
    """The rows that go on to the next level, `width` of each request, and all that their pass must know."""

    tokens: Tensor  # [B * width] int64
    rows: Tensor  # [B * width] int64: which row of the pass before offered each
    lanes: Tensor  # [B * width] int64
    places: Tensor  # [B * width] int64: where each stands in its text
    positions: Tensor  # [B * width] int64: of the token that each guesses
    generated: Tensor  # [B * width] int64: tokens emitted before that one
    guests: Tensor  # [B * width] int64: the numbers under which its entries lie in the cache
    ancestors: Tensor  # [B * width, step] int32: guests from the tree's first level down to each, itself last
    scores: Tensor  # [B * width] fp32: of the whole path
    candidates: Tensor  # [B * width] int64: its place among the candidates

    @staticmethod
    def empty(rows: int, step: int, device: torch.device) -> Level:
        numbers = torch.empty((8, rows), dtype=torch.int64, device=device).unbind(0)
        tokens, offered_by, lanes, places, positions, generated, guests, candidates = numbers
        ancestors = torch.empty((rows, step), dtype=torch.int32, device=device)
        scores = torch.empty(rows, dtype=torch.float32, device=device)
        return Level(tokens, offered_by, lanes, places, positions, generated, guests, ancestors, scores, candidates)


class Grown(NamedTuple):
    """Trees of as many nodes each, parents first."""

    tokens: Tensor  # [B, nodes] int64
    parents: Tensor  # [B, nodes] int64, -1 is the root


class Growth:
    """The trees of B requests while they grow: all candidates so far, level by level."""

    def __init__(
        self, state: LaneState, lanes: Tensor, width: int, depth: int, *, last_place: int, guests: int, most: int
    ) -> None:
        """guests: entries of one request's tree that the cache has room for. most: requests for which it has.

        last_place: no row stands behind it; who is there is not drafted for.
        """
        self.width, self.depth = width, depth
        self.size = width + (depth - 1) * width * width
        shape, device = (lanes.shape[0], self.size), lanes.device
        self.tokens = torch.empty(shape, dtype=torch.int64, device=device)
        self.parents = torch.empty(shape, dtype=torch.int64, device=device)  # among the candidates; -1 is the root
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self._state, self._lanes, self._last_place = state, lanes, last_place
        self._guests, self._most = guests, most
        self._step = 0

    def grow(self, tokens: Tensor, scores: Tensor, above: Level | None) -> Level | None:
        """The next level, from what the roots [B, width] or the rows of the level above [B * width, width] offer.

        Best first, all tokens of a row different, scores at most 0. None: the tree ends here.
        """
        self._step += 1
        last = self._step == self.depth
        level = None if last else Level.empty(self._lanes.shape[0] * self.width, self._step, self._lanes.device)
        (self._launch if on_gpu(tokens) else self._twin)(tokens, scores, above, level)
        return level

    def tree(self, nodes: int) -> Grown:
        """The surest of all candidates, surest first; of equals the earlier, so that parents come first."""
        assert nodes <= self.size, f"{nodes} nodes of {self.size} candidates"
        shape, device = (2, self.tokens.shape[0], nodes), self.tokens.device
        out = Grown(*torch.empty(shape, dtype=torch.int64, device=device).unbind(0))
        (self._launch_tree if on_gpu(self.tokens) else self._twin_tree)(nodes, out)
        return out

    @property
    def _before(self) -> int:
        """Candidates of the levels before this one."""
        return 0 if self._step == 1 else self.width + (self._step - 2) * self.width**2

    def _launch(self, tokens: Tensor, scores: Tensor, above: Level | None, level: Level | None) -> None:
        first = above is None
        up, to = above or level, level or above
        none = scores  # not touched
        _grow_kernel[(self._lanes.shape[0],)](
            tokens.contiguous(), scores.contiguous(), self.tokens, self.parents, self.scores,
            up.scores if up else none, up.candidates if up else none, up.ancestors if up else none,
            to.tokens if to else none, to.rows if to else none, to.lanes if to else none, to.places if to else none,
            to.positions if to else none, to.generated if to else none, to.guests if to else none,
            to.ancestors if to else none, to.scores if to else none, to.candidates if to else none,
            self._state.length, self._state.generated, self._lanes, self._last_place, self._guests, self._most,
            WIDTH=self.width, STEP=self._step, BEFORE=self._before, SIZE=self.size, FIRST=first,
            DEEPER=level is not None, BLOCK=triton.next_power_of_2(self.width if first else self.width**2),
            LINE=triton.next_power_of_2(self._step), num_warps=1,
        )  # fmt: skip

    def _launch_tree(self, nodes: int, out: Grown) -> None:
        _tree_kernel[(self.tokens.shape[0],)](
            self.tokens, self.parents, self.scores, out.tokens, out.parents, nodes, SIZE=self.size,
            BLOCK=triton.next_power_of_2(self.size), PART=16, num_warps=4,
        )  # fmt: skip

    def _twin(self, tokens: Tensor, scores: Tensor, above: Level | None, level: Level | None) -> None:
        width, requests = self.width, self._lanes.shape[0]
        tokens, scores = tokens.reshape(requests, -1), scores.reshape(requests, -1)  # [B, C]
        parents = torch.full_like(tokens, -1)
        if above is not None:
            scores = scores + above.scores.view(requests, width).repeat_interleave(width, dim=1)
            parents = above.candidates.view(requests, width).repeat_interleave(width, dim=1)
        here = slice(self._before, self._before + tokens.shape[1])
        self.tokens[:, here], self.parents[:, here], self.scores[:, here] = tokens, parents, scores
        if level is None:
            return
        chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]  # [B, width]
        request = torch.arange(requests, device=tokens.device)[:, None]  # [B, 1]
        lanes = self._lanes[:, None].expand_as(chosen)
        length = self._state.length[lanes]
        guest = request.clamp_max(self._most - 1) * self._guests + (self._step - 1) * width
        guest = guest + torch.arange(width, device=tokens.device)
        level.tokens.copy_(tokens.gather(1, chosen).flatten())
        rows = request.expand_as(chosen) if above is None else request * width + chosen // width
        level.rows.copy_(rows.flatten())
        if above is not None:
            level.ancestors[:, :-1] = above.ancestors[level.rows]
        level.ancestors[:, -1] = guest.flatten()
        level.lanes.copy_(lanes.flatten())
        level.places.copy_((length + self._step - 1).clamp(0, self._last_place).flatten())
        level.positions.copy_((length + self._step + 1).flatten())
        level.generated.copy_((self._state.generated[lanes] + self._step).flatten())
        level.guests.copy_(guest.flatten())
        level.scores.copy_(scores.gather(1, chosen).flatten())
        level.candidates.copy_((chosen + self._before).flatten())

    def _twin_tree(self, nodes: int, out: Grown) -> None:
        order = self.scores.sort(dim=1, descending=True, stable=True).indices  # [B, C]
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(self.size, device=order.device).expand_as(order))
        above = self.parents.gather(1, order[:, :nodes])
        out.tokens.copy_(self.tokens.gather(1, order[:, :nodes]))
        out.parents.copy_(torch.where(above < 0, -1, rank.gather(1, above.clamp_min(0))))


@jit(sizes=["last_place", "guests", "most"], pointers=["lanes"])
def _grow_kernel(
    offered: tl.tensor,  # [B * rows, WIDTH]
    offered_scores: tl.tensor,
    tokens: tl.tensor,  # [B, SIZE]
    parents: tl.tensor,
    scores: tl.tensor,
    above_scores: tl.tensor,  # [B * WIDTH]
    above_candidates: tl.tensor,
    above_ancestors: tl.tensor,  # [B * WIDTH, STEP - 1]
    out_tokens: tl.tensor,  # [B * WIDTH]
    out_rows: tl.tensor,
    out_lanes: tl.tensor,
    out_places: tl.tensor,
    out_positions: tl.tensor,
    out_generated: tl.tensor,
    out_guests: tl.tensor,
    out_ancestors: tl.tensor,  # [B * WIDTH, STEP]
    out_scores: tl.tensor,
    out_candidates: tl.tensor,
    length_of: tl.tensor,
    generated_of: tl.tensor,
    lanes: tl.tensor,
    last_place: tl.tensor,
    guests: tl.tensor,
    most: tl.tensor,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    BEFORE: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    DEEPER: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= what a request is offered
    LINE: tl.constexpr,  # power of two >= STEP
) -> None:
    request = tl.program_id(0).to(tl.int64)
    COUNT: tl.constexpr = WIDTH if FIRST else WIDTH * WIDTH
    at = tl.arange(0, BLOCK)
    real = at < COUNT
    token = tl.load(offered + request * COUNT + at, mask=real, other=0)
    score = tl.load(offered_scores + request * COUNT + at, mask=real, other=0.0)
    parent = tl.full([BLOCK], -1, tl.int64)
    if not FIRST:
        score += tl.load(above_scores + request * WIDTH + at // WIDTH, mask=real, other=0.0)
        parent = tl.load(above_candidates + request * WIDTH + at // WIDTH, mask=real, other=-1)
    to = request * SIZE + BEFORE + at
    tl.store(tokens + to, token, mask=real)
    tl.store(parents + to, parent, mask=real)
    tl.store(scores + to, score, mask=real)
    if DEEPER:
        lane = tl.load(lanes + request)
        length = tl.load(length_of + lane)
        emitted = tl.load(generated_of + lane)
        base = tl.minimum(request, most - 1) * guests + (STEP - 1) * WIDTH
        line = tl.arange(0, LINE)
        left = real
        for i in range(WIDTH):
            best = tl.max(tl.where(left, score, -float("inf")), 0)
            chosen = tl.min(tl.where(left & (score == best), at, BLOCK), 0)  # of equals the first
            left = left & (at != chosen)
            row = request * WIDTH + i
            by = request * 0 + chosen // WIDTH
            tl.store(out_tokens + row, tl.sum(tl.where(at == chosen, token, 0), 0))
            tl.store(out_rows + row, request if FIRST else request * WIDTH + by)
            tl.store(out_lanes + row, lane)
            tl.store(out_places + row, tl.minimum(tl.maximum(length + STEP - 1, 0), last_place))
            tl.store(out_positions + row, length + STEP + 1)
            tl.store(out_generated + row, emitted + STEP)
            tl.store(out_guests + row, base + i)
            tl.store(out_scores + row, best)
            tl.store(out_candidates + row, (chosen + BEFORE).to(tl.int64))
            way = tl.full([LINE], 0, tl.int32) + (base + i).to(tl.int32)
            if not FIRST:
                known = above_ancestors + (request * WIDTH + by) * (STEP - 1) + line
                way = tl.where(line < STEP - 1, tl.load(known, mask=line < STEP - 1, other=0), way)
            tl.store(out_ancestors + row * STEP + line, way, mask=line < STEP)


@jit(sizes=["nodes"])
def _tree_kernel(
    tokens: tl.tensor,  # [B, SIZE]
    parents: tl.tensor,
    scores: tl.tensor,
    out_tokens: tl.tensor,  # [B, nodes]
    out_parents: tl.tensor,
    nodes: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= SIZE
    PART: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < SIZE
    score = tl.load(scores + request * SIZE + at, mask=real, other=-float("inf"))
    # a candidate's place is how many are surer, or as sure and earlier
    rank = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, SIZE, PART):
        other = begin + tl.arange(0, PART)
        theirs = tl.load(scores + request * SIZE + other, mask=other < SIZE, other=-float("inf"))
        ahead = (theirs[None, :] > score[:, None]) | (
            (theirs[None, :] == score[:, None]) & (other[None, :] < at[:, None])
        )
        rank += tl.sum((ahead & (other < SIZE)[None, :]).to(tl.int32), 1)
    token = tl.load(tokens + request * SIZE + at, mask=real, other=0)
    parent = tl.load(parents + request * SIZE + at, mask=real, other=-1).to(tl.int32)
    above = tl.gather(rank, tl.maximum(parent, 0), 0)
    kept = real & (rank < nodes)
    tl.store(out_tokens + request * nodes + rank, token, mask=kept)
    tl.store(out_parents + request * nodes + rank, tl.where(parent < 0, -1, above).to(tl.int64), mask=kept)
