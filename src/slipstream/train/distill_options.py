"""What can be chosen of a distilled draft and of how it learns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.train.options import Kept, check_one_of, check_option

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
    start: str = ""  # what it begins with: the target's layers, as 0,1,2; a draft's folder; none: fresh weights
    variation: float = 1.0  # weight of the total variation beside the divergence
    keyed: float = 0.0  # weight of the chance that a keyed draw misses the text's token
    sharpen: float = 0.0  # share of the aim that is the target's best token alone
    prompt_weight: float = 0.0  # of rows that guess a prompt's tokens, against an answer's; above 0 they cost as much
    shares: bool = True  # stored without embedding and LM head; False: with both, and the tokenizer
    kept: Kept = "fp16"  # how weights are written

    def __post_init__(self) -> None:
        check_option("layers", self.layers, self.layers >= 1, "at least 1")
        for name in ("hidden", "inner", "heads", "kv_heads", "head_dim"):
            check_option(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("sharpen", "prompt_weight"):
            check_option(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in ("variation", "keyed"):
            check_option(name, getattr(self, name), 0 <= getattr(self, name) < 100, "between 0 and 100")
        check_one_of("kept", self.kept, Kept)
        named = self.start in ("", NOTHING) or self.start_layers or self.start_folder.is_dir()
        check_option("start", self.start, bool(named), "layers such as 0,1,2, the folder of a draft, or none")

    @property
    def start_layers(self) -> list[int]:
        """Numbers of the target's layers; none where it begins otherwise."""
        parts = self.start.split(",")
        return [int(part) for part in parts] if all(part.strip().isdecimal() for part in parts) else []

    @property
    def start_folder(self) -> Path:
        """Of the draft that it begins as, where `start` names neither layers nor nothing."""
        return Path(self.start).expanduser()

    @property
    def starts_as_draft(self) -> bool:
        return self.start not in ("", NOTHING) and not self.start_layers
