"""Entry and exit of the `slipstream` command. Ctrl-C may come while the commands load, which takes a second."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; always ends in SystemExit."""
    codes: list[object] = []
    atexit.register(_leave, codes)  # registered first, so called last
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
    """After a second Ctrl-C threads may still compute; at an ordinary exit C++ would abort with its own message."""
    if _INTERRUPTED in codes:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_INTERRUPTED)
