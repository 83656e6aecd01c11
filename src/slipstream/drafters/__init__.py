"""The registry of drafters, and the specs by which users name them.

A new drafter is one file in this folder and one line at the end of this one. Factories are "module:class" strings,
imported on first use, so listing drafters loads none of them.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.drafters.base import Drafter, HostDrafter

DrafterFactory = Callable[..., "Drafter"]


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter as users name it: `NAME[:PATH[?OPTIONS]]` or `FILE.py:CLASS`. PATH: its weights; without one, with or
    without OPTIONS, those that come with Slipstream. A class in a file goes by its own name."""

    name: str  # as written, even if it is an alias: requests and output use this name
    path: str | None = None  # including the options
    file: str | None = None  # the Python file of the class

    @property
    def kind(self) -> str:
        """Its name in the registry."""
        return kind_of(self.name)

    @property
    def place(self) -> str | None:
        """The path without the options, or None."""
        return None if self.path is None else self.path.partition("?")[0] or None

    def moved(self, place: str) -> DrafterSpec:
        """The same drafter with another path."""
        return DrafterSpec(self.name, place + (self.path or "").removeprefix(self.place or ""))

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.file}:{self.name}"
        return self.name if self.path is None else f"{self.name}:{self.path}"


@dataclass(frozen=True, slots=True)
class _Entry:
    factory: str | DrafterFactory
    takes_path: bool
    ships: str | None = None


AUTO = "auto"
"""Not a drafter, but all those that suit the target (`opening.py`)."""

_entries: dict[str, _Entry] = {}
_aliases: dict[str, str] = {}


def register(
    name: str,
    factory: str | DrafterFactory,
    *,
    takes_path: bool = False,
    ships: str | None = None,
    aliases: Sequence[str] = (),
) -> None:
    """Register a drafter. `factory`: a class or function, or its "module:class".

    takes_path: it is named with the path of its weights, NAME:PATH.
    ships: without a path it uses the weights in this folder, which come with Slipstream (`opening.py`).
    """
    for taken in (name, *aliases):
        if not taken or ":" in taken or "+" in taken:
            raise ConfigError(f"drafter name {taken!r}: must not be empty or have a colon (NAME:PATH) or a plus (A+B)")
        if taken in _entries or taken in _aliases or taken == AUTO:
            raise ConfigError(f"drafter name {taken!r} is taken: choose another")
    _entries[name] = _Entry(factory, takes_path, ships)
    _aliases.update(dict.fromkeys(aliases, name))


def drafter_names() -> tuple[str, ...]:
    """The registered drafters in alphabetical order, without aliases."""
    return tuple(sorted(_entries))


def kind_of(name: str) -> str:
    """The registered name of a drafter or alias; unknown names are returned unchanged."""
    return _aliases.get(name, name)


def loaded_as(wanted: str, loaded: Collection[str]) -> str:
    """Translate `A+B` into the names of loaded drafters: one loaded as eagle3 also answers to eagle."""
    own = {kind_of(name): name for name in loaded}
    return "+".join(name if name in loaded else own.get(kind_of(name), name) for name in wanted.split("+"))


def shipped_as(name: str) -> str | None:
    """The folder of this drafter's weights that come with Slipstream, or None."""
    kind = kind_of(name)
    return _entries[kind].ships if kind in _entries else None


def parse_spec(text: str) -> DrafterSpec:
    """Parse `NAME[:PATH]` or `FILE.py:CLASS` without reading a file."""
    name, colon, path = text.partition(":")
    if text == AUTO:
        return DrafterSpec(AUTO)
    entry = _entries.get(kind_of(name))
    file, _, in_file = text.rpartition(":")
    if entry is None and (file or text).endswith(".py"):
        if not file or not in_file.isidentifier():
            raise ConfigError(f"drafter {text!r}: must name a class in the file, {file or text}:CLASS")
        if in_file == AUTO or kind_of(in_file) in _entries:
            raise ConfigError(f"drafter {text!r}: {in_file!r} is another drafter's name; rename the class")
        return DrafterSpec(in_file, file=file)
    if entry is None:
        known = ", ".join(sorted([AUTO, *_entries, *_aliases]))
        raise ConfigError(f"drafter {name!r} is unknown: must be one of {known}, FILE.py:CLASS, or none")
    if colon and not path:
        raise ConfigError(f"drafter {text!r}: a path must follow the colon")
    if colon and not entry.takes_path:
        raise ConfigError(f"drafter {text!r}: {name} takes no path, write {name!r}")
    if entry.takes_path and not path and entry.ships is None:
        raise ConfigError(f"drafter {name!r} needs a model: write {name}:PATH (folder, hub id or GGUF file)")
    return DrafterSpec(name, path or None)


