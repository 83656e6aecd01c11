"""`slipstream train`: a drafter for the user's model, trained on answers that the model writes."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.loading import use_threads
from slipstream.cli.options import MODEL, OUTPUT, DebugOption, option
from slipstream.core.errors import CapacityError, ConfigError
from slipstream.models.resolve import find_local
from slipstream.train.config import OptionValue, TrainConfig
from slipstream.train.recipe import recipe_class, recipe_names

if TYPE_CHECKING:
    from slipstream.train.run import Finished

DATA = "Data"
TRAINING = "Training (defaults are the recipe's)"
LOOKING = "Reports and measurements"

_OPTIONS: Mapping[str, tuple[str, str, str]] = {
    "data": ("DIR", DATA, "Folder of the data; several drafters can share it. Default: OUT/data."),
    "prompts": ("FILE", DATA, "Prompts, one JSON object a line with 'prompt' or 'turns'. May be repeated."),
    "self_prompts": ("N", DATA, "Let a chat model write N prompts itself, such as 20000; no data is needed."),
    "systems": ("TEXT", DATA, "System message of the model's own prompts: that of your users. May be repeated."),
    "openings": ("TEXT", DATA, "How its own prompts begin; '': as it likes. May be repeated. Default: a mix."),
    "samples": ("N", DATA, "Answers to each prompt, such as 2."),
    "temperatures": ("T", DATA, "Temperature of the answers: that of your users. Repeated, they are dealt in turns."),
    "max_prompt_tokens": ("N", DATA, "Longer prompts are left out."),
    "max_tokens": ("N", DATA, "Longest answer."),
    "held_out": ("N", DATA, "Prompts kept from training, to measure with."),
    "lanes": ("N", DATA, "Answers written at a time: more are faster and need more memory."),
    "steps": ("N", TRAINING, "Steps of the optimizer."),
    "optimizer": ("NAME", TRAINING, "adamw, or muon: for the matrices of layers, AdamW for the rest."),
    "muon_rate": ("TIMES", TRAINING, "Muon's learning rate, as a multiple of --learning-rate, such as 4."),
    "row_tokens": ("N", TRAINING, "Tokens of a row; answers are laid end to end in rows."),
    "rows": ("N", TRAINING, "Rows of a pass, on each device. Halve it where memory is short."),
    "accumulate": ("N", TRAINING, "Passes before the optimizer takes a step. Double it where you halve --rows."),
    "learning_rate": ("R", TRAINING, "Highest learning rate, such as 1e-3."),
    "final_rate": ("PART", TRAINING, "Share of the learning rate that is left at the end, such as 0.05."),
    "warmup": ("N", TRAINING, "Steps until the learning rate is at its highest."),
    "weight_decay": ("W", TRAINING, "AdamW's, such as 0.01."),
    "beta1": ("B", TRAINING, "AdamW's, such as 0.9."),
    "beta2": ("B", TRAINING, "AdamW's, such as 0.95."),
    "clip": ("NORM", TRAINING, "Larger gradients are made as short as this."),
    "average": ("PART", TRAINING, "Export a moving average of the weights with this decay, such as 0.99."),
    "seed": ("N", TRAINING, "Same seed, same data and order."),
    "precision": ("NAME", TRAINING, "Arithmetic: bf16, fp32, or auto (bf16 on a GPU). Weights are fp32 always."),
    "device": ("DEVICE", MODEL, "cpu, cuda, cuda:1, or auto: a GPU if there is one. Several: start it with torchrun."),
    "trust_remote_code": ("", MODEL, "Run Python code that comes with the model. Only where you have read it."),
    "log_every": ("N", LOOKING, "Steps from report to report."),
    "checkpoint_every": ("N", LOOKING, "Steps from checkpoint to checkpoint."),
    "measure_every": ("N", LOOKING, "Steps from measurement to measurement in the real engine; 0: only at the end."),
    "measure_prompts": ("N", LOOKING, "Held-out prompts to measure with."),
    "measure_tokens": ("N", LOOKING, "Tokens of each answer that is measured."),
}  # fmt: skip
_NAMES = {"temperatures": "--temperature", "systems": "--system-prompt", "openings": "--opening"}
_KINDS: Mapping[str, Any] = {"int": int | None, "float": float | None, "bool": bool, "str": str | None}


_FLAGS = {name: _NAMES.get(name, "--" + name.replace("_", "-")) for name in _OPTIONS}
_SETTING = re.compile(rf"(?<![-\w.])({'|'.join(sorted(_FLAGS, key=len, reverse=True))})(?==)|\((\w+_\w+)\)")
_OWN = re.compile(r"\boption (?:'(\w+)'|(\w+=))")


def in_flags(message: str) -> str:
    """A message of the library with options in the place of Python's names."""

    def flag(found: re.Match[str]) -> str:
        return _FLAGS[found[1]] if found[1] else f"({_FLAGS.get(found[2], found[2])})"

    parts = re.split(r"(--set \w+)", _OWN.sub(lambda found: f"--set {found[1] or found[2]}", message))
    return "".join(part if i % 2 else _SETTING.sub(flag, part) for i, part in enumerate(parts))


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's parameter `given` by one option for each setting in `_OPTIONS`; None: not given."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
    kinds = {field.name: str(field.type) for field in fields(TrainConfig)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = []
    for name, (metavar, panel, help) in _OPTIONS.items():
        kind = "str" if kinds[name].endswith("Name") else kinds[name]
        listed = list[float] | None if "float, " in kind else list[str] | None
        hint: Any = listed if kind.startswith("tuple") else _KINDS[kind]
        made = option(_FLAGS[name], metavar=metavar, panel=panel, help=help)
        default = False if kind == "bool" else None
        added.append(inspect.Parameter(name, keyword, default=default, annotation=Annotated[hint, made]))
    parameters = [p.replace(kind=keyword) for p in own] + added

    @functools.wraps(command)
    def run(**values: Any) -> None:
        taken = {name: values.pop(name) for name in _OPTIONS}
        command(given={n: v for n, v in taken.items() if v is not None and v is not False and v != []}, **values)

    del run.__wrapped__  # typer must see the new signature, not the old one
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


@with_settings
def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help=f"What to train: {', '.join(recipe_names())}.", show_default=False)
    ],
    given: Any,
    target: Annotated[
        str,
        option(
            "--target", "-m", metavar="NAME", panel=MODEL, help="The model to draft for: a folder, hub id, or default."
        ),
    ] = "default",
    out: Annotated[
        Path | None,
        option("--out", "-o", metavar="DIR", panel=OUTPUT, help="Folder of the run: all of it lies there."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        option(
            "--set",
            metavar="NAME=VALUE",
            panel=TRAINING,
            help="An option of the recipe's own (docs/training.md); a name that it does not know is answered with all "
            "that it has. May be repeated.",
        ),
    ] = None,
    threads: Annotated[int | None, option(metavar="N", min=1, panel=MODEL, help="CPU threads to compute with.")] = None,
    debug: DebugOption = False,
) -> None:
    """Train a drafter for a model, from answers that the model itself writes.

    Run again with the same options, it goes on where it was stopped. The last line on stdout is JSON.
    """
    if recipe not in recipe_names():
        raise ConfigError(f"recipe {recipe!r} is unknown: must be one of {', '.join(recipe_names())}")
    if out is None:
        raise ConfigError(f"--out: name the folder of the run, such as --out runs/{recipe}")
    named = {"recipe": recipe, "target": target, "out": out, "options": parse_settings(setting or []), **given}
    try:
        TrainConfig(**named)  # refuses what is wrong before torch is imported
        find_local(target)
        use_threads(threads)
        finished = run(TrainConfig(**{**recipe_class(recipe).defaults, **named}))
    except ConfigError as error:
        raise ConfigError(in_flags(str(error))) from error
    except CapacityError as error:
        raise CapacityError(in_flags(str(error))) from error
    except KeyboardInterrupt:
        say(f"stopped; run the same command again to go on with {out}")
        raise
    if os.environ.get("RANK", "0") != "0":
        return  # only the first of several processes reports
    say(f"use it: slipstream generate --model {target} --drafter '{finished.drafter}' \"...\"")
    print(json.dumps({"drafter": finished.drafter, "folder": str(finished.folder), "tau": finished.tau}))


def run(config: TrainConfig) -> Finished:
    """Train. Tests replace this function by a stand-in."""
    from slipstream.train.run import train as train_now

    return train_now(config, say)


def say(text: str) -> None:
    """Print a line of progress with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def parse_settings(given: list[str]) -> dict[str, OptionValue]:
    """Read NAME=VALUE; the recipe converts the values."""
    found: dict[str, OptionValue] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {text}: must be NAME=VALUE")
        found[name.replace("-", "_")] = value
    return found
