"""Medusa heads: each guesses one position further from the target's last hidden state.

A head is some residual blocks, x + silu(linear(x)), and an LM head: its own or the target's. Two layouts of checkpoints
hold the same: the original one (`medusa_lm_head.pt`, `{head}.{layer}.linear.weight`) and vLLM's
(`blocks.{head}.layers.{layer}.weight`, `lm_heads.{head}.weight`).

Those heads guess all at once, without knowing each other's guesses. Heads of our own may also read the token that was
chosen from the state: `{head}.token.weight` maps its embedding to a vector that is added to the state. They may also be
chained, as Hydra's are (`medusa_chained` in `config.json`): then each head continues from the output of the one before
and reads the token that was guessed there. A head's output is the LM head's input, so it has the size of the target's
hidden states, and there is no norm between two heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.core.errors import ModelError
from slipstream.models.headers import HEAD_PICKLES, HEAD_SAFETENSORS
from slipstream.models.heads.checkpoint import (
    MOST_PARTS,
    HeadFiles,
    TargetShape,
    check_kind,
    check_target,
    check_tensors,
    number,
)
from slipstream.models.runner import Runner
from slipstream.models.taps import Taps

_PICKLES = (*HEAD_PICKLES, "pytorch_model.bin")
CHAINED = "medusa_chained"
"""Key of `config.json`: each head continues from the one before it."""
_PREFIX = "medusa_head."
"""Prefix of names in checkpoints that were cut out of a whole model."""


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of tensors in a layout."""

    weight: Callable[[int, int], str]  # of a head's residual block
    bias: Callable[[int, int], str]
    lm_head: Callable[[int], str]

    @staticmethod
    def of(tensors: Mapping[str, Tensor], layers: int) -> _Names:
        if any(name.startswith(("blocks.", "lm_heads.")) for name in tensors):
            linear = ".linear" if any(".linear." in name for name in tensors) else ""
            return _Names(
                lambda h, i: f"blocks.{h}.layers.{i}{linear}.weight",
                lambda h, i: f"blocks.{h}.layers.{i}{linear}.bias",
                lambda h: f"lm_heads.{h}.weight",
            )
        return _Names(
            lambda h, i: f"{h}.{i}.linear.weight",
            lambda h, i: f"{h}.{i}.linear.bias",
            lambda h: f"{h}.{layers}.weight",
        )


class MedusaHeads(nn.Module):
    """All heads of a checkpoint. Blocks of the same depth are stacked in one tensor, so that heads run together."""

    taps = Taps(normed=True)

    def __init__(
        self,
        weights: list[Tensor],  # [heads, H, H] each
        biases: list[Tensor],  # [heads, H] each
        lm_heads: list[Tensor],  # [Vd, H] each; empty: the target's
        target_head: nn.Module,
        width: int,
        vocab: Tensor | None,
        token_maps: Tensor | None = None,  # [heads, H, H]
        embedding: nn.Module | None = None,
        *,
        chained: bool = False,
    ) -> None:
        """embedding: the target's, for heads that read tokens. chained: each head continues from the one before."""
        super().__init__()
        self._weights, self._biases, self._lm_heads = weights, biases, lm_heads
        self._target_head = [target_head]  # in a list, so that it is no submodule
        self._token_maps, self._embedding = token_maps, [embedding]
        self.width = width  # Vd: the size of its vocabulary
        self.vocab = vocab  # [Vd] int64: the target's id of each of its ids; None: the target's vocabulary
        self.heads = weights[0].shape[0] if weights else len(lm_heads)
        self.chained = chained

    @property
    def weights_bytes(self) -> int:
        maps = () if self._token_maps is None else (self._token_maps,)
        own = {t.data_ptr(): t for t in (*self._weights, *self._biases, *self._lm_heads, *maps)}  # some may be shared
        return sum(tensor.numel() * tensor.element_size() for tensor in own.values())

    def hidden(self, features: Tensor, tokens: Tensor) -> Tensor:  # [N, H], [N] -> [heads, N, H]
        """The outputs of all heads, from the target's last hidden states and the tokens chosen from them."""
        assert not self.chained, "chained heads go step by step: `chained_hidden`"
        own = self._weights[0].dtype if self._weights else features.dtype
        x = features.to(own).expand(self.heads, *features.shape)
        if self._token_maps is not None:
            x = with_tokens(x, self._embed(tokens).to(own).expand_as(x), self._token_maps)
        return residual_layers(x, self._weights, self._biases)

    def chained_hidden(self, head: int, x: Tensor, tokens: Tensor) -> Tensor:  # [N, H], [N] -> [N, H]
        """The output of one chained head, from the output of the one before and the tokens guessed there.

        The first head reads the target's last hidden states and the tokens chosen from them.
        """
        assert self._token_maps is not None, "chained heads read tokens"
        maps, own = self._token_maps[head], self._weights[0].dtype
        weights, biases = [w[head] for w in self._weights], [b[head] for b in self._biases]
        return chained_layers(x.to(own), self._embed(tokens).to(own), maps, weights, biases)

    def head_logits(self, head: int, x: Tensor) -> Tensor:  # [N, H] -> [N, Vd] fp32
        """The logits of one head, from its output."""
        own = self._lm_heads[head] if self._lm_heads else None
        return torch.as_tensor(self._target_head[0](x) if own is None else F.linear(x, own)).float()

    def _embed(self, tokens: Tensor) -> Tensor:  # [N] -> [N, H]
        embedding = self._embedding[0]
        assert embedding is not None
        known = tokens.clamp(0, cast(Tensor, embedding.weight).shape[0] - 1)  # ids of padding lanes may be anything
        return cast(Tensor, embedding(known))

    @torch.no_grad()
    def refill(self, weights: Sequence[Tensor], biases: Sequence[Tensor], token_maps: Tensor | None = None) -> None:
        """Replace the weights in place, where captured graphs read them."""
        for mine, given in zip((*self._weights, *self._biases), (*weights, *biases), strict=True):
            mine.copy_(given)
        if self._token_maps is not None and token_maps is not None:
            self._token_maps.copy_(token_maps)

    def logits(self, features: Tensor, tokens: Tensor) -> Tensor:  # [N, H], [N] -> [heads, N, Vd] fp32
        """The logits of all heads."""
        hidden = self.hidden(features, tokens)
        if not self._lm_heads:
            return torch.as_tensor(self._target_head[0](hidden)).float()
        return torch.stack([F.linear(x, own).float() for x, own in zip(hidden, self._lm_heads, strict=True)])


