"""`slipstream train`: a drafter for the user's model, trained on answers that the model writes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.loading import use_threads
from slipstream.cli.options import MODEL, OUTPUT, PANELS, DebugOption, Given, option, with_options
from slipstream.core.errors import CapacityError, ConfigError
from slipstream.core.settings import settings_of
from slipstream.models.resolve import find_local
from slipstream.train.config import OptionValue, TrainConfig
from slipstream.train.recipe import recipe_class, recipe_names

if TYPE_CHECKING:
    from slipstream.train.run import Finished

_FLAGS = {name: one.option(name) for name, one in settings_of(TrainConfig).items()}
_SETTING = re.compile(rf"(?<![-\w.])({'|'.join(sorted(_FLAGS, key=len, reverse=True))})(?==)|\((\w+_\w+)\)")
_OWN = re.compile(r"\boption (?:'(\w+)'|(\w+=))")


def in_flags(message: str) -> str:
    """A message of the library with options in the place of Python's names."""

    def flag(found: re.Match[str]) -> str:
        return _FLAGS[found[1]] if found[1] else f"({_FLAGS.get(found[2], found[2])})"

    parts = re.split(r"(--set \w+)", _OWN.sub(lambda found: f"--set {found[1] or found[2]}", message))
    return "".join(part if i % 2 else _SETTING.sub(flag, part) for i, part in enumerate(parts))


@with_options
def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help=f"What to train: {', '.join(recipe_names())}.", show_default=False)
    ],
    given: Annotated[Given, TrainConfig],
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
            panel=PANELS["training"],
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
