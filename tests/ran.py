"""What a command did, as a test sees it. Not a test file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of stdout."""
        value: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return value


Run = Callable[..., Ran]
