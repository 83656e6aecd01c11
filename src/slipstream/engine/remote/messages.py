"""What the two processes tell each other. Numbers are the parent's names for requests and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.constrain.limits import CompileLimits
from slipstream.core.errors import RequestError, SlipstreamError
from slipstream.core.outputs import CompletionOutput, RequestOutput, SpeculationStats, Timing
from slipstream.core.snapshot import Pulse, Snapshot
from slipstream.engine.requests import Loaded, Request

# from the parent


@dataclass(frozen=True, slots=True)
class Opening:
    """The first: what to open. options: those of `LLM`; threads: of torch."""

    options: Mapping[str, Any]
    threads: int | None


@dataclass(frozen=True, slots=True)
class Start:
    """Start these together. None: the request was compiled before, under this number."""

    jobs: tuple[tuple[int, Request | None], ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """End these; those that ended meanwhile are unknown by now."""

    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Compile:
    """Make a job of a request with a form, which takes a while, and keep it until it is started or forgotten."""

    number: int
    request: Request
    limits: CompileLimits | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody will start what was compiled under this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """Call this with the engine's `LLM` and these, and return what it does."""

    number: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


# from the engine's process


@dataclass(frozen=True, slots=True)
class Progress:
    """What loading is at."""

    text: str


@dataclass(frozen=True, slots=True)
class Beat:
    """How the engine is doing, and what it has done."""

    pulse: Pulse
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is open."""

    model_path: Path
    loaded: Loaded
    max_num_seqs: int
    speculates: bool
    beat: Beat


@dataclass(frozen=True, slots=True)
class Failed:
    """It could not be opened, or broke: nothing else will come."""

    error: SlipstreamError


@dataclass(frozen=True, slots=True)
class Returned:
    """What came of a call or of compiling."""

    number: int
    value: Any = None
    error: SlipstreamError | None = None


@dataclass(frozen=True, slots=True)
class Logged:
    name: str
    level: int
    text: str


Part = tuple[int, str, list[int]] | CompletionOutput
Line = tuple[int, Sequence[Part] | SlipstreamError, bool, int]
"""News of one request: its number, what is new of its answers or why it was refused, whether it is over, and how much
of its prompt was cached. Every stream has one a round, so nearly all are plain tuples."""


@dataclass(frozen=True, slots=True)
class News:
    """Of one turn of the engine. beat: there where an answer ended, so that who hears of it finds it counted."""

    lines: Sequence[Line]
    beat: Beat | None = None


def line_of(number: int, output: RequestOutput) -> Line:
    return number, [_part(answer) for answer in output.outputs], output.finished, output.num_cached_tokens


def refusal(number: int, error: BaseException) -> Line:
    return number, sendable(error), True, 0


def output_of(request: Request, parts: Sequence[Part], finished: bool, cached: int) -> RequestOutput:
    outputs = [part if isinstance(part, CompletionOutput) else _text(*part) for part in parts]
    return RequestOutput(request.id, request.prompt, request.prompt_ids, outputs, finished, cached)


def sendable(error: BaseException) -> SlipstreamError:
    """An error that the other process can read: others than ours may be made of anything."""
    return error if isinstance(error, SlipstreamError) else RequestError(f"{type(error).__name__}: {error}")


_NO_TIMES, _NO_COUNTS = Timing(), SpeculationStats()  # those of an answer come with its end


def _part(answer: CompletionOutput) -> Part:
    if answer.finish_reason is None and answer.logprobs is None and answer.origins is None:
        return answer.index, answer.text, answer.token_ids
    return answer


def _text(index: int, text: str, token_ids: list[int]) -> CompletionOutput:
    return CompletionOutput(index, text, token_ids, timing=_NO_TIMES, speculation=_NO_COUNTS)
