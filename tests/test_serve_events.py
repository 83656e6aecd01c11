"""Events of a stream, as they are written: the short way for those that have only text says what the long one says."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.core.outputs import CompletionOutput, Logprob, RequestOutput
from slipstream.serve.answering import EngineResponse, Work
from slipstream.serve.chat import ChatWording
from slipstream.serve.completions import CompletionWording
from slipstream.serve.drain import Drain
from slipstream.serve.record import Record
from slipstream.serve.tools import HermesParser
from slipstream.serve.wording import Manner, Piece, Wording, quoted

TEXTS = [" hello", 'a "quoted"\nline\t\\', "schön 😀", "\u2028\x85"]


def manner(**changes: Any) -> Manner:
    return Manner("cmpl-1", 7, "tiny", **changes)


@pytest.mark.parametrize("kind", [CompletionWording, ChatWording])
@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_what_stands_around_a_text_never_changes(kind: type[Wording], usage: bool, text: str) -> None:
    around = kind(manner(usage=usage)).around_text(3)
    assert around is not None
    told = f"{around[0]}{quoted(text)}{around[1]}"
    assert told == kind(manner(usage=usage)).events(Piece(3, text))
    assert json.loads(told.removeprefix("data: "))["choices"][0]["index"] == 3


def test_answers_whose_events_say_more_have_no_short_way() -> None:
    assert CompletionWording(manner(), ["echo"]).around_text(0) is None
    assert CompletionWording(manner(chunk_chars=4)).around_text(0) is None
    assert ChatWording(manner(chunk_chars=4)).around_text(0) is None
    assert ChatWording(manner(), lambda: HermesParser(["go"])).around_text(0) is None


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


class Counting(CompletionWording):
    """Counts the events that went the long way."""

    long = 0

    def events(self, piece: Piece) -> str:
        self.long += 1
        return super().events(piece)


def sent_for(arrivals: list[list[RequestOutput]]) -> tuple[list[str], int]:
    """What a client reads, event by event, and how many of them went the long way."""
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()

    wording: Any = Counting(manner(usage=False))
    job: Any = SimpleNamespace(id="r", prompt_ids=[1])
    llm: Any = SimpleNamespace(start=lambda *_: Scripted(arrivals))
    response = EngineResponse(llm, Work([job], 1, wording, True, 60, None, lambda _: None), Drain(5))
    scope: dict[str, Any] = {}
    Record().attach(scope)
    asyncio.run(response(scope, receive, send))
    return b"".join(bodies).decode().split("\n\n")[:-1], wording.long


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
