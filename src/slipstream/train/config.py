"""Everything that a training run depends on, in one frozen record: checked when it is made, stored with the run.

A run that is resumed must be the same run, so the record is compared on resuming, and what differs is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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

_NOT_THE_RUN = ("out", "data", "device", "lanes", "checkpoint_every", "measure_every", "log_every")
"""May differ when a run is resumed: they do not change what is learnt. `out` may have been moved."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One run: a recipe, a target, data, and how to train.

    A recipe's own options (layers, losses, ...) are in `options`; the recipe reads them with `read_options`.
    """

    recipe: str
    target: str
    out: Path

    # data
    data: str = ""  # folder of the data, used as it is where it is complete; "": in the folder of the run
    prompts: tuple[str, ...] = ()  # JSON lines files, as `bench` reads them
    self_prompts: int = 0  # user turns that the target writes itself
    systems: tuple[str, ...] = ()  # system messages for these, dealt in turns; "" and none: the template's own
    openings: tuple[str, ...] = ()  # how these begin, dealt in turns; none: the usual mix (`train/prompts.py`)
    samples: int = 1  # answers to each prompt
    temperatures: tuple[float, ...] = (1.0,)  # of the answers, dealt in turns
    max_prompt_tokens: int = 512
    max_tokens: int = 512  # of an answer
    held_out: int = 64  # prompts that are kept from training, to measure with
    lanes: int = 1024  # answers that are written at a time

    # training
    steps: int = 1000  # of the optimizer
    optimizer: OptimizerName = "adamw"  # muon: for the matrices of layers, AdamW for the rest
    muon_rate: float = 1.0  # the learning rate of these matrices, as a multiple of the others'
    row_tokens: int = 2048  # sequences are laid end to end in rows of so many
    rows: int = 8  # in one pass, on each device
    accumulate: int = 1  # passes before the optimizer takes a step
    learning_rate: float = 1e-3
    final_rate: float = 0.05  # of the learning rate, at the last step
    warmup: int = 50  # steps
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # norm of the gradient at most
    average: float = 0.0  # weights that are exported: a moving average that keeps so much of itself; 0 is off
    seed: int = 0
    precision: PrecisionName = "auto"  # of the arithmetic; weights are fp32. auto: bf16 on a GPU
    device: str = AUTO
    trust_remote_code: bool = False

    # looking at it
    log_every: int = 10  # steps
    checkpoint_every: int = 200
    measure_every: int = 200  # 0: only at the end
    measure_prompts: int = 32
    measure_tokens: int = 128

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
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r}: must be a whole number of at least {least}")
        for name, (low, high) in _BETWEEN.items():
            value = getattr(self, name)
            if not (isinstance(value, int | float) and isfinite(value) and low <= value <= high):
                raise ConfigError(f"{name}={value!r}: must be between {low:g} and {high:g}")
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
        """For JSON; `from_dict` reads it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "out": str(self.out), "options": dict(self.options)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> TrainConfig:
        known = {f.name for f in fields(TrainConfig)}
        if unknown := set(values) - known:
            raise ConfigError(f"{sorted(unknown)[0]!r} is no setting of a training run: known are {sorted(known)}")
        return TrainConfig(**values)

    def check_same_run(self, stored: TrainConfig) -> None:
        """Raise `ConfigError` where resuming `stored` with these settings would be another run."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(stored, f.name)
            if f.name not in _NOT_THE_RUN and mine != theirs:
                raise ConfigError(
                    f"{f.name}={mine!r}: the run in {self.out} was begun with {theirs!r}; give that again to resume "
                    "it, or another --out to begin anew"
                )


_LEAST = {
    "self_prompts": 0,
    "samples": 1,
    "max_prompt_tokens": 1,
    "max_tokens": 1,
    "held_out": 1,
    "lanes": 1,
    "steps": 1,
    "row_tokens": 16,
    "rows": 1,
    "accumulate": 1,
    "warmup": 0,
    "seed": 0,
    "log_every": 1,
    "checkpoint_every": 1,
    "measure_every": 0,
    "measure_prompts": 1,
    "measure_tokens": 1,
}
_BETWEEN = {
    "learning_rate": (1e-9, 10.0),
    "final_rate": (0.0, 1.0),
    "weight_decay": (0.0, 10.0),
    "muon_rate": (1e-6, 1e6),
    "beta1": (0.0, 0.9999),
    "beta2": (0.0, 0.99999),
    "clip": (1e-6, 1e6),
    "average": (0.0, 0.99999),
}


def read_options(kind: type[Options], given: Mapping[str, OptionValue]) -> Options:
    """A recipe's own options, a frozen dataclass, from `TrainConfig.options`. Text becomes what the field is."""
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


def options_as_dict(options: Any) -> dict[str, Any]:
    """All options of a recipe with their values, for the run record."""
    return asdict(options)
