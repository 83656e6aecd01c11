"""Where every running request stands, on the device: written by the host when it joins, advanced by the rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engine.state import Answer
from slipstream.kernels.pack_rows import LaneState


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
        )
        self._device = device
        self._trash_page = trash_page
        self._sent: dict[int, tuple[int, ...]] = {}  # by lane: the pages that the device knows

    def place(self, answers: Sequence[Answer]) -> None:
        """The host knows where these stand: say so, where the device does not know yet."""
        new = [answer for answer in answers if not answer.on_device]
        if new:
            rows = [
                (a.slot, a.tokens[-1], a.tokens[-2] if len(a.tokens) > 1 else 0, a.cached, a.generated) for a in new
            ]
            lane, last, previous, length, generated = self._send(rows).unbind(1)
            self._write(lane, last, previous, length, generated)
            for answer in new:
                answer.on_device = True

    def begin(self, answers: Sequence[Answer], chosen: Tensor) -> None:
        """These have computed their last pending tokens, and chose `chosen` [A], which only the device knows."""
        rows = [(a.slot, a.tokens[-1], len(a.tokens), a.generated + 1) for a in answers]
        lane, previous, length, generated = self._send(rows).unbind(1)
        self._write(lane, chosen.clamp_min(0), previous, length, generated)
        for answer in answers:
            answer.on_device = True

    def send_pages(self, answers: Sequence[Answer]) -> None:
        """Bring the device's page tables up to date.

        Behind a request's own pages stands the trash page always: a drafter that guesses further for others writes
        there, and not to pages that were this lane's once.
        """
        changed = [a for a in answers if a.table is not None and self._sent.get(a.slot) != a.table.pages]
        if not changed:
            return
        tables = [a.table.pages for a in changed if a.table is not None]
        width = max(len(pages) for a, own in zip(changed, tables, strict=True) for pages in (own, self._sent_to(a)))
        nobodys = self._trash_page
        padded = [
            (a.slot, *pages, *([nobodys] * (width - len(pages)))) for a, pages in zip(changed, tables, strict=True)
        ]
        rows = self._send(padded)
        self.state.pages[rows[:, 0], :width] = rows[:, 1:].to(torch.int32)
        for answer, pages in zip(changed, tables, strict=True):
            self._sent[answer.slot] = pages

    def _sent_to(self, answer: Answer) -> tuple[int, ...]:
        return self._sent.get(answer.slot, ())

    def _send(self, rows: Sequence[Sequence[int]]) -> Tensor:
        table = torch.tensor(rows, dtype=torch.int64)
        if self._device.type == "cuda":
            table = table.pin_memory()
        return table.to(self._device, non_blocking=True)

    def _write(self, lane: Tensor, last: Tensor, previous: Tensor, length: Tensor, generated: Tensor) -> None:
        state = self.state
        columns = (state.last, state.previous, state.length, state.generated)
        for column, values in zip(columns, (last, previous, length, generated), strict=True):
            column.index_copy_(0, lane, values)