def residual_layers(
    x: Tensor,  # [heads, N, H]
    weights: Sequence[Tensor],  # [heads, H, H] each
    biases: Sequence[Tensor],  # [heads, H] each
) -> Tensor:  # [heads, N, H]
    """The outputs of all heads' residual blocks. Used for training and for drafting."""
    for weight, bias in zip(weights, biases, strict=True):
        x = x + F.silu(torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)))
    return x


def with_tokens(x: Tensor, words: Tensor, maps: Tensor) -> Tensor:  # [heads, N, H], [heads, N, H], [heads, H, H]
    """The states plus each head's map of the embeddings of the chosen tokens: [heads, N, H]."""
    return torch.baddbmm(x, words, maps.transpose(1, 2))


def chained_layers(
    x: Tensor,  # [N, H]
    words: Tensor,  # [N, H]
    token_map: Tensor,  # [H, H]
    weights: Sequence[Tensor],  # [H, H] each
    biases: Sequence[Tensor],  # [H] each
) -> Tensor:  # [N, H]
    """The output of one chained head, from the output of the one before and the embeddings of its guessed tokens.

    Used for training and for drafting.
    """
    x = x + F.linear(words, token_map)
    for weight, bias in zip(weights, biases, strict=True):
        x = x + F.silu(F.linear(x, weight, bias))
    return x


@dataclass(frozen=True, slots=True)
class _Stored:
    """Stored heads, checked against their configuration and their target."""

    tensors: Mapping[str, Tensor]
    names: _Names
    heads: int
    layers: int
    hidden: int
    vocab: int
    shared: bool  # one LM head for all heads
    reads_tokens: bool
    own: tuple[str, ...]  # names of LM heads of their own
    token_map: Tensor | None
    chained: bool


def check_medusa(folder: Path, shape: TargetShape) -> None:
    """Raise if the heads in `folder` do not fit such a target, without reading their weights."""
    _stored(HeadFiles.outline(folder, _PICKLES, HEAD_SAFETENSORS), shape)


