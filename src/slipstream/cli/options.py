"""The options that generate, chat, serve, bench, audit, tune and explain share, with the help texts that teach them.

`Common` is both the list of these options and the object that a command receives: `with_common` makes an option of each
of its fields. A new option is one field here.
"""

from __future__ import annotations

import copy
import functools
import inspect
import secrets
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_type_hints

import typer

from slipstream.cli.flags import naming_flags
from slipstream.core.errors import ConfigError, read_named
from slipstream.core.params import SETTINGS, SamplingParams, SpeculationParams, VerifierName
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
OF_SAMPLING = tuple(name for name, setting in SETTINGS.items() if setting.metavar)
"""The settings of `SamplingParams` that are options."""
OF_REQUESTS = (*OF_SAMPLING, "verifier")
"""The options that say what is asked, not how the engine runs."""
_MORE_HELP = {
    "temperature": "Default: 0; audit: both 0 and 1.",
    "seed": "With --verifier rejection only while the drafts are the same, too. Default: a fresh one, which the JSON "
    "output shows.",
    "max_tokens": "Default: 256 (generate), 512 (chat), 128 (bench), 64 (audit and tune).",
}
"""What the help of an option says beside that of its setting."""
DEFAULT_DRAFTER = AUTO_DRAFTERS
WITHOUT_PREDICTION = (
    "there is no prediction to follow; give `generate` one with --prediction FILE, or name another drafter, such as "
    "ngram, suffix or auto"
)


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
    """The shared options, as given on the command line."""

    model: Annotated[
        str,
        option(
            "--model",
            "-m",
            metavar="NAME",
            panel=MODEL,
            help="A model folder, a .gguf file, a Hugging Face id such as HuggingFaceTB/SmolLM2-1.7B-Instruct, or "
            "default: a small one (135M parameters) that is fetched once.",
        ),
    ] = "default"
    dtype: Annotated[
        str,
        option(
            metavar="TYPE",
            panel=MODEL,
            help="Precision of the weights: float32 (fp32), bfloat16 (bf16) or float16 (fp16). auto takes float32 on "
            "a CPU and bfloat16 on a GPU (float16 where the model was stored so).",
        ),
    ] = AUTO
    device: Annotated[
        str,
        option(
            "--device",
            metavar="DEVICE",
            panel=MODEL,
            help="Where it runs: cpu, cuda, or cuda:1 for the second GPU. auto takes the first GPU if there is one.",
        ),
    ] = AUTO
    threads: Annotated[
        int | None,
        option(
            metavar="N",
            min=1,
            panel=MODEL,
            help="CPU threads to compute with, such as 4. Give it where other programs need some of the cores, or in "
            "a container that may use fewer than it sees. Default: torch's choice, one for each core.",
        ),
    ] = None
    memory: Annotated[
        str | None,
        option(
            metavar="SIZE",
            panel=MODEL,
            help="Memory for the cache, beyond the weights, such as 512MiB or 2GiB, or a part: 90% of a GPU's, weights "
            "and other programs included. More lets longer and more requests run at once. Default: up to 2GiB on a "
            "CPU, most of what is free on a GPU.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        option(
            metavar="TOKENS",
            min=2,
            panel=MODEL,
            help="Longest prompt and answer together, such as 4096. Default: as long as the model and the memory "
            "allow.",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            panel=MODEL,
            help="Keep what was computed of prompts for others that begin alike: the same tokens, sooner. Default: on; "
            "off for bench and tune, where the same prompts come again and again.",
        ),
    ] = None
    no_graphs: Annotated[
        bool,
        option(
            "--no-graphs",
            panel=MODEL,
            help="On a GPU: run every round as it stands instead of capturing it as a CUDA graph. The same tokens, "
            "slower; try it where capturing fails.",
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        option(
            "--trust-remote-code",
            panel=MODEL,
            help="Fetch and run Python code that comes with the model. Only for models whose code you have read.",
        ),
    ] = False
    force_pair: Annotated[
        bool,
        option(
            "--force-pair",
            panel=SPECULATION,
            help="Load a drafter although it was trained for another model. The tokens stay the same; few of its "
            "guesses will be accepted.",
        ),
    ] = False
    drafter: Annotated[
        list[str] | None,
        option(
            "--drafter",
            "-d",
            metavar="NAME[:PATH]",
            panel=SPECULATION,
            help="The drafter, which guesses tokens ahead. auto: all that suit the model, each where it pays; "
            "ngram: matches in prompt and answer; suffix: those, and earlier answers; lookahead: the model's own "
            "guesses further on; prediction: a text that comes with the request (--prediction); "
            "model:PATH (or draft:PATH): a smaller model, best with the same tokenizer, such as model:path/to/small; "
            "medusa:PATH and eagle:PATH (or eagle3:PATH): heads that were trained for the model (eagle3, "
            "medusa and draft without a path: those that come for the default model); mtp: the model's own modules; "
            "grammar: tokens that the form of an answer forces (always on with a form); path/to/file.py:Class: your "
            "own (docs/extending.md), whose code is run; A+B: both, their drafts merged; none: no drafts. May be "
            "repeated: bench, tune, audit and explain try each in turn; others load all and use the first unless a "
            f"request names another. Default: {DEFAULT_DRAFTER}.",
        ),
    ] = None
    draft_tokens: Annotated[
        int | None,
        option(
            metavar="K",
            min=0,
            max=63,
            panel=SPECULATION,
            help="Most tokens to draft in a step, such as 8; fewer where more do not pay. Default: the drafter's own.",
        ),
    ] = None
    min_gain: Annotated[
        float | None,
        option(
            metavar="X",
            min=1.0,
            panel=SPECULATION,
            help="Draft only where that is expected to be X times as fast as plain decoding, such as 1.1. Default: 1.",
        ),
    ] = None
    strict_drafter: Annotated[
        bool,
        option(
            "--strict-drafter",
            panel=SPECULATION,
            help="End with the error of a drafter that fails or is dropped, instead of going on without it. For "
            "developing drafters.",
        ),
    ] = False
    max_draft_memory: Annotated[
        str | None,
        option(
            metavar="SIZE",
            panel=SPECULATION,
            help="Most of the cache that drafts may take: 512MB, or 20% of it. A drafter that needs more is refused. "
            "Default: no limit.",
        ),
    ] = None
    measure_costs: Annotated[
        bool | None,
        option(
            "--measure-costs/--no-measure-costs",
            panel=SPECULATION,
            help="Time passes and drafts before the first request, now or never. Default: once for a machine and "
            "model, where it takes seconds at the most.",
        ),
    ] = None
    warm_up: Annotated[
        bool | None,
        option(
            "--warm-up/--no-warm-up",
            panel=MODEL,
            help="On a GPU, compile and record what requests will need before the first one: seconds, and longer the "
            "first time on a machine. Without, the first requests wait for it. Default: on for serve, and for bench "
            "with --rate.",
        ),
    ] = None
    planner: Annotated[
        str | None,
        option(
            metavar="NAME",
            panel=SPECULATION,
            help="How much to draft. adaptive: as much as pays by measured costs, none where none pays. fixed: always "
            "as much as allowed, whether it pays or not. Default: adaptive; audit: fixed.",
        ),
    ] = None
    verifier: Annotated[
        str,
        option(
            metavar="NAME",
            panel=SPECULATION,
            help="How sampled drafts are verified. exact: the tokens are those of plain decoding. rejection: other "
            "tokens of the same distribution, and more guesses of a draft model are accepted; bench runs both.",
        ),
    ] = "exact"
    no_speculation: Annotated[
        bool,
        option(
            "--no-speculation",
            panel=SPECULATION,
            help="Decode plainly, one token a pass: the same tokens, for comparison.",
        ),
    ] = False
    debug: DebugOption = False
    asked: Mapping[str, Any] = field(default_factory=dict)  # by name, the settings of `SamplingParams` that were given

    @property
    def temperature(self) -> float | None:
        return self.asked.get("temperature")

    @property
    def seed(self) -> int | None:
        return self.asked.get("seed")

    def asking(self, **settings: Any) -> Common:
        """The same with other settings of `SamplingParams`."""
        return replace(self, asked={**self.asked, **settings})

    @property
    def given(self) -> set[str]:
        """Names of the options that differ from their defaults."""
        own = (one for one in fields(self) if one.name != "asked")
        return {*self.asked, *(one.name for one in own if getattr(self, one.name) != one.default)}

    @property
    def caching(self) -> dict[str, bool]:
        """The engine's `prefix_caching`, if the option was given."""
        return {} if self.enable_prefix_caching is None else {"prefix_caching": self.enable_prefix_caching}

    @property
    def planning(self) -> dict[str, Any]:
        """The engine's settings of planner and start, as far as options were given."""
        asked = {
            "min_gain": self.min_gain,
            "measure_costs": self.measure_costs,
            "warm_up": self.warm_up,
            "max_draft_memory": self.max_draft_memory,
        }
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters to load; empty for 'none', which `check` accepts only alone."""
        named = tuple(dict.fromkeys(self.drafter or (DEFAULT_DRAFTER,)))
        return () if named == ("none",) else named

    def planner_or(self, usual: PlannerName) -> PlannerName:
        """The planner of --planner, or the command's default."""
        return usual if self.planner is None else cast(PlannerName, self.planner)  # `EngineConfig` checks it

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
            EngineConfig(
                memory=parse_share(self.memory, "memory"),
                max_model_len=self.max_model_len,
                draft_tokens=self.draft_tokens,
                max_draft_memory=parse_share(self.max_draft_memory, "max_draft_memory"),
                planner=self.planner_or("adaptive"),
                min_gain=1.0 if self.min_gain is None else self.min_gain,
            )
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


def with_common(
    command: Callable[..., None], hidden: Collection[str] = (), without: str = WITHOUT_PREDICTION
) -> Callable[..., None]:
    """Replace the command's parameter `common: Common` by the options: fields of `Common`, and settings of requests.

    A parameter of the command with the name of an option replaces it. A parameter `named`, an argument, is
    another way to give --model.
    hidden: options that the command refuses with a message of its own; its help does not list them.
    without: see `Common.check`.
    """
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.annotation is not Common]
    hints = get_type_hints(Common, include_extras=True)
    taken = {p.name for p in own}
    engine = [one for one in fields(Common) if one.name not in (*taken, "asked")]
    sampling = [name for name in OF_SAMPLING if name not in taken]
    options = [(one.name, one.default, hints[one.name]) for one in engine]
    options += [(name, None, _of_setting(name)) for name in sampling]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in own]
    for name, default, hint in options:
        hint = _unlisted(hint) if name in hidden else hint
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=hint))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        if (named := values.pop("named", None)) is not None:
            if values["model"] != Common().model:
                raise ConfigError(f"{named} --model {values['model']}: both name the model; give one of them")
            values["model"] = named
        asked = {name: value for name in sampling if (value := values.pop(name)) is not None}
        common = Common(**{one.name: values.pop(one.name) for one in engine}, asked=asked)
        common.check(values.get("prediction"), without)
        command(common=common, **values)

    del run.__wrapped__  # typer must see the new signature, not the old one
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _of_setting(name: str) -> Any:
    """The option of a setting of `SamplingParams`, from its declaration."""
    setting = SETTINGS[name]
    names = (f"--{name.replace('_', '-')}", *([setting.short] if setting.short else []))
    help = " ".join(filter(None, (setting.help, _MORE_HELP.get(name))))
    return Annotated[setting.kind | None, option(*names, metavar=setting.metavar, panel=SAMPLING, help=help)]


def _unlisted(annotated: Any) -> Any:
    kind, option = get_args(annotated)
    unlisted = copy.copy(option)
    unlisted.hidden = True
    return Annotated[kind, unlisted]


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
