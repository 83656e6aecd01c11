"""Which drafters and weights a name means: `auto`, and the weights that come with Slipstream for the default model.

These were trained by this project. They lie in `slipstream/heads/default`, a folder each, with a model card; a drafter
that takes a path and is named without one means them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slipstream.core.errors import ConfigError, DrafterError, ModelNotFound, SlipstreamError
from slipstream.drafters import AUTO, DrafterSpec, shipped_as
from slipstream.models.default import default_folder

HEADS = Path(__file__).parents[1] / "heads" / "default"
_DEFAULT = "default"


def with_shipped(spec: DrafterSpec, target: str | Path) -> DrafterSpec:
    """Fill in the path of the shipped weights if the drafter was named without a path.

    target: the model to draft for, by name or folder. Raises `ConfigError` if nothing is shipped for it. No torch.
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
    """True if the weights in `folder` are the ones shipped for this target."""
    return folder.parent == HEADS and _is_default(target)


def _is_default(target: str | Path) -> bool:
    return Path(target).expanduser().resolve() == default_folder().resolve()


WAYS = (
    "Give NAME:PATH with the folder or the Hugging Face hub id of weights for this drafter (of a smaller model for "
    "model:PATH); `slipstream train` makes some"
)


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Begin the errors inside this block with the option that named the drafter, such as drafter='eagle3:heads'."""
    try:
        yield
    except (ConfigError, DrafterError, ModelNotFound) as error:
        if not str(error).startswith(option):
            error.args = (f"{option}: {error}",)
        raise


def auto_specs(folder: Path, device: str, named: Mapping[str, DrafterSpec]) -> tuple[DrafterSpec, ...]:
    """The drafters of `auto` for the target in this folder, on a device of this type.

    Those that cost nothing until they have a guess are always included. Those that compute join where that is cheap:
    modules in the target's own checkpoint and, on a GPU, the head trained for the default model. The planner decides
    which of them draft in each step. named: drafters that the user also names, by kind; they replace `auto`'s.
    """
    found = [DrafterSpec("suffix")]
    if _has_modules(folder):
        found.append(DrafterSpec("mtp"))
    if device == "cuda":  # on a CPU a head's passes are too expensive relative to the target's
        found += _shipped(DrafterSpec("eagle3"), folder)
    return tuple(named.get(spec.kind, spec) for spec in found)


def expanded(specs: Collection[DrafterSpec], auto: Collection[DrafterSpec]) -> tuple[DrafterSpec, ...]:
    """Replace `auto` by its drafters."""
    found: dict[DrafterSpec, None] = {}
    for spec in specs:
        found.update(dict.fromkeys(auto if spec.name == AUTO else (spec,)))
    return tuple(found)


def _has_modules(folder: Path) -> bool:
    from slipstream.models.heads.checkpoint import read_config  # brings torch
    from slipstream.models.heads.mtp_files import find_modules

    try:
        find_modules(folder, read_config(folder))
    except SlipstreamError:  # none, or incomplete: not an error, since they were not named
        return False
    return True


def _shipped(spec: DrafterSpec, folder: Path) -> list[DrafterSpec]:
    try:
        return [with_shipped(spec, folder)]
    except SlipstreamError:  # nothing shipped for this target
        return []
