"""The options of the commands, and how a command receives them.

A setting that is declared once (`core/settings.py`) is an option by that declaration: those of `EngineConfig` and of
`SamplingParams` are shared by generate, chat, serve, bench, audit, tune and explain, together with the fields of
`Common`; a command declares the others. `with_options` makes options of the parameters that have such a type.
"""

from __future__ import annotations

import copy
import functools
import inspect
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin

import typer

from slipstream.cli.flags import naming_flags
from slipstream.core.errors import ConfigError, read_named
from slipstream.core.params import SamplingParams, SpeculationParams, VerifierName
from slipstream.core.settings import Setting, setting, settings_of
from slipstream.drafters import AUTO as AUTO_DRAFTERS
from slipstream.drafters import opening, parse_specs, python_file
from slipstream.drafters.opening import naming, with_shipped
from slipstream.engine.config import EngineConfig, PlannerName, parse_share
from slipstream.models.headers import AUTO, check_device_name, check_dtype_name
from slipstream.models.resolve import find_local

MODEL = "Model"
SPECULATION = "Speculation (changes the speed, never the tokens, unless rejection sampling judges them)"
SAMPLING = "Sampling"
OUTPUT = "Output"
PROMPTS = "Prompts"
PANELS = {
    "model": MODEL,
    "speculation": SPECULATION,
    "sampling": SAMPLING,
    "output": OUTPUT,
    "prompt": "Prompt",
    "prompts": PROMPTS,
    "measuring": "Measuring",
    "traffic": "Traffic: requests that come at a rate",
    "checking": "Checking",
    "server": "Server",
    "limits": "Limits",
    "data": "Data",
    "training": "Training (defaults are the recipe's)",
    "reports": "Reports and measurements",
}
_OF_RECIPES = ("data", "training", "reports")  # whose defaults depend on the recipe
OF_SAMPLING = tuple(name for name, one in settings_of(SamplingParams).items() if one.metavar)
"""The settings of `SamplingParams` that are options."""
OF_REQUESTS = (*OF_SAMPLING, "verifier")
"""The options that belong to a request, not to the engine."""
_OF_SERVERS = ("max_num_seqs", "max_num_batched_tokens")
"""Settings of `EngineConfig` that are options of `serve` alone."""
_MORE_HELP = {
    "temperature": "Default: 0; audit: both 0 and 1.",
    "seed": "With --verifier rejection only while the drafts are the same, too. Default: a fresh one, which the JSON "
    "output shows.",
    "max_tokens": "Default: 256 (generate), 512 (chat), 128 (bench), 64 (audit and tune).",
}
"""Sentences that the help of an option adds to that of its setting."""
DEFAULT_DRAFTER = AUTO_DRAFTERS
WITHOUT_PREDICTION = (
    "there is no prediction to follow; give `generate` one with --prediction FILE, or name another drafter, such as "
    "ngram, suffix or auto"
)
Given = Mapping[str, Any]
"""Settings by name, as far as options gave them. `Annotated[Given, Kind]`: those that the dataclass Kind declares."""


def option(*names: str, metavar: str = "", panel: str, help: str, **more: Any) -> Any:
    """An option with a name for its value, under a heading of `--help`.

    names: needed where `metavar` is the parameter's own name in capitals: typer 0.27 would take it for the option's.
    """
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


@dataclass
class Debug:
    """Whether `--debug` was given; `main` reads it when an error ends the program."""

    wanted: bool = False


debug = Debug()


def remember_debug(value: bool) -> bool:
    debug.wanted = debug.wanted or value
    return value


DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of an error, for bug reports.",
        callback=remember_debug,
        rich_help_panel=OUTPUT,
    ),
]


