"""The server's side: an engine in another process, asked and heard through a channel.

Requests are checked and tokenized here, where it costs the engine nothing; what takes the engine (jobs, forms) is made
there. Its state is sent by itself, so that nobody who asks for it waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.constrain.limits import CompileLimits
from slipstream.core.errors import EngineDied, InvalidRequest, RequestError
from slipstream.core.params import SamplingParams
from slipstream.core.snapshot import Pulse, Snapshot
from slipstream.engine.remote.channel import CUT_OFF, Sender, pickled
from slipstream.engine.remote.messages import (
    Beat,
    Call,
    Compile,
    Drop,
    Failed,
    Forget,
    Line,
    Logged,
    News,
    Opening,
    Progress,
    Ready,
    Returned,
    Start,
    output_of,
)
from slipstream.engine.remote.spawn import Spawned, spawn
from slipstream.engine.requests import Prompt, Request, Requests
from slipstream.engine.streams import Listeners, OutputStream

SILENCE_S = 3.0
"""A process that says nothing for so long is stuck: then the time since its last word counts."""
_PATIENCE_S = 4.0
"""Most seconds that `close` waits for the process; then it is killed. One that hangs is killed at once."""
_GRACE_S = 2.0
"""… and that one which hung up has to end, or one that was killed: the system may still be at work for it."""
_CLOSED = "the engine is closed"


class RemoteJob:
    """A request that was checked. compiled: the other process has made its job, and keeps it under this number."""

    def __init__(self, number: int, request: Request, *, compiled: bool, unenforced: Sequence[str] = ()) -> None:
        self.number, self.request, self.compiled = number, request, compiled
        self.id, self.prompt_ids = request.id, request.prompt_ids
        self.prediction, self.material = request.prediction, request.material
        self.unenforced = unenforced


class EngineProcess:
    """An `EngineHost`.

    model, options: those of `LLM`; drafters by their names only. threads: of torch, on a CPU.
    spawned: a process that was started before; None: one is started.
    """

    def __init__(
        self,
        model: str | Path = "default",
        *,
        spawned: Spawned | None = None,
        threads: int | None = None,
        on_progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        spawned = spawned or spawn()
        self._process, self._channel = spawned.process, spawned.channel
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[OutputStream, Request]] = {}  # of those that run
        self._waiting: dict[int, Future[Any]] = {}  # for what calls return
        self._forgotten: deque[int] = deque()  # compiled jobs that nobody has any more, and the other process keeps
        self._listeners = Listeners()
        self._closing = False
        self._why = ""  # it ends, as far as that is known before it has
        self._ended: RequestError | None = None  # why nothing more will come
        try:
            with suppress(OSError):  # it has ended already: that nothing is heard of it says so, and why
                self._channel.send(Opening({"model": str(model), **options}, threads))
            from transformers import AutoTokenizer  # noqa: F401  # which takes seconds, while the model is opened

            ready = self._opened(on_progress or (lambda _: None))
            from slipstream.models.load import load_tokenizer

            self.tokenizer: Any = load_tokenizer(ready.model_path, bool(options.get("trust_remote_code")))
        except BaseException:
            self._end_process(0.0)
            self._channel.close()
            raise
        self.max_model_len = ready.loaded.plan.max_model_len
        self.max_num_seqs = ready.max_num_seqs
        self.drafters = tuple(ready.loaded.drafters)
        self._speculates = ready.speculates
        self._requests = Requests(self.tokenizer, ready.loaded)
        self._beat, self._heard_at = ready.beat, time.perf_counter()
        self._sender = Sender(self._channel)
        self._reader = threading.Thread(target=self._read, name="from-engine", daemon=True)
        self._reader.start()

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        streaming: bool = True,
        compiling: CompileLimits | None = None,
    ) -> RemoteJob:
        """As `EngineHost` has it. Only who wants a form waits for the other process, where it is compiled."""
        params = sampling_params or SamplingParams()
        request = self._requests.make(prompt, params, streaming=streaming, request_id=request_id)
        number = next(self._numbers)
        if params.structured_outputs is None:
            return RemoteJob(number, request, compiled=False)
        unenforced = self._asked(number, Compile(number, request, compiling)).result()
        job = RemoteJob(number, request, compiled=True, unenforced=unenforced)
        # it may never be started. Garbage is found in the middle of anything, a message perhaps: so no message is sent
        weakref.finalize(job, self._forgotten.append, number).atexit = False
        return job

    def start(self, *jobs: RemoteJob) -> OutputStream:
        numbers = [job.number for job in jobs]
        message = Start(tuple((job.number, None if job.compiled else job.request) for job in jobs))
        written = pickled(message)  # what cannot be is refused before anybody is waited for
        deliveries = self._listeners.to(asyncio.get_running_loop())
        stream = OutputStream(deliveries, partial(self._drop, numbers), len(numbers))
        with self._lock:
            if self._ended is not None:
                raise self._ended
            for job in jobs:
                self._streams[job.number] = stream, job.request
        self._sender.write(written)
        return stream

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function(llm, *arguments)` returns in the other process; waits for it.

        It must be one that can be imported there; an error that is not Slipstream's comes back as a `RequestError`.
        """
        number = next(self._numbers)
        return self._asked(number, Call(number, function, arguments)).result()

    def expect_forms(self) -> None:
        number = next(self._numbers)
        self._sender.put(Call(number, _expect_forms, ()))  # nobody waits for it

    @property
    def speculates(self) -> bool:
        return self._speculates

    def pulse(self) -> Pulse:
        """By what was heard last: a process that is stuck says nothing any more, and is busy all that time."""
        if self._ended is not None:
            return Pulse(False, 0.0, str(self._ended) if isinstance(self._ended, EngineDied) else "")
        pulse, silent_s = self._beat.pulse, time.perf_counter() - self._heard_at
        at_it = pulse.busy_s > 0 or silent_s > SILENCE_S
        return Pulse(pulse.alive, pulse.busy_s + silent_s if at_it else 0.0)

    def snapshot(self) -> Snapshot:
        return self._beat.snapshot

    def close(self) -> None:
        """End the process, whatever it does; what runs is aborted. May be called twice."""
        self._closing = True
        self._sender.finish()
        self._end_process(0.0 if self.pulse().busy_s > SILENCE_S else _PATIENCE_S)
        self._channel.hang_up()
        self._reader.join()
        self._channel.close()

    def kill(self, why: str) -> None:
        """End the process at once: what runs fails with `EngineDied`. Does not wait."""
        self._why = why
        self._process.kill()
        self._channel.hang_up()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self, say: Callable[[str], None]) -> Ready:
        """Wait for it."""
        while True:
            try:
                message = self._next()
            except CUT_OFF:
                raise EngineDied(f"{self._how_it_ended()} while it opened the model") from None
            match message:
                case Progress(text):
                    say(text)
                case Failed(error):
                    raise error
                case Ready() as ready:
                    return ready

    def _next(self) -> object:
        """The next message that is not only for the log."""
        while isinstance(message := self._channel.receive(), Logged):
            logging.getLogger(message.name).log(message.level, "%s", message.text)
        return message

    def _asked(self, number: int, message: object) -> Future[Any]:
        written, answer = pickled(message), Future[Any]()
        self._forget()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._waiting[number] = answer
        self._sender.write(written)
        return answer

    def _forget(self) -> None:
        """On any thread: before something is asked, and with every beat."""
        with suppress(IndexError):
            while True:
                self._sender.put(Forget(self._forgotten.popleft()))

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._streams.pop(number, None)
        self._sender.put(Drop(numbers))

    def _read(self) -> None:
        """On a thread of its own, until the other process has ended."""
        try:
            with suppress(*CUT_OFF):
                while True:
                    self._hear(self._next())
        finally:
            self._leave_nobody_waiting(RequestError(_CLOSED) if self._closing else EngineDied(self._how_it_ended()))

    def _leave_nobody_waiting(self, why: RequestError) -> None:
        with self._lock:
            self._ended = why
            streams = {stream for stream, _ in self._streams.values()}
            waiting = list(self._waiting.values())
            self._streams.clear()
            self._waiting.clear()
        for answer in waiting:
            answer.set_exception(why)
        for stream in streams:
            with suppress(RequestError):  # nobody listens any more
                stream.put(why)
        self._listeners.flush()

    def _hear(self, message: object) -> None:
        match message:
            case News(lines, beat):
                if beat is not None:
                    self._note(beat)
                for line in lines:
                    self._deliver(line)
                self._listeners.flush()
            case Beat() as beat:
                self._note(beat)
            case Failed(error):
                self._why = str(error)
            case Returned(number, value, error):
                if (answer := self._waiting.pop(number, None)) is not None:
                    answer.set_result(value) if error is None else answer.set_exception(error)

    def _note(self, beat: Beat) -> None:
        self._beat, self._heard_at = beat, time.perf_counter()
        self._forget()

    def _deliver(self, line: Line) -> None:
        number, news, finished, cached = line
        known = self._streams.pop(number, None) if finished else self._streams.get(number)
        if known is None:  # it was dropped meanwhile
            return
        stream, request = known
        try:
            stream.put(news if isinstance(news, Exception) else output_of(request, news, finished, cached))
        except RequestError:  # nobody listens any more
            self._drop([number])

    def _end_process(self, patience_s: float) -> bool:
        """Did it end by itself?"""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
            return False
        return True

    def _how_it_ended(self) -> str:
        """It hung up: if it has not ended, it is of no use any more."""
        ended = self._end_process(_GRACE_S)
        if self._why:
            return self._why
        if not ended:
            return "the engine's process hung up without ending, and was killed"
        code = self._process.returncode
        if code >= 0:
            return f"the engine's process ended with the code {code}"
        memory = ", as the system does with what takes too much memory" if -code == signal.SIGKILL else ""
        return f"the engine's process was ended by {signal.Signals(-code).name}{memory}"


def _expect_forms(llm: Any) -> None:
    with suppress(InvalidRequest, OSError):  # without the extra [grammar] a request that needs it will hear of it
        llm.expect_forms()
