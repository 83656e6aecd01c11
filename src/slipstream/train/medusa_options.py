"""What can be chosen of Medusa heads and of how they learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from slipstream.core.errors import ConfigError

Kept = Literal["fp16", "bf16", "fp32"]
_MOST_HEADS = 16


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """What can be said of the heads with `--set NAME=VALUE`."""

    heads: int = 4  # positions that are guessed
    layers: int = 3  # residual layers of each
    decay: float = 0.8  # weight of each head's loss against the one before
    variation: float = 0.0  # weight of the total variation beside the divergence
    sharpen: float = 0.5  # share of the aim that is the target's best token alone
    kept: Kept = "fp16"  # how weights are written

    def __post_init__(self) -> None:
        _check("heads", self.heads, 1 <= self.heads <= _MOST_HEADS, f"between 1 and {_MOST_HEADS}")
        _check("layers", self.layers, 1 <= self.layers <= _MOST_HEADS, f"between 1 and {_MOST_HEADS}")
        for name in ("decay", "sharpen"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        _check("variation", self.variation, 0 <= self.variation < 100, "between 0 and 100")
        _check("kept", self.kept, self.kept in get_args(Kept), "one of " + ", ".join(get_args(Kept)))


def _check(name: str, value: object, right: bool, wanted: str) -> None:
    if not right:
        raise ConfigError(f"option {name}={value!r}: must be {wanted}")
