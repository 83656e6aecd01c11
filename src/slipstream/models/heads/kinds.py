"""What a folder of weights is, by the names of its tensors: so that one of another kind is told how to be named."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from slipstream.core.errors import DrafterError
from slipstream.models.headers import has_head

_KINDS = {"eagle": "an EAGLE head", "medusa": "Medusa heads", "model": "a whole model"}
_MEDUSA = re.compile(r"(medusa_head\.)?(\d+\.\d+\.(linear\.)?(weight|bias)|blocks\.\d+\.|lm_heads\.\d+\.)")
_WHOLE = re.compile(r"(model\.|transformer\.)?(layers|h)\.0\.(input_layernorm|ln_1)\.")
_EAGLE = re.compile(r"(model\.)?(fc\.weight$|midlayer\.|layers\.0\.hidden_norm\.)")


def kind_of(names: Collection[str]) -> str | None:
    """As which drafter weights with these tensors are named; None: none that we know."""
    for kind, mark in (("eagle", _EAGLE), ("medusa", _MEDUSA), ("model", _WHOLE)):
        if any(mark.match(name) for name in names):
            return kind
    return None


def check_kind(folder: Path, names: Collection[str], wanted: str) -> None:
    """Raise `DrafterError` where these are clearly weights of another kind."""
    found = kind_of(names) or ("medusa" if has_head(folder) else None)
    if found is not None and found != wanted:
        also = ", or mtp if it has modules for that" if found == "model" else ""
        raise DrafterError(
            f"{folder}: the folder holds {_KINDS[found]}, not {_KINDS[wanted]}; write {found}:{folder}{also}"
        )
