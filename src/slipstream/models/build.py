"""Changes to a loaded model: fused layers, packed products and the GPU's trunk swapped in, hooks for hidden states, and
other weights for a model in training."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.cpu.arena import Arena
from slipstream.kernels.cpu.compiled import compiled, keep_in, make_apart, needs_compiling
from slipstream.kernels.cpu.tiled import TiledLinear, join, tiler
from slipstream.kernels.linear import PackedLinear, packs
from slipstream.models.attention import AttentionTraits, running_pass
from slipstream.models.fused import CompiledTrunk, FusedLayer, FusedTrunk
from slipstream.models.gpu import GpuLayer, GpuTrunk, RowLinear
from slipstream.models.paths import Progress, cache_folder

_MAPS = Path("/proc/self/maps")
_DONTNEED = 4  # of <sys/mman.h>, on every Linux
_LAYERS = "model.layers."


def runs_compiled(model: nn.Module) -> bool:
    """Whether the compiled CPU passes serve this model."""
    weight = next(model.parameters())
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def prepare(progress: Progress | None = None) -> None:
    """Load the compiled code; the first start on a machine compiles it, some 10 s. Called before any swap."""
    keep_in(cache_folder() / "compiled")
    if progress and needs_compiling():
        progress("compiling for this CPU (once): 10 seconds to a minute")
    make_apart()
    compiled()


def fuse(model: nn.Module, traits: Mapping[int, AttentionTraits]) -> int:
    """Swap in fused layers for layers of known shape and free the old ones; return their number."""
    if runs_compiled(model):
        prepare()
    swapped, arena = 0, Arena()
    for parent in list(model.modules()):
        if not isinstance(parent, nn.ModuleList):
            continue
        for i, layer in enumerate(parent):
            if FusedLayer.fits(layer):
                parent[i] = FusedLayer(layer, traits[cast(int, cast(nn.Module, layer.self_attn).layer_idx)], arena)
                swapped += 1
                release(linear.weight for linear in layer.modules() if isinstance(linear, nn.Linear))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if FusedTrunk.fits(child):
                setattr(parent, name, FusedTrunk(child))
    return swapped


def pack(model: nn.Module) -> int:
    """Swap in packed products for every remaining `nn.Linear` that gains by it; return their number."""
    if runs_compiled(model):
        prepare()
    swapped, arena = 0, Arena()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (packs(child.weight) or tiler(child.weight) is not None):
                old, product = child.weight.detach(), join(child, arena=arena)
                setattr(parent, name, product)
                swapped += 1
                if isinstance(product, TiledLinear) and isinstance(product.tiles, Tensor):
                    _share(model, old, product.tiles)
                release([old])
    return swapped


def _share(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Keep an LM head and an embedding that were one tensor one tensor."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.data_ptr() == old.data_ptr():
            module.weight = nn.Parameter(new, requires_grad=False)


def install(model: nn.Module, max_positions: int) -> int:
    """Swap in the GPU's trunk and row-independent LM head; return the number of trunks."""
    swapped = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FusedTrunk):
                setattr(parent, name, GpuTrunk(child, max_positions))
                swapped += 1
            elif type(child) is nn.Linear and name == "lm_head":
                setattr(parent, name, RowLinear(child, torch.float32))
    return swapped


def release(tensors: Iterable[Tensor]) -> None:
    """Return the memory of replaced weights to the system.

    A checkpoint is mapped as a whole and stays resident while one of its tensors is used, and the C library keeps freed
    copies; without this a packed model takes twice its size. Pages of a mapped file are only dropped, and read again if
    they are used after all, so a tensor that shares memory with a used one may be released. Tensors that are not part
    of a mapped file are left alone. Does nothing on systems without `madvise`.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # another C library, or no /proc
        libc = ctypes.CDLL(None)
        files = _mapped_files()
        for tensor in tensors:
            start, end = _whole_pages(tensor)
            if start < end and any(first <= start and end <= last for first, last in files):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)
        libc.malloc_trim(ctypes.c_size_t(0))


def _mapped_files() -> list[tuple[int, int]]:
    """Address ranges of mapped checkpoints: ranges of files have an inode other than 0."""
    found = []
    for line in _MAPS.read_text().splitlines():
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        if inode != "0" and path and path[0].endswith(".safetensors"):
            first, last = addresses.split("-")
            found.append((int(first, 16), int(last, 16)))
    return found


def _whole_pages(tensor: Tensor) -> tuple[int, int]:
    """The whole pages inside a contiguous CPU tensor; an empty range for other tensors."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return 0, 0
    start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE


