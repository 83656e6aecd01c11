"""What was measured so far, in a file that is written after every part: a crash or a timeout loses one part only."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LONGEST = 800  # characters of an error


class Report:
    """Owns the results. `put` and `part` are the only writers."""

    def __init__(self, results: dict[str, Any], path: Path | None) -> None:
        self.results = results
        self._path = path
        self._begun = time.perf_counter()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._begun:6.1f} s] {text}", flush=True)

    def put(self, value: Any, *keys: str) -> None:
        """Set what stands under these keys, and save."""
        place = self.results
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        self.say(f"{' '.join(keys)}: {json.dumps(value)}")
        self.save()

    def save(self) -> None:
        if self._path is not None:
            fresh = self._path.with_name(self._path.name + ".new")
            fresh.write_text(json.dumps(self.results, indent=1) + "\n")
            os.replace(fresh, self._path)  # never half a file

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a part. One that fails is noted, and the program goes on behind it."""
        self.say(f"{name} ...")
        self.results.get("failed", {}).pop(name, None)
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.results.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:_LONGEST]
        finally:
            seconds = round(time.perf_counter() - start, 2)
            self.results.setdefault("seconds", {})[name] = seconds
            self.say(f"{name} took {seconds} s")
            self.save()
