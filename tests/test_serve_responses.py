"""Responses as they are written: the events of a stream, and the report on speculation."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.core.outputs import CompletionOutput, DrafterStats, Logprob, RequestOutput, SpeculationStats
from slipstream.serve.admission import Drain
from slipstream.serve.responses import (
    ChatWriter,
    CompletionWriter,
    ResponseOptions,
    ResponseWriter,
    quoted,
    speculation_report,
)
from slipstream.serve.streaming import EngineResponse
from slipstream.serve.telemetry import AnswerRecord, Record
from slipstream.serve.tools import HermesParser

TEXTS = [" hello", 'a "quoted"\nline\t\\', "schön 😀", "\u2028\x85"]


def options(**changes: Any) -> ResponseOptions:
    return ResponseOptions("cmpl-1", 7, "tiny", **changes)


@pytest.mark.parametrize("kind", [CompletionWriter, ChatWriter])
@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_the_short_way_writes_the_same_bytes(kind: type[ResponseWriter], usage: bool, text: str) -> None:
    around = kind(options(usage=usage)).around_text(3)
    assert around is not None
    told = f"{around[0]}{quoted(text)}{around[1]}"
    assert told == kind(options(usage=usage)).events(CompletionOutput(3, text))
    assert json.loads(told.removeprefix("data: "))["choices"][0]["index"] == 3


def test_events_with_more_than_text_have_no_short_way() -> None:
    assert CompletionWriter(options(), ["echo"]).around_text(0) is None
    assert CompletionWriter(options(chunk_chars=4)).around_text(0) is None
    assert ChatWriter(options(chunk_chars=4)).around_text(0) is None
    assert ChatWriter(options(), lambda: HermesParser(["go"])).around_text(0) is None


class Scripted:
    """A stream that brings these outputs, one list at a time."""

    finished = False

    def __init__(self, arrivals: list[list[RequestOutput]]) -> None:
        self._arrivals = iter(arrivals)

    async def take(self) -> list[RequestOutput]:
        return next(self._arrivals, [])

    def close(self) -> None:
        pass

    fail = close


class Counting(CompletionWriter):
    """Counts the events that went the long way."""

    long = 0

    def events(self, delta: CompletionOutput, report: Any = None) -> str:
        self.long += 1
        return super().events(delta, report)


def sent_for(arrivals: list[list[RequestOutput]]) -> tuple[list[str], int]:
    """What a client reads, event by event, and how many of them went the long way."""
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()

    writer: Any = Counting(options(usage=False))
    job: Any = SimpleNamespace(id="r", prompt_ids=[1])
    llm: Any = SimpleNamespace(start=lambda *_: Scripted(arrivals))
    response = EngineResponse(llm, [job], 1, writer, streamed=True, timeout_s=60, done=lambda _: None, drain=Drain(5))
    scope: dict[str, Any] = {}
    Record().attach(scope)
    asyncio.run(response(scope, receive, send))
    return b"".join(bodies).decode().split("\n\n")[:-1], writer.long


def output(text: str, token: int, **more: Any) -> RequestOutput:
    finished = more.get("finish_reason") is not None
    return RequestOutput("r", None, [1], [CompletionOutput(0, text, [token], **more)], finished)


def test_only_text_goes_the_short_way_and_nothing_is_lost() -> None:
    rare = output("d", 4, logprobs=[{4: Logprob(-1.0, 1, "d")}])
    last = output("e", 5, finish_reason="length")
    rounds = [[output("a", 1)], [output("b", 2)], [output("", 9)], [output("c", 3), output("C", 3)], [rare], [last]]
    told, long = sent_for(rounds)
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in told[:-1]]
    assert texts == ["a", "b", "cC", "d", "e"]
    assert told[-1] == "data: [DONE]"
    assert long == 3, "the first, the one with more to say, the last"


def test_rounds_of_which_the_last_ends_go_the_long_way_together() -> None:
    told, long = sent_for([[output("a", 1)], [output("b", 2), output("e", 5, finish_reason="length")]])
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in told[:-1]]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("a", None), ("be", "length")]
    assert long == 2


OFF = "off: batch 48 leaves no spare arithmetic"


@pytest.mark.parametrize(
    ("plan", "drafted", "why"),
    [
        ({"ngram": "off: it had no guess", "suffix": "off: it had no guess"}, 0, "off: it had no guess"),
        ({"ngram": OFF}, 0, OFF),
        ({"ngram": OFF, "suffix": OFF}, 0, OFF),
        ({"ngram": "off: 0.90x expected", "suffix": OFF}, 0, f"ngram off: 0.90x expected; suffix {OFF}"),
        ({"ngram": "ngram 5: 1.30x expected"}, 8, "ngram 5: 1.30x expected; 6 of 8 guesses stood, 2.50 tokens a pass"),
        (
            {"bad": "off: it raised KeyError"},
            8,
            "bad off: it raised KeyError; 6 of 8 guesses stood, 2.50 tokens a pass",
        ),
        ({}, 8, "on: 6 of 8 guesses stood, 2.50 tokens a pass"),
        ({}, 0, "off: it had no drafter: none was named, or speculation is switched off"),
    ],
)
def test_why(plan: dict[str, str], drafted: int, why: str) -> None:
    drafters = {"ngram": DrafterStats(drafted=drafted)} if drafted else {}
    stats = SpeculationStats(4, 10, drafted, min(6, drafted), by_drafter=drafters, plan=plan)
    told = speculation_report(AnswerRecord(10, "stop", speculation=stats))
    assert told["why"] == why
    assert told["plan"] == plan


def test_an_answer_of_one_token_had_no_round_to_draft_in() -> None:
    told = speculation_report(AnswerRecord(1, "length", speculation=SpeculationStats(rounds=1, emitted=1)))
    assert told["why"] == "off: the answer ended with its first token"


def test_what_is_known_beforehand_comes_first() -> None:
    assert speculation_report(AnswerRecord(), "this server has no drafter")["why"] == "off: this server has no drafter"
