"""What a run is at while nothing else is heard of it: what is being loaded, and how long that took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.models.headers import weights_bytes
from slipstream.models.paths import Progress


@contextmanager
def under_way(say: Progress, what: str) -> Iterator[None]:
    """Say what is being done, and when it is done how long it took."""
    begun = time.perf_counter()
    say(f"{what} ...")
    yield
    say(f"{what}: {time.perf_counter() - begun:.1f} s")


def sized(model: Path) -> str:
    """The name of a model, and how much there is to read."""
    return f"{model.name} ({weights_bytes(model) / 1e9:.2f} GB)"
