"""Which model a trained drafter belongs to: a head that fits another target by its shapes alone guesses at random.

A model's identity is a hash of some blocks of its weights, as numbers before any rounding, and one of its tokenizer's
vocabulary. What `train` makes names the identity of its base in config.json (`TRAINED_FOR`). A rounded copy of a model
names its base's there (`IDENTITY`), so that heads of the base fit it too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import DrafterError
from slipstream.models.headers import read_header, summarize, weight_files, weights_bytes

TRAINED_FOR, IDENTITY = "slipstream_trained_for", "slipstream_identity"
_TENSORS, _BLOCK = 8, 1024
_KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Identity = dict[str, str | None]
"""Of `weights` and `tokenizer`; None: there is nothing to tell it by."""


def identity_of(folder: Path) -> Identity:
    """The model's own, or that of the base that it is a rounded copy of."""
    known = _config(folder).get(IDENTITY)
    if isinstance(known, dict):
        return {key: str(known[key]) if known.get(key) else None for key in ("weights", "tokenizer")}
    return {"weights": _weights(folder), "tokenizer": _tokenizer(folder)}


def record_base(drafter: Path, target: Path) -> None:
    """Write into a drafter's config.json for which model it was trained."""
    config = {**_config(drafter), TRAINED_FOR: identity_of(target)}
    (drafter / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_pair(drafter: Path, target: Path, *, force: bool = False, whole: bool = False) -> str:
    """Raise `DrafterError` where a drafter was trained for another model; a remark where that is not known.

    Weights decide. A tokenizer of one more token is another one too, and the drafter may guess as well with it.
    force: go on with a remark all the same. Its guesses may be wrong, and the tokens are the target's anyway.
    whole: it is a model of its own, which need not have been trained for any other.
    """
    base = _config(drafter).get(TRAINED_FOR)
    if not isinstance(base, dict):
        if whole:
            return ""
        return (
            f"{drafter.name} does not say for which model it was trained: the first requests show if its guesses stand"
        )
    own = identity_of(target)
    other = [key for key in ("weights", "tokenizer") if base.get(key) and own[key] and base[key] != own[key]]
    differs = "; ".join(f"{key} {base[key]}, and this target's are {own[key]}" for key in other)
    if "weights" not in other:
        if not (base.get("weights") and own["weights"]):
            also = f", and its tokenizer differs ({differs})" if other else ""
            return (
                f"{drafter.name} could not be compared with {target.name}: one of the models has no safetensors to "
                f"know it by{also}. The first requests show if its guesses stand"
            )
        if other:
            return (
                f"{drafter.name} was trained for {target.name}'s weights with another tokenizer ({differs}): the first "
                "requests show if its guesses stand"
            )
        return ""
    if force:
        return f"{drafter.name} was trained for another model than {target.name}: expect few right guesses ({differs})"
    named = json.dumps({IDENTITY: {key: base.get(key) for key in ("weights", "tokenizer")}})[1:-1]
    raise DrafterError(
        f"{drafter}: it was trained for another model than {target} ({differs}). Use a drafter of this target, train "
        "one (slipstream train), or go on with --force-pair (force_pair=True): the tokens stay the target's. If the "
        f"target is a rounded copy of the drafter's model, its config.json may say so: {named}"
    )


def larger_draft(draft: Path, target: Path) -> str:
    """A remark where a draft model has more weights than its target, or more bytes where one's cannot be counted."""
    counts = [_count(folder) for folder in (draft, target)]
    counted = all(counts)
    sizes = counts if counted else [weights_bytes(folder) for folder in (draft, target)]
    if sizes[0] <= sizes[1]:
        return ""
    unit = "M weights" if counted else " MB; the weights of one cannot be counted"
    return (
        f"the draft model {draft.name} is larger than its target {target.name} ({sizes[0] / 1e6:,.0f} against "
        f"{sizes[1] / 1e6:,.0f}{unit}): drafting with it cannot pay"
    )


def _count(folder: Path) -> int:
    """Weights; 0 where they cannot be counted: they are packed, or pickled."""
    return (summarize(folder).parameters if weight_files(folder) else None) or 0


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):  # what it holds is for others to judge
        return {}
    return found if isinstance(found, dict) else {}


def _weights(folder: Path) -> str | None:
    """Of blocks of matrices from all depths, as fp32: a copy in another float that holds them exactly is the same."""
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
