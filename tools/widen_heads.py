"""Make drafters of a small model fit the wide one that `widen.py` made of it, at the cost that a large model's have.

    python tools/widen_heads.py SMALL WIDE HEAD FOLDER [--heads 48 --inner 12288]

SMALL is what the drafter in HEAD was trained for, WIDE the folder that `widen.py` wrote, FOLDER gets the result. It
guesses what it guesses for the small model: the wide one's hidden states are the small one's, and zeros behind them.

* An EAGLE-3 head becomes as wide as its target, with the target's attention heads and MLP, as heads for large models
  have them. Written in its authors' layout, and in FOLDER/speculators in that of vLLM.
* Medusa heads become as wide as the target.
* A distilled draft stays as it is. It is a model of its own, as small beside a large target as beside a small one; only
  embeddings that it shared are written out, in its own width: a wide target's would not fit, and its LM head would be
  read for every guess.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.models.describe import SHARES
from slipstream.models.headers import HEAD_PICKLES, HEAD_SAFETENSORS, has_head
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle_files import EagleCheckpoint, EagleShape, read_eagle, save_eagle3
from slipstream.models.identity import record_base
from slipstream.models.load import EMBEDDING, LM_HEAD, shares_embeddings
from slipstream.models.resolve import resolve
from widen import TOKENIZER_FILES

_NOISE = 0.02
_NOTE = "widened.json"
"""File in a folder that names what it was made of."""


class Wider:
    """Tensors of a head in a larger size: random where that changes nothing, zero where it would."""

    def __init__(self, small: int, wide: int, dtype: torch.dtype) -> None:
        self.small, self.wide, self.dtype = small, wide, dtype
        self.scale = (small / wide) ** 0.5
        self._generator = torch.Generator().manual_seed(0)

    def product(self, weight: Tensor, shape: tuple[int, int], *, blocks: int = 1, writes: bool = False) -> Tensor:
        """A product that reads `blocks` hidden states side by side, of which what is new is always zero.

        writes: its output is a hidden state, whose new numbers must stay zero; else its new outputs are never read.
        """
        rows, columns = weight.shape
        wide = torch.randn(shape, generator=self._generator) * _NOISE
        old, new = columns // blocks, shape[1] // blocks
        for block in range(blocks):
            at = block * new
            if writes:  # what comes in here is not zero
                wide[rows:, at : at + old] = 0
            wide[:rows, at : at + old] = weight.float()[:, block * old : (block + 1) * old]
        return wide.to(self.dtype)

    def written(self, weight: Tensor, shape: tuple[int, int]) -> Tensor:
        """A product that reads what is random in the new part, and writes a hidden state."""
        wide = torch.zeros(shape)
        wide[: weight.shape[0], : weight.shape[1]] = weight.float()
        return wide.to(self.dtype)

    def norm(self, weight: Tensor, *, blocks: int = 1) -> Tensor:
        """The mean of the squares is over more numbers, of which all that are new are zero."""
        wide = torch.full((blocks, self.wide), self.scale)
        wide[:, : self.small] = weight.float().view(blocks, -1) * self.scale
        return wide.flatten().to(self.dtype)


def widen_eagle3(
    head: EagleCheckpoint, wide: LlamaConfig, dtype: torch.dtype, *, heads: int = 0, inner: int = 0
) -> EagleCheckpoint:
    """The head for the wide target. heads, inner: of its attention and MLP; 0: as the target's."""
    shape = head.shape
    if shape.generation != 3 or shape.head_norms or shape.hidden != shape.target_hidden:
        raise ValueError(f"{head.folder}: only EAGLE-3 heads as wide as their target and without norms of queries")
    heads, inner = heads or wide.num_attention_heads, inner or wide.intermediate_size
    if heads * shape.kv_heads % shape.heads:
        raise ValueError(f"--heads {heads}: there must be {shape.heads // shape.kv_heads} to each head of keys")
    for option, new, old in (("--heads", heads, shape.heads), ("--inner", inner, shape.inner)):
        if new < old:
            raise ValueError(f"{option} {new}: must be at least the small head's {old}")
    made = replace(
        shape,
        hidden=wide.hidden_size,
        target_hidden=wide.hidden_size,
        inner=inner,
        heads=heads,
        kv_heads=heads * shape.kv_heads // shape.heads,
        norm_eps=shape.norm_eps * shape.hidden / wide.hidden_size,
    )
    wider = Wider(shape.hidden, wide.hidden_size, dtype)
    known = made.wanted | made.optional
    tensors = {name: _eagle_tensor(wider, name, tensor, known[name], shape) for name, tensor in head.tensors.items()}
    return EagleCheckpoint(made, tensors, head.folder)


def _eagle_tensor(wider: Wider, name: str, tensor: Tensor, shape: tuple[int, ...], small: EagleShape) -> Tensor:
    if name in ("d2t", "t2d"):
        return tensor
    part = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith(".bias"):
        wide = torch.zeros(shape, dtype=wider.dtype)
        wide[: len(tensor)] = tensor
        return wide
    if len(shape) == 1:
        return wider.norm(tensor, blocks=small.num_taps if name == "input_norm.weight" else 1)
    rows, columns = shape
    if part in ("o_proj", "down_proj", "embed_tokens"):
        return wider.written(tensor, (rows, columns))
    if part == "fc":
        return wider.product(tensor, (rows, columns), blocks=small.num_taps, writes=True)
    if part in ("q_proj", "k_proj", "v_proj") and name.startswith("layers.0."):
        return wider.product(tensor, (rows, columns), blocks=2)  # a token and a feature
    return wider.product(tensor, (rows, columns))


