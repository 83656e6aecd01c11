"""The recipe of Medusa heads: each guesses one position further from the target's last hidden state.

The heads also read the tokens behind that state: the one that the state chose and, if chained, those guessed since. The
target is frozen and its LM head is the heads' own; only residual layers and token maps are trained. Each row of a text
is the aim of all heads: head h guesses it from the state h + 1 tokens before. Chained heads train with the text's
tokens in place of guesses, since guesses after a wrong one are thrown away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.drafters.base import Drafter
from slipstream.drafters.medusa import RANKS, ChainedMedusaDrafter, MedusaDrafter, Table, usual_table
from slipstream.models.headers import HEAD_SAFETENSORS
from slipstream.models.heads.medusa import CHAINED, chained_layers, residual_layers, with_tokens
from slipstream.models.load import named_dtype
from slipstream.models.taps import Taps
from slipstream.train.batch import NO_SEQUENCE, Batch, Rows
from slipstream.train.config import StoredAs, TrainConfig, check_between, check_one_of, check_option, read_options
from slipstream.train.recipe import Losses, Setting, TargetShape, Text
from slipstream.train.soft_loss import Aim, soft_loss
from slipstream.train.teacher import Teacher

_MOST_HEADS = 16
_INIT_SCALE = 0.1  # initial layers change the target's state little
_TEXTS_TOGETHER = 8  # in one pass
_LOGITS = 1 << 27  # computed at a time
_PRIOR_WEIGHT = 16.0  # tries that the usual table counts for
_DIGITS = 5  # stored in the config: the table that was measured with must be exactly the stored one

Hidden = Callable[[Tensor, Tensor], Tensor]
"""The LM head's input of each head [heads, n, H], from states [heads, n, H] and tokens [heads, n]."""


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Options of `--set NAME=VALUE`."""

    heads: int = 4  # positions that are guessed
    layers: int = 2  # residual layers of each head
    chained: bool = True  # each head continues the one before it and reads what that guessed
    token: bool = True  # heads also read the token that their state chose; False: as in other engines
    decay: float = 0.8  # weight of each head's loss relative to the head before
    variation: float = 0.0  # weight of the total variation; the divergence has weight 1
    sharpen: float = 0.5  # weight of the target's best token in the reference distribution
    kept: StoredAs = "fp16"  # dtype of the written weights

    def __post_init__(self) -> None:
        check_between(self, 1, _MOST_HEADS, "heads", "layers")
        check_between(self, 0, 1, "decay", "sharpen")
        check_between(self, 0, 100, "variation")
        check_option("token", self.token, self.token or not self.chained, "true for chained heads (chained=false)")
        check_one_of("kept", self.kept, StoredAs)


class MedusaModule(nn.Module):
    """The residual layers of all heads; tensors of one layer are stacked over the heads."""

    def __init__(self, options: MedusaOptions, embedding: nn.Module) -> None:
        """embedding: the target's, frozen and not part of the state dict."""
        super().__init__()
        table = cast(Tensor, embedding.weight)  # [V, H]
        heads, layers, hidden = options.heads, range(options.layers), table.shape[1]
        self._embedding = (embedding,)  # in a tuple, which keeps it from being a submodule
        self.token_maps = nn.Parameter(torch.zeros(heads, hidden, hidden)) if options.token else None
        self._scale = float(table.float().square().mean().rsqrt())  # brings tokens to the size of states
        self.weights = nn.ParameterList(torch.randn(heads, hidden, hidden) * _INIT_SCALE * hidden**-0.5 for _ in layers)
        self.biases = nn.ParameterList(torch.zeros(heads, hidden) for _ in layers)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:  # [heads, n, H], [heads, n] -> [heads, n, H]
        """The LM head's input of each head, from its states and the tokens that these chose."""
        x = x.to(self.weights[0].dtype)
        if self.token_maps is not None:
            words = cast(Tensor, self._embedding[0](tokens)).to(x.dtype)  # [heads, n, H]
            x = with_tokens(x, words, self.kept_maps)
        return residual_layers(x, list(self.weights), list(self.biases))

    def chain(self, states: Tensor, ids: Tensor) -> list[Tensor]:  # [N, H], [N] -> heads of [N, H]
        """The same for chained heads: head h's output after a row and the h + 1 text tokens that follow it."""
        x, maps, made = states.to(self.weights[0].dtype), self.kept_maps, []
        for head in range(len(maps)):
            words = cast(Tensor, self._embedding[0](torch.roll(ids, -1 - head))).to(x.dtype)  # [N, H]
            own = [w[head] for w in self.weights], [b[head] for b in self.biases]
            x = chained_layers(x, words, maps[head], *own)
            made.append(x)
        return made

    @property
    def kept_maps(self) -> Tensor:  # [heads, H, H]
        """The token maps in the scale of the embeddings, as they are stored."""
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
        """target: the target's name, written into the config."""
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
        """A row's state chooses the next token. Head h guesses that token from the state h + 1 tokens before."""
        options, rows = self.options, batch.rows
        answers, positions = rows.answers.flatten(), rows.positions.flatten()  # [N]
        following = torch.roll(rows.answers, -1, dims=1) & rows.same(1)
        # the state before a row must have chosen the row's own token: drafts follow the target's own token
        chosen = (following.flatten() & answers & (positions > 0)).nonzero()[:, 0]  # [n]
        heads = torch.arange(options.heads, device=chosen.device)[:, None]  # [heads, 1]
        first = (chosen - heads).clamp_min(0)  # the token that the head's state chose
        in_answer = (positions[chosen] > heads) & answers[first]  # [heads, n]
        normed = batch.normed.flatten(0, 1)  # [N, H]
        hidden = self._hidden(normed, rows.ids.flatten(), first)
        shares = options.decay**heads
        weights = in_answer * shares / shares.sum()
        aim = Aim(self._teacher.logits, self._teacher.vocab_size, None, options.variation, options.sharpen)
        found = soft_loss(hidden, self._teacher.lm_head, normed[chosen], weights, in_answer, aim)
        return found.losses(in_answer.sum(1).float(), in_answer[0].sum())

    def _hidden(self, normed: Tensor, ids: Tensor, first: Tensor) -> Tensor:  # [N, H], [N], [heads, n] -> [heads, n, H]
        """The LM head's input of each head. first: rows of the tokens that each head's states chose."""
        states = (first - 1).clamp_min(0)
        if not self.options.chained:
            return cast(Tensor, self._module(normed[states], ids[first]))
        made = self._module.chain(normed, ids)
        return torch.stack([x[rows] for x, rows in zip(made, states, strict=True)])

    def use_texts(self, texts: Sequence[Text]) -> None:
        self._texts = tuple(text for text in texts if len(text.answer) > 1)

    @property
    def table(self) -> Table:
        """Accuracy of each rank of each head on the held-out texts, with the current weights. Unchained heads only."""
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
        self._teacher.synchronize()


