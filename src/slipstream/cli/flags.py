"""Errors in the words of the command line: options instead of Python's keys, and options that no longer exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from typer import BadParameter

from slipstream.core.errors import CapacityError, ConfigError, InvalidRequest
from slipstream.core.settings import settings_of

_OF_A_KEY = re.compile(r"(\w+)=(.+?): (must .*)", re.DOTALL)
_OF_MEMORY = re.compile(r"\b(memory|max_model_len|max_draft_memory)=")
_KINDS = {"int": "a whole number", "float": "a number"}
_EXAMPLE = re.compile(r"such as ([0-9]+(?:\.[0-9]+)?)")

GONE: Mapping[str, Mapping[str, str]] = {
    "bench": {
        "--record": "nothing is simulated any more; --rate R measures traffic on the real engine",
        "--simulate": "nothing is simulated any more; --rate R measures traffic on the real engine",
        "--traffic": "requests come at random times; give --rate R",
        "--replicas": "one engine is measured; start a server for each replica and measure it with "
        "`python -m slipstream.bench.load`",
        "--speculation": "give --drafter NAME or --drafter none, and --planner adaptive or fixed",
        "--plot": "draw the rows that --json FILE writes",
    },
}
"""By command, the options that it had once, and what to use instead."""


def refuse_gone(command: str, words: Sequence[str]) -> None:
    """Raise `ConfigError` for the first word that is an option of an earlier version."""
    gone = GONE.get(command, {})
    for word in words:
        flag = word.partition("=")[0]
        if flag in gone:
            raise ConfigError(f"{flag} is gone: {gone[flag]}")


@contextmanager
def naming_flags(*kinds: type, **other: str) -> Iterator[None]:
    """Name the option instead of the key in errors about values that came from the command line.

    kinds: dataclasses whose settings have options of other names. other: such options, by key.
    """
    names = {name: one.option(name) for kind in kinds for name, one in settings_of(kind).items()} | other
    try:
        yield
    except (ConfigError, InvalidRequest) as error:
        raise ConfigError(flagged(str(error), names)) from error


def flagged(message: str, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """`--key value: must …` for `key=value: must …`; other messages stay as they are. names: other options, by key."""
    found = _OF_A_KEY.fullmatch(message)
    if found is None:
        return message
    name = names.get(found[1]) or f"--{found[1].replace('_', '-')}"
    value = found[2].strip("'")
    return f"{name} {value}: {found[3]}"


@contextmanager
def naming_memory_flags() -> Iterator[None]:
    """As `naming_flags`, and in `CapacityError`s too, which name several memory settings."""
    try:
        with naming_flags():
            yield
    except CapacityError as error:
        raise CapacityError(_OF_MEMORY.sub(_flag, str(error))) from error


def _flag(key: re.Match[str]) -> str:
    return f"--{key[1].replace('_', '-')} "


def wrong_number(error: BadParameter) -> str | None:
    """A message with the option, the value and what would be right; None if the error is not about a number.

    typer lets pydantic read values; pydantic's error is the cause of typer's.
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
