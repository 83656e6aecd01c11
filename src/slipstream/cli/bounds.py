"""Numbers that an option cannot be, said as the library says it: the option, its value, and what would be right."""

from __future__ import annotations

import re
from typing import Any

from typer import BadParameter

_KINDS = {"int": "a whole number", "float": "a number"}
_EXAMPLE = re.compile(r"such as ([0-9]+(?:\.[0-9]+)?)")


def in_words(error: BadParameter) -> str | None:
    """What is wrong with a number; None: it is something else.

    typer lets pydantic read values, whose error is the cause of its own.
    """
    found: Any = getattr(error.__cause__, "errors", list)()
    option: Any = error.param
    if not found or option is None:
        return None
    kind, value = found[0]["type"], found[0]["input"]
    within = _within(getattr(option, "min", None), getattr(option, "max", None))
    number = _KINDS.get(kind.partition("_")[0])
    if number is not None:
        right = f"{number}, {within}" if within else number
    elif kind in ("greater_than_equal", "less_than_equal"):
        right = within
    else:
        return None
    example = _EXAMPLE.search(option.help or "")  # nearly every option's help has one
    return f"{option.opts[0]} {value}: must be {right}" + (f", such as {example[1]}" if example else "")


def _within(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f"{most:g} or less"
    return f"{least:g} or more" if most is None else f"{least:g} to {most:g}"
