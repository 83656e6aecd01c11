"""Checks that a drafter was trained for the target: a head of another model may fit by its shapes and guess at random.

A model's identity is a hash of some blocks of its weights, as numbers, and a hash of its tokenizer's vocabulary.
`slipstream train` writes the identity of its target into the drafter's config.json, under `TRAINED_FOR`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import DrafterError
from slipstream.models.headers import read_header, summarize, weight_files, weights_bytes
from slipstream.models.resolve import shown_name

TRAINED_FOR = "slipstream_trained_for"
_TENSORS, _BLOCK = 8, 1024
_KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Identity = dict[str, str | None]
"""The hashes `weights` and `tokenizer`; None where the folder has no file to hash."""


def identity_of(folder: Path) -> Identity:
    return {"weights": _weights(folder), "tokenizer": _tokenizer(folder)}


def record_base(drafter: Path, target: Path) -> None:
    """Write the target's identity into the drafter's config.json."""
    config = {**_config(drafter), TRAINED_FOR: identity_of(target)}
    (drafter / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_pair(drafter: Path, target: Path, *, force: bool = False, whole: bool = False) -> str:
    """Raise `DrafterError` if the drafter was trained for another model; return a remark if that is unknown.

    Only the weights decide: with another tokenizer the drafter may still guess well.
    force: return a remark instead of raising. Only the speed is at stake: the tokens are the target's either way.
    whole: the drafter is a complete model, which need not have been trained for any target.
    """
    name, target_name = shown_name(drafter), shown_name(target)
    base = _config(drafter).get(TRAINED_FOR)
    if not isinstance(base, dict):
        if whole:
            return ""
        return f"{name} does not say for which model it was trained: the first requests show if its guesses stand"
    own = identity_of(target)
    other = [key for key in ("weights", "tokenizer") if base.get(key) and own[key] and base[key] != own[key]]
    differs = "; ".join(f"{key} {base[key]}, and this target's are {own[key]}" for key in other)
    if "weights" not in other:
        if not (base.get("weights") and own["weights"]):
            also = f", and its tokenizer differs ({differs})" if other else ""
            return (
                f"{name} could not be compared with {target_name}: one of the models has no safetensors to hash{also}. "
                "The first requests show if its guesses stand"
            )
        if other:
            return (
                f"{name} was trained for {target_name}'s weights with another tokenizer ({differs}): the first "
                "requests show if its guesses stand"
            )
        return ""
    if force:
        return f"{name} was trained for another model than {target_name}: expect few right guesses ({differs})"
    raise DrafterError(
        f"{drafter}: it was trained for another model than {target} ({differs}). Use a drafter of this target, train "
        "one (slipstream train), or go on with --force-pair (force_pair=True), as for a rounded copy of the drafter's "
        "target: the tokens stay the target's"
    )


def larger_draft(draft: Path, target: Path) -> str:
    """A remark if a draft model has more weights than its target, or more bytes if either cannot be counted."""
    counts = [_count(folder) for folder in (draft, target)]
    counted = all(counts)
    sizes = counts if counted else [weights_bytes(folder) for folder in (draft, target)]
    if sizes[0] <= sizes[1]:
        return ""
    unit = "M weights" if counted else " MB; the weights of one cannot be counted"
    return (
        f"the draft model {shown_name(draft)} is larger than its target {shown_name(target)} ({sizes[0] / 1e6:,.0f} "
        f"against {sizes[1] / 1e6:,.0f}{unit}): drafting with it cannot pay"
    )


def _count(folder: Path) -> int:
    """The number of weights; 0 if they cannot be counted (packed or pickled)."""
    return (summarize(folder).parameters if weight_files(folder) else None) or 0


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):  # the loader reports what is wrong with it
        return {}
    return found if isinstance(found, dict) else {}


def _weights(folder: Path) -> str | None:
    """Hash blocks of matrices from all depths, as fp32: an exact copy in a wider dtype has the same hash."""
    found: dict[str, tuple[Path, dict[str, Any], int]] = {}
    for file in weight_files(folder):
        with file.open("rb") as handle:
            start = 8 + int.from_bytes(handle.read(8), "little")
        for name, tensor in read_header(file).items():
            inner = any(part.isdecimal() for part in name.split("."))
            if inner and len(tensor["shape"]) > 1 and not name.startswith("mtp"):
                found[name] = file, tensor, start
    if not found:
        return None
    names, digest = sorted(found), hashlib.sha256()
    for name in dict.fromkeys(names[i * (len(names) - 1) // max(1, _TENSORS - 1)] for i in range(_TENSORS)):
        file, tensor, start = found[name]
        first, last = tensor["data_offsets"]
        kind = _KINDS.get(tensor["dtype"])
        size = kind.itemsize if kind is not None else 1
        count = (last - first) // size
        digest.update(json.dumps(tensor["shape"]).encode())
        with file.open("rb") as handle:
            for at in (0, max(0, count - _BLOCK) // 2, max(0, count - _BLOCK)):
                handle.seek(start + first + at * size)
                block = handle.read(min(_BLOCK, count) * size)
                if kind is not None and block:
                    block = torch.frombuffer(bytearray(block), dtype=kind).float().numpy().tobytes()
                digest.update(block)
    return digest.hexdigest()[:16]


def _tokenizer(folder: Path) -> str | None:
    try:
        stored = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary = stored["model"]["vocab"]
        ids = dict(vocabulary if isinstance(vocabulary, dict) else {v[0]: i for i, v in enumerate(vocabulary)})
        ids.update((token["content"], token["id"]) for token in stored.get("added_tokens", ()))
        canonical = "\n".join(f"{at} {token}" for at, token in sorted((at, token) for token, at in ids.items()))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16]
