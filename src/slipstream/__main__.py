"""So that `python -m slipstream` is the `slipstream` command, also where scripts are not on the path."""

from slipstream.cli.entry import main

main()