def _stored(files: HeadFiles, shape: TargetShape) -> _Stored:
    check_kind(files.folder, files.tensors.keys(), "medusa")
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in files.tensors.items()}
    key = next((key for key in ("medusa_num_heads", "num_heads") if key in files.config), "medusa_num_heads")
    heads = max(number(files.config, key, files.folder, most=MOST_PARTS), _heads_in(tensors))
    layers = number(files.config, _layers_key(files), files.folder, otherwise=1, most=MOST_PARTS)
    names = _Names.of(tensors, layers)
    hidden = tensors[first].shape[-1] if (first := names.weight(0, 0)) in tensors else shape.hidden
    check_target(files.folder, "a hidden size of", hidden, shape.hidden)
    token_map, shared = tensors.get("token_map"), "lm_head.weight" in tensors
    own = [names.lm_head(head) for head in range(heads)]
    with_own = shared or any(name in tensors for name in own)
    vocab = token_map.numel() if token_map is not None else shape.vocab
    wanted: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            wanted[names.weight(head, layer)] = (hidden, hidden)
            optional[names.bias(head, layer)] = (hidden,)
    chained = _is_chained(files)
    reads_tokens = chained or any(_token_map(head) in tensors for head in range(heads))
    if reads_tokens:
        wanted.update({_token_map(head): (hidden, hidden) for head in range(heads)})
    if token_map is not None:
        wanted["token_map"] = (vocab,)
    if shared:
        wanted["lm_head.weight"] = (vocab, hidden)
    elif with_own:
        _check_vocabulary(files, tensors, own, vocab, token_map)
        wanted.update(dict.fromkeys(own, (vocab, hidden)))
    check_tensors(files.folder, tensors, wanted, optional)
    if token_map is not None:
        _check_map(files, token_map, shape.vocab, with_own)
    lm_heads = tuple(own) if with_own and not shared else ()
    return _Stored(tensors, names, heads, layers, hidden, vocab, shared, reads_tokens, lm_heads, token_map, chained)


def _token_map(head: int) -> str:
    return f"{head}.token.weight"


def _is_chained(files: HeadFiles) -> bool:
    found = files.config.get(CHAINED, False)
    if not isinstance(found, bool):
        raise ModelError(f"{files.folder}: {CHAINED}={found!r}, must be true or false")
    return found


def load_medusa(folder: Path, target: Runner) -> MedusaHeads:
    """The heads in `folder`; raises if they do not fit this target."""
    stored = _stored(HeadFiles.read(folder, _PICKLES, HEAD_SAFETENSORS), TargetShape.of(target))
    tensors, names, everyone, layers = stored.tensors, stored.names, range(stored.heads), range(stored.layers)

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(target.device, target.dtype)

    empty = torch.zeros(stored.hidden)
    lm_heads = [placed(tensors["lm_head.weight"])] * stored.heads if stored.shared else []
    return MedusaHeads(
        [placed(torch.stack([tensors[names.weight(h, i)] for h in everyone])) for i in layers],
        [placed(torch.stack([tensors.get(names.bias(h, i), empty) for h in everyone])) for i in layers],
        lm_heads or [placed(tensors[name]) for name in stored.own],
        target.model.get_output_embeddings(),
        stored.vocab,
        None if stored.token_map is None else stored.token_map.to(target.device, torch.int64),
        placed(torch.stack([tensors[_token_map(h)] for h in everyone])) if stored.reads_tokens else None,
        target.model.get_input_embeddings() if stored.reads_tokens else None,
        chained=stored.chained,
    )


def _heads_in(tensors: Mapping[str, Tensor]) -> int:
    """The number of heads in the files; the first published configurations name fewer."""
    found = (re.match(r"(?:blocks\.|lm_heads\.)?(\d{1,3})\.", name) for name in tensors)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _layers_key(files: HeadFiles) -> str:
    return next((key for key in ("medusa_num_layers", "num_hidden_layers") if key in files.config), "medusa_num_layers")


def _check_vocabulary(
    files: HeadFiles, tensors: Mapping[str, Tensor], own: list[str], vocab: int, token_map: Tensor | None
) -> None:
    """A complete LM head of another size is a sign of another target, not of a damaged file."""
    found = next(tensors[name] for name in own if name in tensors)
    if token_map is None and found.ndim == 2:
        check_target(files.folder, "a vocabulary of", found.shape[0], vocab)


def _check_map(files: HeadFiles, token_map: Tensor, vocab: int, with_own: bool) -> None:
    if not with_own:
        raise ModelError(f"{files.folder}: token_map without LM heads of its own: lm_heads.0.weight must be there too")
    if token_map.is_floating_point() or int(token_map.min()) < 0 or int(token_map.max()) >= vocab:
        raise ModelError(
            f"{files.folder}: token_map must hold the target's token ids, 0 to {vocab - 1}, not "
            f"{token_map.min().item()} to {token_map.max().item()}. Fetch the head again"
        )
