"""The engine's process. Its parent (`spawn.py`) gives it the file number of its end of the channel, and its own id.

Signals are left to the parent, which ends this process last: so they are caught before anything takes time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType


def _leave_to_the_parent(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: that is handed down to the processes that this one starts."""


_PR_SET_PDEATHSIG = 1


def _end_with(parent: int) -> None:
    """Have the system kill this process when its parent is gone: native code that holds the interpreter would not let
    it see the end of the channel. Where there is no such call (it is Linux'), that end has to do.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    _end_with(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_the_parent)
    from slipstream.engine.remote.channel import Channel
    from slipstream.engine.remote.child import Child

    Child(Channel.of(int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
