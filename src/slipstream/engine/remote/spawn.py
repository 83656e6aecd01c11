"""Starts the engine's process. Apart from the rest, which imports torch: both processes can do so at the same time."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import dataclass

from slipstream.core import interpreter
from slipstream.engine.remote.channel import Channel


@dataclass(frozen=True, slots=True)
class Spawned:
    process: subprocess.Popen[bytes]
    channel: Channel


def spawn() -> Spawned:
    """A process that waits to be told what to open. It ends when this one does, because nobody writes to it then."""
    ours, theirs = socket.socketpair()
    number = str(theirs.fileno())
    with theirs:
        process = subprocess.Popen(
            interpreter.command("-m", "slipstream.engine.remote", number),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=interpreter.surroundings(),
            start_new_session=True,  # Ctrl-C is for us
        )
    return Spawned(process, Channel(ours))
