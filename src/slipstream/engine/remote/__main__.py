"""The engine's process. Its parent starts it (`spawn.py`); the argument is the file number of its end of the channel.

Signals are left to the parent, which ends this process last: so they are caught before anything takes time.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType


def _leave_to_the_parent(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: that is handed down to the processes that this one starts."""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_the_parent)
    from slipstream.engine.remote.channel import Channel
    from slipstream.engine.remote.child import Child

    Child(Channel.of(int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
