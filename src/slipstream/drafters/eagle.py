"""EAGLE-1, 2 and 3: a one-layer head that continues from the target's hidden states, in chains or in trees.

`models/heads/eagle.py` computes the head, `heads.py` drafts with it; this file parses its spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast, get_args

from slipstream.core.draft import MAX_NODES
from slipstream.core.errors import ConfigError
from slipstream.drafters.base import Opening
from slipstream.drafters.heads import FeatureDrafter, parse_sizes
from slipstream.models.heads.base import Head, Weights

if TYPE_CHECKING:
    from slipstream.models.runner import Runner

WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class EagleOptions:
    """The options after a head's path."""

    sizes: Mapping[str, int]  # the named ones of depth, width and nodes
    weights: Weights = "auto"


class EagleDrafter(FeatureDrafter):
    """Drafts with an EAGLE head: chains for width 1, else trees, deep where it is confident and broad elsewhere."""

    name: ClassVar[str] = "eagle"

    def __init__(self, head: Head, *, depth: int = 10, width: int = 8, nodes: int = MAX_NODES) -> None:
        super().__init__(head, depth=depth, width=width, nodes=nodes)

    @classmethod
    def check(cls, opening: Opening) -> None:
        from slipstream.models.headers import stored_names
        from slipstream.models.heads.checkpoint import HeadFiles, TargetShape, check_kind, read_config
        from slipstream.models.heads.eagle_files import read_eagle

        assert opening.path is not None  # `with_shipped` refuses one without
        folder, _, options = opening.path.partition("?")
        parse_options(options)
        path = opening.resolve(folder)
        read_config(path)
        check_kind(path, stored_names(path), cls.name)
        if (shape := TargetShape.of_config(opening.target_config)) is not None:
            read_eagle(HeadFiles.outline(path), shape)

    @classmethod
    def open(cls, opening: Opening, target: Runner) -> EagleDrafter:
        from slipstream.models.heads.eagle import EagleHead

        assert opening.path is not None
        folder, _, options = opening.path.partition("?")
        asked = parse_options(options)
        return cls(EagleHead.open(opening.resolve(folder), target, asked.weights), **asked.sizes)


def parse_options(text: str) -> EagleOptions:
    """Parse `depth=6&width=8&nodes=32&weights=plain`; others keep their defaults."""
    found = parse_sizes(text, (WEIGHTS,))
    weights = found.others.get(WEIGHTS, "auto")
    if weights not in get_args(Weights):
        raise ConfigError(f"PATH?{text}: {WEIGHTS}={weights!r}: must be one of {', '.join(get_args(Weights))}")
    return EagleOptions(found.sizes, cast(Weights, weights))
