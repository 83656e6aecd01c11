"""Numbers that the host writes, a row at a time, and the device reads by columns.

To set one number of a tensor on a GPU waits until all that is queued there is done. So the columns lie in one block of
memory, of which the host has a twin: it writes there, and sends the block as it is, without waiting for anybody.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_ALIGNED = 256
"""Bytes: where a column may begin. Kernels are compiled for pointers that are as even as those of tensors are."""


class Columns:
    """Columns [S] by name. kinds: of each, what it is where nobody wrote, and its type."""

    def __init__(self, rows: int, kinds: Mapping[str, tuple[float, torch.dtype]], device: torch.device) -> None:
        places: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (_, dtype) in kinds.items():
            places[name] = size, size + rows * dtype.itemsize
            size = -(-places[name][1] // _ALIGNED) * _ALIGNED

        def columns(block: Tensor) -> dict[str, Tensor]:
            return {name: block[begin:end].view(kinds[name][1]) for name, (begin, end) in places.items()}

        self._host = torch.zeros(size, dtype=torch.uint8)
        self._block = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._written = {name: column.numpy() for name, column in columns(self._host).items()}
        for name, (value, _) in kinds.items():
            self._written[name][:] = value
        self.by_name = columns(self._block)
        self._send()

    def write(self, row: int, values: Mapping[str, float]) -> None:
        """Numbers of one row; the others stay as they are."""
        for name, value in values.items():
            self._written[name][row] = value
        self._send()

    def _send(self) -> None:
        """What was queued before still reads what was there."""
        if self._block is not self._host:
            host = self._host.pin_memory() if self._block.is_cuda else self._host
            self._block.copy_(host, non_blocking=True)
