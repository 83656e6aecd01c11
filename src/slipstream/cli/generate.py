"""`slipstream generate`: one prompt, one answer, streamed as it comes."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from slipstream.cli.options import OUTPUT, SAMPLING, SPECULATION, Common, loaded, read_text, with_common
from slipstream.cli.show import note, request_json, summary
from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

PROMPT = "Prompt"
DEFAULT_MAX_TOKENS = 256


@with_common
def generate(
    common: Common,
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads it from stdin.", show_default=False)],
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the text as it is, without the chat template.", rich_help_panel=PROMPT),
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Tell the model how to behave.", rich_help_panel=PROMPT)
    ] = None,
    prediction: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Text that the answer will mostly repeat, such as the file to edit: guessed from, never trusted.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="How many answers.", rich_help_panel=SAMPLING)] = 1,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End the answer before this text. May be repeated.", rich_help_panel=SAMPLING
        ),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0: fewer tokens that were used already.", rich_help_panel=SAMPLING)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Above 0: the more often used, the fewer.", rich_help_panel=SAMPLING)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: fewer tokens of prompt and answer again.", rich_help_panel=SAMPLING)
    ] = 1.0,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="K", help="With --json: log probabilities and K alternatives.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with text, tokens and times.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Answer one prompt.

    The answer goes to stdout as it comes, a line about speed to stderr.
    """
    if raw and system is not None:
        raise ConfigError("--system with --raw: a raw prompt has no roles; put the text into the prompt")
    if prompt == "-" and prediction == "-":
        raise ConfigError("--prediction -: stdin already holds the prompt; name a file")
    if logprobs is not None and not as_json:
        raise ConfigError(f"--logprobs {logprobs}: log probabilities are shown in the JSON only; add --json")
    text = read_text("-", "PROMPT") if prompt == "-" else prompt
    params = common.sampling(
        max_tokens=DEFAULT_MAX_TOKENS,
        n=n,
        stop=tuple(stop or ()),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logprobs=logprobs,
        prediction=read_text(prediction, "--prediction") if prediction else None,
    )
    drafters = () if common.no_speculation else common.drafters
    with loaded(common, drafters) as llm:
        request = text if raw else llm.chat_prompt(messages(system, text))
        if as_json:
            output = llm.generate([request], params)[0]
            print(
                json.dumps(request_json(output, model=common.model, seed=params.seed), ensure_ascii=False), flush=True
            )
            answers = output.outputs
        elif n > 1:
            answers = llm.generate([request], params)[0].outputs
            for answer in answers:
                print(f"--- answer {answer.index + 1} of {n}\n{answer.text}", flush=True)
        else:
            answers = [stream(llm, request, params)]
    for answer in answers:
        if not as_json:
            note(summary(answer))
        if answer.error is not None:
            raise RequestError(answer.error)


def messages(system: str | None, text: str) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": text}]
    return asked if system is None else [{"role": "system", "content": system}, *asked]


class Stopped(KeyboardInterrupt):
    """Ctrl-C came while an answer was streaming; `text` is what had come so far."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def stream(llm: LLM, request: Any, params: SamplingParams) -> CompletionOutput:
    """Write the answer to stdout as it grows. Leaving early, by error or Ctrl-C, aborts the request."""
    answer = CompletionOutput(0)
    try:
        with closing(cast(Any, llm.stream(request, params))) as outputs:
            for output in outputs:
                sys.stdout.write(output.outputs[0].text[len(answer.text) :])
                sys.stdout.flush()
                answer = output.outputs[0]
    except KeyboardInterrupt:
        raise Stopped(answer.text) from None
    finally:
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)
    return answer
