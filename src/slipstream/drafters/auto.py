"""`auto`: the drafters that make sense for a target, chosen when it is loaded.

The planner then decides, every round and for every request, which of them guess and how much; nobody is one of the
choices.

What costs nothing until it has something to say is always there. What must be computed joins where it is cheap: modules
that come with the target's own checkpoint, and on a GPU the head that this project trained for the default model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from slipstream.core.errors import SlipstreamError
from slipstream.drafters import AUTO, DrafterSpec
from slipstream.drafters.shipped import with_shipped
from slipstream.models.heads.checkpoint import read_config
from slipstream.models.heads.mtp_files import find_modules


def auto_specs(folder: Path, device: str, named: Mapping[str, DrafterSpec]) -> tuple[DrafterSpec, ...]:
    """What `auto` means for the target in this folder, on a device of this type.

    named: drafters that the user names besides, by kind: who wants other weights or options has them in `auto` as well.
    """
    found = [DrafterSpec("suffix")]
    if _has_modules(folder):
        found.append(DrafterSpec("mtp"))
    if device == "cuda":  # on a CPU a head's passes cost too large a part of the target's
        found += _shipped(DrafterSpec("eagle3"), folder)
    return tuple(named.get(spec.kind, spec) for spec in found)


def expanded(specs: Collection[DrafterSpec], auto: Collection[DrafterSpec]) -> tuple[DrafterSpec, ...]:
    """With what `auto` means in its place."""
    found: dict[DrafterSpec, None] = {}
    for spec in specs:
        found.update(dict.fromkeys(auto if spec.name == AUTO else (spec,)))
    return tuple(found)


def _has_modules(folder: Path) -> bool:
    try:
        find_modules(folder, read_config(folder))
    except SlipstreamError:  # none, or not whole: nobody asked for them by name
        return False
    return True


def _shipped(spec: DrafterSpec, folder: Path) -> list[DrafterSpec]:
    try:
        return [with_shipped(spec, folder)]
    except SlipstreamError:  # nothing is shipped for this target
        return []
