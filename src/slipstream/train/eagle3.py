"""The recipe of EAGLE-3 heads: what is learnt from a batch, and how the head becomes a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from slipstream.drafters.base import Drafter
from slipstream.drafters.eagle import EagleDrafter
from slipstream.models.heads.eagle import EagleHead
from slipstream.models.heads.eagle_files import EagleCheckpoint, save_eagle3
from slipstream.models.load import named_dtype
from slipstream.models.taps import Taps
from slipstream.train.batch import Batch, Rows
from slipstream.train.chain_attention import Sequences
from slipstream.train.config import TrainConfig, read_options
from slipstream.train.draft_vocab import DraftVocab, check_size, choose_vocab
from slipstream.train.eagle3_module import Eagle3Module
from slipstream.train.eagle3_options import Eagle3Options
from slipstream.train.eagle3_start import begin, head_shape
from slipstream.train.recipe import Losses, Setting, TargetShape
from slipstream.train.soft_loss import Aim, soft_loss
from slipstream.train.teacher import Teacher


class Eagle3Recipe:
    """An EAGLE-3 head in training."""

    name: ClassVar[str] = "eagle3"
    defaults: ClassVar[Mapping[str, Any]] = {
        "steps": 4000,
        "rows": 16,
        "row_tokens": 2048,
        "learning_rate": 1e-3,
        "final_rate": 0.02,
        "warmup": 100,
        "average": 0.99,
        "temperatures": (1.0, 0.0),
        "measure_every": 500,
        "checkpoint_every": 500,
    }

    def __init__(
        self, options: Eagle3Options, module: Eagle3Module, vocab: DraftVocab, teacher: Teacher, target: str
    ) -> None:
        """target: what the target is called, for readers of the head."""
        self.options, self.vocab, self._target = options, vocab, target
        self._module, self._teacher = module, teacher
        everything = len(vocab.ids) == teacher.vocab_size
        self._ids = None if everything else vocab.ids.to(teacher.device)

    @classmethod
    def check(cls, config: TrainConfig, target: TargetShape) -> None:
        options = read_options(Eagle3Options, config.options)
        check_size(options.draft_vocab, target.vocab_size)
        head_shape(options, target, options.draft_vocab)

    @classmethod
    def make(cls, setting: Setting) -> Eagle3Recipe:
        options, teacher = read_options(Eagle3Options, setting.config.options), setting.teacher
        vocab = choose_vocab(setting.counts, options.draft_vocab, options.coverage, options.most_vocab)
        shape = head_shape(options, teacher, len(vocab.ids))
        module = Eagle3Module(shape, teacher.model.get_input_embeddings()).to(teacher.device)
        begin(module, vocab, teacher, setting.counts)
        if teacher.device.type == "cuda":
            module.hasten()
        return cls(options, module, vocab, teacher, setting.config.target)

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def taps(self) -> Taps:
        return self._module.shape.taps

    def loss(self, batch: Batch) -> Losses:
        options, rows = self.options, batch.rows
        sequences = Sequences.of(rows)
        weights = self._row_weights(rows)  # [N]
        chosen = (weights > 0).nonzero()[:, 0]
        hidden = torch.stack([last[chosen] for last in self._module(batch, options.steps, sequences)])  # [S, n, H]
        steps = torch.arange(options.steps, device=weights.device)[:, None]  # [S, 1]
        shares = options.decay**steps
        there = sequences.offset[chosen] >= steps  # [S, n]: a chain of so many guesses has room before this row
        scaled = weights[chosen] * there * shares / shares.sum()
        counted = there & (weights[chosen] == 1)  # answers only
        states = torch.roll(batch.normed, -1, dims=1).flatten(0, 1)[chosen]  # of the row's own token
        aim = Aim(self._teacher.logits, self._teacher.vocab_size, self._ids, options.variation, options.sharpen)
        found = soft_loss(hidden, self._module.lm_head.weight, states, scaled, counted, aim)
        positions, count = counted.sum(1).float(), weights.sum()
        mean = found.agreed / positions.clamp_min(1) * count  # parts are divided by the count
        parts = {f"agreed_{k + 1}": mean[k] for k in range(options.steps)}
        return Losses(found.total, count, found.accepted, positions, parts)

    def _row_weights(self, rows: Rows) -> Tensor:  # [N] fp32
        """By the token that a row guesses, two places on: 1 where it is the target's own, less in a prompt."""
        answer = torch.roll(rows.answers, -2, dims=1)
        weight = torch.where(answer, 1.0, self.options.prompt_weight)
        return (weight * rows.same(2)).flatten()

    def export(self, folder: Path) -> None:
        checkpoint = self.checkpoint(folder)
        target, depth = self._target, self.options.steps
        if self.options.layout == "speculators":
            save_eagle3(checkpoint, folder, "speculators", target=target, depth=depth)
            return
        save_eagle3(checkpoint, folder, "original")
        if self.options.layout == "both":
            save_eagle3(checkpoint, folder / "speculators", "speculators", target=target, depth=depth)

    def checkpoint(self, folder: Path) -> EagleCheckpoint:
        """The head as it is stored, with the weights as they stand."""
        dtype = named_dtype(self.options.kept)
        tensors = {name: tensor.to("cpu", dtype) for name, tensor in self._module.state_dict().items()}
        if self._ids is not None:
            tensors["d2t"] = self.vocab.offsets
        return EagleCheckpoint(self._module.shape, tensors, folder)

    def drafter(self, folder: Path) -> str:
        return f"eagle:{folder}?depth={self.options.depth}&width={self.options.width}"

    def refresh(self, drafter: Drafter) -> None:
        assert isinstance(drafter, EagleDrafter)
        cast(EagleHead, drafter.head).refill(self._module.state_dict())
        if self._teacher.device.type == "cuda":
            torch.cuda.synchronize(self._teacher.device)  # the engine computes on streams of its own
