"""Writes answers in OpenAI's format: as one JSON object, or as the events of a stream.

Events are strings put together around parts that never change: a server writes thousands a second, and a general JSON
encoder would cost more than the rest of the way to the client.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from json.encoder import encode_basestring
from typing import Any

from slipstream.core.outputs import CompletionOutput, Logprob
from slipstream.serve.telemetry import AnswerRecord, Record
from slipstream.serve.tools import Call, Parsed, ToolParser

DONE = b"data: [DONE]\n\n"
_ROOM = 512  # bytes of a choice beside its text
_LONGEST = 6  # bytes of an escaped character
_REPORT = 4096  # bytes; a padded choice with a report has a multiple of them
_NO_LOGPROB = -9999.0
"""OpenAI's number for a token that is impossible: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The head of a response, and the client's wishes for its format.

    usage, running: a stream reports usage at its end, and in every event. off: why nothing can be drafted for the
    request. chunk_chars: characters of every event of a stream, all events padded to one size; None: no padding.
    """

    id: str
    created: int
    model: str
    usage: bool = True
    running: bool = False
    token_ids: bool = False
    report: bool = False
    off: str | None = None
    predicted: bool = False
    chunk_chars: int | None = None

    @property
    def only_text(self) -> bool:
        """An event may have nothing but its text."""
        return self.chunk_chars is None and not (self.running or self.token_ids)


class ResponseWriter(ABC):
    """Writes one response. It tracks the progress of each choice, so it belongs to one response alone.

    A `delta` is the new part of a choice, or all of it: an output of the engine, whose index is that of the choice.
    """

    kind: str
    chunk_kind: str

    def __init__(self, options: ResponseOptions) -> None:
        self.options = options
        head = {"id": options.id, "object": self.chunk_kind, "created": options.created, "model": options.model}
        self._head = "data: " + json.dumps(head, ensure_ascii=False)[:-1] + ","
        self._tail = ',"usage":null}\n\n' if options.usage else "}\n\n"
        self._event_bytes = len(self._head.encode()) + _ROOM + _LONGEST * (options.chunk_chars or 0)

    @abstractmethod
    def choice(self, delta: CompletionOutput) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def events(self, delta: CompletionOutput, report: Mapping[str, Any] | None = None) -> str:
        """The events of a stream for a part of a choice. report: the speculation report, at the end of the choice."""

    @abstractmethod
    def around_text(self, index: int) -> tuple[str, str] | None:
        """The parts before and after the text in an event of this choice that has only text, as nearly all have.

        None: the events of this response have more.
        """

    def opening(self, choices: int) -> str:
        """The events at the beginning of a stream."""
        return ""

    def set_usage(self, record: Record, tokens: int) -> None:
        """Set the usage that the next events report."""
        self._tail = f',"usage":{json.dumps(_token_counts(record, tokens))}}}\n\n'

    def whole(self, deltas: Sequence[CompletionOutput], record: Record) -> bytes:
        options = self.options
        choices = [self.choice(delta) for delta in deltas]
        for choice, delta, answer in zip(choices, deltas, record.answers, strict=True):
            if options.token_ids:
                choice["token_ids"] = delta.token_ids
            if delta.origins is not None:
                choice["origins"] = _origins(delta)
            if options.report:
                choice["speculation"] = speculation_report(answer, options.off)
        body = {
            "id": options.id,
            "object": self.kind,
            "created": options.created,
            "model": options.model,
            "choices": choices,
            "usage": _usage(record, predicted=options.predicted),
        }
        return json.dumps(body, ensure_ascii=False).encode()

    def ending(self, record: Record) -> bytes:
        """The end of a stream. As OpenAI's, the event with the usage has no choice."""
        if not self.options.usage:
            return DONE
        fields = {"usage": _usage(record, predicted=self.options.predicted)}
        return (self._head + '"choices":[],' + json.dumps(fields)[1:] + "\n\n").encode() + DONE

    def _event(
        self, delta: CompletionOutput, content: str, logprobs: Any, report: Any, reason: str | None = None
    ) -> str:
        """An event with one choice. content: its own field, as JSON."""
        logs = "null" if logprobs is None else json.dumps(logprobs)
        end = '"finish_reason":null' if delta.finish_reason is None else _members(_ending(delta, reason))
        ids = f',"token_ids":{json.dumps(delta.token_ids)}' if self.options.token_ids else ""
        origins = f',"origins":{json.dumps(_origins(delta))}' if delta.origins else ""
        stats = "" if report is None else f',"speculation":{json.dumps(report)}'
        return self._padded(f'{{"index":{delta.index},{content},"logprobs":{logs},{end}{ids}{origins}{stats}}}')

    def _padded(self, choice: str) -> str:
        if self.options.chunk_chars is None:
            return f'{self._head}"choices":[{choice}]{self._tail}'
        size = len(choice.encode())
        fits = size <= self._event_bytes  # else it has a report, and a size of its own
        room = self._event_bytes if fits else -(-size // _REPORT) * _REPORT
        filling = "." * (room - size)
        return f'{self._head}"obfuscation":"{filling}","choices":[{choice}]{self._tail}'


class CompletionWriter(ResponseWriter):
    """`/v1/completions`. echoes: the text before each choice, where the prompt is repeated."""

    kind = chunk_kind = "text_completion"

    def __init__(self, options: ResponseOptions, echoes: Sequence[str] = ()) -> None:
        super().__init__(options)
        self._echoes = dict(enumerate(echoes))
        self._echoing = bool(echoes)
        self._offsets: dict[int, int] = {}  # by choice: characters of its earlier tokens

    def choice(self, delta: CompletionOutput) -> dict[str, Any]:
        text = self._echoes.pop(delta.index, "") + delta.text
        return {"index": delta.index, "text": text, "logprobs": self._logprobs(delta), **_ending(delta)}

    def events(self, delta: CompletionOutput, report: Mapping[str, Any] | None = None) -> str:
        text = self._echoes.pop(delta.index, "") + delta.text
        return self._event(delta, f'"text":{quoted(text)}', self._logprobs(delta), report)

    def around_text(self, index: int) -> tuple[str, str] | None:
        if self._echoing or not self.options.only_text:
            return None
        before = f'{self._head}"choices":[{{"index":{index},"text":'
        return before, f',"logprobs":null,"finish_reason":null}}]{self._tail}'

    def _logprobs(self, delta: CompletionOutput) -> dict[str, Any] | None:
        """OpenAI's old format: parallel lists."""
        if delta.logprobs is None:
            return None
        fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        at = self._offsets.get(delta.index, 0)
        for token, position in _shown_tokens(delta):
            mine, ranked = position[token], sorted(position.values(), key=lambda entry: entry.rank)
            fields["tokens"].append(mine.decoded_token)
            fields["token_logprobs"].append(max(mine.logprob, _NO_LOGPROB))
            fields["top_logprobs"].append({one.decoded_token: max(one.logprob, _NO_LOGPROB) for one in ranked})
            fields["text_offset"].append(at)
            at += len(mine.decoded_token)
        self._offsets[delta.index] = at
        return fields


class ChatWriter(ResponseWriter):
    """`/v1/chat/completions`.

    make_parser: makes the parser of tool calls for one choice; None: there are no tools. top_logprobs: alternatives to
    report for each token. bytes_of: the bytes of a token, by its id and text.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        options: ResponseOptions,
        make_parser: Callable[[], ToolParser] | None = None,
        top_logprobs: int = 0,
        bytes_of: Callable[[int, str], bytes] = lambda _, text: text.encode(),
    ) -> None:
        super().__init__(options)
        self._bytes_of = bytes_of
        self._make_parser = make_parser
        self._parsers: dict[int, ToolParser] = {}
        self._called: dict[int, int] = {}  # by choice: calls so far
        self._top = top_logprobs

    def opening(self, choices: int) -> str:
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return "".join(self._padded(f'{{"index":{index},{role}') for index in range(choices))

    def choice(self, delta: CompletionOutput) -> dict[str, Any]:
        parsed = self._parse(delta, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text, "refusal": None}
        if parsed.calls:
            message["content"] = parsed.text or None
            message["tool_calls"] = [_call(call) for call in parsed.calls]
        ending = _ending(delta, self._reason(delta))
        return {"index": delta.index, "message": message, "logprobs": self._logprobs(delta), **ending}

    def events(self, delta: CompletionOutput, report: Mapping[str, Any] | None = None) -> str:
        if self._make_parser is None:
            content = f'{{"content":{quoted(delta.text)}}}' if delta.text else "{}"
        else:
            first = self._called.get(delta.index, 0)
            parsed = self._parse(delta, last=delta.finish_reason is not None)
            fields: dict[str, Any] = {"content": parsed.text} if parsed.text else {}
            if parsed.calls:
                fields["tool_calls"] = [{"index": first + i, **_call(call)} for i, call in enumerate(parsed.calls)]
            if not (fields or delta.finish_reason or delta.logprobs or delta.origins or self.options.token_ids):
                return ""
            content = json.dumps(fields)
        return self._event(delta, f'"delta":{content}', self._logprobs(delta), report, self._reason(delta))

    def around_text(self, index: int) -> tuple[str, str] | None:
        if self._make_parser is not None or not self.options.only_text:
            return None
        before = f'{self._head}"choices":[{{"index":{index},"delta":{{"content":'
        return before, f'}},"logprobs":null,"finish_reason":null}}]{self._tail}'

    def _parse(self, delta: CompletionOutput, *, last: bool) -> Parsed:
        if self._make_parser is None:
            return Parsed(delta.text)
        if delta.index not in self._parsers:
            self._parsers[delta.index] = self._make_parser()
        parsed = self._parsers[delta.index].feed(delta.text, last=last)
        self._called[delta.index] = self._called.get(delta.index, 0) + len(parsed.calls)
        return parsed

    def _reason(self, delta: CompletionOutput) -> str | None:
        return "tool_calls" if delta.finish_reason == "stop" and self._called.get(delta.index) else None

    def _logprobs(self, delta: CompletionOutput) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        content = []
        for token, position in _shown_tokens(delta):
            best = sorted(position, key=lambda one: position[one].rank)[: self._top]
            fields = [self._entry(one, position[one]) for one in best]
            content.append({**self._entry(token, position[token]), "top_logprobs": fields})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, entry: Logprob) -> dict[str, Any]:
        written = list(self._bytes_of(token, entry.decoded_token))
        return {"token": entry.decoded_token, "logprob": max(entry.logprob, _NO_LOGPROB), "bytes": written}


def extend(delta: CompletionOutput, output: CompletionOutput) -> None:
    """Add the next output of the choice to `delta`."""
    delta.text += output.text
    delta.token_ids = [*delta.token_ids, *output.token_ids]
    if output.logprobs is not None:
        delta.logprobs = [*(delta.logprobs or ()), *output.logprobs]
    if output.origins is not None:
        delta.origins = [*(delta.origins or ()), *output.origins]
    for name in ("finish_reason", "stop_reason", "violation"):
        setattr(delta, name, getattr(output, name))


def _shown_tokens(delta: CompletionOutput) -> list[tuple[int, Mapping[int, Logprob]]]:
    """Tokens with their log probabilities, without an end token that the text does not have."""
    pairs = list(zip(delta.token_ids, delta.logprobs or (), strict=True))
    if delta.finish_reason == "stop" and delta.stop_reason is None and pairs:
        token, entry = pairs[-1]
        if not delta.text.endswith(entry[token].decoded_token):
            pairs.pop()
    return pairs


def _ending(delta: CompletionOutput, reason: str | None = None) -> dict[str, Any]:
    """Why the choice ended, if it did. reason: the endpoint's own word for it."""
    fields: dict[str, Any] = {"finish_reason": reason or delta.finish_reason}
    for name in ("stop_reason", "violation"):
        if getattr(delta, name) is not None:
            fields[name] = getattr(delta, name)
    return fields


def _origins(delta: CompletionOutput) -> list[dict[str, Any]]:
    """The drafters of each token. `text_end` counts from the beginning of the choice's text."""
    return [
        {"token": token, **asdict(origin)} for token, origin in zip(delta.token_ids, delta.origins or (), strict=True)
    ]


def quoted(text: str) -> str:
    """A text as JSON in UTF-8, with three characters escaped that some readers of streams take for line ends."""
    written = encode_basestring(text)
    if written.isascii():
        return written
    return written.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _members(value: Mapping[str, Any]) -> str:
    """An object as JSON, without its braces."""
    return ",".join(f'"{key}":{quoted(one) if isinstance(one, str) else json.dumps(one)}' for key, one in value.items())


def _call(call: Call) -> Mapping[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _token_counts(record: Record, generated: int) -> dict[str, Any]:
    prompt = record.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _usage(record: Record, *, predicted: bool) -> dict[str, Any]:
    """OpenAI's `usage`, with the accepted and rejected tokens of a prediction."""
    fields = _token_counts(record, record.completion_tokens)
    fields["prompt_tokens_details"] = {"cached_tokens": record.cached_tokens}
    if predicted:
        stats = record.speculation.by_drafter.get("prediction")
        accepted, drafted = (stats.accepted, stats.drafted) if stats else (0, 0)
        fields["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return fields


def speculation_report(answer: AnswerRecord, off: str | None = None) -> dict[str, Any]:
    """The counts and times of speculation for one answer. tau counts the target's own token.

    off: why speculation was impossible for this request, if that was known beforehand.
    """
    stats, timing = answer.speculation, answer.timing
    seconds = {
        "queued": timing.queued_s,
        "first_token": timing.first_token_s,
        "total": timing.total_s,
        "draft": stats.draft_s,
        "verify": stats.verify_s,
        "host": stats.host_s,
    }
    shown = ("drafts", "drafted", "accepted", "failures")
    return {
        "rounds": stats.rounds,
        "tokens": stats.emitted,
        "tau": round(stats.tau, 4),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "alpha": round(stats.alpha, 4),
        "expected_gain": None if stats.expected_gain is None else round(stats.expected_gain, 4),
        "measured_gain": None if stats.measured_gain is None else round(stats.measured_gain, 4),
        "drafters": {name: {key: getattr(one, key) for key in shown} for name, one in stats.by_drafter.items()},
        "why": f"off: {off}" if off else stats.why,
        "plan": dict(stats.plan),
        "seconds": {key: round(value, 6) for key, value in seconds.items()},
    }
