"""The record of a run (run.json, curves.svg) and the drafter's model card, which is made from it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from slipstream import __version__
from slipstream.train.checkpoint import Best
from slipstream.train.config import TrainConfig
from slipstream.train.plot import Panel, draw

Curves = Sequence[Mapping[str, Any]]


def write_record(
    config: TrainConfig,
    data: Mapping[str, Any],
    curves: Curves,
    *,
    step: int,
    seconds: float,
    parameters: int,
    best: Best | None,
) -> Path:
    """Write `run.json` and `curves.svg`. best: the measurement of the kept drafter."""
    record = {
        "config": config.as_dict(),
        "data": dict(data),
        "parameters": parameters,
        "steps_done": step,
        "training_seconds": round(seconds, 1),
        "best": asdict(best) if best else None,
        "measured": [point for point in curves if "tau" in point],
        "versions": _versions(),
        "device": _device_name(config),
        "curves": [dict(point) for point in curves if "tau" not in point],
    }
    config.out.mkdir(parents=True, exist_ok=True)
    file = config.out / "run.json"
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.replace(file)
    (config.out / "curves.svg").write_text(draw(_panels(curves), f"{config.recipe} for {config.target}"))
    return file


def _panels(curves: Curves) -> list[Panel]:
    """Loss, estimated acceptance by depth, and measured tau, by step."""
    trained = [point for point in curves if "loss" in point]
    measured = [point for point in curves if "tau" in point]
    guesses = max((len(p["acceptance"]) for p in trained), default=0)
    temperatures = list(dict.fromkeys(t for p in measured for t in p["tau"]))
    return [
        Panel("loss", {"loss": [(p["step"], p["loss"]) for p in trained]}),
        Panel(
            "acceptance, estimated in training",
            {
                f"guess {g + 1}": [(p["step"], p["acceptance"][g]) for p in trained if g < len(p["acceptance"])]
                for g in range(guesses)
            },
        ),
        Panel(
            "tau, in the engine on held-out prompts",
            {f"T={t}": [(p["step"], p["tau"][t]) for p in measured if t in p["tau"]] for t in temperatures},
        ),
    ]


def _versions() -> dict[str, str]:
    return {
        "slipstream": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _device_name(config: TrainConfig) -> str:
    if config.device == "cpu" or not torch.cuda.is_available():
        return platform.processor() or platform.machine()
    return torch.cuda.get_device_name()


Record = Mapping[str, Any]

_KINDS = {
    "eagle3": "An EAGLE-3 head: one decoder layer that reads three hidden states of the target and guesses in a row",
    "medusa": "Medusa heads: each guesses one position further from the target's last state and tokens, by its LM head",
    "draft": "A small decoder that shares the target's embeddings and LM head",
}
_SETTINGS = (
    "steps",
    "optimizer",
    "muon_rate",
    "rows",
    "row_tokens",
    "accumulate",
    "learning_rate",
    "final_rate",
    "warmup",
    "weight_decay",
    "average",
    "seed",
)


def model_card(record: Record, drafter: str, *, acceptance: Record | None = None, licence: str | None = None) -> str:
    """The card as Markdown. record: `run.json`. drafter: its spec, such as eagle:PATH.

    acceptance: the output of `tools/acceptance.py`, shown by task for this recipe.
    """
    config = record["config"]
    recipe, target = config["recipe"], _short(config["target"])
    parts = [
        f"# {recipe} for {target}",
        f"{_KINDS.get(recipe, 'A drafter')}. Guesses tokens for `{target}`, which checks them: answers are the "
        f"target's own, sooner. Adds {record['parameters']:,} parameters.",
        f"```\nslipstream generate --model {target} --drafter '{drafter}' \"…\"\n```",
        *([f"Licence: {licence}."] if licence else []),
        "## Data",
        _data(record["data"]),
        "## Recipe",
        _recipe(record),
        "## Acceptance",
        "tau: tokens per pass of the target, its own token included.",
        *([_by_task(acceptance, recipe)] if acceptance else []),
        _held_out(record),
        f"Made with {', '.join(f'{name} {version}' for name, version in record['versions'].items())}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _data(data: Record) -> str:
    made = data["made_of"]
    sources = []
    if made.get("self_prompts"):
        sources.append(f"{made['self_prompts']:,} user turns that the target wrote itself after its chat template")
    if made.get("prompts"):
        sources.append("prompts of " + ", ".join(f"`{Path(name).name}`" for name in made["prompts"]))
    temperatures = " and ".join(f"{t:g}" for t in made["temperatures"])
    return (
        f"The target's own answers: {data['answers']:,} of them, {data['answer_tokens']:,} tokens, sampled at "
        f"temperature {temperatures}, {made['samples']} to a prompt, up to {made['max_tokens']} tokens each. Prompts: "
        f"{'; '.join(sources)}. {made['held_out']} prompts were held out for measuring."
    )


def _recipe(record: Record) -> str:
    config = record["config"]
    settings = {name: config[name] for name in _SETTINGS if config.get(name) not in (None, 0, 0.0)}
    settings |= {f"--set {name}": _short(str(value)) for name, value in config["options"].items()}
    minutes, device = record["training_seconds"] / 60, record["device"]
    text = f"`slipstream train {config['recipe']}`, {record['steps_done']:,} steps in {minutes:.1f} minutes on {device}"
    if best := record.get("best"):
        text += f"; kept: the weights of step {best['step']:,}"
    return text + ".\n\n" + _table(("setting", "value"), ((name, f"{value}") for name, value in settings.items()))


def _held_out(record: Record) -> str:
    best = record.get("best")
    if not best:
        return ""
    taus = ", ".join(f"{tau:.2f} at temperature {temperature}" for temperature, tau in best["tau"].items())
    config = record["config"]
    count = min(config["measure_prompts"], record["data"]["made_of"]["held_out"])
    return f"On {count} held-out prompts of the training data, up to {config['measure_tokens']} tokens: tau {taus}."


def _by_task(acceptance: Record, recipe: str) -> str:
    """A table: one column a measurement, one row a task."""
    found = [result for result in acceptance["results"] if _is_of(result["drafter"], recipe)]
    if not found:
        return ""
    tasks = list(dict.fromkeys(name for result in found for name in result["categories"]))
    names = [f"{_named(result['drafter'])}, T={result['temperature']:g}" for result in found]
    rows = [(task, *(_tau(result["categories"].get(task)) for result in found)) for task in tasks]
    rows.append(("all", *(_tau(result) for result in found)))
    about = acceptance["settings"]
    return (
        f"On {acceptance['prompts']} prompts of `{about['prompts']}`, none of them in the training data, up to "
        f"{about['max_tokens']} tokens, drafting in every step:\n\n{_table(('tau by task', *names), rows)}"
    )


def _is_of(drafter: str, recipe: str) -> bool:
    first = drafter.partition("+")[0].partition(":")[0]
    return {"eagle": "eagle3", "model": "draft"}.get(first, first) == recipe


def _named(drafter: str) -> str:
    """The spec without the path of its weights."""
    shown = []
    for part in drafter.split("+"):
        name, _, path = part.partition(":")
        options = path.partition("?")[2]
        shown.append(f"{name} ({options.replace('&', ', ')})" if options else name)
    return " + ".join(shown)


def _tau(result: Record | None) -> str:
    return f"{result['tau']:.2f}" if result else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(name: str) -> str:
    """The last part of an absolute path: a published card must not show local folders."""
    path = Path(name)
    return path.name if path.is_absolute() else name
