"""The target as a teacher: hidden states and logits of whole sequences, computed by transformers.

States are computed on demand. On one GPU with enough memory they are kept for later epochs: the target is frozen, and
13 million tokens of one layer 576 wide take 15 GB. Several ranks keep nothing, since each sees other sequences in every
epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream.core.errors import ModelError, UnsupportedModel
from slipstream.models.build import decoder_layers
from slipstream.models.describe import check_supported
from slipstream.models.load import load_config, load_weights, pick_device, pick_dtype
from slipstream.models.paths import Progress
from slipstream.models.taps import Taps
from slipstream.train.batch import Batch, Rows
from slipstream.train.config import TrainConfig
from slipstream.train.layers import Compiled
from slipstream.train.ranks import Ranks

_CLOSE = 0.02  # largest difference between our logits and the model's, relative to the largest; bf16 reaches 0.01


class Teacher:
    """The target, frozen."""

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig, path: Path) -> None:
        self.model, self.config, self.path = model, config, path
        self.num_layers = cast(int, config.num_hidden_layers)
        self.hidden = cast(int, config.hidden_size)
        self.trunk, self._layers = decoder_layers(model, self.num_layers)
        self._lm_head = cast(nn.Module, model.get_output_embeddings())
        self._check_logits()

    @staticmethod
    def open(path: Path, device: str | torch.device = "auto", *, trust_remote_code: bool = False) -> Teacher:
        """Load the model: in bf16 on a GPU (fp16 if stored so), in fp32 on a CPU."""
        where = pick_device(device) if isinstance(device, str) else device
        config = load_config(path, trust_remote_code)
        check_supported(config)
        load = partial(
            load_weights,
            path,
            dtype=pick_dtype("auto", where, config),
            device=where,
            trust_remote_code=trust_remote_code,
        )
        try:
            model = load(attention="sdpa")
        except ModelError as error:  # torch's attention has no soft caps or sinks
            if "attention implementation" not in str(error):
                raise
            model = load(attention="eager")
        return Teacher(model, config, path)

    @property
    def embedding(self) -> Tensor:  # [V, H]
        """The frozen input embeddings."""
        return cast(Tensor, self.model.get_input_embeddings().weight)

    @property
    def lm_head(self) -> Tensor:  # [V, H]
        """The frozen LM head."""
        return cast(Tensor, self._lm_head.weight)

    def layer(self, number: int) -> nn.Module:
        """Decoder layer `number`, from 0."""
        return self._layers[number]

    @property
    def vocab_size(self) -> int:
        return self.lm_head.shape[0]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def synchronize(self) -> None:
        """Wait for the device before an engine reads new weights: it computes on streams of its own."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def run(self, rows: Rows, taps: Taps) -> Batch:
        """The target's states at these rows, which must be on its device."""
        taps.check(self.num_layers)
        kept: dict[int, Tensor] = {}
        hooks = []
        if 0 in taps.layers:
            hooks.append(self._layers[0].register_forward_pre_hook(_Before(kept), with_kwargs=True))
        for depth in taps.layers:
            if depth:
                hooks.append(self._layers[depth - 1].register_forward_hook(_Behind(kept, depth)))
        try:
            # transformers separates the sequences of a row where positions start again
            with torch.autocast(self.device.type, enabled=False):
                out = self.trunk(input_ids=rows.ids, position_ids=rows.positions, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        normed = cast(Tensor, out[0])  # [B, T, H]
        parts = [kept[depth] for depth in taps.layers] + [normed] * taps.normed
        states = torch.cat(parts, dim=-1) if parts else normed[..., :0]
        return Batch(rows, states, normed)

    def compile(self, rows: int, row_tokens: int) -> None:
        """Compile the layers for passes of this size; others run as before."""
        for layer in self._layers:
            # compile the function, not the module: hooks stay outside, and one compilation serves all layers
            layer.forward = Compiled(layer.forward, (rows, row_tokens))

    def logits(self, normed: Tensor) -> Tensor:  # [..., H] -> [..., V] fp32
        """The target's logits. Pass few positions at a time: the result is large."""
        with torch.autocast(self.device.type, enabled=False):
            logits = torch.as_tensor(self._lm_head(normed.to(self.dtype))).float()
        if scaling := getattr(self.config, "logits_scaling", None):  # Granite
            logits = logits / float(scaling)
        if scale := getattr(self.config, "logit_scale", None):  # Cohere
            logits = logits * float(scale)
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma 2
            logits = torch.tanh(logits / float(cap)) * float(cap)
        return logits

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Compare with the model's own logits: families differ in what follows the last norm."""
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        positions = torch.arange(8, device=self.device)[None]
        rows = Rows(ids, positions, torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool))
        ours = self.logits(self.run(rows, Taps()).normed)
        theirs = cast(Tensor, self.model(input_ids=ids, position_ids=positions, use_cache=False).logits).float()
        if not bool((ours - theirs).abs().max() <= _CLOSE * theirs.abs().max().clamp(min=1.0)):
            raise UnsupportedModel(
                f"{self.path}: {type(self.model).__name__} changes its logits in a way that training does not know; "
                "drafters cannot be trained for it"
            )


