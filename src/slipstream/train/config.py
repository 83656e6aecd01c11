"""The settings of a training run: a frozen record, checked when it is made and stored with the run.

Resuming compares the stored record with the new one and names what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from slipstream.core.errors import ConfigError
from slipstream.core.settings import check_settings, setting
from slipstream.models.headers import AUTO, check_device_name

PrecisionName = Literal["auto", "bf16", "fp32"]
OptimizerName = Literal["adamw", "muon"]
OptionValue = str | int | float | bool
Options = TypeVar("Options")

_MAY_CHANGE = ("out", "data", "device", "lanes", "checkpoint_every", "measure_every", "log_every")
"""Settings that a resumed run may change: they do not affect what it learns."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One run: a recipe, a target, data, and how to train. `options` are the recipe's own; see `read_options`.

    data: Folder of the data; several drafters can share it. Default: OUT/data.
    prompts: Prompts, one JSON object a line with 'prompt' or 'turns'. May be repeated.
    self_prompts: Let a chat model write N prompts itself, such as 20000; no data is needed.
    systems: System message of the model's own prompts: that of your users. May be repeated.
    openings: How its own prompts begin; '': as it likes. May be repeated. Default: a mix.
    samples: Answers to each prompt, such as 2.
    temperatures: Temperature of the answers: that of your users. Repeated, they are dealt in turns.
    max_prompt_tokens: Longer prompts are left out.
    max_tokens: Longest answer.
    held_out: Prompts kept from training, to measure with.
    lanes: Answers written at a time: more are faster and need more memory.
    steps: Steps of the optimizer.
    optimizer: adamw, or muon: for the matrices of layers, AdamW for the rest.
    muon_rate: Muon's learning rate, as a multiple of --learning-rate, such as 4.
    row_tokens: Tokens of a row; answers are laid end to end in rows.
    rows: Rows of a pass, on each device. Halve it where memory is short.
    accumulate: Passes before the optimizer takes a step. Double it where you halve --rows.
    learning_rate: Highest learning rate, such as 1e-3.
    final_rate: Share of the learning rate that is left at the end, such as 0.05.
    warmup: Steps until the learning rate is at its highest.
    weight_decay: AdamW's, such as 0.01.
    beta1: AdamW's, such as 0.9.
    beta2: AdamW's, such as 0.95.
    clip: Larger gradients are made as short as this.
    average: Export a moving average of the weights with this decay, such as 0.99.
    seed: Same seed, same data and order.
    precision: Arithmetic: bf16, fp32, or auto (bf16 on a GPU). Weights are fp32 always.
    device: cpu, cuda, cuda:1, or auto: a GPU if there is one. Several: start it with torchrun.
    trust_remote_code: Run Python code that comes with the model. Only where you have read it.
    log_every: Steps from report to report.
    checkpoint_every: Steps from checkpoint to checkpoint.
    measure_every: Steps from measurement to measurement in the real engine; 0: only at the end.
    measure_prompts: Held-out prompts to measure with.
    measure_tokens: Tokens of each answer that is measured.
    """

    recipe: str
    target: str
    out: Path

    data: str = setting(str, "", metavar="DIR", panel="data")
    prompts: tuple[str, ...] = setting(str, (), many=True, metavar="FILE", panel="data")
    self_prompts: int = setting(int, 0, low=0, metavar="N", panel="data")
    systems: tuple[str, ...] = setting(str, (), many=True, metavar="TEXT", flag="--system-prompt", panel="data")
    openings: tuple[str, ...] = setting(str, (), many=True, metavar="TEXT", flag="--opening", panel="data")
    samples: int = setting(int, 1, low=1, metavar="N", panel="data")
    temperatures: tuple[float, ...] = setting(float, (1.0,), many=True, metavar="T", flag="--temperature", panel="data")
    max_prompt_tokens: int = setting(int, 512, low=1, metavar="N", panel="data")
    max_tokens: int = setting(int, 512, low=1, metavar="N", panel="data")
    held_out: int = setting(int, 64, low=1, metavar="N", panel="data")
    lanes: int = setting(int, 1024, low=1, metavar="N", panel="data")

    steps: int = setting(int, 1000, low=1, metavar="N", panel="training")
    optimizer: OptimizerName = setting(str, "adamw", choices=get_args(OptimizerName), metavar="NAME", panel="training")
    muon_rate: float = setting(float, 1.0, low=1e-6, high=1e6, metavar="TIMES", panel="training")
    row_tokens: int = setting(int, 2048, low=16, metavar="N", panel="training")
    rows: int = setting(int, 8, low=1, metavar="N", panel="training")
    accumulate: int = setting(int, 1, low=1, metavar="N", panel="training")
    learning_rate: float = setting(float, 1e-3, low=1e-9, high=10.0, metavar="R", panel="training")
    final_rate: float = setting(float, 0.05, low=0.0, high=1.0, metavar="PART", panel="training")
    warmup: int = setting(int, 50, low=0, metavar="N", panel="training")
    weight_decay: float = setting(float, 0.0, low=0.0, high=10.0, metavar="W", panel="training")
    beta1: float = setting(float, 0.9, low=0.0, high=0.9999, metavar="B", panel="training")
    beta2: float = setting(float, 0.95, low=0.0, high=0.99999, metavar="B", panel="training")
    clip: float = setting(float, 1.0, low=1e-6, high=1e6, metavar="NORM", panel="training")
    average: float = setting(float, 0.0, low=0.0, high=0.99999, metavar="PART", panel="training")
    seed: int = setting(int, 0, low=0, metavar="N", panel="training")
    precision: PrecisionName = setting(str, "auto", choices=get_args(PrecisionName), metavar="NAME", panel="training")
    device: str = setting(str, AUTO, metavar="DEVICE", panel="model")
    trust_remote_code: bool = setting(bool, False, flag="--trust-remote-code", panel="model")

    log_every: int = setting(int, 10, low=1, metavar="N", panel="reports")
    checkpoint_every: int = setting(int, 200, low=1, metavar="N", panel="reports")
    measure_every: int = setting(int, 200, low=0, metavar="N", panel="reports")
    measure_prompts: int = setting(int, 32, low=1, metavar="N", panel="reports")
    measure_tokens: int = setting(int, 128, low=1, metavar="N", panel="reports")

    options: Mapping[str, OptionValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        object.__setattr__(self, "prompts", tuple(str(path) for path in self.prompts))
        object.__setattr__(self, "systems", tuple(str(text) for text in self.systems))
        object.__setattr__(self, "openings", tuple(str(text) for text in self.openings))
        object.__setattr__(self, "temperatures", tuple(float(t) for t in self.temperatures))
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        check_device_name(self.device)
        check_settings(self)
        if not self.temperatures or not all(isfinite(t) and t >= 0 for t in self.temperatures):
            raise ConfigError(f"temperatures={self.temperatures!r}: must name at least one, each 0 or more")
        if not self.prompts and not self.self_prompts and not self.data:
            raise ConfigError(
                "there is nothing to learn from: name prompt files (--prompts FILE), let a chat model write its own "
                "(--self-prompts 10000), or name the data of another run (--data DIR)"
            )

    @property
    def data_folder(self) -> Path:
        return Path(self.data) if self.data else self.out / "data"

    def as_dict(self) -> dict[str, Any]:
        """The settings for JSON; `from_dict` reads them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "out": str(self.out), "options": dict(self.options)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> TrainConfig:
        known = {f.name for f in fields(TrainConfig)}
        if unknown := set(values) - known:
            raise ConfigError(f"setting {sorted(unknown)[0]!r} is unknown: must be one of {', '.join(sorted(known))}")
        return TrainConfig(**values)

    def check_same_run(self, stored: TrainConfig) -> None:
        """Raise `ConfigError` if these settings cannot resume the run `stored`."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(stored, f.name)
            if f.name not in _MAY_CHANGE and mine != theirs:
                raise ConfigError(
                    f"{f.name}={mine!r}: the run in {self.out} was begun with {theirs!r}; give {theirs!r} to resume "
                    "it, or another --out to start a new run"
                )


def read_options(kind: type[Options], given: Mapping[str, OptionValue]) -> Options:
    """Make a recipe's options, a frozen dataclass, from `TrainConfig.options`, converting text to the field's type."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in hints:
            raise ConfigError(f"option {name!r} is unknown: this recipe has {', '.join(sorted(hints))}")
        values[name] = _as(hints[name], name, value)
    return kind(**values)