@dataclass(frozen=True, slots=True)
class Common:
    """The shared options, as given on the command line.

    model: A model folder, a .gguf file, a Hugging Face id such as HuggingFaceTB/SmolLM2-1.7B-Instruct, or default: a
        small one (135M parameters) that is fetched once.
    dtype: Precision of the weights: float32 (fp32), bfloat16 (bf16) or float16 (fp16). auto takes float32 on a CPU and
        bfloat16 on a GPU (float16 where the model was stored so).
    device: Where it runs: cpu, cuda, or cuda:1 for the second GPU. auto takes the first GPU if there is one.
    threads: CPU threads to compute with, such as 4. Give it where other programs need some of the cores, or in a
        container that may use fewer than it sees. Default: torch's choice, one for each core.
    trust_remote_code: Fetch and run Python code that comes with the model. Only for models whose code you have read.
    force_pair: Load a drafter although it was trained for another model. The tokens stay the same; few of its guesses
        will be accepted.
    drafter: The drafter, which guesses tokens ahead. auto: all that suit the model, each where it pays; ngram: matches
        in prompt and answer; suffix: those, and earlier answers; lookahead: the model's own guesses further on;
        prediction: a text that comes with the request (--prediction); model:PATH (or draft:PATH): a smaller model, best
        with the same tokenizer, such as model:path/to/small; medusa:PATH and eagle:PATH (or eagle3:PATH): heads that
        were trained for the model (eagle3, medusa and draft without a path: those that come for the default model);
        mtp: the model's own modules; grammar: tokens that the form of an answer forces (always on with a form);
        path/to/file.py:Class: your own (docs/extending.md), whose code is run; A+B: both, their drafts merged; none: no
        drafts. May be repeated: bench, tune, audit and explain try each in turn; others load all and use the first
        unless a request names another. Default: auto.
    verifier: How sampled drafts are verified. exact: the tokens are those of plain decoding. rejection: other tokens of
        the same distribution, and more guesses of a draft model are accepted; bench runs both.
    no_speculation: Decode plainly, one token a pass: the same tokens, for comparison.
    """

    model: str = setting(str, "default", short="-m", metavar="NAME", panel="model")
    dtype: str = setting(str, AUTO, metavar="TYPE", panel="model")
    device: str = setting(str, AUTO, metavar="DEVICE", panel="model")
    threads: int | None = setting(int, None, metavar="N", low=1, panel="model")
    trust_remote_code: bool = setting(bool, False, flag="--trust-remote-code", panel="model")
    force_pair: bool = setting(bool, False, flag="--force-pair", panel="speculation")
    drafter: list[str] | None = setting(str, None, many=True, short="-d", metavar="NAME[:PATH]", panel="speculation")
    verifier: str = setting(str, "exact", metavar="NAME", panel="speculation")
    no_speculation: bool = setting(bool, False, flag="--no-speculation", panel="speculation")
    engine: Given = field(default_factory=dict)  # of `EngineConfig`
    asked: Given = field(default_factory=dict)  # of `SamplingParams`

    @property
    def temperature(self) -> float | None:
        return self.asked.get("temperature")

    @property
    def seed(self) -> int | None:
        return self.asked.get("seed")

    @property
    def draft_tokens(self) -> int | None:
        return self.engine.get("draft_tokens")

    @property
    def min_gain(self) -> float | None:
        return self.engine.get("min_gain")

    def asking(self, **settings: Any) -> Common:
        """The same with other settings of `SamplingParams`."""
        return replace(self, asked={**self.asked, **settings})

    @property
    def given(self) -> set[str]:
        """Names of the options that differ from their defaults."""
        return {*self.asked, *self.engine, *differing(self)}

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters to load; empty for 'none', which `check` accepts only alone."""
        named = tuple(dict.fromkeys(self.drafter or (DEFAULT_DRAFTER,)))
        return () if named == ("none",) else named

    def planner_or(self, usual: PlannerName) -> PlannerName:
        """The planner of --planner, or the command's default."""
        return self.engine.get("planner", usual)  # type: ignore[no-any-return]

    def check(self, prediction: str | None, without: str = WITHOUT_PREDICTION, *, option: str = "--drafter") -> None:
        """Refuse wrong values before torch is imported, which takes seconds.

        without: the end of the error for the drafter `prediction` where there is no prediction.
        option: the option that named the drafters.
        """
        with naming(option):
            specs = [spec for spec in parse_specs(self.drafters) if not self.no_speculation]
        if prediction is None and any(spec.name == "prediction" for spec in specs):
            raise ConfigError(f"{option} prediction: {without}")
        if prediction is not None and not specs:
            why = "--no-speculation" if self.no_speculation else "--drafter none"
            raise ConfigError(
                f"--prediction {prediction} with {why}: nothing would guess from it; leave one of them out"
            )
        with naming_flags():
            check_dtype_name(self.dtype)
            check_device_name(self.device)
            shares = {key: parse_share(self.engine.get(key), key) for key in ("memory", "max_draft_memory")}
            EngineConfig(**{**self.engine, **shares})
        found = []
        for spec in specs:
            if spec.file is not None:
                python_file(spec)
            with naming(f"{option} {spec}"):
                found.append((spec, with_shipped(spec, self.model).place))
        find_local(self.model)
        for spec, place in found:
            with naming(f"{option} {spec}"):
                if place is not None:
                    find_local(place, opening.WAYS)

    def sampling(self, *, max_tokens: int, **more: Any) -> SamplingParams:
        """The request's parameters. A sampled request without a seed gets one here, to be shown.

        max_tokens: the command's default.
        """
        asked = {"temperature": 0.0, "max_tokens": max_tokens, **self.asked}
        if self.seed is None and asked["temperature"] > 0:
            asked["seed"] = secrets.randbits(32)
        with naming_flags():
            return SamplingParams(
                **asked,
                speculation=SpeculationParams(
                    enabled=not self.no_speculation,
                    draft_tokens=self.draft_tokens,
                    verifier=cast(VerifierName, self.verifier),  # `SpeculationParams` checks it
                ),
                **more,
            )


