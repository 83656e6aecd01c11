"""The state of every running request on the device: the host writes it when the request joins, steps advance it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.state import Answer
from slipstream.kernels.gpu.rows import RECENT, LaneState, ring
from slipstream.models.batch import sent


class Lanes:
    """Owns the lane state. A lane is a request's slot; the last one is for padding."""

    def __init__(self, slots: int, max_pages: int, trash_page: int, device: torch.device) -> None:
        def column(value: int) -> Tensor:
            return torch.full((slots + 1,), value, dtype=torch.int64, device=device)

        self.state = LaneState(
            last=column(0),
            previous=column(0),
            length=column(1),
            generated=column(0),
            pages=torch.full((slots + 1, max_pages), trash_page, dtype=torch.int32, device=device),
            recent=torch.zeros((slots + 1, RECENT), dtype=torch.int64, device=device),
        )
        self._flat_pages = self.state.pages.view(-1)
        self._max_pages = max_pages
        self._device = device
        self._trash_page = trash_page
        self._sent: dict[int, tuple[int, ...]] = {}  # by lane: the page table on the device

    def place(self, answers: Sequence[Answer]) -> None:
        """Write the state of those answers whose lanes are not up to date. The host knows all their tokens."""
        new = [answer for answer in answers if not answer.on_device]
        if new:
            rows = [
                (a.slot, a.tokens[-1], a.tokens[-2] if len(a.tokens) > 1 else 0, a.cached, a.generated, *ring(a.tokens))
                for a in new
            ]
            sent_rows = self._send(rows)
            lane, last, previous, length, generated = sent_rows[:, :5].unbind(1)
            self._write(new, lane, last, previous, length, generated, sent_rows[:, 5:])

    def begin(self, answers: Sequence[Answer], chosen: Tensor) -> None:
        """Write the state of answers whose prompts are complete. chosen: their first tokens [A], not on the host."""
        rows = [(a.slot, a.tokens[-1], len(a.tokens), a.generated + 1, *ring(a.tokens)) for a in answers]
        sent_rows = self._send(rows)
        lane, previous, length, generated = sent_rows[:, :4].unbind(1)
        last = chosen.clamp_min(0)
        recent = sent_rows[:, 4:].scatter(1, (length % RECENT)[:, None], last[:, None])
        self._write(answers, lane, last, previous, length, generated, recent)

    def occupy(self, pages: Sequence[Sequence[int]], length: int) -> None:
        """Put requests without an owner, with these pages, in the first lanes, until `clear`."""
        for lane, own in enumerate(pages):
            self.state.pages[lane, : len(own)] = torch.tensor(own, dtype=torch.int32, device=self._device)
        self.state.length[: len(pages)] = length

    def clear(self, lanes: int) -> None:
        """Reset the first lanes to those of no request."""
        state = self.state
        state.pages[:lanes] = self._trash_page
        state.length[:lanes] = 1
        for column in (state.last, state.previous, state.generated, state.recent):
            column[:lanes] = 0

    def send_pages(self, answers: Sequence[Answer]) -> None:
        """Bring the device's page tables up to date.

        Behind a request's own pages there is only the trash page: a drafter that guesses further for other requests
        writes there, and not to pages that this lane had before.
        """
        places: list[int] = []
        values: list[int] = []
        for answer in answers:
            assert answer.table is not None
            pages, known = answer.table.pages, self._sent.get(answer.slot, ())
            if pages == known:
                continue
            # nearly always the request only got more pages
            same = len(known) if pages[: len(known)] == known else 0
            new = [*pages[same:], *([self._trash_page] * (len(known) - len(pages)))]
            begin = answer.slot * self._max_pages + same
            places += range(begin, begin + len(new))
            values += new
            self._sent[answer.slot] = pages
        if places:
            where, what = self._send((places, values)).unbind(0)
            self._flat_pages.index_copy_(0, where, what.to(torch.int32))

    def _send(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return sent(np.array(rows, dtype=np.int64), self._device)

    def _write(self, answers: Sequence[Answer], lane: Tensor, *values: Tensor) -> None:
        """values: by column of the state, in the order below, a row for each answer."""
        state = self.state
        columns = (state.last, state.previous, state.length, state.generated, state.recent)
        for column, new in zip(columns, values, strict=True):
            column.index_copy_(0, lane, new)
        for answer in answers:
            answer.on_device = True
