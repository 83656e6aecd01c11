"""The recipe of distilled drafts: a small Llama that learns the target's distribution over its own answers.

The draft reads and speaks through the target's embeddings. Guesses after a wrong one are thrown away, so it needs to be
right only after text that the target wrote: every position of an answer is one example, and all are learnt in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from slipstream.core.errors import ConfigError, UnsupportedModel
from slipstream.drafters.base import Drafter
from slipstream.drafters.model import ModelDrafter
from slipstream.models.build import refill
from slipstream.models.describe import SHARES
from slipstream.models.load import EMBEDDING, LM_HEAD, load_tokenizer, named_dtype
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

_NONE = "none"
_NORM_SCALE = 0.3
"""Size of the first output states relative to the target's: early guesses, mostly wrong, should not be certain."""


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options of `--set NAME=VALUE`. 0 and "": the target's value, or chosen from it."""

    layers: int = 3
    hidden: int = 0  # narrower than the target: embeddings are reduced by learnt projections
    inner: int = 0  # width of the MLPs; 0: the target's, or in the same proportion
    heads: int = 0  # attention heads; 0: the target's, or the number of its size that fits
    kv_heads: int = 0
    head_dim: int = 0
    start: str = ""  # initial weights: target layers, such as 0,1,2; the folder of a draft; none: random
    variation: float = 1.0  # weight of the total variation; the divergence has weight 1
    keyed: float = 0.0  # weight of the probability that a keyed draw misses the text's token
    sharpen: float = 0.0  # weight of the target's best token in the reference distribution
    prompt_weight: float = 0.0  # weight of a prompt's tokens; an answer's have 1. Above 0 they cost compute
    shares: bool = True  # stored without embedding and LM head; False: with both, and the tokenizer
    kept: StoredAs = "fp16"  # dtype of the written weights

    def __post_init__(self) -> None:
        check_at_least(self, 1, "layers")
        check_at_least(self, 0, "hidden", "inner", "heads", "kv_heads", "head_dim")
        check_between(self, 0, 1, "sharpen", "prompt_weight")
        check_between(self, 0, 100, "variation", "keyed")
        check_one_of("kept", self.kept, StoredAs)
        known = self.start in ("", _NONE) or self.start_layers or self.start_folder.is_dir()
        check_option("start", self.start, bool(known), "layers such as 0,1,2, the folder of a draft, or none")

    @property
    def start_layers(self) -> list[int]:
        """The target's layers to start from; empty if `start` is something else."""
        parts = self.start.split(",")
        return [int(part) for part in parts] if all(part.strip().isdecimal() for part in parts) else []

    @property
    def start_folder(self) -> Path:
        """The folder of the draft to start from, if `starts_as_draft`."""
        return Path(self.start).expanduser()

    @property
    def starts_as_draft(self) -> bool:
        return self.start not in ("", _NONE) and not self.start_layers


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The shape of a Llama for one target."""

    hidden: int
    target_hidden: int
    inner: int  # width of the MLPs
    heads: int
    kv_heads: int
    head_dim: int
    num_layers: int
    norm_eps: float
    vocab: int  # the target's
    positions: int
    rope: Mapping[str, Any]  # as transformers' `rope_parameters`

    @property
    def is_reduced(self) -> bool:
        return self.hidden != self.target_hidden


class DraftModule(nn.Module):
    """The draft's own weights: fp32, with the names that they are stored under.

    A draft narrower than its target has a projection after the embedding and one before the LM head; export multiplies
    each into its table. embedding: the target's, frozen and not part of the state dict.
    """

    def __init__(self, shape: DraftShape, embedding: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self._embedding = (embedding,)  # in a tuple, which keeps it from being a submodule
        self._rotary = Rotary(shape.hidden, shape.heads, shape.head_dim, shape.positions, shape.rope)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        if shape.is_reduced:
            self.inward = nn.Linear(shape.target_hidden, shape.hidden, bias=False)
            self.outward = nn.Linear(shape.hidden, shape.target_hidden, bias=False)

    def forward(self, rows: Rows, sequences: Sequences) -> Tensor:  # [B * T, h], normed
        """The states before the LM head. The row at p has read the token at p and guesses the one at p + 1."""
        x = self.embed(rows.ids.flatten())
        cos, sin = self._rotary(x, rows.positions)
        for layer in self.layers:
            x = layer(x, cos, sin, sequences)
        return cast(Tensor, self.norm(x))

    def compile_layers(self) -> None:
        """Compile all but the attention, for passes of one size on a GPU."""
        for layer in self.layers:
            cast(DraftLayer, layer).compile_parts()

    def embed(self, ids: Tensor) -> Tensor:  # [N] -> [N, h] fp32
        words = self._embedding[0](ids).float()
        return cast(Tensor, self.inward(words).float() if self.shape.is_reduced else words)

    def widened(self, normed: Tensor) -> Tensor:  # [n, h] -> [n, H]
        """The input of the target's LM head."""
        return cast(Tensor, self.outward(normed) if self.shape.is_reduced else normed)


