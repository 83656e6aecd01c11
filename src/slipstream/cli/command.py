"""Commands as typer has them, but for `--help` and wrong numbers.

Help: text flows; what takes no value shows none, where typer would print `<bool>` or `<str>`. A number that an option
cannot be is a `ConfigError`, in one line as all of them.
"""

from __future__ import annotations

import inspect
import shutil
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from slipstream.cli.bounds import in_words
from slipstream.cli.help import help_text
from slipstream.core.errors import ConfigError


def _nothing(ctx: Any) -> str:
    return ""


def _without_values(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.display_type_rich = _nothing  # its name says it already
    return parameters


def _flowing(help: str | None) -> str | None:
    """Paragraphs without their line breaks: the terminal has a width of its own."""
    return help and "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(help).split("\n\n"))


class Command(TyperCommand):
    def __init__(self, *arguments: Any, help: str | None = None, **more: Any) -> None:
        super().__init__(*arguments, help=_flowing(help), **more)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            if (said := in_words(error)) is None:
                raise
            raise ConfigError(said) from error

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = shutil.get_terminal_size().columns
        usage = " ".join(self.get_usage(ctx).split())
        formatter.write(help_text(usage, self.help or "", self.get_params(ctx), width, self.epilog or ""))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))
