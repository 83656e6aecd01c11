"""The commands in tools/ that tests call. Not a test file."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tools"))
_NAMES = ("acceptance", "exact", "figures", "http_cost", "ship")
acceptance, exact, figures, http_cost, ship = map(import_module, _NAMES)
clients = import_module("clients")
hostile = import_module("hostile")
results = import_module("results")
beside, shapes = map(import_module, ("beside", "shapes"))
