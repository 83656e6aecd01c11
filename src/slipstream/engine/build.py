"""From names to a running engine: resolve, load, check, plan the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.drafters import DrafterSpec, drafter_factory, parse_spec
from slipstream.drafters.base import Drafter
from slipstream.drafters.model import ModelDrafter
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.memory import plan_memory
from slipstream.models.load import load_config, load_tokenizer, pick_device, pick_dtype
from slipstream.models.parity import open_model
from slipstream.models.resolve import resolve
from slipstream.models.runner import Runner

Progress = Callable[[str], None]
DrafterChoice = str | Drafter | Sequence[str | Drafter] | None


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    tokenizer: Any
    model_path: Path
    eos_ids: frozenset[int]


def build(
    model: str,
    drafter: DrafterChoice,
    config: EngineConfig,
    *,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    progress: Progress | None,
) -> Built:
    """Everything that a model and its drafters need before the first request. Cheap refusals come first."""
    say = progress or (lambda _: None)
    choices = [parse_spec(c) if isinstance(c, str) else c for c in _listed(drafter)]
    where = pick_device(device)
    path = resolve(model, progress)

    def open_runner(folder: Path) -> Runner:
        say(f"loading {folder.name}")
        return open_model(
            folder,
            pick_dtype(dtype, where, load_config(folder, trust_remote_code)),
            where,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )

    tokenizer: Any = load_tokenizer(path, trust_remote_code)
    target = open_runner(path)
    drafters: dict[str, Drafter] = {}
    for choice in choices:
        made = choice
        if isinstance(choice, DrafterSpec):
            made = _make(choice, open_runner, tokenizer, progress, trust_remote_code)
        assert isinstance(made, Drafter)
        if made.name in drafters:
            raise ConfigError(f"drafter {made.name!r} is given twice: give each once")
        drafters[made.name] = made
    default = next(iter(drafters), None)
    if "prediction" not in drafters and drafters:  # costs nothing until a request brings a prediction
        drafters["prediction"] = drafter_factory("prediction")()
    drafts = [d.runner for d in drafters.values() if isinstance(d, ModelDrafter)]
    plan = plan_memory(target, drafts, config)
    engine = Engine(target, drafters, default_drafter=default, plan=plan, config=config, decoder=tokenizer)
    return Built(engine, tokenizer, path, _eos_ids(target, tokenizer))


def _make(
    spec: DrafterSpec,
    open_runner: Callable[[Path], Runner],
    tokenizer: Any,
    progress: Progress | None,
    trust_remote_code: bool,
) -> Drafter:
    factory = drafter_factory(spec.name)
    if factory is not ModelDrafter:
        return factory()
    if spec.path is None:
        raise ConfigError(f"drafter {spec.name!r} needs a model: write {spec.name}:PATH (a folder, hub id or GGUF file)")
    path = resolve(spec.path, progress)
    # the vocabulary first: it is quick to read, and a draft that does not fit need not be loaded
    ModelDrafter.check_vocabulary(load_tokenizer(path, trust_remote_code).get_vocab(), tokenizer.get_vocab())
    return ModelDrafter(open_runner(path))


def _listed(drafter: DrafterChoice) -> Iterable[str | Drafter]:
    if drafter is None or drafter == "none":
        return []
    return [drafter] if isinstance(drafter, (str, Drafter)) else drafter


def _eos_ids(target: Runner, tokenizer: Any) -> frozenset[int]:
    """Everything that ends an answer: the generation configuration may name several, the tokenizer one."""
    found: set[int] = set()
    for source in (getattr(target.model, "generation_config", None), target.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)



