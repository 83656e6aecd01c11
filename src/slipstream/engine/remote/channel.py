"""Messages between the two processes: pickles, one behind the other, on a pair of sockets that nobody else has.

The pair has no name, and its ends are inherited: no stranger can connect, so what is read here was written by us.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import threading
from contextlib import suppress
from typing import Any

CUT_OFF = (EOFError, OSError, pickle.UnpicklingError)
"""What `receive` raises when the other process has ended, in the middle of a message perhaps."""
_BUFFER = 1 << 18


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._incoming = end.makefile("rb", _BUFFER)
        self._lock = threading.Lock()

    @staticmethod
    def of(number: int) -> Channel:
        """The end that was inherited under this file number. No further process inherits it: it would keep it open."""
        os.set_inheritable(number, False)
        return Channel(socket.socket(fileno=number))

    def send(self, message: Any) -> None:
        """Waits while the other process does not read. Raises `OSError` where it has ended, and what pickle does."""
        self.write(pickled(message))

    def write(self, written: bytes) -> None:
        """The same, for a message that is pickled already, or the rest of one."""
        with self._lock:
            self._socket.sendall(written)

    def write_now(self, written: bytes) -> int:
        """As many bytes of it as there is room for; returns how many. Does not wait: nobody else may be writing."""
        try:
            return self._socket.send(written, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def receive(self) -> Any:
        """The next message; waits for it. Raises one of `CUT_OFF` where none will come."""
        return pickle.load(self._incoming)

    def finish(self) -> None:
        """Nothing more will be sent: the other process reads to the end, and hears of it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """Nothing more will be read either: `receive` ends, on whatever thread it waits."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._incoming.close()
        self._socket.close()


class Sender:
    """The only one who sends: at once what there is room for, the rest from a thread of its own.

    Who has something to say never waits for the other process, and hardly ever for a thread to wake up.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._behind = 0  # messages that the thread has still to send: later ones go behind them
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="to-engine", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Raises what pickle does."""
        self.write(pickled(message))

    def write(self, written: bytes) -> None:
        """The same, for a message that is pickled already."""
        with self._lock, suppress(OSError):  # whoever reads from the channel finds out as well, and says so
            if not self._behind:
                written = written[self._channel.write_now(written) :]
            if written:
                self._behind += 1
                self._waiting.put(written)

    def finish(self) -> None:
        """Send what is waiting, and nothing after it."""
        with self._lock:
            self._behind += 1  # for good: what comes from now on goes behind the end
            self._waiting.put(None)

    def _run(self) -> None:
        with suppress(OSError):
            while (written := self._waiting.get()) is not None:
                self._channel.write(written)
                with self._lock:
                    self._behind -= 1
        self._channel.finish()


def pickled(message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
