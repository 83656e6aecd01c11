"""Drafters whose weights come with Slipstream: those of the default model, trained by this project.

They lie in `slipstream/heads/default`, a folder each, with a model card. A drafter that takes a path and is named
without one means these.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.drafters import DrafterSpec, shipped_as
from slipstream.models.default import default_folder

HEADS = Path(__file__).parents[1] / "heads" / "default"
_DEFAULT = "default"


def with_shipped(spec: DrafterSpec, target: str | Path) -> DrafterSpec:
    """The drafter with the place of its weights, also where it was named without one.

    target: the model to draft for, as its user names it, or its folder. Quick, and without torch. Raises `ConfigError`
    where nothing is shipped for it.
    """
    name = shipped_as(spec.kind)
    if spec.place is not None or name is None:
        return spec
    is_default = target == _DEFAULT or _is_default(target)
    train = f"`slipstream train {name} --target {target if not is_default else _DEFAULT} --out runs/{name}"
    use = f"{name}:runs/{name}/drafter"
    if not is_default:
        raise ConfigError(
            f"drafter {spec.name!r} without a path: weights that come with Slipstream are for the default model, not "
            f"for {target}; name those of this model, {name}:PATH, or train some: {train} "
            f"--self-prompts 20000`, then {use}"
        )
    folder = HEADS / name
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"drafter {spec.name!r} without a path: its weights are not in this installation ({folder}); train them: "
            f"{train} --self-prompts 20000`, then {use}"
        )
    return spec.moved(str(folder))


def is_shipped_for(folder: Path, target: Path) -> bool:
    """Are the weights in `folder` those that come with Slipstream for this target?"""
    return folder.parent == HEADS and _is_default(target)


def _is_default(target: str | Path) -> bool:
    return Path(target).expanduser().resolve() == default_folder().resolve()
