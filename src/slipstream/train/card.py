"""The model card of a trained drafter: data, recipe and acceptance, filled in from the records and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    """The card as Markdown. record: `run.json`. drafter: how it is named to the engine.

    acceptance: what `bench/acceptance.py` wrote; its rows of this drafter's recipe are shown by task.
    """
    config = record["config"]
    recipe, target = config["recipe"], _short(config["target"])
    parts = [
        f"# {recipe} for {target}",
        f"{_KINDS.get(recipe, 'A drafter')}. Guesses tokens for `{target}`, which checks them: answers are the "
        f"target's own, only sooner. Adds {record['parameters']:,} parameters.",
        f"```\nslipstream generate --model {target} --drafter '{drafter}' \"…\"\n```",
        *([f"Licence: {licence}."] if licence else []),
        "## Data",
        _data(record["data"]),
        "## Recipe",
        _recipe(record),
        "## Acceptance",
        "tau is tokens a pass of the target, its own token included.",
        *([_by_task(acceptance, recipe)] if acceptance else []),
        _held_out(record),
        f"Made with {', '.join(f'{name} {version}' for name, version in record['versions'].items())}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _data(data: Record) -> str:
    made = data["made_of"]
    sources = []
    if made.get("self_prompts"):
        sources.append(f"{made['self_prompts']:,} user turns that the target wrote itself behind its chat template")
    if made.get("prompts"):
        sources.append("prompts of " + ", ".join(f"`{Path(name).name}`" for name in made["prompts"]))
    temperatures = " and ".join(f"{t:g}" for t in made["temperatures"])
    return (
        f"The target's own answers: {data['answers']:,} of them, {data['answer_tokens']:,} tokens, sampled at "
        f"temperature {temperatures}, {made['samples']} to a prompt, up to {made['max_tokens']} tokens each. Prompts: "
        f"{'; '.join(sources)}. {made['held_out']} prompts were held out to measure with."
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
    """A column for each measurement, a row for each task."""
    found = [result for result in acceptance["results"] if _is_of(result["drafter"], recipe)]
    if not found:
        return ""
    tasks = list(dict.fromkeys(name for result in found for name in result["categories"]))
    names = [f"{_named(result['drafter'])}, T={result['temperature']:g}" for result in found]
    rows = [(task, *(_tau(result["categories"].get(task)) for result in found)) for task in tasks]
    rows.append(("all", *(_tau(result) for result in found)))
    about = acceptance["settings"]
    return (
        f"On {acceptance['prompts']} prompts of `{about['prompts']}`, none of which it was trained on, up to "
        f"{about['max_tokens']} tokens, every round drafted:\n\n{_table(('tau by task', *names), rows)}"
    )


def _is_of(drafter: str, recipe: str) -> bool:
    first = drafter.partition("+")[0].partition(":")[0]
    return {"eagle": "eagle3", "model": "draft"}.get(first, first) == recipe


def _named(drafter: str) -> str:
    """Without the place of its weights."""
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
    """Of a folder its own name: where it lay is nobody's business."""
    path = Path(name)
    return path.name if path.is_absolute() else name
