"""Rows for the sampling kernels, and the check that their tokens are those of the torch twin.

The twin runs on the CPU, whose logarithms and exponentials may round differently. So a token may differ where the twin
itself could hardly tell: two scores within 1e-4, or a token at the very edge of top-p. Nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from interpreted import DEVICE as KERNEL_DEVICE
from slipstream.core.params import SamplingParams
from slipstream.sampling import Features, SampleRows, SamplingTable, choose, gumbel, processed
from slipstream.sampling.filters import top_ids
from slipstream.sampling.fused import CHUNK, choose_fused

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Rows of logits, a slot each. Where there are more rows than wishes, these are repeated, with other noise."""

    logits: Tensor  # [R, V] fp32 on the CPU
    params: list[SamplingParams]
    seed: int = 1
    vocab_size: int | None = None  # the table's, where it is wider than the logits

    @property
    def width(self) -> int:
        return self.vocab_size or self.logits.shape[1]

    def table(self, device: torch.device) -> SamplingTable:
        table = SamplingTable(len(self.params), self.width, device)
        for slot, wanted in enumerate(self.params):
            table.add(slot, wanted, seed=self.seed + slot)
        return table

    def rows(self, device: torch.device) -> SampleRows:
        at = torch.arange(self.logits.shape[0], device=device)
        return SampleRows(at % len(self.params), at + 10, at)

    def row(self, row: int) -> SampleRows:
        rows, here = self.rows(KERNEL_DEVICE), slice(row, row + 1)
        return SampleRows(rows.slots[here], rows.positions[here], rows.generated[here])

    def padded(self) -> Tensor:
        missing = self.width - self.logits.shape[1]
        return torch.nn.functional.pad(self.logits, (0, missing), value=-math.inf)

    def twin(self) -> list[int]:
        table = self.table(CPU)
        features = table.features(range(len(self.params)))
        return choose(self.padded(), self.rows(CPU), table, features).tolist()

    def fused(self, *, features: Features | None = None, chunk: int = CHUNK) -> list[int]:
        table, rows = self.table(KERNEL_DEVICE), self.rows(KERNEL_DEVICE)
        features = features or table.features(range(len(self.params)))
        return choose_fused(self.logits.to(KERNEL_DEVICE), rows, table, features, chunk=chunk).tolist()

    def alone(self, row: int, *, chunk: int = CHUNK) -> int:
        """The row's token when it is by itself."""
        table, logits = self.table(KERNEL_DEVICE), self.logits.to(KERNEL_DEVICE)
        features = table.features([row % len(self.params)])
        return int(choose_fused(logits[row : row + 1], self.row(row), table, features, chunk=chunk))

    def check(self, *, chunk: int = CHUNK) -> list[int]:
        """The kernels' tokens, after making sure that they are the twin's."""
        tokens, expected = self.fused(chunk=chunk), self.twin()
        for row, (token, twins) in enumerate(zip(tokens, expected, strict=True)):
            assert token == twins or self._hardly_differs(row, token, twins), f"row {row}: {token}, twin {twins}"
        return tokens

    def _hardly_differs(self, row: int, token: int, twins: int) -> bool:
        if token < 0 or twins < 0 or token >= self.logits.shape[1]:
            return False
        table, rows = self.table(CPU), self.rows(CPU)
        rows = SampleRows(rows.slots[row : row + 1], rows.positions[row : row + 1], rows.generated[row : row + 1])
        params, features = self.params[row % len(self.params)], table.features(rows.slots.tolist())
        log_p = processed(self.padded()[row : row + 1], rows, table, features)[0]  # [V]
        noisy = log_p + gumbel(table.noise_keys(rows), torch.arange(self.width, dtype=torch.int32))[0]
        if noisy[twins] - noisy[token] < 1e-4:
            return True
        dropped = token if log_p[token] == -math.inf else twins  # by one of the two, and kept by the other
        return self._distance_to_top_p(row, params, dropped) < 1e-5

    def _distance_to_top_p(self, row: int, params: SamplingParams, token: int) -> float:
        """How far the probability before `token`, in order, is from top_p; infinite without top-p."""
        if params.top_p >= 1:
            return math.inf
        logits = self.padded()[row]
        ids = top_ids(logits[None], self.width)[0]
        x = logits[ids].to(torch.float64)
        p = ((x - x[0]) / params.temperature).exp()
        if params.top_k:
            p[params.top_k :] = 0
        before = (p.cumsum(0) - p) / p.sum()
        return float((before[ids == token] - params.top_p).abs())
