"""The recipe of Medusa heads: each learns to guess one position further from the target's last hidden state, and from
the tokens behind it: the one that this state chose, and where heads are chained those that were guessed since.

The target is frozen, and its LM head is the heads' own: only residual layers and maps of tokens are trained. A row is a
position of the text; what the target says there is the aim of all heads, each of which began with the state so many
tokens before. Chained heads learn with the text's own tokens in the place of guesses: behind a wrong one nobody asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.drafters.base import Drafter
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.drafters.medusa_chain import ChainedMedusaDrafter
from slipstream.drafters.medusa_tree import Table, usual_table
from slipstream.models.headers import HEAD_SAFETENSORS
from slipstream.models.heads.medusa import CHAINED, chained_layers, residual_layers, with_tokens
from slipstream.models.load import named_dtype
from slipstream.models.taps import Taps
from slipstream.train.batch import Batch
from slipstream.train.config import TrainConfig, read_options
from slipstream.train.medusa_options import MedusaOptions
from slipstream.train.medusa_table import measure_table
from slipstream.train.recipe import Losses, Setting, TargetShape, Text
from slipstream.train.soft_loss import Aim, soft_loss
from slipstream.train.teacher import Teacher

_MODEST = 0.1
"""Fresh layers add little: a head begins with what the target says."""


class MedusaModule(nn.Module):
    """The residual layers of all heads, those of one place in one tensor."""

    def __init__(self, options: MedusaOptions, embedding: nn.Module) -> None:
        """embedding: the target's, frozen, no part of the state dict."""
        super().__init__()
        table = cast(Tensor, embedding.weight)  # [V, H]
        heads, everyone, hidden = options.heads, range(options.layers), table.shape[1]
        self._embedding = (embedding,)  # kept from being a child
        self.token_maps = nn.Parameter(torch.zeros(heads, hidden, hidden)) if options.token else None
        self._scale = float(table.float().square().mean().rsqrt())  # so that tokens count as much as states
        self.weights = nn.ParameterList(torch.randn(heads, hidden, hidden) * _MODEST * hidden**-0.5 for _ in everyone)
        self.biases = nn.ParameterList(torch.zeros(heads, hidden) for _ in everyone)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:  # [heads, n, H], [heads, n] -> [heads, n, H]
        """What the LM head reads of each head, for the states that each is given and the tokens that these chose."""
        x = x.to(self.weights[0].dtype)
        if self.token_maps is not None:
            words = cast(Tensor, self._embedding[0](tokens)).to(x.dtype)  # [heads, n, H]
            x = with_tokens(x, words, self.kept_maps)
        return residual_layers(x, list(self.weights), list(self.biases))

    def chain(self, states: Tensor, ids: Tensor) -> list[Tensor]:  # [N, H], [N] -> heads of [N, H]
        """The same of chained heads, of a text: what head h makes behind a row, and h + 1 tokens that follow it."""
        x, maps, made = states.to(self.weights[0].dtype), self.kept_maps, []
        for head in range(len(maps)):
            words = cast(Tensor, self._embedding[0](torch.roll(ids, -1 - head))).to(x.dtype)  # [N, H]
            own = [w[head] for w in self.weights], [b[head] for b in self.biases]
            x = chained_layers(x, words, maps[head], *own)
            made.append(x)
        return made

    @property
    def kept_maps(self) -> Tensor:  # [heads, H, H]
        """Maps of embeddings as they are, which are small numbers in most targets."""
        assert self.token_maps is not None
        return self.token_maps * self._scale


