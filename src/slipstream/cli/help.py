"""Help and errors of commands, in the place of typer's own.

Help is text in two columns for terminals of 80 columns: names on the left (a long one has a line of its own),
descriptions on the right. A number that an option cannot have is a `ConfigError` in one line, as every other error.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from slipstream.cli.flags import refuse_gone, wrong_number
from slipstream.core.errors import ConfigError

_NAMES = 26
"""Width of the column of names, margins included."""
_WIDEST = 100
_NARROWEST = 50
_ARGUMENTS, _OTHERS = "Arguments", "Other"


class Command(TyperCommand):
    def __init__(self, *arguments: Any, help: str | None = None, **more: Any) -> None:
        super().__init__(*arguments, help=_flowing(help), **more)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_gone(self.name or "", args)
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            if (text := wrong_number(error)) is None:
                raise
            raise ConfigError(text) from error

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = shutil.get_terminal_size().columns
        usage = " ".join(self.get_usage(ctx).split())
        formatter.write(help_text(usage, self.help or "", self.get_params(ctx), width, self.epilog or ""))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))


def _flowing(help: str | None) -> str | None:
    """Paragraphs without line breaks."""
    return help and "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(help).split("\n\n"))


def _without_values(parameters: list[Any]) -> list[Any]:
    """Hide typer's `<bool>` and `<str>` where the name alone says what to give."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.display_type_rich = _nothing
    return parameters


def _nothing(ctx: Any) -> str:
    return ""


def help_text(usage: str, help: str, parameters: Sequence[Any], width: int, epilog: str = "") -> str:
    """The whole help text. width: columns of the terminal."""
    columns = max(_NARROWEST, min(width, _WIDEST) - 1)
    parts = [usage, *(textwrap.fill(paragraph, columns) for paragraph in help.split("\n\n"))]
    for title, listed in _panels(parameters).items():
        lines = [typer.style(line, bold=True) for line in textwrap.wrap(title, columns)]
        for parameter in listed:
            lines += _entry(parameter, columns)
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *([epilog] if epilog else [])]) + "\n"


def _panels(parameters: Sequence[Any]) -> dict[str, list[Any]]:
    """The parameters by heading, in the order of the command; those without a heading come last."""
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
    text = " ".join([*str(getattr(parameter, "help", None) or "").split(), _default(parameter)]).strip()
    wrapped = textwrap.wrap(text, columns - _NAMES, break_long_words=False, break_on_hyphens=False) or [""]
    if len(names) + 4 > _NAMES:
        yield f"  {typer.style(names, fg='cyan')}"
    else:
        yield f"  {typer.style(names, fg='cyan')}{' ' * (_NAMES - 2 - len(names))}{wrapped.pop(0)}".rstrip()
    for line in wrapped:
        yield " " * _NAMES + line


def _named(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = " / ".join(", ".join(some) for some in (parameter.opts, parameter.secondary_opts) if any(some))
    return f"{names} {parameter.metavar}" if parameter.metavar else names


def _default(parameter: Any) -> str:
    value = getattr(parameter, "default", None)
    plain = isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""
    return f"[default: {value}]" if plain and getattr(parameter, "show_default", True) else ""
