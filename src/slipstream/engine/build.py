"""Builds an engine from the names of a model and its drafters: resolve, check, load, plan the memory, measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import CapacityError, ConfigError
from slipstream.drafters import (
    AUTO,
    DrafterSpec,
    class_in_file,
    drafter_factory,
    naming_the_line,
    parse_merged,
    parse_specs,
)
from slipstream.drafters.base import DeviceDrafter, Drafter, Opening
from slipstream.drafters.opening import WAYS, auto_specs, expanded, is_shipped_for, naming, with_shipped
from slipstream.engine.config import EngineConfig
from slipstream.engine.eager import EagerBackend
from slipstream.engine.measuring import known_costs
from slipstream.engine.memory import plan_memory
from slipstream.engine.queued import QueuedBackend
from slipstream.engine.requests import Loaded
from slipstream.engine.step import Engine
from slipstream.engine.warming import warm_up
from slipstream.kernels.gpu.jit import has_kernels
from slipstream.models.describe import SHARES, check_supported, max_positions_of
from slipstream.models.identity import check_pair, larger_draft
from slipstream.models.load import load_config, load_tokenizer, naming_model, pick_device, pick_dtype
from slipstream.models.parity import open_model
from slipstream.models.paths import Progress
from slipstream.models.resolve import resolve, shown_name
from slipstream.models.runner import Runner

Choice = DrafterSpec | Drafter
Classes = Mapping[Choice, type[Drafter] | None]
DrafterChoice = str | Drafter | Sequence[str | Drafter] | None


class _Default(str):
    """A default value, distinguished by its identity from the same text given by a caller."""

    __slots__ = ()


USUAL_DRAFTER: DrafterChoice = _Default(AUTO)


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    tokenizer: Any
    model_path: Path
    eos_ids: frozenset[int]

    @property
    def loaded(self) -> Loaded:
        """The properties of the engine that requests are checked against."""
        drafting = self.engine.drafting
        takes_material = {name: drafter.needs.material for name, drafter in drafting.drafters.items()}
        vocab_size = self.engine.target.vocab_size
        return Loaded(vocab_size, self.engine.plan, takes_material, drafting.default, drafting.auto)


def build(
    model: str,
    drafter: DrafterChoice,
    config: EngineConfig,
    *,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    progress: Progress | None,
    force_pair: bool = False,
) -> Built:
    """Load a model and its drafters, and build their engine. Cheap checks come before expensive work."""
    say = progress or (lambda _: None)
    groups = _parsed(drafter)
    where = pick_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)  # for kernels, events and graphs of this thread
    path = resolve(model, progress, trust_remote_code=trust_remote_code)
    named = {spec.kind: spec for group in groups for spec in group if isinstance(spec, DrafterSpec)}
    auto = auto_specs(path, where.type, named) if AUTO in named else ()
    choices = _choices(groups, auto, path)
    loading = _Loading(dtype, where, trust_remote_code, progress)
    opening = loading.opening(path)
    classes = {choice: _class_of(choice) for choice in choices}
    remarks = _check_drafters(classes, opening, force_pair=force_pair)
    target = loading.runner(path)
    for remark in filter(None, (target.remark, *remarks.values())):
        say(f"note: {remark}")
    drafters = _open_drafters(classes, remarks, opening, target)
    default = "+".join(one.name for one in groups[0]) if groups else None
    dispensable = [spec.name for spec in auto if spec.kind not in named and _uses_cache(drafters[spec.name])]
    try:
        plan = plan_memory(target, list(drafters.values()), config)
    except CapacityError:
        if config.max_draft_memory is None or not dispensable:
            raise
        say(f"auto goes without {', '.join(dispensable)}: more of the cache than max_draft_memory allows")
        drafters = {name: one for name, one in drafters.items() if name not in dispensable}
        plan = plan_memory(target, list(drafters.values()), config)
    make = partial(
        Engine,
        target,
        drafters,
        default_drafter=default,
        auto=tuple(spec.name for spec in auto if spec.name in drafters),
        plan=plan,
        config=config,
        decoder=opening.tokenizer,
    )
    if config.rounds == "queued" or (config.rounds is None and has_kernels(where)):
        engine = make(backend=QueuedBackend, graphs=config.graphs, progress=progress)
    else:
        engine = make(backend=EagerBackend)
    costs = known_costs(engine, path, config.measure_costs, progress)
    if costs is not None:
        engine.drafting.planner.adopt(costs)
    if config.warm_up:
        warm_up(engine, progress)
    engine.drafting.caution = target.remark
    with naming_model(path):
        return Built(engine, opening.tokenizer, path, eos_ids(target, opening.tokenizer))


def _parsed(drafter: DrafterChoice) -> list[tuple[Choice, ...]]:
    """Parse the drafters that a caller names: a tuple for each entry, with several if their drafts are merged."""
    if drafter is None or drafter == "none":
        return []
    listed = [drafter] if isinstance(drafter, (str, Drafter)) else drafter
    if not (isinstance(listed, Sequence) and all(isinstance(one, (str, Drafter)) for one in listed)):
        raise ConfigError(f"drafter={drafter!r}: must be a name, a Drafter object (not its class), or a list of these")
    parse_specs([one for one in listed if isinstance(one, str)])  # refuses ambiguous names
    return [parse_merged(one) if isinstance(one, str) else (one,) for one in listed]


def _choices(groups: Sequence[Sequence[Choice]], auto: Sequence[DrafterSpec], path: Path) -> list[Choice]:
    """All drafters to open, each once: `auto` replaced by its drafters, and shipped weights found."""
    found: dict[Choice, None] = {}
    for group in groups:
        specs = [one for one in group if isinstance(one, DrafterSpec)]
        found.update(dict.fromkeys(expanded(specs, auto) if specs else group))  # a group of objects has one
    return [with_shipped(one, path) if isinstance(one, DrafterSpec) else one for one in found]


@dataclass(frozen=True, slots=True)
class _Loading:
    """How to load models: the target and those of drafters."""

    dtype: str
    device: torch.device
    trust: bool
    progress: Progress | None

    def opening(self, path: Path) -> Opening:
        """Check that the target is supported, and read its configuration and tokenizer."""
        config = load_config(path, self.trust)
        with naming_model(path):
            check_supported(config)
            max_positions_of(config)
        return Opening(
            path=None,
            model_path=path,
            tokenizer=load_tokenizer(path, self.trust),
            resolve=cache(partial(resolve, progress=self.progress, trust_remote_code=self.trust, ways=WAYS)),
            load_tokenizer=partial(load_tokenizer, trust_remote_code=self.trust),
            open_runner=self.runner,
            say=self.progress or (lambda _: None),
            target_config=config,
        )

    def runner(self, folder: Path, beside: Runner | None = None) -> Runner:
        """Load a model. beside: a runner whose embeddings it may share."""
        if self.progress is not None:
            self.progress(f"loading {shown_name(folder)}")
        config = load_config(folder, self.trust)
        shared = beside if getattr(config, SHARES, False) else None
        return open_model(
            folder,
            pick_dtype(self.dtype, self.device, config) if shared is None else shared.dtype,
            self.device,
            trust_remote_code=self.trust,
            progress=self.progress,
            target=shared,
        )


def _check_drafters(classes: Classes, opening: Opening, *, force_pair: bool) -> dict[str, str]:
    """Check that named drafters suit the target, before any weights are loaded. Returns remarks by drafter."""
    remarks: dict[str, str] = {}
    for choice, kind in classes.items():
        if kind is None or not isinstance(choice, DrafterSpec):
            continue
        with naming(f"drafter={str(choice)!r}"):
            kind.check(replace(opening, path=choice.path))
            if choice.place is None or choice.file is not None:
                continue
            folder, target = opening.resolve(choice.place), opening.model_path
            is_model = choice.kind == "model"
            force = force_pair or is_shipped_for(folder, target)  # the default model must always start
            remark = check_pair(folder, target, force=force, whole=is_model)
            remarks[choice.name] = remark or (larger_draft(folder, target) if is_model else "")
    return remarks


def _open_drafters(
    classes: Classes, remarks: Mapping[str, str], opening: Opening, target: Runner
) -> dict[str, Drafter]:
    """Open all drafters, by name; with any, also those that draft from a request's prediction and grammar."""
    drafters: dict[str, Drafter] = {}
    for choice, kind in classes.items():
        made = _open_drafter(choice, kind, opening, target)
        if about := remarks.get(made.name):
            made.remark = "; ".join(filter(None, (made.remark, about)))
        if made.name in drafters:
            raise ConfigError(f"drafter {made.name!r} is given twice: give each once")
        drafters[made.name] = made
    for name in ("prediction", "grammar") if drafters else ():
        if name not in drafters:
            drafters[name] = drafter_factory(name)()
    return drafters


