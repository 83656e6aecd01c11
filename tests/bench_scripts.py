"""The commands in bench/ that tests call. Not a test file."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "bench"))
_NAMES = ("acceptance", "exact", "figures", "first_tokens", "kept", "offers", "play", "replay", "ship")
acceptance, exact, figures, first_tokens, kept, offers, play, replay, ship = map(import_module, _NAMES)
suffix_speed = import_module("suffix_speed")
clients = import_module("clients")
hostile_forms = import_module("hostile_forms")
tiles, tiles_list, tiles_work = map(import_module, ("tiles", "tiles_list", "tiles_work"))
beside, shapes = map(import_module, ("beside", "shapes"))
