"""Where every running request stands, on the device: written by the host when it joins, advanced by the rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.state import Answer
from slipstream.kernels.gpu.rows import RECENT, LaneState, ring
from slipstream.models.batch import sent


class Lanes:
    """Owns the lane state. A lane is a request's slot; the last one takes what belongs to nobody."""

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
        self._sent: dict[int, tuple[int, ...]] = {}  # by lane: the pages that the device knows

    def place(self, answers: Sequence[Answer]) -> None:
        """The host knows where these stand: say so, where the device does not know yet."""
        new = [answer for answer in answers if not answer.on_device]
        if new:
            rows = [
                (a.slot, a.tokens[-1], a.tokens[-2] if len(a.tokens) > 1 else 0, a.cached, a.generated, *ring(a.tokens))
                for a in new
            ]
            sent_rows = self._send(rows)
            lane, last, previous, length, generated = sent_rows[:, :5].unbind(1)
            self._write(lane, last, previous, length, generated, sent_rows[:, 5:])
            for answer in new:
                answer.on_device = True

    def pose(self, pages: Sequence[Sequence[int]], length: int) -> None:
        """Requests that are nobody's stand in the first lanes, until they are cleared."""
        for lane, own in enumerate(pages):
            self.state.pages[lane, : len(own)] = torch.tensor(own, dtype=torch.int32, device=self._device)
        self.rewind(len(pages), length)

    def rewind(self, lanes: int, length: int) -> None:
        """Those who pose in the first lanes have so many tokens again."""
        self.state.length[:lanes] = length

    def clear(self, lanes: int) -> None:
        """The first lanes are as they were before anybody was in them."""
        state = self.state
        state.pages[:lanes] = self._trash_page
        state.length[:lanes] = 1
        for column in (state.last, state.previous, state.generated, state.recent):
            column[:lanes] = 0

    def begin(self, answers: Sequence[Answer], chosen: Tensor) -> None:
        """These have computed their last pending tokens, and chose `chosen` [A], which only the device knows."""
        rows = [(a.slot, a.tokens[-1], len(a.tokens), a.generated + 1, *ring(a.tokens)) for a in answers]
        sent_rows = self._send(rows)
        lane, previous, length, generated = sent_rows[:, :4].unbind(1)
        last = chosen.clamp_min(0)
        recent = sent_rows[:, 4:].scatter(1, (length % RECENT)[:, None], last[:, None])
        self._write(lane, last, previous, length, generated, recent)
        for answer in answers:
            answer.on_device = True

    def send_pages(self, answers: Sequence[Answer]) -> None:
        """Bring the device's page tables up to date.

        Behind a request's own pages stands the trash page always: a drafter that guesses further for others writes
        there, and not to pages that were this lane's once.
        """
        places: list[int] = []
        values: list[int] = []
        for answer in answers:
            assert answer.table is not None
            pages, known = answer.table.pages, self._sent.get(answer.slot, ())
            if pages == known:
                continue
            # nearly always a request got more pages, behind those that the device knows
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

    def _write(
        self, lane: Tensor, last: Tensor, previous: Tensor, length: Tensor, generated: Tensor, recent: Tensor
    ) -> None:
        state = self.state
        columns = (state.last, state.previous, state.length, state.generated, state.recent)
        for column, values in zip(columns, (last, previous, length, generated, recent), strict=True):
            column.index_copy_(0, lane, values)