class _Behind:
    def __init__(self, kept: dict[int, Tensor], depth: int) -> None:
        self.kept, self.depth = kept, depth

    def __call__(self, layer: nn.Module, given: Any, out: Any) -> None:
        self.kept[self.depth] = out[0] if isinstance(out, tuple) else out


class _Before:
    def __init__(self, kept: dict[int, Tensor]) -> None:
        self.kept = kept

    def __call__(self, layer: nn.Module, given: Sequence[Any], named: dict[str, Any]) -> None:
        self.kept[0] = given[0] if given else named["hidden_states"]


_PART = 0.5  # largest share of the memory free at the start; the drafter's own passes need the rest
_PADDING = -1  # the last row of the kept states


class States:
    """The target's states at training rows. kept: number of corpus tokens whose states are kept; 0: none."""

    def __init__(self, teacher: Teacher, taps: Taps, kept: int = 0) -> None:
        self._teacher, self._taps, self.device = teacher, taps, teacher.device
        self._width = taps.width(teacher.hidden)
        self._plane: Tensor | None = None
        if kept:
            shape = (kept + 1, self._width + (0 if taps.normed else teacher.hidden))
            self._plane = torch.zeros(shape, dtype=teacher.dtype, device=teacher.device)
            self._known = torch.zeros(kept + 1, dtype=torch.bool)  # on the host, to avoid synchronizing
            self._known[_PADDING] = True

    @staticmethod
    def bytes(teacher: Teacher, taps: Taps, tokens: int) -> int:
        """Memory for the kept states of `tokens` tokens."""
        numbers = taps.width(teacher.hidden) + (0 if taps.normed else teacher.hidden)
        return (tokens + 1) * numbers * teacher.dtype.itemsize

    def release(self) -> bool:
        """Free the kept states for good. Returns False if there were none."""
        kept, self._plane = self._plane is not None, None
        return kept

    def run(self, rows: Rows) -> Batch:
        """The target's states at these rows, which are on the host."""
        moved, plane = rows.to(self.device), self._plane
        if plane is None or rows.places is None:
            return self._teacher.run(moved, self._taps)
        assert moved.places is not None
        if bool(self._known[rows.places].all()):
            found = plane[moved.places]  # [B, T, F + H]
            taps, normed = found[..., : self._width], found[..., -self._teacher.hidden :]
            return Batch(moved, taps.contiguous(), normed.contiguous())
        made = self._teacher.run(moved, self._taps)
        parts = (made.taps,) if self._taps.normed else (made.taps, made.normed)
        plane[moved.places] = torch.cat(parts, dim=-1)
        plane[_PADDING] = 0  # every padding token was written there
        self._known[rows.places] = True
        return made


def states_for(config: TrainConfig, teacher: Teacher, taps: Taps, tokens: int, ranks: Ranks, say: Progress) -> States:
    """The states of a run over `tokens` tokens, kept if that pays and fits."""
    size = States.bytes(teacher, taps, tokens)
    if ranks.world > 1 or not worth_keeping(config, tokens, size, teacher.device):
        return States(teacher, taps)
    say(f"keeping the target's states once computed: {size / 1e9:.1f} GB for {tokens:,} tokens")
    return States(teacher, taps, tokens)


def worth_keeping(config: TrainConfig, tokens: int, size: int, device: torch.device) -> bool:
    """True on a GPU with room for `size` bytes, if the run sees tokens more than once.

    Never on a CPU, where a resumed run must end with the same bits as an uninterrupted one.
    """
    seen = config.steps * config.accumulate * config.rows * config.row_tokens
    return device.type == "cuda" and seen > tokens and size <= _PART * _free(device)


def _free(device: torch.device) -> int:
    """Memory that torch can still allocate, its own reserve included."""
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + spare
