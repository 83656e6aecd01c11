"""`slipstream generate`: one prompt, one answer, streamed as it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from slipstream.cli.loading import loaded
from slipstream.cli.options import Common, read_text, with_options
from slipstream.cli.show import note, request_json, summary
from slipstream.constrain.source import source_of
from slipstream.core.errors import ConfigError, InvalidRequest, RequestError
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams
from slipstream.core.settings import setting
from slipstream.core.structured import StructuredOutputsParams, renamed
from slipstream.drafters import AUTO

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """The options of `slipstream generate` alone.

    raw: Continue the text as it is, without the model's chat template.
    system: Tell the model how to behave, such as 'Answer in one sentence.'
    prediction: A text that the answer will mostly repeat, such as the file to edit: guessed from, never trusted. '-'
        reads it from stdin.
    material: A text that the answer may quote from though it is not in the prompt, such as a file that a tool found.
        May be repeated. Only the drafters auto and suffix guess from it.
    n: How many answers; they differ where --temperature is above 0.
    stop: End the answer before this text, such as '###'. May be repeated.
    json_schema: The answer is JSON of the schema in this file. Needs the extra [grammar].
    regex: The answer matches this pattern. Needs the extra [grammar].
    logprobs: With --json: each token's log probability, and the K likeliest instead of it (0 to 20).
    as_json: Print one JSON object with text, tokens, times and counts.
    """

    raw: bool = setting(bool, False, flag="--raw", panel="prompt")
    system: str | None = setting(str, None, metavar="TEXT", panel="prompt")
    prediction: str | None = setting(str, None, metavar="FILE", panel="speculation")
    material: list[str] | None = setting(str, None, many=True, metavar="FILE", panel="speculation")
    n: int = setting(int, 1, metavar="N", panel="sampling")
    stop: list[str] | None = setting(str, None, many=True, metavar="TEXT", panel="sampling")
    json_schema: str | None = setting(str, None, metavar="FILE", panel="output")
    regex: str | None = setting(str, None, metavar="PATTERN", panel="output")
    logprobs: int | None = setting(int, None, metavar="K", panel="output")
    as_json: bool = setting(bool, False, flag="--json", panel="output")


@with_options
def generate(
    common: Common,
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="What to ask, in quotes; '-' reads it from stdin.", show_default=False),
    ],
    own: GenerateOptions,
) -> None:
    """Answer one prompt.

    The answer goes to stdout as it comes, a line about speed to stderr.
    """
    if own.raw and own.system is not None:
        raise ConfigError("--system with --raw: a raw prompt has no roles; put the text into the prompt")
    if prompt == "-" and own.prediction == "-":
        raise ConfigError("--prediction -: stdin already holds the prompt; name a file")
    if own.material and not any({"suffix", AUTO}.intersection(name.split("+")) for name in common.drafters):
        raise ConfigError(f"--material {own.material[0]}: only suffix drafts from it; add --drafter suffix")
    if own.logprobs is not None and not own.as_json:
        raise ConfigError(f"--logprobs {own.logprobs}: log probabilities are shown in the JSON only; add --json")
    if own.json_schema is not None and own.regex is not None:
        raise ConfigError("--regex with --json-schema: an answer has one form; give one of them")
    text = read_text("-", "PROMPT") if prompt == "-" else prompt
    if not text.strip() and not own.raw:
        raise ConfigError("PROMPT is empty: say what to ask; '-' reads it from stdin")
    params = common.sampling(
        max_tokens=DEFAULT_MAX_TOKENS,
        n=own.n,
        stop=tuple(own.stop or ()),
        logprobs=own.logprobs,
        prediction=read_text(own.prediction, "--prediction") if own.prediction is not None else None,
        structured_outputs=form(own.json_schema, own.regex),
    )
    if params.structured_outputs is not None:
        with naming_form(own.json_schema, own.regex):
            source_of(params.structured_outputs)  # refuses a bad form before the model loads
    if own.material:
        texts = tuple(read_text(source, "--material") for source in own.material)
        params = replace(params, speculation=replace(params.speculation, material=texts))
    drafters = () if common.no_speculation else common.drafters
    with loaded(common, drafters) as llm, naming_form(own.json_schema, own.regex):
        for remark in llm.remarks:
            note(remark)
        request = text if own.raw else llm.chat_prompt(messages(own.system, text))
        if own.as_json:
            output = llm.generate([request], params)[0]
            print(
                json.dumps(request_json(output, model=common.model, seed=params.seed), ensure_ascii=False), flush=True
            )
            answers = output.outputs
        elif own.n > 1:
            answers = llm.generate([request], params)[0].outputs
            for answer in answers:
                print(f"--- answer {answer.index + 1} of {own.n}\n{answer.text}", flush=True)
        else:
            answers = [stream(llm, request, params)]
    for answer in answers:
        if not own.as_json:
            note(summary(answer))
            if answer.violation is not None:
                note(f"the answer breaks its schema: {answer.violation}")
        if answer.error is not None:
            raise RequestError(answer.error)


def form(json_schema: str | None, regex: str | None) -> StructuredOutputsParams | None:
    with naming_form(json_schema, regex):
        if json_schema is not None:
            return StructuredOutputsParams(json=read_text(json_schema, "--json-schema"))
        return None if regex is None else StructuredOutputsParams(regex=regex)


@contextmanager
def naming_form(json_schema: str | None, regex: str | None) -> Iterator[None]:
    """Begin errors about the form of an answer with the option that gave it, and its file."""
    try:
        yield
    except InvalidRequest as error:
        option = f"--json-schema {json_schema}" if json_schema is not None else f"--regex {regex}"
        if (message := renamed(str(error), option)) is None:
            raise
        raise ConfigError(message) from error


def messages(system: str | None, text: str) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": text}]
    return asked if system is None else [{"role": "system", "content": system}, *asked]


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a streamed answer. text: the answer so far."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def stream(llm: LLM, request: Any, params: SamplingParams) -> CompletionOutput:
    """Write the answer to stdout as it comes. An error or Ctrl-C aborts the request."""
    text, tokens = "", list[int]()
    answer = CompletionOutput(0)
    try:
        with closing(cast(Any, llm.stream(request, replace(params, output_kind="delta")))) as outputs:
            for output in outputs:
                answer = output.outputs[0]
                text += answer.text
                tokens += answer.token_ids
                sys.stdout.write(answer.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        raise Stopped(text) from None
    finally:
        if text and not text.endswith("\n"):
            print(flush=True)
    return replace(answer, text=text, token_ids=tokens)
