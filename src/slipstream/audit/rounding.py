"""The bound on rounding errors that tells a near-tie from a bug, by the margin between two tokens.

The bound is for one logit, computed in two orders of summation:

    unit        relative error of one rounding: 2^-24 in fp32, 2^-11 in fp16, 2^-8 in bf16
    roundings   about 8 in sequence per layer (norms, products, attention). fp32 sums are accumulated in fp32: each
                product rounds once for every number added. 16-bit numbers are accumulated in fp32
    walk        errors have either sign and add up like a random walk, by the square root of their number
    spread      relative to the standard deviation of the row's logits
    4           for the worst of many rows and tokens

Measured on the default model, our passes against transformers': 1/5 of the bound in fp32, most of it in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.core.params import SamplingParams
from slipstream.sampling import SampleRows, SamplingTable
from slipstream.sampling.adjust import adjusted
from slipstream.sampling.noise import gumbel_of_hashes

if TYPE_CHECKING:
    from slipstream.models.runner import Runner

_WORST_OF_MANY = 4.0
_ROUNDINGS_A_LAYER = 8
_HALVINGS = 48
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class Rounding:
    """The effect of rounding on the logits of one model in one precision."""

    dtype: str
    unit: float
    layers: int
    summed: int  # terms of one sum that is accumulated in the precision of `unit`

    @staticmethod
    def of(target: Runner) -> Rounding:
        dtype = target.dtype
        summed = int(getattr(target.config, "hidden_size", 1)) if dtype == torch.float32 else 1
        return Rounding(str(dtype).removeprefix("torch."), torch.finfo(dtype).eps / 2, len(target.layers), summed)

    @property
    def relative(self) -> float:
        """Largest error of a logit relative to its row's standard deviation."""
        return _WORST_OF_MANY * self.unit * math.sqrt(_ROUNDINGS_A_LAYER * self.layers * self.summed)

    def of_row(self, logits: Tensor) -> float:
        """Largest error of these logits [V] that rounding explains."""
        return self.relative * float(logits[logits.isfinite()].double().std())

    @property
    def why(self) -> str:
        """The bound in words, for the report."""
        sums = f", each a sum of {self.summed} numbers in the same precision" if self.summed > 1 else ""
        return (
            f"A logit computed in two orders of summation may differ by {self.relative:.1e} of its row's standard "
            f"deviation in {self.dtype}: one rounding errs by {self.unit:.1e}; about "
            f"{_ROUNDINGS_A_LAYER * self.layers} follow each other through {self.layers} layers{sums}; errors add up "
            "like a random walk (by the square root of their number), and the worst of many rows is allowed "
            f"{_WORST_OF_MANY:g} times that. Two tokens whose margin is at most twice the bound are a near-tie: either "
            "may come first. A larger margin is a bug."
        )


@dataclass(frozen=True, slots=True)
class _Limits:
    """Tokens that top-k, top-p and min-p may keep, and those that they may drop, within an error of the logits."""

    may_keep: Tensor  # [V] bool
    may_drop: Tensor  # [V] bool


@dataclass(frozen=True, slots=True)
class Row:
    """One sampling decision: the logits after penalties, bias and masks, the noise and the parameters."""

    logits: Tensor  # [V] fp64
    noise: Tensor  # [V] fp64, 0 for greedy requests
    params: SamplingParams

    @staticmethod
    def of(
        logits: Tensor,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        end_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> Row:
        """The choice of the token after `output`, by the model's logits. Must have a seed unless it is greedy.

        end_ids, bad_words: as in `SamplingTable.add`.
        """
        table = SamplingTable(1, logits.shape[0])
        seed = params.seed or 0
        table.add(0, params, seed=seed, prompt=prompt, output=output, end_ids=end_ids, bad_words=bad_words)
        slot = torch.zeros(1, dtype=torch.int64)
        rows = SampleRows(slot, slot + len(prompt) + len(output), slot + len(output))
        own = adjusted(logits[None].cpu(), rows, table, table.features([0]))[0].double()
        if params.greedy:
            return Row(own, torch.zeros_like(own), params)
        return Row(own, gumbel_of_hashes(table.noise_keys(rows), table.token_hashes)[0].double(), params)

    def margin(self, *tokens: int) -> float:
        """Twice the smallest error of the logits with which each of these tokens could be the choice.

        Without top-k, top-p and min-p this is the gap, noise included, between the best token and the farthest of
        these. With limits it also covers how close a token is to being kept or dropped.
        """
        low, high = 0.0, float(self.logits.max() - self.logits[self.logits.isfinite()].min()) + 1.0
        high *= 1 + float(self.noise.abs().max()) * max(self.params.temperature, 1.0)
        if self._possible(0.0, tokens):
            return 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._possible(middle, tokens) else (middle, high)
        return 2 * high

    def _possible(self, error: float, tokens: tuple[int, ...]) -> bool:
        """True if each of the tokens could be chosen with errors of up to `error` in every logit."""
        greedy = self.params.greedy
        temperature = 1.0 if greedy else self.params.temperature
        slack = 2 * error / temperature
        scores = self.logits / temperature + self.noise  # [V]
        limits = None if greedy else self._limits(error, temperature)
        for token in tokens:
            rivals = scores > scores[token] + slack
            if limits is not None:
                rivals &= ~limits.may_drop
                if not bool(limits.may_keep[token]):
                    return False
            if bool(rivals.any()):
                return False
        return True

    def _limits(self, error: float, temperature: float) -> _Limits:
        """The effect of top-k, top-p and min-p with errors of up to `error` in every logit."""
        logits, params, slack = self.logits, self.params, 2 * error / temperature
        kept, dropped = torch.ones_like(logits, dtype=torch.bool), torch.zeros_like(logits, dtype=torch.bool)
        order = logits.sort()
        # number of tokens that certainly and possibly come before each
        surely = logits.shape[0] - torch.searchsorted(order.values, logits + 2 * error, right=True)  # [V]
        maybe = logits.shape[0] - torch.searchsorted(order.values, logits - 2 * error) - 1  # [V], itself not counted
        if params.top_k:
            kept &= surely < params.top_k
            dropped |= maybe >= params.top_k
        if params.top_p < 1:
            weights = (order.values / temperature).softmax(0)
            if params.top_k:
                weights[: -params.top_k] = 0
            shares = weights.flip(0).cumsum(0) / weights.sum()  # [V]
            before = torch.cat((torch.zeros_like(shares[:1]), shares))  # [V + 1]
            factor = math.exp(min(slack, _LARGEST_EXPONENT))  # largest relative error of the odds
            odds = before / (1 - before).clamp(min=0)  # [V + 1], infinite at the end
            wanted = params.top_p / (1 - params.top_p)
            kept &= odds[surely] / factor < wanted
            dropped |= odds[maybe] * factor >= wanted
        if params.min_p > 0:
            behind = (logits - logits.max()) / temperature  # [V]
            kept &= behind >= math.log(params.min_p) - slack
            dropped |= behind < math.log(params.min_p) + slack
        return _Limits(kept, dropped)
