"""Runs one HTTP request on the engine and sends its answer: whole, or as a stream of events.

When the client leaves or the time is up, the request's work in the engine ends within a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.core.errors import InvalidRequest, RequestError, SlipstreamError
from slipstream.core.outputs import CompletionOutput, RequestOutput
from slipstream.engine.remote import EngineProcess
from slipstream.engine.requests import Request
from slipstream.engine.streams import OutputStream
from slipstream.serve.admission import Drain
from slipstream.serve.errors import ApiError, for_log, from_exception
from slipstream.serve.responses import DONE, ResponseWriter, extend, quoted, speculation_report
from slipstream.serve.telemetry import AnswerRecord, Record, log_failure

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not collect the events
]
_GRACE_S = 5.0
"""Time beyond the request's own for a client to read the rest."""


class EngineResponse(Response):
    """Runs requests with `n` answers each while it sends these: a response learns when its client leaves.

    done: called once, when the HTTP request is over. Errors before the first byte are raised, and the application
    answers with them.
    """

    def __init__(
        self,
        llm: EngineProcess,
        jobs: Sequence[Request],
        n: int,
        writer: ResponseWriter,
        *,
        streamed: bool,
        timeout_s: float,
        done: Callable[[Record], None],
        drain: Drain,
    ) -> None:
        super().__init__()
        self._llm, self._jobs, self._writer, self._drain = llm, jobs, writer, drain
        self._streamed, self._timeout_s, self._done = streamed, timeout_s, done
        self._choice = {job.id: i * n for i, job in enumerate(jobs)}  # by request: its first choice
        count = n * len(jobs)
        self._ends: list[CompletionOutput | None] = [None] * count
        self._tokens = [0] * count
        self._cached = 0
        self._chunk_chars = writer.options.chunk_chars
        self._held = [""] * count  # text that does not fill a chunk yet
        self._around = [writer.around_text(index) for index in range(count)] if streamed else []

    @property
    def tokens(self) -> int:
        """Tokens of its answers so far."""
        return sum(self._tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = Record.of(scope)
        record.streamed = self._streamed
        record.prompt_tokens = sum(len(job.prompt_ids) for job in self._jobs)
        try:
            stream = self._llm.start(*self._jobs)
        except BaseException:
            self._done(record)
            raise
        loop = asyncio.get_running_loop()
        late = ApiError(
            408,
            f"the answer took more than {self._timeout_s:g} s; ask for fewer tokens (max_tokens), or have the server "
            "started with a longer --request-timeout",
            code="timeout",
            headers={"x-should-retry": "false"},  # else OpenAI's clients ask for the same again
        )
        timer = loop.call_later(self._timeout_s, stream.fail, late)
        watcher = asyncio.create_task(_watch(receive, stream, record))
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                with self._drain.following(stream):
                    await (self._stream if self._streamed else self._whole)(stream, record, send)
        finally:
            timer.cancel()
            watcher.cancel()
            stream.close()
            self._done(record)

    async def _whole(self, stream: OutputStream, record: Record, send: Send) -> None:
        deltas = [CompletionOutput(index) for index in range(len(self._ends))]
        while arrived := await stream.take():
            for request in arrived:
                for index, output in self._new(request):
                    extend(deltas[index], output)
        if record.disconnected:
            return
        self._close(record)
        body = self._writer.whole(deltas, record)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, stream: OutputStream, record: Record, send: Send) -> None:
        writer, begun = self._writer, False
        try:
            while arrived := await stream.take():
                if begun and (quick := self._only_text(arrived)) is not None:
                    if quick:
                        await send({"type": "http.response.body", "body": quick, "more_body": True})
                    continue
                deltas = self._deltas(arrived)
                if writer.options.running:
                    writer.set_usage(record, sum(self._tokens))
                events = [writer.events(delta, self._report(delta)) for delta in deltas]
                if not begun:
                    events.insert(0, writer.opening(len(self._ends)))
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    begun, send = True, record.send or send
                if self._chunk_chars is None:  # padded events are written one by one: their sizes must not differ
                    events = ["".join(events)]
                for event in events:
                    if event:
                        body = event.encode("utf-8", "replace")
                        await send({"type": "http.response.body", "body": body, "more_body": True})
            if record.disconnected:
                return
            self._close(record)
            ending = writer.ending(record)
        except Exception as error:
            if not begun:
                raise
            record.error = for_log(error)
            if not isinstance(error, ApiError | SlipstreamError):
                log_failure(record, error)
            ending = b"data: " + from_exception(error).json + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": ending})

    def _only_text(self, arrived: Sequence[RequestOutput]) -> bytes | None:
        """The event for outputs that have text for one choice and nothing else; None: they have more.

        Nearly all outputs do. The bytes equal those that `_deltas` and the writer produce.
        """
        first = arrived[0]
        if not all(_is_text(request, first) for request in arrived):
            return None
        index = self._choice[first.request_id] + first.outputs[0].index
        around = self._around[index]
        if around is None:
            return None
        outputs = [request.outputs[0] for request in arrived]
        self._tokens[index] += sum([len(output.token_ids) for output in outputs])
        text = outputs[0].text if len(outputs) == 1 else "".join([output.text for output in outputs])
        return f"{around[0]}{quoted(text)}{around[1]}".encode("utf-8", "replace") if text else b""

    def _new(self, request: RequestOutput) -> list[tuple[int, CompletionOutput]]:
        """The new outputs of a request, by choice. A choice that ended has none."""
        first = self._choice[request.request_id]
        found = []
        if request.finished:
            self._cached += request.num_cached_tokens
        for output in request.outputs:
            index = first + output.index
            if self._ends[index] is None:
                self._tokens[index] += len(output.token_ids)
                found.append((index, output))
            if output.finish_reason is not None:
                self._ends[index] = output  # the last one has the counts and times
        return found

    def _deltas(self, arrived: Sequence[RequestOutput]) -> list[CompletionOutput]:
        """The new part of each choice: one, or one for each chunk."""
        deltas: dict[int, CompletionOutput] = {}
        for request in arrived:
            for index, output in self._new(request):
                if index in deltas:
                    extend(deltas[index], output)
                elif output.text or output.token_ids or output.finish_reason is not None:
                    deltas[index] = replace(output, index=index)
        if self._chunk_chars is not None:
            return [part for delta in deltas.values() for part in self._chunks(delta, self._chunk_chars)]
        ids = self._writer.options.token_ids
        return [d for d in deltas.values() if ids or d.text or d.logprobs or d.origins or d.finish_reason]

    def _report(self, delta: CompletionOutput) -> Mapping[str, Any] | None:
        """The speculation report of a choice that ends, if the client asked for it."""
        end, options = self._ends[delta.index], self._writer.options
        if end is None or not options.report or delta.finish_reason is None:
            return None
        return speculation_report(_answer(end, self._tokens[delta.index]), options.off)

    def _chunks(self, delta: CompletionOutput, size: int) -> list[CompletionOutput]:
        """Deltas of `size` characters each. The last one of a choice has the rest and the end."""
        text = self._held[delta.index] + delta.text
        whole = len(text) // size * size
        ends = delta.finish_reason is not None
        if ends and whole == len(text):
            whole = max(0, whole - size)  # the end has a text as well
        chunks = [CompletionOutput(delta.index, text[at : at + size]) for at in range(0, whole, size)]
        self._held[delta.index] = text[whole:]
        return (
            [*chunks, replace(delta, text=text[whole:], logprobs=None, token_ids=[], origins=None)] if ends else chunks
        )

    def _close(self, record: Record) -> None:
        """Note the results of all answers; raise if one failed."""
        record.cached_tokens = self._cached
        for output, tokens in zip(self._ends, self._tokens, strict=True):
            if output is None:
                raise RequestError("an answer did not come to its end")
            record.answers.append(_answer(output, tokens))
        for output in self._ends:
            assert output is not None
            if output.finish_reason == "abort":
                raise self._drain.refusal()
            if output.finish_reason == "error":
                error = output.error or "the answer failed"
                of_form = error.startswith("structured_outputs: ")  # which cannot be followed: the client's mistake
                raise InvalidRequest(error) if of_form else RequestError(error)


def _answer(output: CompletionOutput, tokens: int) -> AnswerRecord:
    return AnswerRecord(tokens, output.finish_reason, output.timing, output.speculation)


def _is_text(request: RequestOutput, first: RequestOutput) -> bool:
    """The output has text and nothing else, for the same choice as `first`."""
    if len(request.outputs) != 1 or request.request_id != first.request_id:
        return False
    output = request.outputs[0]
    silent = output.finish_reason is None and output.logprobs is None and output.origins is None
    return silent and output.index == first.outputs[0].index


async def _watch(receive: Receive, stream: OutputStream, record: Record) -> None:
    """Close the stream when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    record.disconnected = not stream.finished
    stream.close()
