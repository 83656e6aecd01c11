"""The commands in bench/ that tests call. Not a test file."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "bench"))
acceptance, figures, replay, ship, simulated, suffix_speed = (
    import_module(name) for name in ("acceptance", "figures", "replay", "ship", "simulated", "suffix_speed")
)
