"""The budget for trying drafters that are not used: text changes, and a drafter that is never tried stays unknown."""

from __future__ import annotations

from collections.abc import Collection

PROBE_SHARE = 0.01
"""Of the time that probes may cost, all together: less than anybody notices."""

_SAVED = 512  # steps whose share may be saved up: what costs more is never tried
MEMBERS = 8  # requests that a probe is for at most: others tell little more


class Probes:
    """The budget, in equal parts for all drafters that are not used."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}  # seconds

    def earn(self, drafters: Collection[str], step_s: float) -> None:
        """A step that took so long went by without these."""
        for name in drafters:
            saved = self._saved.get(name, 0.0) + PROBE_SHARE * step_s / len(drafters)
            self._saved[name] = min(saved, PROBE_SHARE * _SAVED * step_s)

    def spend(self, drafter: str, cost_s: float) -> bool:
        """May it be tried for so much? Then it is paid."""
        saved = self._saved.get(drafter, 0.0)
        if saved < cost_s:
            return False
        self._saved[drafter] = saved - max(cost_s, 0.0)
        return True
