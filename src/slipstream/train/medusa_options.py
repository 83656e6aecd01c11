"""What can be chosen of Medusa heads and of how they learn."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.train.options import Kept, check_one_of, check_option

_MOST_HEADS = 16


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """What can be said of the heads with `--set NAME=VALUE`."""

    heads: int = 4  # positions that are guessed
    layers: int = 2  # residual layers of each
    chained: bool = True  # each goes on from the one before it, and reads what was guessed there
    token: bool = True  # heads also read the token that their state chose; False: as other engines know them
    decay: float = 0.8  # weight of each head's loss against the one before
    variation: float = 0.0  # weight of the total variation beside the divergence
    sharpen: float = 0.5  # share of the aim that is the target's best token alone
    kept: Kept = "fp16"  # how weights are written

    def __post_init__(self) -> None:
        check_option("heads", self.heads, 1 <= self.heads <= _MOST_HEADS, f"between 1 and {_MOST_HEADS}")
        check_option("layers", self.layers, 1 <= self.layers <= _MOST_HEADS, f"between 1 and {_MOST_HEADS}")
        for name in ("decay", "sharpen"):
            check_option(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        check_option("variation", self.variation, 0 <= self.variation < 100, "between 0 and 100")
        check_option(
            "token", self.token, self.token or not self.chained, "true where heads are chained (chained=false)"
        )
        check_one_of("kept", self.kept, Kept)
