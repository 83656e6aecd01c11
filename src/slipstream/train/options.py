"""What the options of all recipes share: how a wrong one is refused, and how weights may be written."""

from __future__ import annotations

from typing import Literal, get_args

from slipstream.core.errors import ConfigError

Kept = Literal["fp16", "bf16", "fp32"]


def check_option(name: str, value: object, right: bool, wanted: str) -> None:
    if not right:
        raise ConfigError(f"option {name}={value!r}: must be {wanted}")


def check_one_of(name: str, value: object, known: object) -> None:
    """known: a `Literal` of names."""
    check_option(name, value, value in get_args(known), "one of " + ", ".join(get_args(known)))