@torch.no_grad()
def refill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace weights of an open model: a draft in training is measured in a running engine.

    tensors: by the names of a Llama checkpoint; all tensors of a layer or none. On a GPU they are overwritten in place,
    where captured graphs read them; on a CPU a product may move, so the compiled trunk is made again.
    """
    weight = next(model.parameters())
    given = {name: tensor.to(weight.device, weight.dtype) for name, tensor in tensors.items()}
    trunks = [module for module in model.modules() if isinstance(module, (FusedTrunk, GpuTrunk))]
    for trunk in trunks:
        layers: Any = trunk.layers
        for i, layer in enumerate(layers):
            part = _below(given, f"{_LAYERS}{i}.")
            if part:
                _refill_layer(layer, part)
        if isinstance(trunk, FusedTrunk) and trunk.compiled is not None:
            trunk.compiled = CompiledTrunk.of(layers, trunk.norm)
    for name, tensor in given.items():
        if not trunks or not name.startswith(_LAYERS):
            _put(model.get_submodule(name.removesuffix(".weight")), tensor)


def _refill_layer(layer: FusedLayer | GpuLayer, weights: Mapping[str, Tensor]) -> None:
    attention = [weights[f"self_attn.{name}_proj.weight"] for name in "qkv"]
    gated = [weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]
    _put(layer.qkv, torch.cat(attention))
    _put(layer.o, weights["self_attn.o_proj.weight"])
    _put(layer.gate_up, torch.cat(gated))
    _put(layer.down, weights["mlp.down_proj.weight"])
    norms = ((layer.input_norm, "input_layernorm"), (layer.post_norm, "post_attention_layernorm"))
    for norm, name in norms:
        (norm if isinstance(norm, Tensor) else norm.weight).copy_(weights[f"{name}.weight"])


def _put(module: Any, weight: Tensor) -> None:
    """module: a product, a norm or an embedding."""
    if isinstance(module, PackedLinear):
        module.refill(weight)
    else:
        module.weight.copy_(weight)


def _below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def hook(model: PreTrainedModel, num_layers: int) -> None:
    """Make passes of this model keep the hidden states that their taps ask for. For models without a fused trunk."""
    trunk, layers = decoder_layers(model, num_layers)
    for depth, layer in enumerate(layers):
        if not depth:
            layer.register_forward_pre_hook(_before, with_kwargs=True)
        layer.register_forward_hook(_Behind(depth + 1))
    trunk.register_forward_hook(_normed)


def decoder_layers(model: PreTrainedModel, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The module that contains the decoder layers and the last norm, and the list of layers."""
    found = [
        (trunk, part)
        for trunk in model.modules()
        for part in trunk.children()
        if isinstance(part, nn.ModuleList) and _holds_layers(part, num_layers)
    ]
    if len(found) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__}: its {num_layers} decoder layers are not one list, so hidden states cannot be "
            "read from it; use a drafter that needs none (ngram, suffix, model)"
        )
    return found[0]


def _holds_layers(part: nn.ModuleList, num_layers: int) -> bool:
    """Whether `part` is the list of decoder layers: entry i contains the attention with `layer_idx` i."""
    return len(part) == num_layers and all(
        any(getattr(inner, "layer_idx", None) == depth for inner in layer.modules()) for depth, layer in enumerate(part)
    )


class _Behind:
    """Keeps a layer's output, the residual stream after it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __call__(self, layer: nn.Module, given: Any, out: Any) -> None:
        hidden: Tensor = out[0] if isinstance(out, tuple) else out  # [1, N, D]
        running_pass().keep(self.depth, hidden[0])


def _before(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    hidden: Tensor = given[0] if given else named["hidden_states"]  # [1, N, D]
    running_pass().keep(0, hidden[0])


def _normed(trunk: nn.Module, given: Any, out: Any) -> None:
    running_pass().keep_normed(out[0][0])  # a trunk's first output is its last hidden state