class DraftLayer(nn.Module):
    """A Llama's decoder layer."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Projections(shape.hidden, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape.hidden, shape.inner)
        self._before: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._before_attention
        self._after: Callable[..., Tensor] = self._after_attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:  # [N, h]
        query, key, value = self._before(x, cos, sin)
        no_chain = key.new_zeros((0, *key.shape))
        return self._after(x, attend_chain(query, key, value, no_chain, no_chain, sequences))

    def compile_parts(self) -> None:
        self._before, self._after = Compiled(self._before_attention), Compiled(self._after_attention)

    def _before_attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = self.self_attn(self.input_layernorm(x), cos, sin)  # each [N, heads, D]
        return found

    def _after_attention(self, x: Tensor, attended: Tensor) -> Tensor:  # [N, h], [N, heads, D] -> [N, h]
        x = x + self.self_attn.o_proj(attended.flatten(1))
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


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
        init_draft(module, options, teacher)
        if teacher.device.type == "cuda":
            module.compile_layers()
        return cls(options, module, teacher)

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def taps(self) -> Taps:
        return Taps()

    @property
    def shares(self) -> bool:
        """True if it is stored without embeddings. A draft narrower than the target needs its own."""
        return self.options.shares and not self._module.shape.is_reduced

    def loss(self, batch: Batch) -> Losses:
        """All rows run; only those with a weight go through the LM head."""
        options, rows, teacher = self.options, batch.rows, self._teacher
        weights = rows.loss_weights(1, options.prompt_weight)  # [N]
        chosen = (weights > 0).nonzero()[:, 0]
        normed = self._module(rows, Sequences.of(rows))[chosen]  # [n, h]
        hidden = self._module.widened(normed)[None]  # [1, n, H]
        weights = weights[chosen][None]  # [1, n]
        aim = Aim(teacher.logits, teacher.vocab_size, None, options.variation, options.sharpen, options.keyed)
        counted = weights == 1  # answers only
        text = torch.roll(rows.ids, -1, dims=1).flatten()[chosen]
        found = soft_loss(hidden, teacher.lm_head, batch.normed.flatten(0, 1)[chosen], weights, counted, aim, text)
        positions, count = counted.sum(1).float(), weights.sum()
        scale = count / positions.clamp_min(1)  # the loop divides parts by the count
        parts = {"agreed": found.agreed * scale, "divergence": found.divergence * scale}
        return Losses(found.total, count, found.accepted, positions, {name: part[0] for name, part in parts.items()})

    def export(self, folder: Path) -> None:
        dtype = named_dtype(self.options.kept)
        tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in self.tensors().items()}
        if not self.shares:
            tensors |= {name: tensor.to("cpu", dtype).clone() for name, tensor in self.tables().items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self._config(dtype).save_pretrained(folder)
        if not self.shares:
            load_tokenizer(self._teacher.path).save_pretrained(folder)

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Layers and last norm, under a Llama's names."""
        own = self._module.state_dict()
        return {f"model.{name}": own[name] for name in own if name.startswith(("layers.", "norm."))}

    @torch.no_grad()
    def tables(self) -> dict[str, Tensor]:
        """Embedding and LM head of the draft's own width, [V, h] each, for a draft that cannot share the target's."""
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
        refill(drafter.runner.model, self.tensors() | (self.tables() if self._module.shape.is_reduced else {}))
        self._teacher.synchronize()