def _as(hint: Any, name: str, value: OptionValue) -> Any:
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind in (bool, int, float, str)] or [str]
    for kind in kinds:
        if kind is bool and str(value).lower() in ("true", "false", "1", "0"):
            return str(value).lower() in ("true", "1")
        if kind in (int, float):
            try:
                return kind(str(value))
            except ValueError:
                continue
        if kind is str:
            return str(value)
    raise ConfigError(f"option {name}={value!r}: must be {' or '.join(kind.__name__ for kind in kinds)}")


StoredAs = Literal["fp16", "bf16", "fp32"]
"""The dtype in which a recipe writes weights."""


def check_option(name: str, value: object, right: bool, wanted: str) -> None:
    if not right:
        raise ConfigError(f"option {name}={value!r}: must be {wanted}")


def check_one_of(name: str, value: object, known: object) -> None:
    """Raise unless `value` is one of the names of the `Literal` type `known`."""
    check_option(name, value, value in get_args(known), "one of " + ", ".join(get_args(known)))


def check_at_least(options: object, least: int, *names: str) -> None:
    for name in names:
        check_option(name, getattr(options, name), getattr(options, name) >= least, f"at least {least}")


def check_between(options: object, low: float, high: float, *names: str) -> None:
    for name in names:
        check_option(name, getattr(options, name), low <= getattr(options, name) <= high, f"between {low} and {high}")
