"""The commands in bench/ that tests call. Not a test file."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "bench"))
_NAMES = ("acceptance", "exact", "figures", "first_tokens", "kept", "offers", "play", "replay", "ship", "simulated")
acceptance, exact, figures, first_tokens, kept, offers, play, replay, ship, simulated = map(import_module, _NAMES)
simulated_held, suffix_speed = map(import_module, ("simulated_held", "suffix_speed"))
hostile_forms = import_module("hostile_forms")
tiles, tiles_list, tiles_work = map(import_module, ("tiles", "tiles_list", "tiles_work"))
beside, shapes = map(import_module, ("beside", "shapes"))
