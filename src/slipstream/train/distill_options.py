"""What can be chosen of a distilled draft and of how it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from slipstream.core.errors import ConfigError

Kept = Literal["fp16", "bf16", "fp32"]

NOTHING = "none"


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What can be said of a draft with `--set NAME=VALUE`. 0 and "": the target's, or chosen by it."""

    layers: int = 3
    hidden: int = 0  # narrower than the target: embeddings are reduced by learnt projections
    inner: int = 0  # width of its MLPs; 0: as the target's, or in the same proportion
    heads: int = 0  # attention heads; 0: as the target's, or as many of its size as fit
    kv_heads: int = 0
    head_dim: int = 0
    start: str = ""  # the target's layers whose weights it begins with, as 0,1,2; none: fresh ones
    variation: float = 1.0  # weight of the total variation beside the divergence
    sharpen: float = 0.0  # share of the aim that is the target's best token alone
    prompt_weight: float = 0.0  # of rows that guess a prompt's tokens, against an answer's; above 0 they cost as much
    shares: bool = True  # stored without embedding and LM head; False: with both, and the tokenizer
    kept: Kept = "fp16"  # how weights are written

    def __post_init__(self) -> None:
        _check("layers", self.layers, self.layers >= 1, "at least 1")
        for name in ("hidden", "inner", "heads", "kv_heads", "head_dim"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("sharpen", "prompt_weight"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        _check("variation", self.variation, 0 <= self.variation < 100, "between 0 and 100")
        _check("kept", self.kept, self.kept in get_args(Kept), "one of " + ", ".join(get_args(Kept)))
        named = self.start in ("", NOTHING) or all(part.strip().isdecimal() for part in self.start.split(","))
        _check("start", self.start, named, "layers such as 0,1,2, or none")

    @property
    def start_layers(self) -> list[int]:
        return [] if self.start in ("", NOTHING) else [int(part) for part in self.start.split(",")]


def _check(name: str, value: object, right: bool, wanted: str) -> None:
    if not right:
        raise ConfigError(f"option {name}={value!r}: must be {wanted}")
