"""How an endpoint words answers: as one JSON object, or as the events of a stream.

Events are put together by hand around parts that never change: thousands a second are written, and a general encoder
would cost more than the rest of the way to the client.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from json.encoder import encode_basestring
from typing import Any

from slipstream.core.outputs import CompletionOutput, FinishReason, Logprob, Origin
from slipstream.serve.record import AnswerRecord, Record
from slipstream.serve.usage import speculation_report, usage

DONE = b"data: [DONE]\n\n"
_ROOM = 512  # bytes of a choice beside its text
_LONGEST = 6  # bytes of a character, escaped
_REPORT = 4096  # bytes; a choice with a report is filled up to so many


@dataclass(slots=True)
class Piece:
    """What is new of one choice since the last look, or all of it."""

    index: int
    text: str = ""
    logprobs: list[Mapping[int, Logprob]] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    origins: list[Origin] | None = None
    violation: str | None = None  # with the end: what the answer breaks of its schema
    report: Mapping[str, Any] | None = None  # with the end: what speculation did

    @classmethod
    def of(cls, index: int, output: CompletionOutput) -> Piece:
        """The first of it. Most rounds bring nothing but this."""
        return cls(
            index,
            output.text,
            output.logprobs,
            output.token_ids,
            output.finish_reason,
            output.stop_reason,
            output.origins,
            output.violation,
        )

    @property
    def told_tokens(self) -> Iterator[tuple[int, Mapping[int, Logprob]]]:
        """The tokens whose log probabilities are told: not that of an end of the text which the text has not."""
        pairs = list(zip(self.token_ids, self.logprobs or (), strict=True))
        if self.finish_reason == "stop" and self.stop_reason is None and pairs:
            token, entry = pairs[-1]
            if not self.text.endswith(entry[token].decoded_token):
                pairs.pop()
        return iter(pairs)

    def add(self, output: CompletionOutput) -> None:
        self.text += output.text
        self.token_ids = [*self.token_ids, *output.token_ids]
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        if output.origins is not None:
            self.origins = [*(self.origins or ()), *output.origins]
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.violation = output.violation


@dataclass(frozen=True, slots=True)
class Manner:
    """What the client wants to be told."""

    id: str
    created: int
    model: str
    usage: bool = True  # of a stream: at its end
    running: bool = False  # of a stream: usage so far in every event
    token_ids: bool = False
    report: bool = False
    off: str | None = None  # why nothing can be drafted for it
    predicted: bool = False
    chunk_chars: int | None = None  # every event has so many characters, and all of them the same size

    @property
    def only_text(self) -> bool:
        """May an event of a stream have nothing but its text?"""
        return self.chunk_chars is None and not (self.running or self.token_ids)


class Wording(ABC):
    """One request's. It knows how far each choice got, so it belongs to one answer alone."""

    kind: str
    chunk_kind: str

    def __init__(self, manner: Manner) -> None:
        self.manner = manner
        head = {"id": manner.id, "object": self.chunk_kind, "created": manner.created, "model": manner.model}
        self._head = "data: " + json.dumps(head, ensure_ascii=False)[:-1] + ","
        self._tail = ',"usage":null}\n\n' if manner.usage else "}\n\n"
        self._event_bytes = len(self._head.encode()) + _ROOM + _LONGEST * (manner.chunk_chars or 0)

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def events(self, piece: Piece) -> str:
        """The events of a stream for what is new of a choice."""

    def around_text(self, index: int) -> tuple[str, str] | None:
        """What stands around the text in an event of this choice that has nothing else to say, as nearly all.

        None: those of this answer have more.
        """
        return None

    def opening(self, choices: int) -> str:
        """What a stream begins with."""
        return ""

    def count(self, record: Record, tokens: int) -> None:
        """Have the next events say what was used so far."""
        prompt = record.prompt_tokens
        told = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        self._tail = f',"usage":{json.dumps(told)}}}\n\n'

    def extras(self, piece: Piece) -> str:
        """The parts of an event's choice that OpenAI's has not; nothing where nobody asked."""
        ids = f',"token_ids":{json.dumps(piece.token_ids)}' if self.manner.token_ids else ""
        origins = f',"origins":{json.dumps(origins_json(piece))}' if piece.origins else ""
        return ids + origins + ("" if piece.report is None else f',"speculation":{json.dumps(piece.report)}')

    def whole(self, pieces: Sequence[Piece], record: Record) -> bytes:
        manner = self.manner
        choices = [self.choice(piece) for piece in pieces]
        for choice, piece in zip(choices, pieces, strict=True):
            if manner.token_ids:
                choice["token_ids"] = piece.token_ids
            if piece.origins is not None:
                choice["origins"] = origins_json(piece)
        if manner.report:
            for choice, answer in zip(choices, record.answers, strict=True):
                choice["speculation"] = self.report(answer)
        body = {
            "id": manner.id,
            "object": self.kind,
            "created": manner.created,
            "model": manner.model,
            "choices": choices,
            "usage": usage(record, predicted=manner.predicted),
        }
        return json.dumps(body, ensure_ascii=False).encode()

    def ending(self, record: Record) -> bytes:
        """The end of a stream: what it cost, where that was asked for. Only that event has no choice, as OpenAI's."""
        if not self.manner.usage:
            return DONE
        told = {"usage": usage(record, predicted=self.manner.predicted)}
        return (self._head + '"choices":[],' + json.dumps(told)[1:] + "\n\n").encode() + DONE

    def report(self, answer: AnswerRecord) -> dict[str, Any]:
        return speculation_report(answer, self.manner.off)

    def event(self, choice: str) -> str:
        """One event with one choice, which is JSON already."""
        if self.manner.chunk_chars is None:
            return f'{self._head}"choices":[{choice}]{self._tail}'
        size = len(choice.encode())
        fits = size <= self._event_bytes  # else it has a report, and a size of its own
        room = self._event_bytes if fits else -(-size // _REPORT) * _REPORT
        filling = "." * (room - size)
        return f'{self._head}"obfuscation":"{filling}","choices":[{choice}]{self._tail}'


def quoted(text: str) -> str:
    """As JSON, in UTF-8; but for three characters that some readers of streams take for the end of a line."""
    told = encode_basestring(text)
    if told.isascii():
        return told
    return told.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def ending_of(piece: Piece, reason: str | None = None) -> str:
    """The end of a choice in an event: that it goes on, or why it ended."""
    if piece.finish_reason is None:
        return '"finish_reason":null'
    stopped = f',"stop_reason":{json.dumps(piece.stop_reason)}' if piece.stop_reason is not None else ""
    broken = f',"violation":{quoted(piece.violation)}' if piece.violation is not None else ""
    return f'"finish_reason":"{reason or piece.finish_reason}"{stopped}{broken}'


def reason_json(piece: Piece, reason: str | None = None) -> dict[str, Any]:
    told: dict[str, Any] = {"finish_reason": reason or piece.finish_reason}
    if piece.stop_reason is not None:
        told["stop_reason"] = piece.stop_reason
    if piece.violation is not None:
        told["violation"] = piece.violation
    return told


def origins_json(piece: Piece) -> list[dict[str, Any]]:
    """Who guessed each token. `text_end` counts from the beginning of the choice's text."""
    return [
        {"token": token, **asdict(origin)} for token, origin in zip(piece.token_ids, piece.origins or (), strict=True)
    ]


def answer_record(output: CompletionOutput, tokens: int) -> AnswerRecord:
    return AnswerRecord(tokens, output.finish_reason, output.timing, output.speculation)
