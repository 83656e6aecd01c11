"""The target as a teacher: hidden states and logits over whole sequences, as transformers computes them.

States are made when they are needed and never stored: a million tokens of three layers would be gigabytes, and the
forward pass that makes them is a small part of a training step.
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
from slipstream.models.taps import Taps
from slipstream.train.batch import Batch, Rows
from slipstream.train.hasten import Hastened

_CLOSE = 0.02
"""How far our logits may be from the model's own, of their largest: bf16 leaves a hundredth."""


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
        """Load the model in `path`: bf16 (fp16 where it was stored so) on a GPU, fp32 on a CPU."""
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
        except ModelError as error:  # soft caps and sinks are not in torch's attention
            if "attention implementation" not in str(error):
                raise
            model = load(attention="eager")
        return Teacher(model, config, path)

    @property
    def embedding(self) -> Tensor:  # [V, H]
        """The input embeddings' weight, frozen."""
        return cast(Tensor, self.model.get_input_embeddings().weight)

    @property
    def lm_head(self) -> Tensor:  # [V, H]
        """The LM head's weight, frozen."""
        return cast(Tensor, self._lm_head.weight)

    def layer(self, number: int) -> nn.Module:
        """One of its decoder layers, counted from 0."""
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

    @torch.no_grad()
    def look(self, rows: Rows, taps: Taps) -> Batch:
        """The target's states at these rows, which are on its device."""
        taps.check(self.num_layers)
        kept: dict[int, Tensor] = {}
        hooks = []
        if 0 in taps.layers:
            hooks.append(self._layers[0].register_forward_pre_hook(_Before(kept), with_kwargs=True))
        for depth in taps.layers:
            if depth:
                hooks.append(self._layers[depth - 1].register_forward_hook(_Behind(kept, depth)))
        try:
            # rows hold several sequences: transformers parts them where positions begin anew
            with torch.autocast(self.device.type, enabled=False):
                out = self.trunk(input_ids=rows.ids, position_ids=rows.positions, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        normed = cast(Tensor, out[0])  # [B, T, H]
        parts = [kept[depth] for depth in taps.layers] + [normed] * taps.normed
        states = torch.cat(parts, dim=-1) if parts else normed[..., :0]
        return Batch(rows, states, normed)

    def hasten(self, rows: int, row_tokens: int) -> None:
        """Compile the layers, for passes of this size on a GPU. Others are computed as before."""
        for layer in self._layers:
            # its function and not the module: hooks stay outside, so that one compilation serves all layers
            layer.forward = Hastened(layer.forward, (rows, row_tokens))

    def logits(self, normed: Tensor) -> Tensor:  # [..., H] -> [..., V] fp32
        """What the target says behind these states. Wide: hand in some positions at a time."""
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
        """What comes between the last norm and the logits differs by model: compare with the model's own."""
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        positions = torch.arange(8, device=self.device)[None]
        rows = Rows(ids, positions, torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool))
        ours = self.logits(self.look(rows, Taps()).normed)
        theirs = cast(Tensor, self.model(input_ids=ids, position_ids=positions, use_cache=False).logits).float()
        if not bool((ours - theirs).abs().max() <= _CLOSE * theirs.abs().max().clamp(min=1.0)):
            raise UnsupportedModel(
                f"{self.path}: {type(self.model).__name__} does something to its logits that training does not know; "
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
