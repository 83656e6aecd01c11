"""Trees that grow by confidence (EAGLE-2), on the device: one launch a level, and one for the tree.

On each level every row of a beam offers its best tokens, and the most probable paths continue. An offered token that
did not continue may still be more probable than deeper ones, so in the end all candidates are ranked together. A path
is never more probable than its beginning, so the best candidates form a tree. As torch operations this is some thirty
steps between two passes of a head, each as long as reading ten megabytes; here one program a request does all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton
from slipstream.kernels.gpu.rows import LaneState
from slipstream.kernels.gpu.sortable import NOTHING, sortable, unsorted

_PART = 512
"""Candidates that one program of the ranking compares at a time."""
_RANKED = 16
"""Candidates that one program of the ranking places; a tree's candidates are divided among programs."""


@dataclass(frozen=True, slots=True)
class Level:
    """The rows of the next level, `width` of each request, and everything that their pass needs."""

    tokens: Tensor  # [B * width] int64
    rows: Tensor  # [B * width] int64: the row of the previous pass that offered each
    lanes: Tensor  # [B * width] int64
    places: Tensor  # [B * width] int64: places among the drafter's entries
    positions: Tensor  # [B * width] int64: of the token that each guesses
    generated: Tensor  # [B * width] int64: tokens emitted before that one
    slots: Tensor  # [B * width] int64: where its entries lie in the cache
    ancestors: Tensor  # [B * width, step] int32: guests from the tree's first level down to each, itself last
    scores: Tensor  # [B * width] fp32: of the whole path
    candidates: Tensor  # [B * width] int64: its place among the candidates

    @staticmethod
    def empty(rows: int, step: int, device: torch.device) -> Level:
        numbers = torch.empty((8, rows), dtype=torch.int64, device=device).unbind(0)
        tokens, offered_by, lanes, places, positions, generated, slots, candidates = numbers
        ancestors = torch.empty((rows, step), dtype=torch.int32, device=device)
        scores = torch.empty(rows, dtype=torch.float32, device=device)
        return Level(tokens, offered_by, lanes, places, positions, generated, slots, ancestors, scores, candidates)


class Grown(NamedTuple):
    """Trees of equal size, parents first."""

    tokens: Tensor  # [B, nodes] int64
    parents: Tensor  # [B, nodes] int64, -1 is the root


def candidates(width: int, levels: int) -> int:
    """The number of candidates of a tree: the root's, and those of `width` rows on each level below."""
    return width + (levels - 1) * width**2 if levels else 0