def widen_medusa(files: HeadFiles, wide: int, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors for a wide target. Residual layers write a hidden state, LM heads read one."""
    config = dict(files.config)
    first = files.tensors.get("0.0.linear.weight")
    if first is None:
        raise ValueError(f"{files.folder}: only Medusa heads in the original layout, with 0.0.linear.weight")
    small = first.shape[1]
    if "hidden_size" in config:
        config["hidden_size"] = wide
    wider = Wider(small, wide, dtype)
    found: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        if not tensor.is_floating_point():  # token_map
            found[name] = tensor
        elif name.endswith(".bias"):
            found[name] = torch.cat((tensor.float(), torch.zeros(wide - len(tensor)))).to(dtype)
        elif name.endswith((".linear.weight", ".token.weight")):
            found[name] = wider.product(tensor, (wide, wide), writes=True)
        else:
            found[name] = wider.product(tensor, (tensor.shape[0], wide))
    return config, found


def write_draft(folder: Path, small: Path, out: Path, dtype: torch.dtype) -> None:
    """A draft that stands alone: embeddings that it shared with its target are written out."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    source = folder
    if shares_embeddings(folder):
        model: Any = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
        tensors[EMBEDDING] = model.get_input_embeddings().weight.detach()
        tensors[LM_HEAD] = model.get_output_embeddings().weight.detach().clone()
        del config[SHARES]
        source = small
    config["dtype"] = str(dtype).removeprefix("torch.")
    kept = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in TOKENIZER_FILES:
        if (source / file).exists():
            shutil.copy(source / file, out / file)


def widen_head(
    small: Path, wide: Path, head: Path, out: Path, dtype: torch.dtype, *, heads: int = 0, inner: int = 0
) -> str:
    """Widen the drafter in `head` for the wide target; returns its spec."""
    narrow, config = LlamaConfig.from_pretrained(small), LlamaConfig.from_pretrained(wide)
    found: dict[str, Any] = json.loads((head / "config.json").read_text())
    if "LlamaForCausalLM" in found.get("architectures", ()) and "draft_vocab_size" not in found:
        kind = "model"
        write_draft(head, small, out, dtype)
    elif has_head(head) or any(key.startswith("medusa") for key in found):
        kind = "medusa"
        files = HeadFiles.read(head, HEAD_PICKLES, HEAD_SAFETENSORS)
        changed, tensors = widen_medusa(files, config.hidden_size, dtype)
        out.mkdir(parents=True, exist_ok=True)
        save_file(tensors, out / HEAD_SAFETENSORS[0], metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(changed, indent=2) + "\n")
    else:
        kind = "eagle"
        shape = TargetShape(
            narrow.hidden_size, narrow.vocab_size, narrow.num_hidden_layers, narrow.max_position_embeddings
        )
        made = widen_eagle3(read_eagle(HeadFiles.read(head), shape), config, dtype, heads=heads, inner=inner)
        save_eagle3(made, out, "original")
        save_eagle3(made, out / "speculators", "speculators", target=str(wide))
    record_base(out, wide)
    return f"{kind}:{out}"


def widen_all(small: Path, wide: Path, heads: Path, work: Path, dtype: torch.dtype) -> dict[str, str]:
    """Widen every drafter in `heads` (folders eagle3, medusa, draft) for the wide target, into a folder of `work`.

    Returns specs by name. Results for the same drafter and target are kept.
    """
    found = {}
    for head in sorted(folder for folder in heads.iterdir() if (folder / "config.json").is_file()):
        out = work / head.name
        note, made_of = out / _NOTE, _fingerprint(head, small, wide, dtype)
        known = json.loads(note.read_text()) if note.is_file() else {}
        if known.get("made_of") != made_of:
            kind = widen_head(small, wide, head, out, dtype).partition(":")[0]
            known = {"kind": kind, "made_of": made_of}
            note.write_text(json.dumps(known) + "\n")  # last: a folder without it is not whole
        found[head.name] = f"{known['kind']}:{out}"
    return found


def _fingerprint(head: Path, small: Path, wide: Path, dtype: torch.dtype) -> str:
    files = [small / "config.json", wide / "config.json", *sorted(file for file in head.iterdir() if file.is_file())]
    parts = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.suffix != ".md"]
    return hashlib.sha256("".join([str(dtype), *parts]).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small")
    for name in ("wide", "head", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--heads", type=int, default=0, help="of an EAGLE head's attention; 0: as the target's")
    parser.add_argument("--inner", type=int, default=0, help="width of an EAGLE head's MLP; 0: as the target's")
    given = parser.parse_args()
    try:
        drafter = widen_head(
            resolve(given.small),
            given.wide,
            given.head,
            given.folder,
            torch.bfloat16,
            heads=given.heads,
            inner=given.inner,
        )
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps({"drafter": drafter}))


if __name__ == "__main__":
    main()
