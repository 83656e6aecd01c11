"""Which rows a head reads of a text: the token at q beside the target's hidden states at q - 1, kept at place q - 1.

The head's cache hangs on the target's pages, and a row lies in the slot of the token before: so the slot of its K and V
is also the slot of the features that it reads, and the first token of a text has no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.gpu.rows import RECENT, LaneState, ring
from slipstream.models.batch import PassBatch, sent


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring rows of one request: the tokens from `first` up to `end`."""

    pages: Sequence[int]
    first: int  # at least 1
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.first


def head_batch(stretches: Sequence[Stretch], ids: Tensor, page_size: int) -> PassBatch:
    """A pass of a head over these rows, with the tokens `ids` [N]. Of one row logits could be made, if one wanted."""
    starts = np.cumsum([0, *(part.rows for part in stretches)])
    places = np.concatenate([np.arange(part.first, part.end) - 1 for part in stretches])  # [N]
    slots = np.concatenate(
        [
            np.asarray(part.pages, dtype=np.int64)[at // page_size] * page_size + at % page_size
            for part in stretches
            for at in (np.arange(part.first, part.end) - 1,)
        ]
    )
    both = sent(np.stack((places, slots)).astype(np.int64), ids.device)
    return PassBatch(
        input_ids=ids,
        positions=both[0],
        slots=both[1],
        row_starts=tuple(starts.tolist()),
        prefix_lengths=tuple(part.first - 1 for part in stretches),
        pages=tuple(tuple(part.pages) for part in stretches),
        is_tree=(False,) * len(stretches),
        masks=None,
        logit_rows=both.new_zeros(1),
    )


def read_along(batch: PassBatch, page_size: int, longest: int) -> PassBatch | None:
    """The rows of a head beside these of the target; None where there are none.

    longest: requests that go beyond are left out.
    """
    stretches: list[Stretch] = []
    rows: list[int] = []  # of the target's batch
    for i, prefix in enumerate(batch.prefix_lengths):
        start, end = batch.row_starts[i], batch.row_starts[i + 1]
        skipped = 1 if prefix == 0 else 0  # the first token of a text
        if end - start > skipped and prefix + end - start <= longest:
            stretches.append(Stretch(batch.pages[i], prefix + skipped, prefix + end - start))
            rows += range(start + skipped, end)
    if not stretches:
        return None
    index = sent(np.array(rows, dtype=np.int64), batch.input_ids.device)
    return head_batch(stretches, batch.input_ids[index], page_size)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one request stands, as the host knows it."""

    lane: int
    tokens: Sequence[int]  # the last of them is not in the cache yet
    generated: int
    pages: Sequence[int]


def lane_state(standing: Sequence[Standing], lanes: int, reach: int, nobody: int, device: torch.device) -> LaneState:
    """What the device would know of these requests, for drafters that are asked by the host.

    lanes: how many there are. reach: slots that a request may touch, in pages; behind its own stands the page `nobody`.
    """
    columns = np.zeros((4, lanes + 1), dtype=np.int64)
    recent = np.zeros((lanes + 1, RECENT), dtype=np.int64)
    pages = np.full((lanes + 1, reach), nobody, dtype=np.int32)
    for one in standing:
        length = len(one.tokens) - 1
        columns[:, one.lane] = one.tokens[-1], one.tokens[-2] if length else 0, length, one.generated
        recent[one.lane] = ring(one.tokens)
        pages[one.lane, : len(one.pages)] = one.pages
    columns[2, lanes] = 1  # nobody's lane has a token, as all have
    last, previous, length_of, generated = sent(columns, device).unbind(0)
    return LaneState(last, previous, length_of, generated, sent(pages, device), sent(recent, device))


def slots_before_last(state: LaneState, lanes: Tensor, page_size: int) -> Tensor:  # [B]
    """Where the target's hidden state lies that chose the last token of each of these lanes [B]."""
    at = (state.length[lanes] - 1).clamp_min(0)
    return state.pages[lanes, at // page_size].long() * page_size + at % page_size
