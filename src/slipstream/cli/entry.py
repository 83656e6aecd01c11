"""Where the `slipstream` command begins: to load the commands takes a second, in which Ctrl-C may come."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; always ends in SystemExit."""
    try:
        from slipstream.cli.main import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()
