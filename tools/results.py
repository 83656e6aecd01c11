"""The results of a benchmark: written after every part, with the command and the machine that they come from."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError

_FOLDERS = re.compile(r"[^:+?,=]*/(?=[^/])")
_LONGEST = 800  # characters of an error


def told(text: str) -> str:
    """The text with only the last name of every path."""
    return _FOLDERS.sub("", text)


def command_line(arguments: Sequence[str]) -> str:
    """The command with shortened paths."""
    script, *given = arguments
    return shlex.join([f"tools/{Path(script).name}", *map(told, given)])


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """All options but --json."""
    return {name: _value(value) for name, value in vars(options).items() if name != "json"}


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(part) for part in value]
    return told(str(value)) if isinstance(value, str | Path) else value


def chosen(key: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names of a list such as a,b, in the order of `known`."""
    names = [name for name in text.split(",") if name]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"{key}={text!r}: {wrong[0]!r} is unknown; choose from {', '.join(known)}")
    return tuple(name for name in known if name in names)


def sizes(key: str, text: str) -> tuple[int, ...]:
    """The numbers of a list such as 1,8,32, sorted."""
    try:
        found = tuple(sorted({int(part) for part in text.split(",") if part}))
    except ValueError:
        found = (0,)
    if any(size < 1 for size in found):
        raise ConfigError(f"{key}={text!r}: must be numbers from 1 on by commas, such as 1,8,32")
    return found


def first_results(options: argparse.Namespace) -> dict[str, Any]:
    """Command, machine and versions; with --add on top of the results of an older file."""
    import torch

    kept = json.loads(options.json.read_text()) if options.add and options.json and options.json.exists() else {}
    return kept | {
        "command": " && ".join(filter(None, [kept.get("command"), command_line(sys.argv)])),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {name: _version(name) for name in ("triton", "transformers")},
    }


def _version(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


class Report:
    """Owns the results; `put` and `part` are the only writers. A crash or a timeout loses one part at most."""

    def __init__(self, results: dict[str, Any], path: Path | None) -> None:
        self.results = results
        self._path = path
        self._begun = time.perf_counter()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._begun:6.1f} s] {text}", flush=True)

    def put(self, value: Any, *keys: str) -> None:
        """Set the value under these keys, and save."""
        place = self.results
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        self.say(f"{' '.join(keys)}: {json.dumps(value)}")
        self.save()

    def save(self) -> None:
        if self._path is not None:
            fresh = self._path.with_name(self._path.name + ".new")
            fresh.write_text(json.dumps(self.results, indent=1) + "\n")
            os.replace(fresh, self._path)  # never half a file

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part. An error is written down, and the program goes on behind the part."""
        self.say(f"{name} ...")
        self.results.get("failed", {}).pop(name, None)
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.results.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:_LONGEST]
        finally:
            seconds = round(time.perf_counter() - start, 2)
            self.results.setdefault("seconds", {})[name] = seconds
            self.say(f"{name} took {seconds} s")
            self.save()
