"""A recipe of a few lines for the tests of the trainer: a Medusa head of one layer, by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.drafters.base import Drafter
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.models.taps import Taps
from slipstream.train.batch import Batch
from slipstream.train.config import TrainConfig, read_options
from slipstream.train.recipe import Losses, Setting, TargetShape

HEADS = 2


@dataclass(frozen=True)
class TinyOptions:
    decay: float = 0.8


class TinyHeads(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HEADS, hidden, hidden) * 0.01)
        self.bias = nn.Parameter(torch.zeros(HEADS, hidden))

    def forward(self, x: Tensor) -> Tensor:  # [N, H] -> [heads, N, H]
        return x + F.silu(torch.einsum("hij,nj->hni", self.weight, x) + self.bias[:, None])


class TinyRecipe:
    """Heads that share the target's LM head."""

    name: ClassVar[str] = "tiny"
    defaults: ClassVar[Mapping[str, Any]] = {"learning_rate": 0.01}

    def __init__(self, setting: Setting) -> None:
        self.teacher = setting.teacher
        self.options = read_options(TinyOptions, setting.config.options)
        self._heads = TinyHeads(setting.teacher.hidden).to(setting.teacher.device)

    @classmethod
    def check(cls, config: TrainConfig, target: TargetShape) -> None:
        read_options(TinyOptions, config.options)

    @classmethod
    def make(cls, setting: Setting) -> TinyRecipe:
        return cls(setting)

    @property
    def module(self) -> nn.Module:
        return self._heads

    @property
    def taps(self) -> Taps:
        return Taps(normed=True)

    def loss(self, batch: Batch) -> Losses:
        rows = batch.rows
        total = torch.zeros(())
        accepted, positions = [], []
        hidden = self._heads(batch.taps.flatten(0, 1).float()).unflatten(1, rows.ids.shape)  # [heads, B, T, H]
        for head in range(HEADS):
            ahead = 2 + head  # the state at q says the token at q + 1; a head guesses further on
            keep = rows.same(ahead)
            keep = keep & torch.roll(rows.answers, -ahead, 1)
            wanted = torch.roll(rows.ids, -ahead, 1)[keep]
            logits = F.linear(hidden[head][keep], self.teacher.lm_head.float())
            total = total + self.options.decay**head * F.cross_entropy(logits, wanted, reduction="sum")
            accepted.append((logits.argmax(-1) == wanted).sum())
            positions.append(keep.sum())
        return Losses(total, positions[0], torch.stack(accepted), torch.stack(positions))

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for head in range(HEADS):
            tensors[f"{head}.0.linear.weight"] = self._heads.weight[head].detach().cpu().clone()
            tensors[f"{head}.0.linear.bias"] = self._heads.bias[head].detach().cpu().clone()
        save_file(tensors, folder / "medusa_lm_head.safetensors")
        config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))

    def drafter(self, folder: Path) -> str:
        return f"medusa:{folder}"

    def refresh(self, drafter: Drafter) -> None:
        heads = cast(MedusaDrafter, drafter).heads
        with torch.no_grad():
            heads._weights[0].copy_(self._heads.weight)
            heads._biases[0].copy_(self._heads.bias)
