"""What a recipe is: a module to be trained, its loss, and how it becomes a drafter of the real engine.

The loop knows nothing about heads or drafts, a recipe nothing about optimizers, checkpoints or ranks. A new recipe is
one file beside this one and a line at the end of this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
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
    """What a pass gives. Sums, not means: the loop divides by all positions of all passes and ranks of a step."""

    total: Tensor  # scalar fp32 with a gradient: the loss summed over positions
    count: Tensor  # scalar: positions that it was summed over
    accepted: Tensor  # [K]: summed over positions, the chance that guess k is accepted (sum of min(p, q), or a hit)
    positions: Tensor  # [K]: over how many; guess k / positions k is its estimated acceptance
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # sums of other terms, by name, for the curves


class TargetShape(Protocol):
    """What is known of a target before it is loaded. A `Teacher` has it too."""

    @property
    def config(self) -> Any:
        """As transformers reads it."""

    @property
    def hidden(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ToldShape:
    """A target's shape by its configuration alone."""

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
    """What a recipe is made for."""

    config: TrainConfig
    teacher: Teacher
    counts: Tensor  # [V] int64: how often each token stands in the answers of the training data


class Recipe(Protocol):
    """A drafter in training. Made on the teacher's device, fp32, by `make` under the run's seed."""

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    """Settings of `TrainConfig` that this recipe wants where the user says nothing."""

    @classmethod
    def check(cls, config: TrainConfig, target: TargetShape) -> None:
        """Raise `ConfigError` for options that are wrong: a run asks before it writes any data."""

    @classmethod
    def make(cls, setting: Setting) -> Recipe:
        """With fresh weights."""

    @property
    def module(self) -> nn.Module:
        """What is trained: those of its parameters that require a gradient. Its state dict is the checkpoint's."""

    @property
    def taps(self) -> Taps:
        """The target's hidden states that `Batch.taps` must hold."""

    def loss(self, batch: Batch) -> Losses:
        """One pass, under autocast. Deterministic: the same weights and batch give the same bits on a CPU."""

    def export(self, folder: Path) -> None:
        """Write the drafter with the module's weights as they stand, in a form that the engine opens."""

    def drafter(self, folder: Path) -> str:
        """How the engine is told to open what `export` wrote there: NAME:PATH."""

    def refresh(self, drafter: Drafter) -> None:
        """Copy the module's weights as they stand, in place, into a drafter that an engine opened from `drafter`."""


@dataclass(frozen=True, slots=True)
class Text:
    """What the target answered to a prompt that was held out."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@runtime_checkable
class Listens(Protocol):
    """A recipe that looks at held-out texts besides: what it finds there is exported with the weights."""

    def hear(self, texts: Sequence[Text]) -> None:
        """Called once in a process, before anything is measured or kept. The target chose greedily."""


_recipes: dict[str, str] = {}


def register_recipe(name: str, factory: str) -> None:
    """Make a recipe known. `factory` is its "module:class", imported when first asked for."""
    if name in _recipes:
        raise ConfigError(f"recipe {name!r} is taken: choose another name")
    _recipes[name] = factory


def recipe_names() -> tuple[str, ...]:
    return tuple(_recipes)


def recipe_class(name: str) -> type[Recipe]:
    """The recipe of this name."""
    if name not in _recipes:
        raise ConfigError(f"recipe {name!r} is unknown: must be one of {', '.join(_recipes)}")
    module, _, attribute = _recipes[name].partition(":")
    if find_spec(module) is None:
        raise ConfigError(
            f"recipe {name!r}: this installation does not have it ({module} is missing); install a newer one"
        )
    return cast("type[Recipe]", getattr(import_module(module), attribute))


register_recipe("eagle3", "slipstream.train.eagle3:Eagle3Recipe")
register_recipe("medusa", "slipstream.train.medusa:MedusaRecipe")
register_recipe("draft", "slipstream.train.distill:DraftRecipe")
