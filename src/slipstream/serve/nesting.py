"""How deep a client's JSON goes: what handles schemas and tools later would follow it down, level by level."""

from __future__ import annotations

from typing import Any

from slipstream.serve.errors import refused


def check_nesting(param: str, value: Any, most: int) -> None:
    """Refuse more than `most` levels of lists and objects. Goes by levels, not by calls of itself."""
    level = [value]
    for _ in range(most + 1):
        level = [part for one in level if isinstance(one, dict | list) for part in _parts(one)]
        if not level:
            return
    raise refused(param, f"nested too deep: must have at most {most} levels on this server")


def _parts(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
