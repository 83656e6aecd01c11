"""The recipe of distilled drafts: a small Llama that learns the target's distribution, token by token.

What a guess is worth depends only on a text that the target wrote: guesses behind a wrong one are thrown away. So every
position of the target's answers is a lesson, and all of them are learnt in one pass, as a language model learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from slipstream.core.errors import UnsupportedModel
from slipstream.drafters.base import Drafter
from slipstream.drafters.model import ModelDrafter
from slipstream.models.build import refill
from slipstream.models.describe import SHARES
from slipstream.models.load import EMBEDDING, LM_HEAD, load_tokenizer, named_dtype
from slipstream.models.taps import Taps
from slipstream.train.batch import Batch, Rows
from slipstream.train.chain_attention import Sequences
from slipstream.train.config import TrainConfig, read_options
from slipstream.train.distill_module import DraftModule
from slipstream.train.distill_options import DraftOptions
from slipstream.train.distill_start import begin, check_start, draft_shape
from slipstream.train.recipe import Losses, Setting, TargetShape
from slipstream.train.soft_loss import Aim, soft_loss
from slipstream.train.teacher import Teacher


class DraftRecipe:
    """A draft in training."""

    name: ClassVar[str] = "draft"
    defaults: ClassVar[Mapping[str, Any]] = {
        "steps": 4500,
        "rows": 12,
        "row_tokens": 1536,
        "optimizer": "muon",
        "learning_rate": 5e-3,
        "final_rate": 0.02,
        "warmup": 100,
        "average": 0.99,
        "temperatures": (1.0, 0.0),
        "measure_every": 600,
        "checkpoint_every": 600,
    }

    def __init__(self, options: DraftOptions, module: DraftModule, teacher: Teacher) -> None:
        self.options = options
        self._module, self._teacher = module, teacher

    @classmethod
    def check(cls, config: TrainConfig, target: TargetShape) -> None:
        options = read_options(DraftOptions, config.options)
        draft_shape(options, target)
        check_start(options, target)

    @classmethod
    def make(cls, setting: Setting) -> DraftRecipe:
        options, teacher = read_options(DraftOptions, setting.config.options), setting.teacher
        if getattr(teacher.model.get_output_embeddings(), "bias", None) is not None:
            raise UnsupportedModel(
                f"{teacher.path}: its LM head has a bias, which drafts do not share; train an EAGLE-3 head for it"
            )
        module = DraftModule(draft_shape(options, teacher), teacher.model.get_input_embeddings()).to(teacher.device)
        begin(module, options, teacher)
        if teacher.device.type == "cuda":
            module.hasten()
        return cls(options, module, teacher)

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def taps(self) -> Taps:
        return Taps()

    @property
    def shares(self) -> bool:
        """Is it stored without embeddings? One that is narrower than the target has some of its own."""
        return self.options.shares and not self._module.shape.is_reduced

    def loss(self, batch: Batch) -> Losses:
        """All rows run; those that guess a token of an answer cost logits."""
        options, rows, teacher = self.options, batch.rows, self._teacher
        weights = self._row_weights(rows)  # [N]
        chosen = (weights > 0).nonzero()[:, 0]
        normed = self._module(rows, Sequences.of(rows))[chosen]  # [n, h]
        hidden = self._module.widened(normed)[None]  # [1, n, H]
        weights = weights[chosen][None]  # [1, n]
        aim = Aim(teacher.logits, teacher.vocab_size, None, options.variation, options.sharpen, options.keyed)
        counted = weights == 1  # answers only
        said = torch.roll(rows.ids, -1, dims=1).flatten()[chosen]
        found = soft_loss(hidden, teacher.lm_head, batch.normed.flatten(0, 1)[chosen], weights, counted, aim, said)
        positions, count = counted.sum(1).float(), weights.sum()
        scale = count / positions.clamp_min(1)  # parts are divided by the count
        parts = {"agreed": found.agreed * scale, "divergence": found.divergence * scale}
        return Losses(found.total, count, found.accepted, positions, {name: part[0] for name, part in parts.items()})

    def _row_weights(self, rows: Rows) -> Tensor:  # [N] fp32
        """By the token that a row guesses, the next one: 1 where it is the target's own, less in a prompt."""
        answer = torch.roll(rows.answers, -1, dims=1)
        weight = torch.where(answer, 1.0, self.options.prompt_weight)
        return (weight * rows.same(1)).flatten()

    def export(self, folder: Path) -> None:
        dtype = named_dtype(self.options.kept)
        tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in self.tensors().items()}
        if not self.shares:
            tensors |= {name: tensor.to("cpu", dtype).clone() for name, tensor in self.words().items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self._config(dtype).save_pretrained(folder)
        if not self.shares:
            load_tokenizer(self._teacher.path).save_pretrained(folder)

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Layers and last norm as they stand, by the names that a Llama has for them."""
        own = self._module.state_dict()
        return {f"model.{name}": own[name] for name in own if name.startswith(("layers.", "norm."))}

    @torch.no_grad()
    def words(self) -> dict[str, Tensor]:
        """Embedding and LM head of the draft's own width, for one that cannot share the target's: [V, h] each."""
        ids = torch.arange(self._teacher.embedding.shape[0], device=self._teacher.device)
        head = self._teacher.lm_head.float()
        if self._module.shape.is_reduced:
            head = head @ self._module.outward.weight
        return {EMBEDDING: self._module.embed(ids), LM_HEAD: head}

    def _config(self, dtype: torch.dtype) -> LlamaConfig:
        shape, theirs = self._module.shape, self._teacher.config
        more: dict[str, Any] = {SHARES: True} if self.shares else {}
        more |= {name: getattr(theirs, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=self._teacher.embedding.shape[0],
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=shape.norm_eps,
            max_position_embeddings=shape.positions,
            rope_parameters=dict(shape.rope),
            tie_word_embeddings=False,
            dtype=str(dtype).removeprefix("torch."),
            **more,
        )

    def drafter(self, folder: Path) -> str:
        return f"model:{folder}"

    def refresh(self, drafter: Drafter) -> None:
        assert isinstance(drafter, ModelDrafter)
        tensors = self.tensors() | (self.words() if self._module.shape.is_reduced else {})
        refill(drafter.runner.model, tensors)
        if self._teacher.device.type == "cuda":
            torch.cuda.synchronize(self._teacher.device)  # the engine computes on streams of its own
