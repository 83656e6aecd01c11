"""Files that an option names: what is wrong with one is said in the option's name."""

from __future__ import annotations

from pathlib import Path

from slipstream.core.errors import ConfigError


def read_named(path: Path, option: str, remedy: str = "") -> str:
    """The text of the file that `option` names. remedy: what else would be right, where that is not plain."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        wrong = f"there is no file {path.absolute()}" if missing else f"cannot be read as text ({error})"
        raise ConfigError(f"{option} {path}: {wrong}" + (f"; {remedy}" if remedy else "")) from error
