"""The help of a command as text of two columns: readable in a terminal of 80, where typer's tables break every line.

Names stand on the left; one that is too long for its column has a line of its own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import typer

_NAMES = 26
"""Columns of names, with what surrounds them."""
_WIDEST = 100
_NARROWEST = 50
_ARGUMENTS, _OTHERS = "Arguments", "Other"


def help_text(usage: str, help: str, parameters: Sequence[Any], width: int, epilog: str = "") -> str:
    """All of it. width: of the terminal."""
    columns = max(_NARROWEST, min(width, _WIDEST) - 1)
    parts = [usage, *(textwrap.fill(paragraph, columns) for paragraph in help.split("\n\n"))]
    for title, listed in _panels(parameters).items():
        lines = [typer.style(line, bold=True) for line in textwrap.wrap(title, columns)]
        for parameter in listed:
            lines += _entry(parameter, columns)
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *([epilog] if epilog else [])]) + "\n"


def _panels(parameters: Sequence[Any]) -> dict[str, list[Any]]:
    """By heading, in the order of the command; what has none comes last."""
    found: dict[str, list[Any]] = {}
    for parameter in parameters:
        if not getattr(parameter, "hidden", False):
            argument = parameter.param_type_name == "argument"
            title = getattr(parameter, "rich_help_panel", None) or (_ARGUMENTS if argument else _OTHERS)
            found.setdefault(title, []).append(parameter)
    first = {title: found.pop(title) for title in (_ARGUMENTS,) if title in found}
    last = {title: found.pop(title) for title in (_OTHERS,) if title in found}
    return {**first, **found, **last}


def _entry(parameter: Any, columns: int) -> Iterator[str]:
    names = _named(parameter)
    said = " ".join([*str(getattr(parameter, "help", None) or "").split(), _default(parameter)]).strip()
    wrapped = textwrap.wrap(said, columns - _NAMES, break_long_words=False, break_on_hyphens=False) or [""]
    if len(names) + 4 > _NAMES:
        yield f"  {typer.style(names, fg='cyan')}"
    else:
        yield f"  {typer.style(names, fg='cyan')}{' ' * (_NAMES - 2 - len(names))}{wrapped.pop(0)}".rstrip()
    for line in wrapped:
        yield " " * _NAMES + line


def _named(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join(parameter.opts)
    if parameter.secondary_opts:
        names += " / " + ", ".join(parameter.secondary_opts)
    return f"{names} {parameter.metavar}" if parameter.metavar else names


def _default(parameter: Any) -> str:
    value = getattr(parameter, "default", None)
    plain = isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""
    return f"[default: {value}]" if plain and getattr(parameter, "show_default", True) else ""
