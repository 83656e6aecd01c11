"""A model that runs passes: the target, or a draft model.

All passes are of one kind (`batch.py`). The runner owns the weights; the cache is an argument, so that a target and its
draft can share one page table.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.gpu.jit import has_kernels
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kernels.gpu.paged_wide import wide_tile_rows
from slipstream.kernels.gpu.row_linear import rows_agree, use_one_tile
from slipstream.kv.cache import KVCache, LayerShape
from slipstream.models import attention, build
from slipstream.models.attention import PassContext, ProbeContext
from slipstream.models.batch import PassBatch
from slipstream.models.describe import SHARES, check_supported, max_positions_of
from slipstream.models.fused import FusedTrunk
from slipstream.models.gpu import WIDE_ROWS, WIDE_SIZES, DevicePass, GpuTrunk, layout_of
from slipstream.models.graphs import PromptGraphs, WidePromptGraphs
from slipstream.models.load import (
    LENT,
    check_fits,
    lend,
    load_config,
    load_weights,
    names_model,
    quiet_transformers,
    shape_of,
    without_embeddings,
)
from slipstream.models.taps import Taps


@dataclass(frozen=True, slots=True)
class Parity:
    """The error of our logits against the same weights in fp32, as measured at load."""

    ours: float
    theirs: float  # of transformers' own pass in the model's dtype
    most: float

    @property
    def holds(self) -> bool:
        return self.ours <= self.most  # NaN does not

    def __str__(self) -> str:
        own = f"; its own pass in this dtype by {self.theirs:.1e}" if self.theirs else ""
        return f"{self.ours:.1e} (relative{own}; at most {self.most:.1e} is rounding)"


class Runner:
    """Runs passes of one model. `swaps` names the modules that replaced transformers' own."""

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig, target: Runner | None = None) -> None:
        """target: the model whose embedding and LM head this one uses."""
        self.model = model
        self.config = config
        self.vocab_size: int = (
            target.vocab_size if target is not None else cast(int, model.get_output_embeddings().weight.shape[0])
        )
        theirs = set() if target is None else {id(p) for p in target.model.parameters()}
        self.weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in theirs)
        self.row_flops = _row_flops(model, config)
        self.swaps = "none"
        self.parity: Parity | None = None  # None: not checked
        self.taps = Taps()  # hidden states that passes keep in the cache
        self.wide_rows = WIDE_ROWS  # longer prompts use other products where those are faster
        self.shares_wide = False  # prompts with more rows than that may share a pass
        self._row_independent = False
        self.prompt_graphs: PromptGraphs | None = None
        self.wide_prompt_graphs: WidePromptGraphs | None = None
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        probe = self._probe()
        self.layers = [LayerShape(*probe.shapes[layer]) for layer in probe.layers_seen]
        self._traits = probe.traits
        self.max_positions = max_positions_of(config)

    @property
    def query_heads(self) -> int:
        return cast(int, getattr(self.config, "num_attention_heads", 1))

    @property
    def device(self) -> torch.device:
        return cast(Tensor, self.model.get_input_embeddings().weight).device

    @property
    def dtype(self) -> torch.dtype:
        return cast(Tensor, self.model.get_input_embeddings().weight).dtype

    @property
    def cuts_alike(self) -> bool:
        """Whether a prompt's logits are the same, up to fp32 rounding, for every way of cutting it into passes."""
        return self._row_independent or self.dtype == torch.float32

    @property
    def remark(self) -> str:
        """A warning about the answers; empty if they are the same with drafts, in a batch, and alone."""
        if self.cuts_alike:
            return ""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{type(self.model).__name__} in {dtype} on {self.device.type} has no row-independent passes: other "
            "requests in a batch, and drafts, change the last bits of logits, so answers may differ where two tokens "
            "are almost equally likely; --dtype float32 keeps them the same"
        )

    @property
    def wide_grain(self) -> int:
        """Rows of a tile of attention in passes over many rows of a prompt."""
        return lcm(*(wide_tile_rows(self.query_heads, shape.kv_heads) for shape in self.layers))

    def tap(self, taps: Taps) -> None:
        """Make new caches keep these hidden states, and passes write them."""
        taps.check(len(self.layers))
        known, self.taps = self.taps, taps
        if (
            taps
            and not known
            and not any(isinstance(module, (FusedTrunk, GpuTrunk)) for module in self.model.modules())
        ):
            build.hook(self.model, len(self.layers))

    def width_of(self, taps: Taps) -> int:
        """The numbers of a token's hidden states in the cache."""
        return taps.width(cast(int, self.config.hidden_size)) if taps else 0  # some configurations lack it

    def new_cache(self, num_pages: int, page_size: int) -> KVCache:
        return KVCache(self.layers, num_pages, page_size, self.dtype, self.device, self.width_of(self.taps))

    def forward(self, batch: PassBatch, cache: KVCache) -> Tensor:  # [R, V] fp32
        """One pass. Writes the rows' K and V into the cache at `batch.slots`, and commits nothing."""
        if has_kernels(self.device):
            wide = batch.num_rows > self.wide_rows if batch.wide is None else batch.wide
            layout = layout_of(batch, cache.page_size)
            graphs = self.wide_prompt_graphs if wide else self.prompt_graphs
            if graphs is not None and graphs.cache is cache and layout.ancestors is None:
                logits = graphs.run(batch, layout)
                if logits is not None:
                    return logits
            context = DevicePass(layout, cache, wide=wide)
            return self._call(context, batch.input_ids, batch.positions, batch.logit_rows).float()
        logits = self._call(PassContext(batch, cache), batch.input_ids, batch.positions, batch.logit_rows)
        return logits.float()

    def capture_prompts(self, cache: KVCache, trash_slot: int, pool: Any) -> None:
        """Capture passes over prompts into this cache from now on. trash_slot: a slot that no request uses."""
        self.prompt_graphs = PromptGraphs(self._prompt_pass, cache, trash_slot, pool)
        if self.shares_wide:
            self.wide_prompt_graphs = WidePromptGraphs(
                partial(self._prompt_pass, wide=True), WIDE_SIZES, cache, trash_slot, pool
            )

    def _prompt_pass(
        self, ids: Tensor, positions: Tensor, layout: RowLayout, cache: KVCache, rows: Tensor, *, wide: bool = False
    ) -> Tensor:
        return self._call(DevicePass(layout, cache, wide=wide), ids, positions, rows).float()

    def run(self, ids: Tensor, layout: RowLayout, cache: KVCache, rows: Tensor | None = None) -> Tensor:  # [R, V] fp32
        """As `forward`, for a pass that was laid out on the device. Reads no values on the host."""
        return self._call(DevicePass(layout, cache), ids, layout.positions, rows).float()

    def swap(self, *, fused: bool) -> None:
        """Swap in packed products, and fused layers if asked for. Frees the old weights."""
        count = build.fuse(self.model, self._traits) if fused else 0
        trunks = build.install(self.model, self.max_positions) if has_kernels(self.device) else 0
        kernels = "row-independent kernels"
        if trunks and not rows_agree(self.device, self.dtype):
            use_one_tile(self.device, self.dtype)
            kernels += " (of one tile: this chip's others differ)"
        self._row_independent = bool(trunks)
        self.shares_wide = bool(trunks) and all(
            module.shares_wide for module in self.model.modules() if isinstance(module, GpuTrunk)
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # returns the memory of the old layers
        packed = build.pack(self.model)
        self.swaps = (
            " + ".join(
                part
                for part, some in (
                    (f"{count} fused layers", count),
                    (kernels, trunks),
                    (f"{packed} packed products", packed),
                )
                if some
            )
            or "none"
        )

    @torch.inference_mode()
    def _probe(self) -> ProbeContext:
        """Each layer's cache shape and attention traits; refuses a model whose attention does not reach us."""
        context = ProbeContext(2, self.device)
        tokens = torch.zeros(2, dtype=torch.int64, device=self.device)
        try:
            with quiet_transformers():  # some models warn that the tokens might be padding
                self._call(context, tokens, context.spans[0].positions, None)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{type(self.model).__name__}: {error}") from error
        wanted = list(range(_num_layers(self.config)))
        if context.layers_seen != wanted:
            raise UnsupportedModel(
                f"{type(self.model).__name__}: its attention function was called for layers {context.layers_seen} "
                f"instead of once for each of {len(wanted)} layers; models that mix tokens in other ways cannot be run"
            )
        return context

    def _call(self, context: PassContext, ids: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        context.taps = self.taps
        picked = {} if rows is None or not self._picks_rows else {"logits_to_keep": rows}
        with attention.running(context):
            out = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **picked)
        logits = cast(Tensor, out.logits)[0]
        return logits if rows is None or picked else logits[rows]


@names_model
def open_unchecked(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    target: Runner | None = None,
) -> Runner:
    """Load a model with our attention and no swaps, without comparing it to transformers.

    target: lends its embedding and LM head to a draft that is stored without.
    """
    config = load_config(path, trust_remote_code)
    check_supported(config, alone=target is None)
    attention.register()
    load = partial(
        load_weights,
        path,
        dtype=dtype,
        device=device,
        attention=attention.NAME,
        trust_remote_code=trust_remote_code,
    )
    if target is None or not getattr(config, SHARES, False):
        return Runner(load(), config)
    check_fits(path, config, *shape_of(target.model))
    return Runner(lend(load(config=without_embeddings(config), lent=LENT), target.model), config, target)


def _row_flops(model: PreTrainedModel, config: PreTrainedConfig) -> float:
    """Operations of all layers' products for one row; of experts, only those that a row is sent to."""
    words = {
        id(getattr(part, "weight", None)) for part in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    sizes = {name: p.numel() for name, p in model.named_parameters() if id(p) not in words}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    count = count or getattr(config, "n_routed_experts", None) or 1
    active = min(1.0, (getattr(config, "num_experts_per_tok", None) or count) / count)
    return 2.0 * (sum(sizes.values()) - (1 - active) * experts)


def _num_layers(config: PreTrainedConfig) -> int:
    return cast(int, config.num_hidden_layers)
