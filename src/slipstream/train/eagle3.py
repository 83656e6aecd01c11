"""The recipe of EAGLE-3 heads, trained by training-time test.

The head first reads the target's states (step 0), then its own of the step before, as it will when it guesses ahead,
and learns at every step. `Eagle3Module` computes what `models/heads/eagle.py` does, over whole texts and with gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from slipstream.core.errors import ConfigError
from slipstream.drafters.base import Drafter
from slipstream.drafters.eagle import EagleDrafter
from slipstream.models.heads.checkpoint import TargetShape as HeadTarget
from slipstream.models.heads.eagle import EagleHead
from slipstream.models.heads.eagle_files import EagleCheckpoint, EagleShape, default_taps, save_eagle3
from slipstream.models.load import named_dtype
from slipstream.models.taps import Taps
from slipstream.train.batch import Batch, Rows
from slipstream.train.chain_attention import Sequences, attend_chain
from slipstream.train.config import (
    StoredAs,
    TrainConfig,
    check_at_least,
    check_between,
    check_one_of,
    check_option,
    read_options,
)
from slipstream.train.layers import Compiled, Mlp, Norm, Projections, Rotary, init_matrices, rope_of
from slipstream.train.recipe import Losses, Setting, TargetShape
from slipstream.train.soft_loss import Aim, soft_loss
from slipstream.train.teacher import Teacher

Layouts = Literal["both", "original", "speculators"]

_VOCAB_STEP = 1024  # draft vocabularies are multiples of it, which suits kernels
_NORM_SCALE = 0.3
"""Size of the first output states relative to the target's: early guesses, mostly wrong, should not be certain."""


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """Options of `--set NAME=VALUE`. 0 and "": chosen from the target or the data."""

    steps: int = 6  # of training-time test: guesses in a row that the head is trained for
    decay: float = 0.85  # weight of each step's loss relative to the step before
    variation: float = 0.0  # weight of the total variation; the divergence has weight 1
    sharpen: float = 0.0  # weight of the target's best token in the reference distribution
    prompt_weight: float = 0.0  # weight of a prompt's tokens; an answer's have 1. Above 0 they cost compute
    taps: str = ""  # layers whose hidden states it reads, as 2,15,27
    inner: int = 0  # width of its MLP; 0: 5 times the hidden size
    heads: int = 0  # attention heads
    kv_heads: int = 0  # 0: equal to heads
    head_dim: int = 0
    draft_vocab: int = 0  # tokens that it can name; 0: chosen by coverage
    coverage: float = 0.997  # share of the answers' tokens that the draft vocabulary must cover
    most_vocab: int = 32768  # largest draft vocabulary chosen by coverage
    norm_before_residual: bool = True
    fc_norm: bool = False  # EAGLE-3.1, which some engines do not know
    norm_output: bool = False  # EAGLE-3.1
    depth: int = 6  # of trees when tau is measured
    width: int = 8
    kept: StoredAs = "fp16"  # dtype of the written weights
    layout: Layouts = "both"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "steps", "depth", "width", "most_vocab")
        check_at_least(self, 0, "inner", "heads", "kv_heads", "head_dim", "draft_vocab")
        check_between(self, 0, 1, "decay", "sharpen", "prompt_weight", "coverage")
        check_between(self, 0, 100, "variation")
        check_one_of("kept", self.kept, StoredAs)
        check_one_of("layout", self.layout, Layouts)
        check_option("taps", self.taps, all(part.strip().isdecimal() for part in self.layers), "layers such as 2,15,27")

    @property
    def layers(self) -> list[str]:
        return self.taps.split(",") if self.taps else []


