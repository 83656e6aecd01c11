"""One HTTP request on the engine: started, followed to its end, told to the client as it comes or at once.

A client that goes away, or takes too long, leaves nothing behind: its requests end within a round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.core.errors import InvalidRequest, RequestError, SlipstreamError
from slipstream.core.outputs import CompletionOutput, RequestOutput
from slipstream.engine.remote import EngineProcess
from slipstream.engine.requests import Request
from slipstream.engine.streams import OutputStream
from slipstream.serve.drain import Drain
from slipstream.serve.errors import ApiError, for_log, from_exception
from slipstream.serve.logs import log_failure
from slipstream.serve.record import Record
from slipstream.serve.wording import DONE, Piece, Wording, answer_record, quoted

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect it
]
_GRACE_S = 5.0
"""What a client that does not read has, beyond its time."""


@dataclass(frozen=True, slots=True)
class Work:
    """Prepared requests, of which every one has `n` answers, and how to tell of them."""

    jobs: Sequence[Request]
    n: int
    wording: Wording
    streamed: bool
    timeout_s: float
    chunk_chars: int | None
    done: Callable[[Record], None]


class EngineResponse(Response):
    """Runs the work while it is being sent: only here is it known when the client goes away."""

    def __init__(self, llm: EngineProcess, work: Work, drain: Drain) -> None:
        super().__init__()
        self._drain = drain
        self._llm = llm
        self._work = work
        self._choice = {job.id: i * work.n for i, job in enumerate(work.jobs)}  # of a request's first answer
        count = work.n * len(work.jobs)
        self._ends: list[CompletionOutput | None] = [None] * count
        self._tokens = [0] * count
        self._cached = 0  # tokens of the prompts that were found in the cache
        self._held = [""] * count  # text that waits for a whole chunk
        self._around = [work.wording.around_text(index) for index in range(count)] if work.streamed else []

    @property
    def tokens(self) -> int:
        """Of its answers, as far as they were told."""
        return sum(self._tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, work = Record.of(scope), self._work
        record.streamed = work.streamed
        record.prompt_tokens = sum(len(job.prompt_ids) for job in work.jobs)
        try:
            stream = self._llm.start(*work.jobs)
        except Exception as error:
            work.done(record)
            await _refuse(error, record, send)
            return
        loop = asyncio.get_running_loop()
        late = ApiError(
            408,
            f"the answer took more than {work.timeout_s:g} s; ask for fewer tokens (max_tokens), or have the server "
            "started with a longer --request-timeout",
            code="timeout",
            headers={"x-should-retry": "false"},  # OpenAI's clients ask again by themselves: for as long, and in vain
        )
        timer = loop.call_later(work.timeout_s, stream.fail, late)
        watcher = asyncio.create_task(_watch(receive, stream, record))
        try:
            async with asyncio.timeout(work.timeout_s + _GRACE_S):
                with self._drain.following(stream):
                    await (self._stream(stream, record, send) if work.streamed else self._whole(stream, record, send))
        finally:
            timer.cancel()
            watcher.cancel()
            stream.close()
            work.done(record)

    async def _whole(self, stream: OutputStream, record: Record, send: Send) -> None:
        pieces = [Piece(index) for index in range(len(self._ends))]
        try:
            while arrived := await stream.take():
                for request in arrived:
                    for index, output in self._new(request):
                        pieces[index].add(output)
            if record.disconnected:
                return
            self._close(record)
            record.cached_tokens = self._cached
            body = self._work.wording.whole(pieces, record)
        except Exception as error:
            await _refuse(error, record, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, stream: OutputStream, record: Record, send: Send) -> None:
        wording, begun = self._work.wording, False
        try:
            while arrived := await stream.take():
                if begun and (quick := self._only_text(arrived)) is not None:
                    if quick:
                        await send({"type": "http.response.body", "body": quick, "more_body": True})
                    continue
                pieces = self._pieces(arrived)
                if wording.manner.running:
                    wording.count(record, sum(self._tokens))
                events = [wording.events(piece) for piece in pieces]
                if not begun:
                    events.insert(0, wording.opening(len(self._ends)))
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    begun, send = True, record.send or send
                if self._work.chunk_chars is None:  # else sizes must not tell, and each event is a write of its own
                    events = ["".join(events)]
                for told in events:
                    if told:
                        body = told.encode("utf-8", "replace")
                        await send({"type": "http.response.body", "body": body, "more_body": True})
            if record.disconnected:
                return
            self._close(record)
            record.cached_tokens = self._cached
            ending = wording.ending(record)
        except Exception as error:
            if not begun:
                await _refuse(error, record, send)
                return
            ending = b"data: " + _told(error, record).json + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": ending})

    def _only_text(self, arrived: Sequence[RequestOutput]) -> bytes | None:
        """The event for rounds that brought one choice some text and nothing else; None: they brought more.

        Nearly all rounds of nearly all streams are such, and what `_pieces` and the wording do for them comes to this.
        """
        first = arrived[0]
        if not all(_is_text(request, first) for request in arrived):
            return None
        index = self._choice[first.request_id] + first.outputs[0].index
        around = self._around[index]
        if around is None:
            return None
        said = [request.outputs[0] for request in arrived]
        self._tokens[index] += sum([len(output.token_ids) for output in said])
        text = said[0].text if len(said) == 1 else "".join([output.text for output in said])
        return f"{around[0]}{quoted(text)}{around[1]}".encode("utf-8", "replace") if text else b""

    def _new(self, request: RequestOutput) -> list[tuple[int, CompletionOutput]]:
        """What a request brought, by choice; of those that ended, nothing is new any more."""
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

    def _pieces(self, arrived: Sequence[RequestOutput]) -> list[Piece]:
        """What is new of every choice, in one piece each; or in pieces of one size."""
        pieces: dict[int, Piece] = {}
        for request in arrived:
            for index, output in self._new(request):
                if index in pieces:
                    pieces[index].add(output)
                elif output.text or output.token_ids or output.finish_reason is not None:
                    pieces[index] = Piece.of(index, output)
        wording = self._work.wording
        if wording.manner.report:
            for index, piece in pieces.items():
                if (end := self._ends[index]) is not None:
                    piece.report = wording.report(answer_record(end, self._tokens[index]))
        if self._work.chunk_chars is None:
            return [piece for piece in pieces.values() if wording.manner.token_ids or _says(piece)]
        return [part for piece in pieces.values() for part in self._cut(piece, self._work.chunk_chars)]

    def _cut(self, piece: Piece, size: int) -> list[Piece]:
        text = self._held[piece.index] + piece.text
        whole = len(text) // size * size
        if piece.finish_reason is not None and whole == len(text):
            whole = max(0, whole - size)  # the end has a text as well
        parts = [Piece(piece.index, text[at : at + size]) for at in range(0, whole, size)]
        self._held[piece.index] = text[whole:]
        if piece.finish_reason is not None:
            parts.append(
                Piece(
                    piece.index,
                    text[whole:],
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                    violation=piece.violation,
                    report=piece.report,
                )
            )
        return parts

    def _close(self, record: Record) -> None:
        """All answers are there: note what they came to, and raise if one failed."""
        for output, tokens in zip(self._ends, self._tokens, strict=True):
            if output is None:
                raise RequestError("an answer did not come to its end")
            record.answers.append(answer_record(output, tokens))
        for output in self._ends:
            assert output is not None
            if output.finish_reason == "abort":
                raise self._drain.refusal()
            if output.finish_reason == "error":
                raise _of_answer(output.error or "the answer failed")


def _of_answer(error: str) -> RequestError:
    """Why an answer failed. A form that cannot be followed is the client's own."""
    return InvalidRequest(error) if error.startswith("structured_outputs: ") else RequestError(error)


def _is_text(request: RequestOutput, first: RequestOutput) -> bool:
    """Did it bring text and nothing else, for the one choice that the first is about?"""
    if len(request.outputs) != 1 or request.request_id != first.request_id:
        return False
    output = request.outputs[0]
    silent = output.finish_reason is None and output.logprobs is None and output.origins is None
    return silent and output.index == first.outputs[0].index


def _says(piece: Piece) -> bool:
    return bool(piece.text or piece.logprobs or piece.origins or piece.finish_reason)


async def _watch(receive: Receive, stream: OutputStream, record: Record) -> None:
    """Until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    record.disconnected = not stream.finished
    stream.close()


def _told(error: Exception, record: Record) -> ApiError:
    """What the client is told of an error; the log has it too."""
    told = from_exception(error)
    record.error = for_log(error)
    if told.status >= 500 and not isinstance(error, ApiError | SlipstreamError):
        log_failure(record, error)
    return told


async def _refuse(error: Exception, record: Record, send: Send) -> None:
    """A status and a body in the place of an answer."""
    told = _told(error, record)
    body = told.json
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(key.lower().encode(), value.encode()) for key, value in told.headers.items()]
    await send({"type": "http.response.start", "status": told.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
