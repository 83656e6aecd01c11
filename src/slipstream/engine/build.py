"""From names to a running engine: resolve, load, check, plan the memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
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

DrafterChoice = str | Drafter | Sequence[str | Drafter] | None


class _Unsaid(str):
    """A default: told by its identity from the same text that a caller gives."""

    __slots__ = ()


USUAL_DRAFTER: DrafterChoice = _Unsaid(AUTO)


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    tokenizer: Any
    model_path: Path
    eos_ids: frozenset[int]

    @property
    def loaded(self) -> Loaded:
        """What those must know who check requests."""
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
    """Everything that a model and its drafters need before the first request. Cheap refusals come first."""
    say = progress or (lambda _: None)
    listed = list(_listed(drafter))
    parse_specs([one for one in listed if isinstance(one, str)])  # refuses a name with two meanings
    merged = [parse_merged(one) if isinstance(one, str) else (one,) for one in listed]
    where = pick_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)  # kernels, events and graphs of this thread belong to it
    path = resolve(model, progress, trust_remote_code=trust_remote_code)
    own = {one.kind: one for parts in merged for one in parts if isinstance(one, DrafterSpec)}
    auto = auto_specs(path, where.type, own) if AUTO in own else ()
    named = dict.fromkeys(choice for parts in merged for choice in _expanded(parts, auto))
    choices = [with_shipped(one, path) if isinstance(one, DrafterSpec) else one for one in named]

    def open_runner(folder: Path, beside: Runner | None = None) -> Runner:
        say(f"loading {shown_name(folder)}")
        own = load_config(folder, trust_remote_code)
        shares = beside if getattr(own, SHARES, False) else None
        return open_model(
            folder,
            pick_dtype(dtype, where, own) if shares is None else shares.dtype,
            where,
            trust_remote_code=trust_remote_code,
            progress=progress,
            target=shares,
        )

    target_config = load_config(path, trust_remote_code)
    with naming_model(path):
        check_supported(target_config)
        max_positions_of(target_config)
    tokenizer: Any = load_tokenizer(path, trust_remote_code)
    opening = Opening(
        path=None,
        model_path=path,
        tokenizer=tokenizer,
        resolve=cache(lambda name: resolve(name, progress, trust_remote_code=trust_remote_code, ways=WAYS)),
        load_tokenizer=lambda folder: load_tokenizer(folder, trust_remote_code),
        open_runner=open_runner,
        say=say,
        target_config=target_config,
    )
    kinds = {choice: _class_of(choice) for choice in choices}
    remarks: dict[str, str] = {}  # by drafter
    for choice, kind in kinds.items():
        if kind is not None and isinstance(choice, DrafterSpec):
            with naming(f"drafter={str(choice)!r}"):
                kind.check(replace(opening, path=choice.path))
                if choice.place is not None and choice.file is None:
                    folder = opening.resolve(choice.place)
                    whole = choice.kind == "model"
                    shipped = is_shipped_for(folder, path)  # known by its folder, so the default model starts always
                    remarks[choice.name] = check_pair(folder, path, force=force_pair or shipped, whole=whole) or (
                        larger_draft(folder, path) if whole else ""
                    )
    target = open_runner(path)
    for remark in filter(None, (target.remark, *remarks.values())):
        say(f"note: {remark}")
    drafters: dict[str, Drafter] = {}
    for choice, kind in kinds.items():
        if isinstance(choice, Drafter):
            made = choice
        elif kind is not None and choice.file is not None:
            with naming_the_line(choice):
                made = kind.open(opening, target)
        elif kind is not None:
            made = kind.open(replace(opening, path=choice.path), target)
        else:
            made = drafter_factory(choice.name)()
        if isinstance(choice, DrafterSpec) and choice.name != getattr(made, "name", None):
            made.call(choice.name)
        if not getattr(made, "name", None):
            raise ConfigError(f'drafter {type(made).__name__}: it has no name; give its class one, name = "mine"')
        if ":" in made.name or "+" in made.name:
            raise ConfigError(f"drafter name {made.name!r}: must not have a colon (NAME:PATH) or a plus (A+B)")
        if about := remarks.get(made.name):
            made.remark = "; ".join(filter(None, (made.remark, about)))
        if made.name in drafters:
            raise ConfigError(f"drafter {made.name!r} is given twice: give each once")
        drafters[made.name] = made
    default = "+".join(one.name for one in merged[0]) if merged else None
    for name in (
        ("prediction", "grammar") if drafters else ()
    ):  # cost nothing until a request brings what they draft from
        if name not in drafters:
            drafters[name] = drafter_factory(name)()
    chosen = tuple(spec.name for spec in auto)
    spare = [spec.name for spec in auto if spec.kind not in own and _keeps_memory(drafters[spec.name])]
    try:
        plan = plan_memory(target, list(drafters.values()), config)
    except CapacityError:
        if config.max_draft_memory is None or not spare:
            raise
        say(f"auto goes without {', '.join(spare)}: more of the cache than max_draft_memory allows")
        drafters = {name: drafter for name, drafter in drafters.items() if name not in spare}
        chosen = tuple(name for name in chosen if name not in spare)
        plan = plan_memory(target, list(drafters.values()), config)
    given: dict[str, Any] = {
        "default_drafter": default,
        "auto": chosen,
        "plan": plan,
        "config": config,
        "decoder": tokenizer,
    }
    if config.rounds == "queued" or (config.rounds is None and has_kernels(where)):
        engine = Engine(target, drafters, backend=QueuedBackend, graphs=config.graphs, progress=progress, **given)
    else:
        engine = Engine(target, drafters, backend=EagerBackend, **given)
    costs = known_costs(engine, path, config.measure_costs, progress)
    if costs is not None:
        engine.drafting.planner.adopt(costs)
    if config.warm_up:
        warm_up(engine, progress)
    engine.drafting.caution = target.remark
    with naming_model(path):
        return Built(engine, tokenizer, path, eos_ids(target, tokenizer))


def _expanded(parts: Sequence[DrafterSpec | Drafter], auto: Sequence[DrafterSpec]) -> Sequence[DrafterSpec | Drafter]:
    specs = [one for one in parts if isinstance(one, DrafterSpec)]
    return expanded(specs, auto) if specs else parts  # objects stand alone


def _keeps_memory(drafter: Drafter) -> bool:
    """Does it keep something in the cache?"""
    return drafter.page_bytes(1) > 0 or (isinstance(drafter, DeviceDrafter) and bool(drafter.taps))


def _class_of(choice: DrafterSpec | Drafter) -> type[Drafter] | None:
    """The class of a drafter that is named, which knows how to open one; None: a mere function makes it."""
    if isinstance(choice, DrafterSpec) and choice.file is not None:
        return class_in_file(choice)
    factory = drafter_factory(choice.name) if isinstance(choice, DrafterSpec) else None
    return factory if isinstance(factory, type) and issubclass(factory, Drafter) else None


def _listed(drafter: DrafterChoice) -> Iterable[str | Drafter]:
    if drafter is None or drafter == "none":
        return []
    listed = [drafter] if isinstance(drafter, (str, Drafter)) else drafter
    if not (isinstance(listed, Sequence) and all(isinstance(one, (str, Drafter)) for one in listed)):
        raise ConfigError(f"drafter={drafter!r}: must be a name, a Drafter object (not its class), or a list of these")
    return listed


def eos_ids(target: Runner, tokenizer: Any) -> frozenset[int]:
    """Everything that ends an answer: the generation configuration may name several, the tokenizer one."""
    found: set[int] = set()
    for source in (getattr(target.model, "generation_config", None), target.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)