class MedusaRecipe:
    """Medusa heads in training."""

    name: ClassVar[str] = "medusa"
    defaults: ClassVar[Mapping[str, Any]] = {
        "steps": 1600,
        "rows": 8,
        "row_tokens": 2048,
        "optimizer": "muon",
        "learning_rate": 1.5e-3,
        "final_rate": 0.02,
        "warmup": 50,
        "average": 0.99,
        "temperatures": (1.0, 0.0),
        "measure_every": 400,
        "measure_prompts": 64,
        "checkpoint_every": 400,
    }

    def __init__(self, options: MedusaOptions, module: MedusaModule, teacher: Teacher, target: str) -> None:
        """target: what the target is called, for readers of the heads."""
        self.options, self._module, self._teacher, self._target = options, module, teacher, target
        self._texts: tuple[Text, ...] = ()

    @classmethod
    def check(cls, config: TrainConfig, target: TargetShape) -> None:
        read_options(MedusaOptions, config.options)

    @classmethod
    def make(cls, setting: Setting) -> MedusaRecipe:
        options, teacher = read_options(MedusaOptions, setting.config.options), setting.teacher
        module = MedusaModule(options, teacher.model.get_input_embeddings()).to(teacher.device)
        return cls(options, module, teacher, setting.config.target)

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def taps(self) -> Taps:
        return Taps()

    def loss(self, batch: Batch) -> Losses:
        """A row's state says the token behind it. Head h guesses that token from the state h + 1 tokens before."""
        options, rows = self.options, batch.rows
        answers, positions = rows.answers.flatten(), rows.positions.flatten()  # [N]
        following = torch.roll(rows.answers, -1, dims=1) & rows.same(1)
        # the state before a row must have chosen the row's own token: drafts begin behind the target's own
        chosen = (following.flatten() & answers & (positions > 0)).nonzero()[:, 0]  # [n]
        heads = torch.arange(options.heads, device=chosen.device)[:, None]  # [heads, 1]
        first = (chosen - heads).clamp_min(0)  # the token that the head's state chose
        there = (positions[chosen] > heads) & answers[first]  # [heads, n]: it lies in the same answer
        normed = batch.normed.flatten(0, 1)  # [N, H]
        hidden = self._hidden(normed, rows.ids.flatten(), first)
        shares = options.decay**heads
        weights = there * shares / shares.sum()
        aim = Aim(self._teacher.logits, self._teacher.vocab_size, None, options.variation, options.sharpen)
        found = soft_loss(hidden, self._teacher.lm_head, normed[chosen], weights, there, aim)
        seen, count = there.sum(1).float(), there[0].sum()
        mean = found.agreed / seen.clamp_min(1) * count  # parts are divided by the count
        parts = {f"agreed_{k + 1}": mean[k] for k in range(options.heads)}
        return Losses(found.total, count, found.accepted, seen, parts)

    def _hidden(self, normed: Tensor, ids: Tensor, first: Tensor) -> Tensor:  # [N, H], [N], [heads, n] -> [heads, n, H]
        """What the LM head reads of each head. first: for each head the rows of the tokens that its states chose."""
        states = (first - 1).clamp_min(0)
        if not self.options.chained:
            return cast(Tensor, self._module(normed[states], ids[first]))
        made = self._module.chain(normed, ids)
        return torch.stack([x[rows] for x, rows in zip(made, states, strict=True)])

    def hear(self, texts: Sequence[Text]) -> None:
        self._texts = tuple(text for text in texts if len(text.answer) > 1)

    @property
    def table(self) -> Table:
        """How often each guess is right on the held-out texts, with the weights as they stand. Of chained heads nobody
        asks: what they guess depends on the guesses before."""
        if not self._texts:
            return usual_table(self.options.heads)
        return measure_table(self._teacher, self._module, self.options.heads, self._texts)

    def export(self, folder: Path) -> None:
        options, dtype = self.options, named_dtype(self.options.kept)
        tensors: dict[str, Tensor] = {}
        for kind, layers in (("weight", self._module.weights), ("bias", self._module.biases)):
            for i, tensor in enumerate(layers):
                for head in range(options.heads):
                    tensors[f"{head}.{i}.linear.{kind}"] = tensor[head].detach().to("cpu", dtype).clone()
        if options.token:
            maps = self._module.kept_maps.detach().to("cpu", dtype)
            tensors |= {f"{head}.token.weight": maps[head].clone() for head in range(options.heads)}
        config = {
            "model_type": "medusa",
            "base_model_name_or_path": self._target,
            "medusa_num_heads": options.heads,
            "medusa_num_layers": options.layers,
            "hidden_size": self._teacher.hidden,
            "vocab_size": self._teacher.vocab_size,
            **({CHAINED: True} if options.chained else {"medusa_acceptance": self.table}),
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / HEAD_SAFETENSORS[0], metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def drafter(self, folder: Path) -> str:
        return f"medusa:{folder}"

    def refresh(self, drafter: Drafter) -> None:
        assert isinstance(drafter, MedusaDrafter | ChainedMedusaDrafter)
        module = self._module
        maps = module.kept_maps if self.options.token else None
        drafter.heads.refill(list(module.weights), list(module.biases), maps)
        if isinstance(drafter, MedusaDrafter):
            drafter.adopt(self.table)
        if self._teacher.device.type == "cuda":
            torch.cuda.synchronize(self._teacher.device)  # the engine computes on streams of its own
