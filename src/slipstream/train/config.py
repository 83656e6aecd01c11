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
from slipstream.models.headers import AUTO, check_device_name

PrecisionName = Literal["auto", "bf16", "fp32"]
OptimizerName = Literal["adamw", "muon"]
OptionValue = str | int | float | bool
Options = TypeVar("Options")

_MAY_CHANGE = ("out", "data", "device", "lanes", "checkpoint_every", "measure_every", "log_every")
"""Settings that a resumed run may change: they do not affect what it learns."""


def _least(default: int, least: int) -> Any:
    """A whole number of at least `least`."""
    return field(default=default, metadata={"least": least})


def _between(default: float, low: float, high: float) -> Any:
    """A number from `low` to `high`."""
    return field(default=default, metadata={"between": (low, high)})


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One run: a recipe, a target, data, and how to train. `options` are the recipe's own; see `read_options`."""

    recipe: str
    target: str
    out: Path

    # data
    data: str = ""  # folder of the data, used as it is if complete; "": a folder of the run
    prompts: tuple[str, ...] = ()  # JSON lines files, in the format of `slipstream bench`
    self_prompts: int = _least(0, 0)  # user turns that the target writes itself
    systems: tuple[str, ...] = ()  # system messages for these, in turn; "" and none: the template's own
    openings: tuple[str, ...] = ()  # first words of these, in turn; none: the usual mix (`train/prompts.py`)
    samples: int = _least(1, 1)  # answers to each prompt
    temperatures: tuple[float, ...] = (1.0,)  # of the answers, in turn
    max_prompt_tokens: int = _least(512, 1)
    max_tokens: int = _least(512, 1)  # of an answer
    held_out: int = _least(64, 1)  # prompts kept from training, for measuring
    lanes: int = _least(1024, 1)  # answers written at a time

    # training
    steps: int = _least(1000, 1)  # optimizer steps
    optimizer: OptimizerName = "adamw"  # muon: Muon for the matrices of layers, AdamW for the rest
    muon_rate: float = _between(1.0, 1e-6, 1e6)  # Muon's learning rate as a multiple of AdamW's
    row_tokens: int = _least(2048, 16)  # length of the rows that sequences are packed into
    rows: int = _least(8, 1)  # in one pass of each device
    accumulate: int = _least(1, 1)  # passes in a step
    learning_rate: float = _between(1e-3, 1e-9, 10.0)
    final_rate: float = _between(0.05, 0.0, 1.0)  # learning rate at the last step, relative to the highest
    warmup: int = _least(50, 0)  # steps
    weight_decay: float = _between(0.0, 0.0, 10.0)
    beta1: float = _between(0.9, 0.0, 0.9999)
    beta2: float = _between(0.95, 0.0, 0.99999)
    clip: float = _between(1.0, 1e-6, 1e6)  # largest norm of the gradient
    average: float = _between(
        0.0, 0.0, 0.99999
    )  # decay of the moving average of the weights, which is exported; 0: off
    seed: int = _least(0, 0)
    precision: PrecisionName = "auto"  # of the arithmetic; weights are fp32. auto: bf16 on a GPU, else fp32
    device: str = AUTO
    trust_remote_code: bool = False

    # progress
    log_every: int = _least(10, 1)  # steps
    checkpoint_every: int = _least(200, 1)
    measure_every: int = _least(200, 0)  # steps; 0: only at the end
    measure_prompts: int = _least(32, 1)
    measure_tokens: int = _least(128, 1)

    options: Mapping[str, OptionValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        object.__setattr__(self, "prompts", tuple(str(path) for path in self.prompts))
        object.__setattr__(self, "systems", tuple(str(text) for text in self.systems))
        object.__setattr__(self, "openings", tuple(str(text) for text in self.openings))
        object.__setattr__(self, "temperatures", tuple(float(t) for t in self.temperatures))
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        check_device_name(self.device)
        for name, known in (("precision", PrecisionName), ("optimizer", OptimizerName)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(get_args(known))}")
        for f in fields(self):
            value, least = getattr(self, f.name), f.metadata.get("least")
            if least is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{f.name}={value!r}: must be a whole number of at least {least}")
            low, high = f.metadata.get("between", (None, None))
            if low is not None and not (isinstance(value, int | float) and isfinite(value) and low <= value <= high):
                raise ConfigError(f"{f.name}={value!r}: must be between {low:g} and {high:g}")
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
