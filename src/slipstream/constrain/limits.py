"""What forms of strangers may take to compile. Apart from the compiler, which needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.errors import ConfigError

MOST_SHARING = 96
"""Requests that wait for the compilation of another's equal form, of all tenants."""
THREADS = 160
"""Threads that a server has for requests with forms: more than may wait for heavy ones (the above, and `Places`), so
that simple forms never wait for those."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Forms that are surely little work have no limit, and wait for nobody.

    trial_s: seconds of a CPU, with a sample of the vocabulary (`trials.py`); with all of 49,152 tokens it takes about
        twenty times as long.
    waiting: forms of a tenant alone that are tried or compiled, or wait for it, and of several their shares
        (`places.py`); more are refused with `QueueFull`.
    """

    trial_s: float = 0.25
    waiting: int = 8

    def __post_init__(self) -> None:
        for key in self.__slots__:
            if not getattr(self, key) > 0:
                raise ConfigError(f"{key}={getattr(self, key)!r}: must be above 0")
