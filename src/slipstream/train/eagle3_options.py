"""What can be chosen of an EAGLE-3 head and of how it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.train.options import Kept, check_one_of, check_option

Layouts = Literal["both", "original", "speculators"]


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """What can be said of a head with `--set NAME=VALUE`. 0 and "": chosen by the target or the data."""

    steps: int = 6  # of training-time test: guesses in a row that the head is trained for
    decay: float = 0.85  # weight of each step's loss against the one before
    variation: float = 0.0  # weight of the total variation beside the divergence
    sharpen: float = 0.0  # share of the aim that is the target's best token alone
    prompt_weight: float = 0.0  # of rows that guess a prompt's tokens, against an answer's; above 0 they cost as much
    taps: str = ""  # layers whose hidden states it reads, as 2,15,27
    inner: int = 0  # width of its MLP; 0: 5 times the hidden size
    heads: int = 0  # attention heads
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0
    draft_vocab: int = 0  # tokens that it can name; 0: by coverage
    coverage: float = 0.997  # share of the answers' tokens that the draft vocabulary must cover
    most_vocab: int = 32768  # tokens of a draft vocabulary that is chosen by coverage, at most
    norm_before_residual: bool = True
    fc_norm: bool = False  # EAGLE-3.1; not every engine knows it
    norm_output: bool = False  # EAGLE-3.1
    depth: int = 6  # of trees, where tau is measured
    width: int = 8
    kept: Kept = "fp16"  # how weights are written
    layout: Layouts = "both"

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("depth", 1), ("width", 1), ("most_vocab", 1)):
            check_option(name, getattr(self, name), getattr(self, name) >= least, f"at least {least}")
        for name in ("inner", "heads", "kv_heads", "head_dim", "draft_vocab"):
            check_option(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("decay", "sharpen", "prompt_weight", "coverage"):
            check_option(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        check_option("variation", self.variation, 0 <= self.variation < 100, "between 0 and 100")
        check_one_of("kept", self.kept, Kept)
        check_one_of("layout", self.layout, Layouts)
        check_option("taps", self.taps, all(part.strip().isdecimal() for part in self.layers), "layers such as 2,15,27")

    @property
    def layers(self) -> list[str]:
        return self.taps.split(",") if self.taps else []
