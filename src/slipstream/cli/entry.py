"""Where the `slipstream` command begins and ends: to load the commands takes a second, in which Ctrl-C may come."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; always ends in SystemExit."""
    codes: list[object] = []
    atexit.register(_leave, codes)  # registered first, called last: whoever closes something has done it by then
    try:
        from slipstream.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        codes.append(_INTERRUPTED)
        sys.exit(_INTERRUPTED)
    except SystemExit as ended:
        codes.append(ended.code)
        raise


def _leave(codes: list[object]) -> None:
    """After a second Ctrl-C nobody has waited for the threads that compute: where Python goes away around them, C++
    aborts, in words of its own."""
    if _INTERRUPTED in codes:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_INTERRUPTED)
