"""From the fields of `Common` to options of a command: the machinery behind the options that commands share."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from slipstream.cli.options import WITHOUT_PREDICTION, Common
from slipstream.core.errors import ConfigError

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
OF_REQUESTS = (*SAMPLING, "verifier")
"""Options that are about what is asked, not about the engine."""


def with_common(
    command: Callable[..., None], hidden: Collection[str] = (), without: str = WITHOUT_PREDICTION
) -> Callable[..., None]:
    """Replace the command's parameter `common: Common` by one option for each field of `Common`.

    hidden: options that the command refuses in its own words; its help does not list them. A parameter `named` of
        the command, an argument, is another way to give --model.
    without: see `Common.check`.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    hints = get_type_hints(Common, include_extras=True)
    names = [field.name for field in fields(Common)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(
            field.name,
            keyword,
            default=field.default,
            annotation=_unlisted(hints[field.name]) if field.name in hidden else hints[field.name],
        )
        for field in fields(Common)
    ]
    parameters = [p.replace(kind=keyword) for p in own if p.annotation is not Common] + shared

    @functools.wraps(command)
    def run(**values: Any) -> None:
        if (named := values.pop("named", None)) is not None:
            if values["model"] != Common().model:
                raise ConfigError(f"{named} --model {values['model']}: both name the model; give one of them")
            values["model"] = named
        common = Common(**{name: values.pop(name) for name in names})
        common.check(values.get("prediction"), without, loads=values.get("simulate") is None)
        command(common=common, **values)

    del run.__wrapped__  # typer must see the new signature, not the old one
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def check_written(files: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written in the end, by option. What is drawn is SVG."""
    for name, path in files.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise ConfigError(f"--{name} {path}: is a folder; name a file in it")
        if path is not None and name == "plot" and path.suffix != ".svg":
            raise ConfigError(f"--plot {path}: is drawn as SVG; name it {path.with_suffix('.svg')}")


def _unlisted(annotated: Any) -> Any:
    kind, option = get_args(annotated)
    unlisted = copy.copy(option)
    unlisted.hidden = True
    return Annotated[kind, unlisted]