def draft_shape(options: DraftOptions, target: TargetShape) -> DraftShape:
    """The shape of a draft for this target."""
    config: Any = target.config
    wide = target.hidden
    hidden = options.hidden or wide
    if hidden > wide:
        raise ConfigError(f"option hidden={hidden}: must be at most the target's hidden size, {wide}")
    dim = options.head_dim or int(getattr(config, "head_dim", None) or wide // config.num_attention_heads)
    target_heads = int(config.num_attention_heads)
    target_kv = int(getattr(config, "num_key_value_heads", None) or target_heads)
    target_inner = int(getattr(config, "intermediate_size", None) or 4 * wide)
    if hidden == wide:
        heads, kv_heads = options.heads or target_heads, options.kv_heads or target_kv
        inner = target_inner
    else:
        heads = options.heads or max(hidden // dim, 1)
        group = max(target_heads // target_kv, 1)
        kv_heads = options.kv_heads or (heads // group if heads % group == 0 else heads)
        inner = -(-target_inner * hidden // wide // 64) * 64  # the target's proportion, in multiples of 64
    if heads % kv_heads:
        raise ConfigError(f"option kv_heads={kv_heads}: must divide heads={heads}")
    return DraftShape(
        hidden=hidden,
        target_hidden=wide,
        inner=options.inner or inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        num_layers=options.layers,
        norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        vocab=target.vocab_size,
        positions=int(getattr(config, "max_position_embeddings", None) or 2048),
        rope=rope_of(config),
    )


@torch.no_grad()
def init_draft(module: DraftModule, options: DraftOptions, teacher: Teacher) -> list[int]:
    """Set the initial weights. Returns the target layers that they were copied from, if any.

    The target's first layers read the draft's input, and its LM head makes some sense of their output; late layers are
    useless without the earlier ones. A wider MLP starts as the target's, its new part without effect. A narrower draft
    starts from the directions in which embeddings differ most.
    """
    shape = module.shape
    init_matrices(module, torch.Generator().manual_seed(torch.initial_seed() % (1 << 63)))
    if shape.is_reduced:
        words = teacher.embedding.float()
        basis = torch.linalg.eigh(words.T @ words).eigenvectors[:, -shape.hidden :]  # [H, h]
        module.inward.weight.copy_(basis.T)
        module.outward.weight.copy_(basis)
    last = _last_norm(teacher)
    if last is not None:
        size = last.pow(2).mean().sqrt()
        module.norm.weight.copy_(_NORM_SCALE * (size if shape.is_reduced else last))
    if options.starts_as_draft:
        ours = module.state_dict()
        _copy(ours, _stored(options.start_folder, ours))
        return []
    check_start(options, teacher)
    wanted = options.start_layers or list(range(min(shape.num_layers, teacher.num_layers)))
    ours = module.layers[0].state_dict()
    fits = len(wanted) == len(module.layers) and all(_fits(teacher.layer(n).state_dict(), ours) for n in wanted)
    if options.start == _NONE or not fits:
        if options.start_layers:
            raise ConfigError(
                f"option start={options.start!r}: the target's layers have other tensors than the draft's (hidden, "
                "heads, kv_heads, head_dim must be its own, inner at least, and its layers a Llama's); use start=none"
            )
        return []
    for layer, number in zip(module.layers, wanted, strict=True):
        _copy(layer.state_dict(), teacher.layer(number).state_dict())
    return wanted


def check_start(options: DraftOptions, target: TargetShape) -> None:
    """Raise `ConfigError` if a draft cannot start from `options.start`. Cheap: called before data is made."""
    if options.starts_as_draft:
        with torch.device("meta"):
            ours = DraftModule(draft_shape(options, target), nn.Identity()).state_dict()
        _stored(options.start_folder, ours)
    wanted = options.start_layers
    if not wanted:
        return
    if len(wanted) != options.layers:
        raise ConfigError(f"option start={options.start!r}: must name {options.layers} layers (option layers)")
    if max(wanted) >= target.num_layers:
        raise ConfigError(f"option start={options.start!r}: must be below {target.num_layers}, the target's layers")


def _stored(folder: Path, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the exported draft in `folder`. Its MLPs may be narrower than ours."""
    try:
        stored = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"option start={str(folder)!r}: has no readable model.safetensors ({error})") from error
    theirs = {
        name.removeprefix("model."): tensor for name, tensor in stored.items() if name not in (EMBEDDING, LM_HEAD)
    }
    if not _fits(theirs, ours):
        raise ConfigError(
            f"option start={str(folder)!r}: its tensors do not fit this draft; layers, hidden, heads, kv_heads "
            "and head_dim must be its own, inner at least, and both as wide as the target"
        )
    return theirs


def _fits(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> bool:
    """True if names and shapes agree; the draft's MLPs may be wider."""
    return theirs.keys() == ours.keys() and all(
        theirs[name].dim() == own.dim()
        and all(small <= large for small, large in zip(theirs[name].shape, own.shape, strict=True))
        and (".mlp." in f".{name}" or theirs[name].shape == own.shape)
        for name, own in ours.items()
    )


def _copy(ours: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy weights. The new part of a wider MLP gets an output of 0."""
    for name, theirs in source.items():
        own = ours[name]
        if name.endswith("down_proj.weight"):
            own[:, theirs.shape[1] :] = 0
        own[tuple(slice(size) for size in theirs.shape)] = theirs.float()


def _last_norm(teacher: Teacher) -> Tensor | None:  # [H] fp32
    norm = getattr(teacher.trunk, "norm", None)
    weight = getattr(norm, "weight", None) if isinstance(norm, nn.Module) else None
    return weight.detach().float() if isinstance(weight, Tensor) and weight.shape == (teacher.hidden,) else None