class Eagle3Module(nn.Module):
    """The head's own weights: fp32, with the names that they are stored under.

    embedding: the target's, frozen and not part of the state dict.
    """

    def __init__(self, shape: EagleShape, embedding: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self._embedding = (embedding,)  # in a tuple, which keeps it from being a submodule
        tapped = shape.num_taps * shape.target_hidden
        self.fc = nn.Linear(tapped, shape.hidden, bias=False)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(shape.target_hidden, shape.norm_eps) for _ in range(shape.num_taps))
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self._rotary = Rotary(shape.hidden, shape.heads, shape.head_dim, shape.trained_positions, shape.rope)
        self._before: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = self._before_attention
        self._after: Callable[..., tuple[Tensor, Tensor]] = self._after_attention

    def forward(self, batch: Batch, steps: int, sequences: Sequences) -> list[Tensor]:  # steps of [B * T, H], normed
        """The LM head's input at each step. The row at p has the token at p + 1 and guesses the one at p + 2.

        At step k the row at p stands k guesses behind a text that ended with the token at p - k + 1. Rows with fewer
        than k tokens before them in their sequence are meaningless, and so is the last row of a sequence.
        """
        rows, shape = batch.rows, self.shape
        token = torch.roll(rows.ids, -1, dims=1).flatten()  # [N]
        words = self._layer.input_layernorm(self._embedding[0](token).float())  # [N, H]
        cos, sin = self._rotary(words, rows.positions)
        feature = self.combine(batch.taps.flatten(0, 1))
        text: tuple[Tensor, Tensor] | None = None  # K and V of step 0
        chain: list[tuple[Tensor, Tensor]] = []  # K and V of steps 1 to k, at their own rows
        found = []
        for _ in range(steps):
            x, query, key, value = self._before(feature, words, cos, sin)
            if text is None:
                text = key, value
            else:
                chain.append((key, value))
            out = attend_chain(query, *text, *_rolled(chain, key), sequences)
            x, last = self._after(x, out)
            found.append(last)
            feature = torch.roll(last if shape.norm_output else x, 1, dims=0)
        return found

    def compile_parts(self) -> None:
        """Compile all but the attention, for passes of one size on a GPU."""
        self._before, self._after = Compiled(self._before_attention), Compiled(self._after_attention)

    def _before_attention(
        self, feature: Tensor, words: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual [N, H], and queries, keys and values [N, h, D]."""
        normed = self._layer.hidden_norm(feature)
        query, key, value = self._layer.self_attn(torch.cat((words, normed), dim=1), cos, sin)
        return normed if self.shape.norm_before_residual else feature, query, key, value

    def _after_attention(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:  # [N, H] each
        """The row's state, and the LM head's input."""
        layer = self._layer
        x = x + layer.self_attn.o_proj(attended.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, self.norm(x)

    def combine(self, taps: Tensor) -> Tensor:  # [N, F] -> [N, H] fp32
        """The target's hidden states, reduced by `fc`."""
        if self.shape.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return cast(Tensor, self.fc(taps.to(self.fc.weight.dtype))).float()

    @property
    def _layer(self) -> Layer:
        return cast(Layer, self.layers[0])


class Layer(nn.Module):
    """The weights of the head's decoder layer. Its attention reads a token and a feature side by side."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Projections(2 * shape.hidden, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim)
        self.mlp = Mlp(shape.hidden, shape.inner)


def _rolled(chain: list[tuple[Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:  # each [k, N, h, D]
    """K and V of each row's chain: the last step's at the row itself, those of earlier steps rolled down to it."""
    if not chain:
        return like.new_zeros((0, *like.shape)), like.new_zeros((0, *like.shape))
    back = range(len(chain) - 1, -1, -1)
    keys = torch.stack([torch.roll(key, by, dims=0) for (key, _), by in zip(chain, back, strict=True)])
    values = torch.stack([torch.roll(value, by, dims=0) for (_, value), by in zip(chain, back, strict=True)])
    return keys, values


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
        """target: the target's name, written into the checkpoint."""
        self.options, self.vocab, self._target = options, vocab, target
        self._module, self._teacher = module, teacher
        is_whole = len(vocab.ids) == teacher.vocab_size
        self._ids = None if is_whole else vocab.ids.to(teacher.device)

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
        init_head(module, vocab, teacher, setting.counts)
        if teacher.device.type == "cuda":
            module.compile_parts()
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
        weights = rows.loss_weights(2, options.prompt_weight)  # [N]
        chosen = (weights > 0).nonzero()[:, 0]
        hidden = torch.stack([last[chosen] for last in self._module(batch, options.steps, sequences)])  # [S, n, H]
        steps = torch.arange(options.steps, device=weights.device)[:, None]  # [S, 1]
        shares = options.decay**steps
        has_chain = sequences.offset[chosen] >= steps  # [S, n]: the sequence has enough tokens before the row
        scaled = weights[chosen] * has_chain * shares / shares.sum()
        counted = has_chain & (weights[chosen] == 1)  # answers only
        states = torch.roll(batch.normed, -1, dims=1).flatten(0, 1)[chosen]  # of the row's own token
        aim = Aim(self._teacher.logits, self._teacher.vocab_size, self._ids, options.variation, options.sharpen)
        found = soft_loss(hidden, self._module.lm_head.weight, states, scaled, counted, aim)
        return found.losses(counted.sum(1).float(), weights.sum())

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
        """The head with its current weights, as it is stored."""
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
        self._teacher.synchronize()


def head_shape(options: Eagle3Options, target: TargetShape, draft_vocab: int) -> EagleShape:
    """The shape of a head for this target."""
    config: Any = target.config
    heads = options.heads or int(config.num_attention_heads)
    kv_heads = options.kv_heads or heads
    if target.hidden % heads:
        raise ConfigError(f"option heads={heads}: must divide the hidden size of the target, {target.hidden}")
    if heads % kv_heads:
        raise ConfigError(f"option kv_heads={kv_heads}: must divide heads={heads}")
    dim = options.head_dim or int(getattr(config, "head_dim", None) or target.hidden // config.num_attention_heads)
    positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    layers = tuple(int(part) for part in options.layers)
    head_target = HeadTarget(target.hidden, target.vocab_size, target.num_layers, positions)
    taps = Taps(layers) if layers else default_taps(head_target)
    taps.check(target.num_layers)
    return EagleShape(
        generation=3,
        hidden=target.hidden,
        target_hidden=target.hidden,
        inner=options.inner or 5 * target.hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        num_layers=1,
        norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        vocab=target.vocab_size,
        draft_vocab=draft_vocab,
        taps=taps,
        max_positions=positions,
        trained_positions=positions,
        rope=rope_of(config),
        fc_norm=options.fc_norm,
        norm_before_residual=options.norm_before_residual,
        norm_output=options.norm_output,
    )


@torch.no_grad()
def init_head(module: Eagle3Module, vocab: DraftVocab, teacher: Teacher, counts: Tensor) -> None:
    """Set initial weights that match the sizes of the target's states, with the target's LM head.

    The sizes are measured on a short text of frequent tokens. `fc` gives each tap the same weight and passes the last
    one through unchanged. The last norm scales every dimension to the target's size times `_NORM_SCALE`.
    """
    made = torch.Generator().manual_seed(torch.initial_seed() % (1 << 63))
    likely = counts.cpu().double() + 1e-3
    ids = torch.multinomial(likely, 128, replacement=True, generator=made)[None].to(teacher.device)
    positions = torch.arange(128, device=teacher.device)[None]
    shown = teacher.run(
        Rows(ids, positions, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)), module.shape.taps
    )
    init_matrices(module, made)
    width = module.shape.target_hidden
    parts = shown.taps[0].float().unflatten(1, (-1, width))  # [T, taps, H]
    # [taps]; the median, since the first token's states can be huge
    sizes = parts.pow(2).mean(2).sqrt().median(0).values.clamp_min(1e-6)
    blocks = module.fc.weight.unflatten(1, (-1, width))  # [H, taps, H]
    blocks[:, -1] += torch.eye(width, device=blocks.device)
    if not module.shape.fc_norm:
        blocks /= sizes[None, :, None]
    feature = module.combine(shown.taps[0])[1:]
    feature = feature / feature.pow(2).mean(1, keepdim=True).sqrt().clamp_min(1e-6)
    wanted, found = (x.float().pow(2).mean(0).sqrt() for x in (shown.normed[0, 1:], feature))  # [H] each
    ratio = wanted / found.clamp_min(1e-6)
    middle = float(ratio.median())
    module.norm.weight.copy_(_NORM_SCALE * ratio.clamp(0.2 * middle, 5 * middle))
    module.lm_head.weight.copy_(teacher.lm_head[vocab.ids.to(teacher.device)])


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """The tokens that a head can name. Few suffice, and the LM head is most of its cost; others cost one guess."""

    ids: Tensor  # [Vd] int64, ascending: the target's ids
    coverage: float  # share of the counted tokens that are among them

    @property
    def offsets(self) -> Tensor:  # [Vd] int64
        """The d2t tensor of checkpoints: target id = i + offset."""
        return self.ids - torch.arange(len(self.ids))


def check_size(size: int, vocab: int) -> None:
    if size > vocab:
        raise ConfigError(f"option draft_vocab={size}: the target's vocabulary has {vocab} tokens, it cannot be larger")


def choose_vocab(counts: Tensor, size: int, coverage: float, most: int) -> DraftVocab:
    """The most frequent tokens by `counts` [V]; ties go to the lower id.

    size: number of tokens; 0: the least multiple of 1024 that covers a share of `coverage`, up to `most`.
    """
    counts = counts.cpu().long()
    vocab, seen = len(counts), int(counts.sum())
    check_size(size, vocab)
    order = counts.sort(descending=True, stable=True)
    if not size:
        covered = order.values.cumsum(0) >= coverage * seen
        needed = int(covered.int().argmax()) + 1
        size = min(-(-needed // _VOCAB_STEP) * _VOCAB_STEP, most, vocab)
    ids = order.indices[:size].sort().values
    return DraftVocab(ids, int(counts[ids].sum()) / max(seen, 1))
