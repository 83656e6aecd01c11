"""Starts the engine's process. Apart from the rest, which imports torch: both processes can do so at the same time."""

from __future__ import annotations

import os
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
    """A process that waits to be told what to open. It ends with this one; on Linux with the thread that calls this,
    which must last therefore."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            interpreter.command("-m", "slipstream.engine.remote", str(theirs.fileno()), str(os.getpid())),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=interpreter.surroundings(),
            start_new_session=True,  # Ctrl-C is for us
        )
    return Spawned(process, Channel(ours))