def with_options(
    command: Callable[..., None],
    hidden: Collection[str] = (),
    without: str = WITHOUT_PREDICTION,
    more: Collection[str] = (),
) -> Callable[..., None]:
    """Put options in the place of each parameter whose type declares settings: a dataclass, or `Annotated[Given, …]`.

    An option of the command replaces the shared one of the same name. A parameter `named`, an argument, is
    another way to give --model.
    hidden: options that the command refuses with a message of its own; its help does not list them.
    without: see `Common.check`. more: settings of `EngineConfig` that are options of few commands.
    """
    written = list(inspect.signature(command, eval_str=True).parameters.values())
    groups = {p.name: kind for p in written if (kind := _kind_of(p.annotation)) is not None}
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in written if p.name not in groups]
    taken = {p.name for p in parameters}
    names: dict[str, list[str]] = {}  # by group
    shared = {"engine": EngineConfig, "asked": SamplingParams} if Common in groups.values() else {}
    for group, kind in sorted((groups | shared).items(), key=lambda one: one[1] in (Common, *shared.values())):
        left = set(_OF_SERVERS) - set(more) if kind is EngineConfig else set()
        options = [p for p in _options(kind) if p.name not in taken | left]
        names[group] = [p.name for p in options]
        taken |= {*names[group]}
        parameters += [_unlisted(p) if p.name in hidden else p for p in options]
    if shared:
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("debug", keyword, default=False, annotation=DebugOption))
    plain = {p.name for p in written if get_origin(p.annotation) is Annotated}  # a mapping of what was given

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given: dict[str, Any] = {
            group: {name: value for name in found if (value := values.pop(name)) not in (None, [])}
            for group, found in names.items()
        }
        prediction = next((one["prediction"] for one in given.values() if "prediction" in one), None)
        for group, kind in groups.items():
            if kind is Common:
                values.pop("debug")
                _name_model(given[group], values.pop("named", None))
                given[group] = Common(**given[group], engine=given.pop("engine"), asked=given.pop("asked"))
                given[group].check(prediction, without)
        for group, kind in groups.items():
            if group not in plain and kind is not Common:
                given[group] = kind(**given[group])
        command(**given, **values)

    del run.__wrapped__  # typer must see the new signature, not the old one
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _name_model(given: dict[str, Any], named: str | None) -> None:
    if named is not None:
        if "model" in given:
            raise ConfigError(f"{named} --model {given['model']}: both name the model; give one of them")
        given["model"] = named


def _kind_of(annotation: Any) -> type | None:
    """The dataclass whose settings stand for a parameter; None: it is an option of its own."""
    kinds = get_args(annotation)[1:] if get_origin(annotation) is Annotated else (annotation,)
    return next((kind for kind in kinds if is_dataclass(kind) and isinstance(kind, type) and settings_of(kind)), None)


def differing(options: Any) -> set[str]:
    """The names of the options that differ from their defaults."""
    return {
        name for name, one in settings_of(cast(Any, type(options))).items() if getattr(options, name) != one.default
    }


def _options(kind: type) -> Iterable[inspect.Parameter]:
    """The options that a dataclass declares. Without one, the value is None: not given."""
    for name, one in settings_of(kind).items():
        if one.option(name):
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotated(kind, name, one)
            )


def _annotated(kind: type, name: str, one: Setting) -> Any:
    flags = (one.flag or one.option(name), *([one.short] if one.short else []))
    limits: dict[str, Any] = {}
    help, panel, value = [one.help], PANELS.get(one.panel, SAMPLING), one.default
    if kind is SamplingParams:  # which checks ranges itself
        help.append(_MORE_HELP.get(name, ""))
    else:
        if one.kind in (int, float):
            limits = {"min": None if one.above else one.low, "max": one.high}
        plain = isinstance(value, str | int | float) and not isinstance(value, bool) and value
        if plain and one.panel not in _OF_RECIPES and "Default" not in one.help:
            help.append(f"[default: {value}]")
    made = option(*flags, metavar=one.metavar, panel=panel, help=" ".join(filter(None, help)), **limits)
    typed: Any = one.kind
    return Annotated[list[typed] | None if one.many else typed | None, made]


def _unlisted(parameter: inspect.Parameter) -> inspect.Parameter:
    kind, option = get_args(parameter.annotation)
    unlisted = copy.copy(option)
    unlisted.hidden = True
    return parameter.replace(annotation=Annotated[kind, unlisted])


def check_written(files: Mapping[str, Path | None]) -> None:
    """Refuse output files, by option, that could not be written after the work. A plot must be SVG."""
    for name, path in files.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise ConfigError(f"--{name} {path}: is a folder; name a file in it")
        if path is not None and name == "plot" and path.suffix != ".svg":
            raise ConfigError(f"--plot {path}: is drawn as SVG; name it {path.with_suffix('.svg')}")


def whole_numbers(option: str, text: str, such_as: str, *, least: int = 1) -> list[int]:
    """The numbers of a list such as 1,4,16, each once. least: how many there must be."""
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError:
        found = [0]
    if len(found) < least or any(number < 1 for number in found):
        raise ConfigError(f"{option} {text}: must be whole numbers of 1 or more, such as {such_as}")
    return list(dict.fromkeys(found))


def read_text(source: str, option: str) -> str:
    """A file's text, or that of stdin for '-'."""
    if source == "-":
        return sys.stdin.read()
    return read_named(Path(source), option, "name a file that is there, or - for stdin")