class Growth:
    """The trees of B requests while they grow: all candidates, level by level."""

    def __init__(
        self,
        state: LaneState,
        lanes: Tensor,  # [B] int64
        width: int,
        depth: int,
        *,
        last_place: int,
        guests: Tensor,  # [G] int64
        each: int,
    ) -> None:
        """guests: slots of the cache for the entries of trees, `each` of them for one request. Further requests share
        the slots of the last one. If rows keep nothing in the cache, `each` is 0 and all requests name the same slots.

        last_place: the last place at which a row may stand; longer texts are not drafted for.
        """
        self.width, self.depth = width, depth
        self.size = candidates(width, depth)
        shape, device = (lanes.shape[0], self.size), lanes.device
        self.tokens = torch.empty(shape, dtype=torch.int64, device=device)
        self.parents = torch.empty(shape, dtype=torch.int64, device=device)  # among the candidates; -1 is the root
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self._state, self._lanes, self._last_place = state, lanes, last_place
        self._guests, self._each, self._most = guests, each, guests.shape[0] // max(each, 1)
        self._step = 0

    def grow(self, tokens: Tensor, scores: Tensor, above: Level | None) -> Level | None:
        """The next level, from what the roots [B, width] or the rows of the level above [B * width, width] offer.

        Tokens come best first and differ within a row; scores are at most 0. None: the tree ends here.
        """
        self._step += 1
        last = self._step == self.depth
        level = None if last else Level.empty(self._lanes.shape[0] * self.width, self._step, self._lanes.device)
        (self._launch if on_gpu(tokens) else self._twin)(tokens, scores, above, level)
        return level

    def tree(self, nodes: int) -> Grown:
        """The best candidates, best first; the earlier of equals, so that parents come first."""
        assert nodes <= self.size, f"{nodes} nodes of {self.size} candidates"
        shape, device = (2, self.tokens.shape[0], nodes), self.tokens.device
        out = Grown(*torch.empty(shape, dtype=torch.int64, device=device).unbind(0))
        (self._launch_tree if on_gpu(self.tokens) else self._twin_tree)(nodes, out)
        return out

    @property
    def _before(self) -> int:
        """The number of candidates of earlier levels."""
        return candidates(self.width, self._step - 1)

    def _launch(self, tokens: Tensor, scores: Tensor, above: Level | None, level: Level | None) -> None:
        first, overlap = above is None, on_gpu(tokens)
        offered = self.width if first else self.width**2
        up, to = above or level, level or above
        none = scores  # unused
        _grow_kernel[(self._lanes.shape[0],)](
            tokens.contiguous(), scores.contiguous(), self.tokens, self.parents, self.scores,
            up.scores if up else none, up.candidates if up else none, up.ancestors if up else none,
            to.tokens if to else none, to.rows if to else none, to.lanes if to else none, to.places if to else none,
            to.positions if to else none, to.generated if to else none, to.slots if to else none,
            to.ancestors if to else none, to.scores if to else none, to.candidates if to else none,
            self._state.length, self._state.generated, self._lanes, self._guests, self._last_place, self._each,
            self._most, self.size, self._step, self._before, WIDTH=self.width, FIRST=first, DEEPER=level is not None,
            BLOCK=triton.next_power_of_2(offered), BEAM=triton.next_power_of_2(self.width),
            LINE=triton.next_power_of_2(self._step) if level else 1, OVERLAP=overlap,
            num_warps=1 if offered <= 1024 else 4, launch_pdl=overlap,
        )  # fmt: skip

    def _launch_tree(self, nodes: int, out: Grown) -> None:
        overlap = on_gpu(self.tokens)
        _tree_kernel[(self.tokens.shape[0], triton.cdiv(self.size, _RANKED))](
            self.tokens, self.parents, self.scores, out.tokens, out.parents, nodes, self.size, RANKED=_RANKED,
            PART=_PART, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
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
        guest = request.clamp_max(self._most - 1) * self._each + (self._step - 1) * width
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
        level.slots.copy_(self._guests[guest.flatten()])
        level.scores.copy_(scores.gather(1, chosen).flatten())
        level.candidates.copy_((chosen + self._before).flatten())

    def _twin_tree(self, nodes: int, out: Grown) -> None:
        order = self.scores.sort(dim=1, descending=True, stable=True).indices  # [B, C]
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(self.size, device=order.device).expand_as(order))
        above = self.parents.gather(1, order[:, :nodes])
        out.tokens.copy_(self.tokens.gather(1, order[:, :nodes]))
        out.parents.copy_(torch.where(above < 0, -1, rank.gather(1, above.clamp_min(0))))


