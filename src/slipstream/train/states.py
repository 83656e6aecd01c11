"""The target's states of a run's data: made when a sequence is first seen, kept for when it comes again.

A run sees its data ten times over, and the target, which is frozen, would say the same each time. On a GPU there is
often room for what it said: 13 million tokens of one layer 576 wide are 15 GB. Where there is not, or nothing comes
twice, all is made anew for every pass. So it is where several processes train: each sees other sequences in every
epoch, and nearly all of its rows would hold a new one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.paths import Progress
from slipstream.models.taps import Taps
from slipstream.train.batch import Batch, Rows
from slipstream.train.config import TrainConfig
from slipstream.train.ranks import Ranks
from slipstream.train.teacher import Teacher

_PART = 0.5
"""Of the memory that is free when training begins, at most: the drafter's own passes need the rest."""
_NOBODY = -1
"""The last place of all, which is padding's."""


class States:
    """What a recipe reads of the target at rows of the data. kept: of so many tokens, by their places; 0: of none."""

    def __init__(self, teacher: Teacher, taps: Taps, kept: int = 0) -> None:
        self._teacher, self._taps, self.device = teacher, taps, teacher.device
        self._width = taps.width(teacher.hidden)
        self._plane: Tensor | None = None
        if kept:
            shape = (kept + 1, self._width + (0 if taps.normed else teacher.hidden))
            self._plane = torch.zeros(shape, dtype=teacher.dtype, device=teacher.device)
            self._known = torch.zeros(kept + 1, dtype=torch.bool)  # on the host: nobody waits for the device
            self._known[_NOBODY] = True

    @staticmethod
    def bytes(teacher: Teacher, taps: Taps, tokens: int) -> int:
        """What it takes to keep the states of so many tokens."""
        numbers = taps.width(teacher.hidden) + (0 if taps.normed else teacher.hidden)
        return (tokens + 1) * numbers * teacher.dtype.itemsize

    def let_go(self) -> bool:
        """Keep nothing from now on, for somebody needs the memory. False: nothing was kept."""
        kept, self._plane = self._plane is not None, None
        return kept

    def look(self, rows: Rows) -> Batch:
        """The target's states at these rows, which lie on the host and say where each token is from."""
        moved, plane = rows.to(self.device), self._plane
        if plane is None or rows.places is None:
            return self._teacher.look(moved, self._taps)
        assert moved.places is not None
        if bool(self._known[rows.places].all()):
            found = plane[moved.places]  # [B, T, F + H]
            taps, normed = found[..., : self._width], found[..., -self._teacher.hidden :]
            return Batch(moved, taps.contiguous(), normed.contiguous())  # as they come from the target
        made = self._teacher.look(moved, self._taps)
        parts = (made.taps,) if self._taps.normed else (made.taps, made.normed)
        plane[moved.places] = torch.cat(parts, dim=-1)
        plane[_NOBODY] = 0  # padding's states are nobody's, and many
        self._known[rows.places] = True
        return made


def states_for(config: TrainConfig, teacher: Teacher, taps: Taps, tokens: int, ranks: Ranks, say: Progress) -> States:
    """The states of a run on so many tokens: kept where that is worth it and there is room."""
    size = States.bytes(teacher, taps, tokens)
    if ranks.world > 1 or not worth_keeping(config, tokens, size, teacher.device):
        return States(teacher, taps)
    say(f"the target's states are kept once they are made: {size / 1e9:.1f} GB for {tokens:,} tokens")
    return States(teacher, taps, tokens)


def worth_keeping(config: TrainConfig, tokens: int, size: int, device: torch.device) -> bool:
    """Where tokens come again, on a GPU that has room for so many bytes.

    On a CPU nothing is kept: runs end with the same bits there, however often they were stopped.
    """
    seen = config.steps * config.accumulate * config.rows * config.row_tokens
    return device.type == "cuda" and seen > tokens and size <= _PART * _free(device)


def _free(device: torch.device) -> int:
    """What torch can still have of a GPU's memory, its own spare parts included."""
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + spare
