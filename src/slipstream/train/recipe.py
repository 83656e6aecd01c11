"""The contract of a recipe: a module to train, its loss, and its export as a drafter of the real engine.

The training loop knows nothing about heads or drafts, and a recipe nothing about optimizers, checkpoints or ranks. A
new recipe is one file in this folder and one line at the end of this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

from slipstream.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from slipstream.drafters.base import Drafter
    from slipstream.models.taps import Taps
    from slipstream.train.batch import Batch
    from slipstream.train.config import TrainConfig
    from slipstream.train.teacher import Teacher


@dataclass(frozen=True, slots=True)
class Losses:
    """Results of a pass. Sums, not means: the loop divides by all positions of all passes and ranks of a step."""

    total: Tensor  # scalar fp32 with a gradient: the loss, summed over positions
    count: Tensor  # scalar: number of those positions
    accepted: Tensor  # [K]: probability that guess k is accepted, summed over positions (min(p, q), or a hit)
    positions: Tensor  # [K]: number of those positions
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # sums of further terms by name, for the curves


class TargetShape(Protocol):
    """A target's shape, known before it is loaded. `Teacher` and `ConfigShape` have it."""

    @property
    def config(self) -> Any:
        """The configuration as transformers reads it."""

    @property
    def hidden(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ConfigShape:
    """A target's shape, from its configuration alone."""

    config: Any

    @property
    def hidden(self) -> int:
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)


@dataclass(frozen=True, slots=True)
class Setting:
    """The run, the target and the token counts that a recipe is built for."""

    config: TrainConfig
    teacher: Teacher
    counts: Tensor  # [V] int64: occurrences of each token in the answers of the training data


class Recipe(Protocol):
    """A drafter in training: fp32, on the teacher's device."""

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    """Defaults of `TrainConfig` for this recipe."""

    @classmethod
    def check(cls, config: TrainConfig, target: TargetShape) -> None:
        """Raise `ConfigError` for wrong options. Called before any data is made."""

    @classmethod
    def make(cls, setting: Setting) -> Recipe:
        """Build it with initial weights."""

    @property
    def module(self) -> nn.Module:
        """The trained module: its parameters that require a gradient. Checkpoints hold its state dict."""

    @property
    def taps(self) -> Taps:
        """The target's hidden states that `Batch.taps` must have."""

    def loss(self, batch: Batch) -> Losses:
        """One pass, under autocast. Deterministic on a CPU."""

    def export(self, folder: Path) -> None:
        """Write the drafter with the current weights, in a format that the engine loads."""

    def drafter(self, folder: Path) -> str:
        """The spec NAME:PATH of the drafter that `export` wrote to `folder`."""

    def refresh(self, drafter: Drafter) -> None:
        """Copy the current weights in place into a drafter that an engine opened from `drafter`."""


@dataclass(frozen=True, slots=True)
class Text:
    """The target's greedy answer to a held-out prompt."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@runtime_checkable
class UsesTexts(Protocol):
    """A recipe that measures something on held-out texts and exports it with the weights."""

    def use_texts(self, texts: Sequence[Text]) -> None:
        """Called once in a process, before anything is measured or kept."""


_recipes: dict[str, str] = {}


def register_recipe(name: str, factory: str) -> None:
    """Add a recipe. `factory` is its "module:class", imported when first used."""
    if name in _recipes:
        raise ConfigError(f"recipe {name!r} is taken: choose another name")
    _recipes[name] = factory


def recipe_names() -> tuple[str, ...]:
    return tuple(_recipes)


def recipe_class(name: str) -> type[Recipe]:
    """The recipe class of this name."""
    if name not in _recipes:
        raise ConfigError(f"recipe {name!r} is unknown: must be one of {', '.join(_recipes)}")
    module, _, attribute = _recipes[name].partition(":")
    return cast("type[Recipe]", getattr(import_module(module), attribute))


register_recipe("eagle3", "slipstream.train.eagle3:Eagle3Recipe")
register_recipe("medusa", "slipstream.train.medusa:MedusaRecipe")
register_recipe("draft", "slipstream.train.draft:DraftRecipe")
