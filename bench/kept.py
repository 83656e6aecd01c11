"""What is kept of a call beside its results: the command and its options, without the folders of one machine."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FOLDERS = re.compile(r"[^:+?,=]*/(?=[^/])")


def told(text: str) -> str:
    """As it was given, but of paths only the last name: where things lie is one machine's business."""
    return _FOLDERS.sub("", text)


def command_line(arguments: Sequence[str]) -> str:
    """A command, to be given again in a folder that has what it names."""
    script, *given = arguments
    return shlex.join([f"bench/{Path(script).name}", *map(told, given)])


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """All options but the one that says where the results go."""
    return {name: _value(value) for name, value in vars(options).items() if name != "json"}


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(part) for part in value]
    return told(str(value)) if isinstance(value, str | Path) else value
