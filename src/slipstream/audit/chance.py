"""Counts against probabilities: could chance alone have drawn these? (Pearson's chi-square test.)"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST = 5.0  # expected draws of a cell of the test; rarer tokens are counted together


@dataclass(slots=True)
class Fit:
    """Gathers places, each with its own distribution, into one test.

    slack: the probabilities themselves are known only up to a factor e^slack; what that explains counts as nothing.
    """

    slack: float = 0.0
    statistic: float = 0.0
    freedom: int = 0
    draws: int = 0
    impossible: int = 0  # tokens drawn that have no probability

    def add(self, observed: Tensor, p: Tensor) -> None:
        """`observed` [V]: how often each token was drawn at a place where their probabilities are p [V]."""
        observed, p = observed.double(), p.double()
        draws = float(observed.sum())
        self.draws += int(draws)
        self.impossible += int(observed[p == 0].sum())
        wanted = p / p.sum() * draws
        common = wanted >= _LEAST
        observed = torch.cat((observed[common], observed[~common].sum()[None]))
        wanted = torch.cat((wanted[common], wanted[~common].sum()[None]))
        if wanted[-1] < _LEAST and len(wanted) > 1:  # too few to be a cell: they join the rarest one
            rarest = int(wanted[:-1].argmin())
            observed[rarest] += observed[-1]
            wanted[rarest] += wanted[-1]
            observed, wanted = observed[:-1], wanted[:-1]
        off = ((observed - wanted).abs() - wanted * math.expm1(self.slack)).clamp(min=0)
        self.statistic += float((off**2 / wanted).sum())
        self.freedom += len(wanted) - 1

    @property
    def p_value(self) -> float:
        """How often chance alone deviates at least so much. 1 where nothing could be told."""
        if self.impossible:
            return 0.0
        if not self.freedom:
            return 1.0
        half = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))
