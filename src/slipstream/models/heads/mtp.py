"""Native multi-token prediction: modules that were trained with the target and lie in its own checkpoint.

A module joins a token with the hidden state before it, runs one decoder layer of the target's own kind, and norms the
result: the target's LM head reads from it the token after. That result is the hidden state for the next guess, by the
next module, or by the last one again. The decoder layer is transformers' class, with our attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from slipstream.core.errors import UnsupportedModel
from slipstream.kv.cache import LayerShape
from slipstream.models import attention
from slipstream.models.attention import PassContext, ProbeContext
from slipstream.models.fuse import pack
from slipstream.models.heads.base import HeadStates
from slipstream.models.heads.checkpoint import read_config
from slipstream.models.heads.mtp_files import EMBEDDINGS, LM_HEADS, own_tensor, read_modules
from slipstream.models.heads.mtp_module import MtpModule, build_modules
from slipstream.models.runner import Runner
from slipstream.models.taps import Taps


class MtpHead(nn.Module):
    """A `Head` of one or several modules. embedding, lm_head: the target's, or the checkpoint's own if other."""

    taps = Taps(normed=True)
    vocab: Tensor | None = None

    def __init__(
        self,
        modules: Sequence[MtpModule],
        rotary: nn.Module,
        embedding: nn.Module,
        lm_head: nn.Module,
        max_positions: int,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.rotary = rotary
        self._others = (embedding, lm_head)  # in a tuple: they are the target's, and no part of this
        table = cast(Tensor, embedding.weight)
        self.dtype, self._device, self._known_ids = table.dtype, table.device, table.shape[0]
        self.hidden_size = table.shape[1]
        self.max_positions = max_positions
        self.weights_bytes = sum(p.numel() * p.element_size() for p in self.parts.parameters())
        self.layers = self._probe()

    @staticmethod
    def open(folder: Path, target: Runner) -> MtpHead:
        """The modules in the target's own `folder`."""
        checkpoint = read_modules(folder, read_config(folder))
        model = target.model
        built = build_modules(checkpoint, type(model), model.config, target.dtype, target.device)
        embedding = own_tensor(checkpoint, checkpoint.layout.embedding, EMBEDDINGS)
        head = own_tensor(checkpoint, checkpoint.layout.lm_head, LM_HEADS)

        def placed(weight: Tensor) -> nn.Parameter:
            return nn.Parameter(weight.to(target.device, target.dtype), requires_grad=False)

        lm_head = model.get_output_embeddings()
        if head is not None:
            lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
            lm_head.weight = placed(head)
        if target.device.type == "cpu":
            for module in built.modules:
                pack(module)
        return MtpHead(
            built.modules,
            built.rotary,
            model.get_input_embeddings() if embedding is None else nn.Embedding.from_pretrained(placed(embedding)),
            lm_head,
            target.max_positions,
        )

    def combine(self, taps: Tensor) -> Tensor:  # [N, H]
        return taps

    def run(
        self,
        ids: Tensor,
        features: Tensor,
        context: PassContext,
        positions: Tensor,
        step: int,
        *,
        behind: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> HeadStates:
        """As `Head.run`. What a module made is normed already."""
        embedded = self._others[0](ids.clamp(0, self._known_ids - 1))  # what stands in for nobody may hold anything
        module = self.parts[min(step, len(self.parts) - 1)]
        with attention.running(context):
            turns = self.rotary(embedded, positions[None])
            hidden = module(embedded, features if behind is None else features[behind], positions, turns)
        hidden = cast(Tensor, hidden if wanted is None else hidden[wanted])
        return HeadStates(hidden, hidden)

    def logits(self, read: Tensor) -> Tensor:  # [R, H] -> [R, V] fp32
        return cast(Tensor, self._others[1](read)).float()

    @torch.inference_mode()
    def _probe(self) -> list[LayerShape]:
        """What each module's attention keeps of a token."""
        context = ProbeContext(2, self._device)
        ids = torch.zeros(2, dtype=torch.int64, device=self._device)
        features = torch.zeros_like(self._others[0](ids))
        for step in range(len(self.parts)):
            self.run(ids, features, context, context.spans[0].positions, step)
        if context.layers_seen != list(range(len(self.parts))):
            raise UnsupportedModel("the attention of its multi-token prediction modules does not reach Slipstream")
        return [LayerShape(*context.shapes[i]) for i in range(len(self.parts))]
