"""Whether the server can answer, truthfully: its engine lives, gets on, and it is not about to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.core.snapshot import Pulse

Status = Literal["ok", "draining", "crowded", "stalled", "dead"]


@dataclass(frozen=True, slots=True)
class Health:
    status: Status
    reason: str = ""

    @property
    def http_status(self) -> int:
        """Who is only crowded goes on: it is no reason to start it again, which would end all answers."""
        return 200 if self.status in ("ok", "crowded") else 503


def judge(pulse: Pulse, *, draining: bool, crowded: str, stall_s: float) -> Health:
    """crowded: why there was lately no room for a connection."""
    if not pulse.alive:
        return Health("dead", f"{pulse.why or 'the engine has ended'}: start the server again")
    if pulse.busy_s > stall_s:
        return Health("stalled", f"the engine gave no sign of progress for {pulse.busy_s:.0f} s")
    if draining:
        return Health("draining", "the server is shutting down")
    if crowded:
        return Health("crowded", crowded)
    return Health("ok")
