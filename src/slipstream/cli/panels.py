"""The headings that options stand under in `--help`."""

from __future__ import annotations

from typing import Any

import typer

MODEL = "Model"
SPECULATION = "Speculation (changes the speed, never the tokens, unless rejection sampling judges them)"
SAMPLING = "Sampling"
OUTPUT = "Output"
PROMPTS = "Prompts"


def option(*names: str, metavar: str = "", panel: str, help: str, **more: Any) -> Any:
    """An option as all of ours are: what it takes is named, and it stands under a heading.

    names: needed where `metavar` is the parameter's own name in capitals: typer 0.27 would take it for the option's.
    """
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)
