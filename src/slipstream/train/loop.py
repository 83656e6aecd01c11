"""The trainer, for any recipe. `Trainer.run` is the loop and `Trainer._train_step` one step.

A step depends only on its number and the checkpoint: a killed and resumed run ends with the same weights as an
uninterrupted one. The host waits for the device only to report.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.core.errors import CapacityError, NumericError
from slipstream.models.paths import Progress
from slipstream.train.batch import RowPlan
from slipstream.train.checkpoint import (
    Best,
    Checkpoint,
    forget_best,
    keep_best,
    load_best,
    load_checkpoint,
    save_checkpoint,
    update_curves,
)
from slipstream.train.config import TrainConfig
from slipstream.train.measure import Measured
from slipstream.train.optimizer import Optimizers
from slipstream.train.progress import Stop, stop_asked, watched
from slipstream.train.ranks import Ranks
from slipstream.train.recipe import Losses, Recipe
from slipstream.train.teacher import States

_SILENCE_S = 20.0  # after this long without a message, report the step in progress; on a CPU one takes minutes

MeasureNow = Callable[[], Sequence[Measured]]
"""Measures the current drafter in the real engine: one result a temperature."""


@dataclass(slots=True)
class _Sums:
    """Sums of the passes since the last report, on the device."""

    total: Tensor | None = None
    count: Tensor | None = None
    accepted: Tensor | None = None
    positions: Tensor | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)
    norm: Tensor | None = None
    since: float = field(default_factory=time.perf_counter)
    steps: int = 0

    def add(self, losses: Losses) -> None:
        self.total = _plus(self.total, losses.total)
        self.count = _plus(self.count, losses.count)
        self.accepted = _plus(self.accepted, losses.accepted)
        self.positions = _plus(self.positions, losses.positions)
        for name, value in losses.parts.items():
            self.parts[name] = _plus(self.parts.get(name), value)


class Trainer:
    """Trains one recipe to the end of its steps."""

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        states: States,
        plan: RowPlan,
        ranks: Ranks,
        say: Progress,
        measure: MeasureNow | None = None,
        on_checkpoint: Callable[[Trainer], object] | None = None,
    ) -> None:
        """The first rank calls `measure`, and `on_checkpoint` after each checkpoint and measurement."""
        self.config, self.recipe, self.ranks = config, recipe, ranks
        self._states, self._plan, self._say = states, plan, say
        self._measure, self._on_checkpoint = measure, on_checkpoint
        self._device = states.device
        self._parameters = {n: p for n, p in recipe.module.named_parameters() if p.requires_grad}
        self._optimizer = Optimizers(self._parameters, config, self._device)
        self._average = {n: p.detach().clone() for n, p in self._parameters.items()} if config.average else {}
        self._sums = _Sums()
        self._begun = time.perf_counter()
        self._seconds_before = 0.0
        self._step_s: list[float] = []
        self._step_begun, self._turn = 0.0, 0
        self._reported = math.inf  # time of the last message about steps; inf: something else is running
        self._reminded = 0.0  # time of the last message from the watching thread
        self.step = 0
        self.curves: list[dict[str, Any]] = []
        self.best: Best | None = None  # the best measurement so far

    @property
    def seconds(self) -> float:
        """Training time, that of earlier parts of the run included."""
        return self._seconds_before + time.perf_counter() - self._begun

    def resume(self) -> bool:
        """Restore the last checkpoint. Returns False if there is none."""
        found = load_checkpoint(self.config.out, self._device)
        if found is None:
            if self.ranks.leads:
                forget_best(self.config.out)
            return False
        self.config.check_same_run(TrainConfig.from_dict(found.config))
        self.recipe.module.load_state_dict(dict(found.weights))
        self._optimizer.load_state_dict(dict(found.optimizer))
        for name, tensor in found.average.items():
            self._average[name].copy_(tensor)
        torch.set_rng_state(found.noise[0])
        if self._device.type == "cuda" and len(found.noise) > 1:
            torch.cuda.set_rng_state(found.noise[1], self._device)
        self.step, self.curves = found.step, [dict(point) for point in found.curves]
        self._seconds_before, self._begun = found.seconds, time.perf_counter()
        self.best = load_best(self.config.out)
        return True

    def run(self) -> None:
        """Run the remaining steps. On Ctrl-C or kill, finish the step, save, and raise `KeyboardInterrupt`.

        A measurement comes after its checkpoint and may be interrupted: a resumed run starts with it.
        """
        config = self.config
        self._sums = _Sums()
        try:
            with stop_asked(self._say, at_once=self.ranks.world > 1) as stop, watched(self._say, self._at):
                if self._unmeasured:
                    self._measure_now(stop)
                if self._device.type == "cuda" and self.step < config.steps:
                    self._say("the first step, for which torch compiles: about a minute ...")
                while self.step < config.steps:
                    self._train_step()
                    if self._is_due(config.log_every):
                        self._report()
                    if stop.asked or self._unmeasured or self._is_due(config.checkpoint_every):
                        self.save()
                    if self._unmeasured:
                        self._measure_now(stop)
                    if stop.asked and self.step < config.steps:
                        raise KeyboardInterrupt
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"rows={config.rows} of row_tokens={config.row_tokens}: the memory of {self._device} is too small for "
                f"this pass; halve rows and double accumulate={config.accumulate}, which trains the same"
            ) from error

    def save(self) -> None:
        """Write a checkpoint. The other ranks wait. Raises `NumericError` if a weight is not finite."""
        reported, self._reported = self._reported, math.inf
        if self.ranks.leads:
            self._check_finite()
            noise = [torch.get_rng_state()]
            if self._device.type == "cuda":
                noise.append(torch.cuda.get_rng_state(self._device))
            state = Checkpoint(
                self.step,
                self.recipe.module.state_dict(),
                self._average,
                self._optimizer.state_dict(),
                noise,
                self.curves,
                self.config.as_dict(),
                self.seconds,
            )
            save_checkpoint(self.config.out, state)
            if self._on_checkpoint is not None:
                self._on_checkpoint(self)
        self.ranks.wait()
        self._reported = reported

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this block the module has the averaged weights, if an average is kept."""
        own = {name: self._parameters[name].detach().clone() for name in self._average}
        self._put(self._average)
        try:
            yield
        finally:
            self._put(own)

    def _train_step(self) -> None:
        """One optimizer step: `accumulate` passes."""
        config, count = self.config, None
        self._step_begun = time.perf_counter()
        self._reported = min(self._reported, self._step_begun)
        try:
            count = self._passes()
        except torch.OutOfMemoryError:
            if not self._states.release():
                raise
        if count is None:  # outside the handler, which holds the failed pass's memory
            self._say("releasing the target's kept states: a step needs their memory")
            self._sums = _Sums()
            for parameter in self._parameters.values():
                parameter.grad = None
            count = self._passes()
        self._sums.norm = self._share(count)
        self._optimizer.step(learning_rate(config, self.step))
        if self._average:
            kept = min(config.average, (1 + self.step) / (10 + self.step))  # start short, to forget the first weights
            with torch.no_grad():
                old, new = list(self._average.values()), [p.detach() for p in self._parameters.values()]
                torch._foreach_lerp_(old, new, 1 - kept)
        self.step += 1
        self._sums.steps += 1

    def _passes(self) -> Tensor:
        """The passes of one step, forward and backward. Returns their number of positions."""
        count: Tensor | None = None
        for turn in range(self.config.accumulate):
            self._turn = turn
            losses = self._pass(turn)
            losses.total.backward()
            count = _plus(count, losses.count)
            self._sums.add(losses)
        assert count is not None
        return count

    def _pass(self, turn: int) -> Losses:
        """The forward pass of this rank's rows."""
        config, ranks = self.config, self.ranks
        first = ((self.step * config.accumulate + turn) * ranks.world + ranks.rank) * config.rows
        batch = self._states.run(self._plan.batch(first, config.rows))
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._narrow):
            return self.recipe.loss(batch)

    def _share(self, count: Tensor) -> Tensor:
        """Sum the gradients over ranks, divide by all positions, and clip. Returns their norm."""
        for parameter in self._parameters.values():
            if parameter.grad is None:  # no row reached it
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        total = count.detach().to(torch.float32).reshape(1).clone()
        self.ranks.add_up([*gradients, total])
        torch._foreach_div_(gradients, total.clamp_min(1.0).squeeze())
        return nn.utils.clip_grad_norm_(self._parameters.values(), self.config.clip, foreach=True)

    @property
    def _narrow(self) -> bool:
        wish = self.config.precision
        return wish == "bf16" or (wish == "auto" and self._device.type == "cuda")

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in weights.items():
                self._parameters[name].copy_(tensor)

    def _report(self) -> None:
        """Report the sums since the last report. Waits for the device."""
        sums, self._sums = self._sums, _Sums()
        if sums.total is None or sums.count is None or sums.accepted is None or sums.positions is None:
            return
        parts = list(sums.parts.values())
        flat = [t.detach().to(torch.float32) for t in (sums.total, sums.count, sums.accepted, sums.positions, *parts)]
        self.ranks.add_up(flat)
        count = max(float(flat[1]), 1.0)
        loss = float(flat[0]) / count
        if not math.isfinite(loss):
            raise NumericError(
                f"the loss is {loss} before step {self.step}: lower learning_rate={self.config.learning_rate}, or "
                f"lengthen warmup={self.config.warmup}; the last checkpoint is whole"
            )
        chance = (flat[2] / flat[3].clamp_min(1)).tolist()
        elapsed = time.perf_counter() - sums.since
        config = self.config
        tokens = sums.steps * config.accumulate * config.rows * config.row_tokens * self.ranks.world
        if sums.steps:
            self._step_s = [*self._step_s[-9:], elapsed / sums.steps]
        left = sorted(self._step_s)[len(self._step_s) // 2] * (config.steps - self.step) if self._step_s else 0.0
        point = {
            "step": self.step,
            "epoch": round(self._plan.epoch_of(self._rows_done), 4),
            "loss": loss,
            "acceptance": [round(c, 5) for c in chance],
            "expected_tau": round(_expected_tau(chance), 4),
            "learning_rate": learning_rate(config, self.step - 1),
            "gradient": float(sums.norm) if sums.norm is not None else 0.0,
            **{name: float(value) / count for name, value in zip(sums.parts, flat[4:], strict=True)},
        }
        self.curves.append(point)
        if self.ranks.leads:
            self._say(
                f"step {self.step:,} of {config.steps:,}: loss {loss:.4f}, acceptance "
                f"{' '.join(f'{c:.2f}' for c in chance)}, {tokens / max(elapsed, 1e-9):,.0f} tok/s, {_clock(left)} left"
            )
        self._reported = time.perf_counter()

    def _at(self) -> str:
        """A line about the current step after a long silence, else "". Called on another thread."""
        now = time.perf_counter()
        if now - max(self._reported, self._reminded) < _SILENCE_S:
            return ""
        self._reminded = now
        config, passes = self.config, ""
        if config.accumulate > 1:
            passes = f"pass {self._turn + 1} of {config.accumulate}, "
        number = min(self.step + 1, config.steps)
        return f"step {number:,} of {config.steps:,}: {passes}{_clock(now - self._step_begun)} so far"

    def _is_due(self, every: int) -> bool:
        """True after every `every` steps and after the last one. 0: only after the last one."""
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    @property
    def _unmeasured(self) -> bool:
        """True if a measurement is due and missing; after a resume, that of the step before."""
        due = self.step > 0 and self._is_due(self.config.measure_every)
        return due and not any("tau" in point and point["step"] == self.step for point in self.curves)

    @property
    def _rows_done(self) -> int:
        config = self.config
        return self.step * config.accumulate * self.ranks.world * config.rows

    def _measure_now(self, stop: Stop) -> None:
        """Measure the current weights, which are those of the last checkpoint."""
        self._reported = math.inf  # the measurement reports its own progress
        if self.ranks.leads and self._measure is not None:
            begun = time.perf_counter()
            own = [self._device] if self._device.type == "cuda" else []
            with self.averaged(), torch.random.fork_rng(own):  # measuring must not change what follows
                with stop.at_once():
                    found = self._measure()
                now = Best(self.step, {f"{m.temperature:g}": round(m.tau, 4) for m in found})
                if now.beats(self.best):
                    self.best = now
                    keep_best(self.config.out, now, self.recipe.export)
            self.curves.append({"step": self.step, "tau": dict(now.tau)})
            self._say(
                f"step {self.step:,}: " + ", ".join(str(m) for m in found) + f" ({_clock(time.perf_counter() - begun)})"
            )
            update_curves(self.config.out, self.curves)
            if self._on_checkpoint is not None:
                self._on_checkpoint(self)
            self._sums.since = time.perf_counter()
        self.ranks.wait()

    def _check_finite(self) -> None:
        for name, parameter in self._parameters.items():
            if not bool(parameter.isfinite().all()):
                raise NumericError(
                    f"{name} is not finite at step {self.step}: lower learning_rate={self.config.learning_rate}; the "
                    "last checkpoint is whole"
                )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to `final_rate`."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    way = (step - config.warmup) / max(1, config.steps - config.warmup)
    low = config.final_rate
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(way, 1.0))))


def _expected_tau(chance: Sequence[float]) -> float:
    """Tokens per pass of a chain, from each guess's acceptance given that all before it were accepted."""
    tau = together = 1.0
    for c in chance:
        together *= c
        tau += together
    return tau


def _plus(so_far: Tensor | None, more: Tensor) -> Tensor:
    more = more.detach()
    return more.clone() if so_far is None else so_far + more


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