@torch.no_grad()
def measure_table(teacher: Teacher, hidden: Hidden, heads: int, texts: Sequence[Text]) -> Table:
    """How often each rank of each head is right, teacher forced over the texts: the table of the drafter's tree."""
    batches = (texts[at : at + _TEXTS_TOGETHER] for at in range(0, len(texts), _TEXTS_TOGETHER))
    return table_of(torch.cat([_ranks(teacher, hidden, heads, batch) for batch in batches], dim=1).cpu())


def table_of(ranks: Tensor) -> Table:  # [heads, n]: the token's rank among each head's guesses; below 0: no token
    """Count a rank where the text has a token and the heads before had theirs among their first guesses."""
    rows = []
    reached = torch.ones_like(ranks[0], dtype=torch.bool)
    for rank, prior in zip(ranks, usual_table(len(ranks)), strict=True):
        tried = reached & (rank >= 0)
        hits = torch.bincount(rank[tried & (rank < RANKS)], minlength=RANKS)
        weight = int(tried.sum()) + _PRIOR_WEIGHT
        chances = ((hit + _PRIOR_WEIGHT * p) / weight for hit, p in zip(hits.tolist(), prior, strict=True))
        rows.append(tuple(round(chance, _DIGITS) for chance in chances))
        reached = tried & (rank < RANKS)
    return tuple(rows)


def _ranks(teacher: Teacher, hidden: Hidden, heads: int, texts: Sequence[Text]) -> Tensor:  # [heads, n]
    rows = _text_rows(texts).to(teacher.device)
    normed = teacher.run(rows, Taps()).normed.flatten(0, 1)  # [N, H]
    ids, answers = rows.ids.flatten(), rows.answers.flatten()
    chosen = (answers & rows.same(1).flatten()).nonzero()[:, 0] - 1  # states whose token has another one behind it
    width = rows.ids.shape[1]
    found = []
    few = max(_LOGITS // (teacher.vocab_size * heads), 1)
    for part in chosen.split(few):
        out = hidden(normed[part].expand(heads, -1, -1), ids[part + 1].expand(heads, -1))  # [heads, n, H]
        ranks = []
        for head, state in enumerate(out):
            at = part + 2 + head
            inside = (part % width + 2 + head < width) & answers[at.clamp_max(len(ids) - 1)]
            token = ids[at.clamp_max(len(ids) - 1)]
            logits = teacher.logits(state)  # [n, V]
            rank = (logits > logits.gather(1, token[:, None])).sum(1)
            ranks.append(torch.where(inside, rank, -1))
        found.append(torch.stack(ranks))
    return torch.cat(found, dim=1) if found else torch.zeros(heads, 0, dtype=torch.int64, device=teacher.device)


def _text_rows(texts: Sequence[Text]) -> Rows:
    """One text a row."""
    width = max(len(text.prompt) + len(text.answer) for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    positions, segments = torch.zeros_like(ids), torch.full_like(ids, NO_SEQUENCE)
    answers = torch.zeros_like(ids, dtype=torch.bool)
    for i, text in enumerate(texts):
        size = len(text.prompt) + len(text.answer)
        ids[i, :size] = torch.tensor((*text.prompt, *text.answer))
        positions[i, :size] = torch.arange(size)
        segments[i, :size] = 0
        answers[i, len(text.prompt) : size] = True
    return Rows(ids, positions, segments, answers)