def _open_drafter(choice: Choice, kind: type[Drafter] | None, opening: Opening, target: Runner) -> Drafter:
    if isinstance(choice, Drafter):
        made = choice
    elif kind is None:
        made = drafter_factory(choice.name)()
    elif choice.file is not None:
        with naming_the_line(choice):
            made = kind.open(opening, target)
    else:
        made = kind.open(replace(opening, path=choice.path), target)
    if isinstance(choice, DrafterSpec) and choice.name != getattr(made, "name", None):
        made.call(choice.name)
    if not getattr(made, "name", None):
        raise ConfigError(f'drafter {type(made).__name__}: it has no name; give its class one, name = "mine"')
    if ":" in made.name or "+" in made.name:
        raise ConfigError(f"drafter name {made.name!r}: must not have a colon (NAME:PATH) or a plus (A+B)")
    return made


def _uses_cache(drafter: Drafter) -> bool:
    """Whether it keeps something in the cache."""
    return drafter.page_bytes(1) > 0 or (isinstance(drafter, DeviceDrafter) and bool(drafter.taps))


def _class_of(choice: Choice) -> type[Drafter] | None:
    """The class that opens a named drafter; None: an object, or a function makes it."""
    if not isinstance(choice, DrafterSpec):
        return None
    if choice.file is not None:
        return class_in_file(choice)
    factory = drafter_factory(choice.name)
    return factory if isinstance(factory, type) and issubclass(factory, Drafter) else None


def eos_ids(target: Runner, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer, from the generation configuration, the model's configuration and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(target.model, "generation_config", None), target.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)