def parse_merged(text: str) -> tuple[DrafterSpec, ...]:
    """Parse `A+B`, drafters whose drafts are merged. A plus in a path is kept unless a drafter's name follows it."""
    parts: list[str] = []
    for piece in text.split("+"):
        name = piece.partition(":")[0]
        is_named = name == AUTO or kind_of(name) in _entries or ".py:" in piece
        if parts and ":" in parts[-1] and not is_named:
            parts[-1] += "+" + piece
        else:
            parts.append(piece)
    if len(parts) > 1 and ("none" in parts or not all(parts)):
        raise ConfigError(
            f"drafter {text!r}: must have a drafter's name on both sides of a plus, and cannot include none"
        )
    specs = tuple(parse_spec(part) for part in parts)
    _check_once([spec.kind for spec in specs], f" in {text!r}")
    return specs


def merged_name(specs: Sequence[DrafterSpec]) -> str:
    """The name of the union of these drafters in requests."""
    return "+".join(spec.name for spec in specs)


def names_of(merged: str, auto: Sequence[str]) -> tuple[str, ...]:
    """The names in `A+B`, each once, with `auto` expanded."""
    found: dict[str, None] = {}
    for name in merged.split("+"):
        found.update(dict.fromkeys(auto if name == AUTO and auto else (name,)))
    return tuple(found)


def chosen_for(default: str | None, predicted: bool) -> str | None:
    """The drafter of a request that names none: its prediction if it has one, merged with `auto` if that is loaded."""
    if not predicted:
        return default
    return f"prediction+{default}" if default is not None and AUTO in default.split("+") else "prediction"


def parse_specs(texts: Sequence[str]) -> list[DrafterSpec]:
    """All drafters named by these texts, each once. Requests choose by name, so names must be unique."""
    if "none" in texts:
        raise ConfigError("drafter 'none': cannot be combined with other drafters; give it alone or leave it out")
    merged = [parse_merged(text) for text in texts]
    _check_once([merged_name(specs) for specs in merged])
    found = list(dict.fromkeys(spec for specs in merged for spec in specs))
    _check_once([spec.kind for spec in found])
    return found


def _check_once(names: Sequence[str], where: str = "") -> None:
    for name in names:
        if names.count(name) > 1:
            others = [alias for alias, own in _aliases.items() if own == name]
            also = f" ({', '.join(others)} is an alias)" if others else ""
            raise ConfigError(f"drafter {name!r} is given twice{where}: give each once{also}")


def python_file(spec: DrafterSpec) -> Path:
    """The path of a drafter `FILE.py:CLASS`. Raises `ConfigError` if there is no such file."""
    path = Path(spec.file or "").expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"drafter {str(spec)!r}: there is no file {path}")
    return path


@contextmanager
def naming_the_line(spec: DrafterSpec) -> Iterator[None]:
    """Turn exceptions from a drafter's own file into a `ConfigError` that names the line."""
    try:
        yield
    except SlipstreamError:
        raise
    except (Exception, SystemExit) as error:
        file = str(python_file(spec))
        lines: list[int | None] = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines.append(error.lineno)
        where = f" line {lines[-1]}:" if lines else ""
        raise ConfigError(f"drafter {str(spec)!r}:{where} {type(error).__name__}: {error}") from error


def class_in_file(spec: DrafterSpec) -> type[HostDrafter]:
    """Load the class that `FILE.py:CLASS` names. Executes the file: allow it to operators, never to requests."""
    from slipstream.drafters.base import HostDrafter

    path = python_file(spec)
    module = ModuleType(f"slipstream_drafter_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their module
    with naming_the_line(spec):
        exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))
    made = getattr(module, spec.name, None)
    if isinstance(made, type) and issubclass(made, HostDrafter):
        return made
    own = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, HostDrafter)]
    there = ", ".join(key for key in own if key != "HostDrafter") or "none"
    what = "there is no such class" if made is None else f"{spec.name} is no class that derives from HostDrafter"
    raise ConfigError(f"drafter {str(spec)!r}: {what}; HostDrafters of the file: {there}")


def drafter_factory(name: str) -> DrafterFactory:
    """The factory of this drafter, usually its class. Imports its module."""
    name = kind_of(name)
    if name not in _entries:
        raise ConfigError(f"drafter {name!r} is unknown: must be one of {', '.join(drafter_names())}")
    factory = _entries[name].factory
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        loaded: Any = getattr(import_module(module), attribute)
        _entries[name] = replace(_entries[name], factory=loaded)
        return loaded  # type: ignore[no-any-return]
    return factory


register("ngram", "slipstream.drafters.ngram:NgramDrafter")
register("grammar", "slipstream.drafters.grammar:GrammarDrafter")
register("lookahead", "slipstream.drafters.lookahead:LookaheadDrafter")
register("prediction", "slipstream.drafters.prediction:PredictionDrafter")
register("suffix", "slipstream.drafters.suffix:SuffixDrafter")
register("model", "slipstream.drafters.model:ModelDrafter", takes_path=True, ships="draft", aliases=("draft",))
register("medusa", "slipstream.drafters.medusa:MedusaDrafter", takes_path=True, ships="medusa")
register("mtp", "slipstream.drafters.mtp:MtpDrafter")
register("eagle", "slipstream.drafters.eagle:EagleDrafter", takes_path=True, ships="eagle3", aliases=("eagle3",))
