"""How `--help` looks: what takes no value shows none, where typer would print `<bool>` or `<str>`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _nothing(ctx: Any) -> str:
    return ""


def _without_values(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.display_type_rich = _nothing  # its name says it already
    return parameters


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))
