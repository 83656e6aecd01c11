"""What the library says of a key, said of the option that gave it: planner='x' is --planner x on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.core.errors import CapacityError, ConfigError, InvalidRequest

_OF_A_KEY = re.compile(r"(\w+)=(.+?): (must .*)", re.DOTALL)
_OF_MEMORY = re.compile(r"\b(memory|max_model_len|max_draft_memory)=")


@contextmanager
def naming_flags() -> Iterator[None]:
    """A value that is refused inside came from the command line: it is a bad option, and named as one."""
    try:
        yield
    except (ConfigError, InvalidRequest) as error:
        raise ConfigError(flagged(str(error))) from error


def flagged(message: str) -> str:
    """`--key value: must …`, of `key=value: must …`; other messages stay as they are."""
    found = _OF_A_KEY.fullmatch(message)
    if found is None:
        return message
    key, value, remedy = found[1].replace("_", "-"), found[2].strip("'"), found[3]
    return f"--{key} {value}: {remedy}"


@contextmanager
def naming_memory_flags() -> Iterator[None]:
    """What does not fit was bounded by options, and others would make room: they are named as on the command line."""
    try:
        with naming_flags():
            yield
    except CapacityError as error:
        raise CapacityError(_OF_MEMORY.sub(_flag, str(error))) from error


def _flag(key: re.Match[str]) -> str:
    return f"--{key[1].replace('_', '-')} "
