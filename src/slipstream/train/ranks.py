"""Training in several processes, started by `torchrun`.

Each has its part of the rows of every step; one message sums the gradients.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed

from slipstream.core.errors import ConfigError

_TIMEOUT = timedelta(hours=2)  # must cover a measurement, which the first rank makes alone


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of `world` processes."""

    rank: int = 0
    world: int = 1

    @staticmethod
    def join(device: str) -> Ranks:
        """Join the other processes, if `torchrun` started several."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return Ranks()
        if not distributed.is_initialized():
            if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
                raise ConfigError(f"WORLD_SIZE={world}: several processes must be started by torchrun")
            backend = "gloo" if device == "cpu" or not torch.cuda.is_available() else "cpu:gloo,cuda:nccl"
            distributed.init_process_group(backend, timeout=_TIMEOUT)
        return Ranks(distributed.get_rank(), distributed.get_world_size())

    @property
    def leads(self) -> bool:
        """True for the rank that writes files and reports."""
        return self.rank == 0

    def device(self, named: str) -> str:
        """The device of this process, which has a GPU of its own."""
        if self.world > 1 and named in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{int(os.environ.get('LOCAL_RANK', self.rank))}"
        return named

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum each of these fp32 tensors over all ranks, in place."""
        if self.world == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            distributed.barrier()

    def leave(self) -> None:
        if self.world > 1 and distributed.is_initialized():
            distributed.destroy_process_group()
