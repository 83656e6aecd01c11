"""`slipstream chat`: a conversation with history, from a terminal or from lines of a pipe."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from slipstream.cli.generate import Stopped, stream
from slipstream.cli.loading import loaded
from slipstream.cli.options import OUTPUT, Common, option, with_options
from slipstream.cli.show import note, rate_line, request_json, summary
from slipstream.core.errors import RequestError
from slipstream.core.outputs import CompletionOutput, SpeculationStats

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

DEFAULT_MAX_TOKENS = 512
COMMANDS = "/reset empties the history · /speculation on|off · /stats · /help · /exit"


@dataclass
class Totals:
    """Sums over the answers of a conversation."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0  # prompts included
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, answer: CompletionOutput) -> None:
        self.answers += 1
        self.tokens += len(answer.token_ids)
        self.seconds += answer.timing.total_s
        self.stats.add(answer.speculation)

    def line(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return f"{self.answers} answer{'s' * (self.answers != 1)} · {rate_line(self.tokens, rate, self.stats)}"


class Conversation:
    """The history, and the commands of the user."""

    def __init__(self, llm: LLM, common: Common, system: str | None, as_json: bool) -> None:
        self.llm = llm
        self.common = common
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []
        self.as_json = as_json
        self.speculation = not common.no_speculation
        self.totals = Totals()

    def take(self, line: str) -> bool:
        """Answer a line or run a command; False ends the conversation."""
        if not line.startswith("/"):
            self.answer(line)
            return True
        command, _, argument = line.partition(" ")
        match command, argument.strip():
            case "/exit" | "/quit", "":
                return False
            case "/reset", "":
                self.turns.clear()
                note("the history is empty now")
            case "/speculation", "on" | "off" as choice:
                self.speculation = choice == "on"
                note(f"speculation is {choice}")
            case "/speculation", "":
                note(f"speculation is {'on' if self.speculation else 'off'}")
            case "/stats", "":
                note(self.totals.line())
            case "/help", "":
                note(COMMANDS)
            case _:
                note(f"{line}: not a command. {COMMANDS}", style="red")
        return True

    def answer(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})
        params = self.common.sampling(max_tokens=DEFAULT_MAX_TOKENS)
        if self.speculation != params.speculation.enabled:
            params = replace(params, speculation=replace(params.speculation, enabled=self.speculation))
        try:
            prompt = self.prompt(params.max_tokens)
            if self.as_json:
                output = self.llm.generate([prompt], params)[0]
                payload = request_json(output, model=self.common.model, seed=params.seed)
                print(json.dumps(payload, ensure_ascii=False), flush=True)
                answer = output.outputs[0]
            else:
                answer = stream(self.llm, prompt, params)
            if answer.error is not None:
                raise RequestError(answer.error)
        except Stopped as stopped:
            self.turns.append({"role": "assistant", "content": stopped.text})
            note("stopped")
            return
        except KeyboardInterrupt:  # nothing had come yet
            self.turns.pop()
            note("stopped; that question is dropped")
            return
        except RequestError as error:  # one request failed, not the conversation
            self.turns.pop()
            note(f"error: {error}", style="bold red")
            return
        self.turns.append({"role": "assistant", "content": answer.text})
        self.totals.add(answer)
        if not self.as_json:
            note(summary(answer))

    def prompt(self, max_tokens: int) -> list[int]:
        """The history as tokens, without the oldest turns if the answer would not fit."""
        ids = self.llm.chat_prompt(self.opening + self.turns)
        dropped = 0
        while len(ids) + max_tokens > self.llm.max_model_len and len(self.turns) > 2:
            del self.turns[:2]
            dropped += 1
            ids = self.llm.chat_prompt(self.opening + self.turns)
        if dropped:
            gone = "oldest turn is" if dropped == 1 else f"{dropped} oldest turns are"
            note(f"the conversation is too long for the model: its {gone} dropped")
        return ids


@with_options
def chat(
    common: Common,
    system: Annotated[
        str | None,
        option(metavar="TEXT", panel="Prompt", help="Tell the model how to behave, such as 'Answer in one sentence.'"),
    ] = None,
    as_json: Annotated[
        bool, option("--json", panel=OUTPUT, help="Print each answer as one line of JSON, for scripts.")
    ] = False,
) -> None:
    """Talk with a model.

    Ctrl-C stops an answer, /exit or Ctrl-D the program. Lines may also come from a pipe.
    """
    common.sampling(max_tokens=DEFAULT_MAX_TOKENS)  # refuses a bad option before the model loads
    with loaded(common, common.drafters) as llm:
        conversation = Conversation(llm, common, system, as_json)
        terminal = sys.stdin.isatty()
        for remark in llm.remarks:
            note(remark)
        if terminal:
            note(f"{common.model} · {COMMANDS}")
        while (line := read_line(terminal)) is not None:
            if line.strip() and not conversation.take(line.strip()):
                break


def read_line(terminal: bool) -> str | None:
    """The next line; None at the end of the input."""
    if not terminal:
        return sys.stdin.readline() or None
    with suppress(ImportError):  # not on every platform
        import readline  # noqa: F401  # gives input() editing and history
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            note("\n/exit leaves")
        except EOFError:
            print(file=sys.stderr)
            return None
