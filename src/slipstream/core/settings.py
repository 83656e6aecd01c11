"""Settings that are declared once: a field of a dataclass with its default, range and help text.

Its check (`check_settings`), its option on the command line (`cli/options.py`) and the HTTP field of a sampling setting
(`serve/schemas.py`) are derived from the declaration.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from typing import Any

from slipstream.core.errors import ConfigError, SlipstreamError


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting.

    kind: the type of its value, as the command line takes it; `many`: it is a list of such values.
    checked: whether `check_settings` checks it; others are checked by their dataclass.
    low, high: the range, both ends included; None: unbounded. above: `low` itself is excluded.
    choices: the texts that it may be. note: what a special value means, such as "0 is off".
    help: the help text of the option, and the description of the HTTP field; "": its entry in the class's docstring.
    metavar: the placeholder of the option's value. flag: the option, if its name is not the setting's (`--top-p` for
    `top_p`); no metavar and no flag: there is no option. short: a short form, such as "-t".
    panel: the heading of the option in `--help`. http: a sampling setting is a field of the same name, kind and range.
    """

    kind: type
    default: Any
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()
    note: str = ""
    help: str = ""
    metavar: str = ""
    flag: str = ""
    short: str = ""
    panel: str = ""
    http: bool = True
    many: bool = False
    checked: bool = True

    def fault(self, value: object) -> str | None:
        """What the value must be instead; None: it is valid."""
        if self.many or not self.checked or (value is None and self.default is None):
            return None
        if self.choices:
            return None if value in self.choices else f"one of {', '.join(self.choices)}"
        if self.kind not in (int, float):
            right = isinstance(value, self.kind)
            return None if right else {bool: "True or False", str: "a text"}.get(self.kind, f"a {self.kind.__name__}")
        if not (is_whole(value) if self.kind is int else is_number(value)):
            words = "a whole number" if self.kind is int else "a number"
            return ", ".join(filter(None, (words, self.range, "or None" if self.default is None else "")))
        number: Any = value
        fits = (self.low is None or number >= self.low) and (self.high is None or number <= self.high)
        return None if fits and not (self.above and number == self.low) and number == number else self.range

    @property
    def range(self) -> str:
        """The range in words; "": any number."""
        low, high = (f"{end:g}" if isinstance(end, float) else str(end) for end in (self.low, self.high))
        if self.low is None and self.high is None:
            return ""
        if self.high is None:
            words = f"above {low}" if self.above else f"{low} or more"
        else:
            words = f"above {low}, at most {high}" if self.above else f"{low} to {high}"
        return f"{words} ({self.note})" if self.note else words

    def option(self, name: str) -> str:
        """The option on the command line; "": there is none. Of a switch with two names the first."""
        named = self.flag.partition("/")[0].strip() or self.flag.rpartition("/")[2]
        return named or (f"--{name.replace('_', '-')}" if self.metavar else "")


def setting(kind: type, default: Any, **more: Any) -> Any:
    """A field of a dataclass with the declaration of its setting."""
    return field(default=default, metadata={"setting": Setting(kind, default, **more)})


@cache
def settings_of(kind: Any) -> Mapping[str, Setting]:
    """The declared settings of a dataclass, by name. Those without a help text have their entry of its docstring."""
    declared = {one.name: one.metadata["setting"] for one in fields(kind) if "setting" in one.metadata}
    texts = _entries(kind.__doc__ or "")
    return {name: replace(one, help=one.help or texts.get(name, "")) for name, one in declared.items()}


def _entries(doc: str) -> dict[str, str]:
    """The `name: text` entries of a docstring. An indented line continues the entry before it."""
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(doc).splitlines():
        if entry := re.fullmatch(r"(\w+): (.+)", line):
            name = entry[1]
            found[name] = entry[2]
        elif line.startswith(" ") and name:
            found[name] += f" {line.strip()}"
        else:
            name = ""
    return found


def check_settings(made: Any, error: type[SlipstreamError] = ConfigError) -> None:
    """Raise for the first setting whose value is out of its range."""
    kind: Any = type(made)
    for name, declared in settings_of(kind).items():
        if (right := declared.fault(getattr(made, name))) is not None:
            raise error(f"{name}={getattr(made, name)!r}: must be {right}")


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True and False are numbers to Python; here they are an argument in the wrong place."""
    return isinstance(value, Real) and not isinstance(value, bool)