@jit(sizes=["last_place", "each", "most", "size", "step", "before"], pointers=["lanes", "guests"])
def _grow_kernel(
    offered: tl.tensor,  # [B * rows, WIDTH]
    offered_scores: tl.tensor,
    tokens: tl.tensor,  # [B, size]
    parents: tl.tensor,
    scores: tl.tensor,
    above_scores: tl.tensor,  # [B * WIDTH]
    above_candidates: tl.tensor,
    above_ancestors: tl.tensor,  # [B * WIDTH, step - 1]
    out_tokens: tl.tensor,  # [B * WIDTH]
    out_rows: tl.tensor,
    out_lanes: tl.tensor,
    out_places: tl.tensor,
    out_positions: tl.tensor,
    out_generated: tl.tensor,
    out_slots: tl.tensor,
    out_ancestors: tl.tensor,  # [B * WIDTH, step]
    out_scores: tl.tensor,
    out_candidates: tl.tensor,
    length_of: tl.tensor,
    generated_of: tl.tensor,
    lanes: tl.tensor,
    guests: tl.tensor,  # [G]
    last_place: tl.tensor,
    each: tl.tensor,
    most: tl.tensor,
    size: tl.tensor,  # not specialized on, nor the next two: levels of all trees share their code
    step: tl.tensor,
    before: tl.tensor,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    DEEPER: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= the number of offered tokens
    BEAM: tl.constexpr,  # power of two >= WIDTH
    LINE: tl.constexpr,  # power of two >= step
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    COUNT: tl.constexpr = WIDTH if FIRST else WIDTH * WIDTH
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.arange(0, BLOCK)
    real = at < COUNT
    token = tl.load(offered + request * COUNT + at, mask=real, other=0)
    score = tl.load(offered_scores + request * COUNT + at, mask=real, other=0.0)
    parent = tl.full([BLOCK], -1, tl.int64)
    if not FIRST:
        score += tl.load(above_scores + request * WIDTH + at // WIDTH, mask=real, other=0.0)
        parent = tl.load(above_candidates + request * WIDTH + at // WIDTH, mask=real, other=-1)
    to = request * size + before + at
    tl.store(tokens + to, token, mask=real)
    tl.store(parents + to, parent, mask=real)
    tl.store(scores + to, score, mask=real)
    if DEEPER:
        lane = tl.load(lanes + request)
        length = tl.load(length_of + lane)
        emitted = tl.load(generated_of + lane)
        beam = tl.arange(0, BEAM)
        row = request * WIDTH + beam
        kept = beam < WIDTH
        guest = tl.minimum(request, most - 1) * each + (step - 1) * WIDTH + beam
        slot = tl.load(guests + guest, mask=kept, other=0)
        left = tl.where(real, sortable(score), NOTHING)
        chosen = tl.zeros([BEAM], tl.int32)
        surest = tl.zeros([BEAM], tl.int32)
        for i in range(WIDTH):
            best = tl.max(left, 0)
            first = tl.min(tl.where(left == best, at, BLOCK), 0)  # the first of equals
            left = tl.where(at == first, NOTHING, left)
            chosen = tl.where(beam == i, first, chosen)
            surest = tl.where(beam == i, best, surest)
        by = chosen // WIDTH
        same = tl.zeros([BEAM], tl.int64)  # broadcasts to all rows
        tl.store(out_tokens + row, tl.load(offered + request * COUNT + chosen, mask=kept, other=0), mask=kept)
        tl.store(out_rows + row, same + request if FIRST else request * WIDTH + by, mask=kept)
        tl.store(out_lanes + row, same + lane, mask=kept)
        tl.store(out_places + row, same + tl.minimum(tl.maximum(length + step - 1, 0), last_place), mask=kept)
        tl.store(out_positions + row, same + length + step + 1, mask=kept)
        tl.store(out_generated + row, same + emitted + step, mask=kept)
        tl.store(out_slots + row, slot, mask=kept)
        tl.store(out_scores + row, unsorted(surest), mask=kept)
        tl.store(out_candidates + row, (chosen + before).to(tl.int64), mask=kept)
        line = tl.arange(0, LINE)[None, :]
        way = tl.zeros([BEAM, LINE], tl.int32) + guest.to(tl.int32)[:, None]
        if not FIRST:
            known = above_ancestors + (request * WIDTH + by)[:, None] * (step - 1) + line
            inside = kept[:, None] & (line < step - 1)
            way = tl.where(line < step - 1, tl.load(known, mask=inside, other=0), way)
        tl.store(out_ancestors + row[:, None] * step + line, way, mask=kept[:, None] & (line < step))


@jit(sizes=["nodes", "size"])
def _tree_kernel(
    tokens: tl.tensor,  # [B, size]
    parents: tl.tensor,
    scores: tl.tensor,
    out_tokens: tl.tensor,  # [B, nodes]
    out_parents: tl.tensor,
    nodes: tl.tensor,
    size: tl.tensor,  # not specialized on: trees of all depths share their code
    RANKED: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * RANKED + tl.arange(0, RANKED)
    real = at < size
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    scores += request * size
    token = tl.load(tokens + request * size + at, mask=real, other=0)
    parent = tl.load(parents + request * size + at, mask=real, other=-1).to(tl.int32)
    score = tl.load(scores + at, mask=real, other=0.0)
    above_score = tl.load(scores + parent, mask=parent >= 0, other=0.0)
    # the place of the parent is computed again: another program may have it
    place = tl.zeros([RANKED], tl.int32)
    above = tl.zeros([RANKED], tl.int32)
    for begin in range(0, size, PART):
        other = begin + tl.arange(0, PART)
        theirs = tl.load(scores + other, mask=other < size, other=-float("inf"))
        place += _ahead(theirs, other, score, at)
        above += _ahead(theirs, other, above_score, parent)
    kept = real & (place < nodes)
    tl.store(out_tokens + request * nodes + place, token, mask=kept)
    tl.store(out_parents + request * nodes + place, tl.where(parent < 0, -1, above).to(tl.int64), mask=kept)


@jit
def _ahead(theirs: tl.tensor, other: tl.tensor, score: tl.tensor, at: tl.tensor) -> tl.tensor:
    """The number of better candidates, or equal and earlier ones: the place of each after all parts were seen."""
    ahead = (theirs[None, :] > score[:, None]) | ((theirs[None, :] == score[:, None]) & (other[None, :] < at[:, None]))
    return tl.sum(ahead.to(tl.int32), 1)
