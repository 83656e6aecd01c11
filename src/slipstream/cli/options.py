"""The options that generate, chat and bench share: written once, with the help texts that teach them.

`Common` is both the list of options and what a command receives. `with_common` turns each of its fields into an
option of the command, so a new option is one field here.
"""

from __future__ import annotations

import functools
import inspect
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from slipstream.core.errors import ConfigError, InvalidRequest
from slipstream.core.params import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

DEFAULT_DRAFTER = "ngram"

MODEL = "Model"
SPECULATION = "Speculation (changes the speed, never the tokens)"
SAMPLING = "Sampling"
OUTPUT = "Output"


@dataclass
class Debug:
    """Whether a traceback was asked for; `main` reads it when an error ends the program."""

    wanted: bool = False


debug = Debug()


def remember_debug(value: bool) -> bool:
    debug.wanted = debug.wanted or value
    return value


DebugOption = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", callback=remember_debug, rich_help_panel=OUTPUT),
]


@dataclass(frozen=True, slots=True)
class Common:
    """What generate, chat and bench all understand."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A folder, a .gguf file, a Hugging Face id (org/name), or 'default': a small one, fetched once.",
            rich_help_panel=MODEL,
        ),
    ] = "default"
    dtype: Annotated[
        str,
        typer.Option(help="Weights in float32, bfloat16 or float16; auto picks for the device.", rich_help_panel=MODEL),
    ] = "auto"
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; auto takes a GPU if there is one.", rich_help_panel=MODEL)
    ] = "auto"
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for the cache, such as 512MiB or 2GiB. More lets longer and more requests run at once.",
            rich_help_panel=MODEL,
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Longest prompt and answer together. Default: what the model was made for.",
            rich_help_panel=MODEL,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run Python code that comes with the model. Only for models you trust.",
            rich_help_panel=MODEL,
        ),
    ] = False
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            metavar="NAME[:PATH]",
            help="Who guesses ahead: ngram needs nothing; model:PATH is a smaller model with the same tokenizer; "
            f"none guesses nothing. Repeat it to load several. Default: {DEFAULT_DRAFTER}.",
            rich_help_panel=SPECULATION,
        ),
    ] = None
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            max=63,
            help="Most tokens to guess ahead in a round. Default: the drafter's own.",
            rich_help_panel=SPECULATION,
        ),
    ] = None
    no_speculation: Annotated[
        bool,
        typer.Option(
            "--no-speculation",
            help="Decode plainly, one token a pass: same tokens, for comparison.",
            rich_help_panel=SPECULATION,
        ),
    ] = False
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "-t", help="0 takes the likeliest token; higher is more varied.", rich_help_panel=SAMPLING
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample from the likeliest tokens that hold this much probability.", rich_help_panel=SAMPLING
        ),
    ] = 1.0
    top_k: Annotated[
        int, typer.Option(help="Sample from the K likeliest tokens; 0 is off.", rich_help_panel=SAMPLING)
    ] = 0
    min_p: Annotated[
        float,
        typer.Option(
            help="Leave out tokens less likely than this share of the likeliest; 0 is off.", rich_help_panel=SAMPLING
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same tokens, with or without speculation. Default: a fresh one.", rich_help_panel=SAMPLING
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            help="Longest answer in tokens. Default: 256 (generate), 512 (chat), 128 (bench).",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    debug: DebugOption = False

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters to load; none of them where 'none' was named."""
        named = tuple(dict.fromkeys(self.drafter or (DEFAULT_DRAFTER,)))
        return () if "none" in named else named

    def sampling(self, *, max_tokens: int, **more: Any) -> SamplingParams:
        """The request's parameters. A sampled request without a seed gets one here, so that it can be shown."""
        seed = self.seed
        if seed is None and self.temperature > 0:
            seed = secrets.randbits(32)
        try:
            return SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                seed=seed,
                max_tokens=self.max_tokens if self.max_tokens is not None else max_tokens,
                speculation=SpeculationParams(enabled=not self.no_speculation, draft_tokens=self.draft_tokens),
                **more,
            )
        except InvalidRequest as error:  # it came from the command line: a bad option
            raise ConfigError(str(error)) from error


def open_llm(
    common: Common, drafters: Sequence[str], on_progress: Callable[[str], None] | None = None, **more: Any
) -> LLM:
    """Load the engine. The one place where the command line does, so tests put a stand-in here."""
    from slipstream.engine.llm import LLM

    return LLM(
        common.model,
        drafter=list(drafters) or None,
        draft_tokens=common.draft_tokens,
        dtype=common.dtype,
        device=common.device,
        memory=common.memory,
        max_model_len=common.max_model_len,
        trust_remote_code=common.trust_remote_code,
        on_progress=on_progress,
        **more,
    )


@contextmanager
def loaded(common: Common, drafters: Sequence[str], **more: Any) -> Iterator[LLM]:
    """The engine, closed at the end; while it loads, what it does is shown on stderr if that is a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"loading {common.model}") as status:
            llm = open_llm(common, drafters, lambda message: status.update(message), **more)
    else:
        llm = open_llm(common, drafters, **more)
    try:
        yield llm
    finally:
        llm.close()


def read_text(source: str, option: str) -> str:
    """A file's text, or that of stdin for '-'."""
    if source == "-":
        return sys.stdin.read()
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {source}: cannot be read as text ({error})") from error


def with_common(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's parameter `common: Common` by one option for each field of `Common`."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    hints = get_type_hints(Common, include_extras=True)
    names = [field.name for field in fields(Common)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
        for field in fields(Common)
    ]
    parameters = [p.replace(kind=keyword) for p in own if p.annotation is not Common] + shared

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(common=Common(**{name: values.pop(name) for name in names}), **values)

    del run.__wrapped__  # typer must see the new signature, not the old one
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
