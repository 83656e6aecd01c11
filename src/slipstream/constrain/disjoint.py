"""Can no value fit both of two schemas? Then "one of them" means the same as "any of them", which can be followed."""

from __future__ import annotations

import json
from typing import Any

_JUMPS = 32


def disjoint(one: Any, other: Any, document: Any) -> bool:
    """True where it is plain to see: types, values, or a property that tells them apart. `document`: for references."""
    left, right = _resolved(one, document), _resolved(other, document)
    if not isinstance(left, dict) or not isinstance(right, dict):
        return False
    values = _values(left), _values(right)
    if values[0] is not None and values[1] is not None:
        return values[0].isdisjoint(values[1])
    types = _types(left), _types(right)
    if types[0] and types[1] and types[0].isdisjoint(types[1]):
        return True
    if types[0] != {"object"} or types[1] != {"object"}:
        return False
    return any(_told_apart(name, left, right, document) for name in _names(left) & _names(right))


def type_names(value: Any) -> set[str]:
    """The types of JSON Schema that a value has: 3 is an integer and a number."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


def _told_apart(name: str, left: dict[str, Any], right: dict[str, Any], document: Any) -> bool:
    tags = [_values(_resolved(side["properties"][name], document)) for side in (left, right)]
    return tags[0] is not None and tags[1] is not None and tags[0].isdisjoint(tags[1])


def _names(node: dict[str, Any]) -> set[str]:
    """Properties that every such object has, and that are described."""
    named, required = node.get("properties", {}), node.get("required", [])
    return set(named).intersection(required) if isinstance(named, dict) and isinstance(required, list) else set()


def _values(node: Any) -> set[str] | None:
    """As JSON, because 1 and true are not the same here; numbers that are equal are."""
    if not isinstance(node, dict):
        return None
    listed = [node["const"]] if "const" in node else node.get("enum")
    return {json.dumps(_plain(value), sort_keys=True) for value in listed} if isinstance(listed, list) else None


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _types(node: dict[str, Any]) -> set[str]:
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if isinstance(values, list):
        return set().union(*(type_names(value) for value in values))
    given = node.get("type", "object" if "properties" in node else [])
    types = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    return types | {"integer"} if "number" in types else types


def _resolved(node: Any, document: Any) -> Any:
    """Where references lead to; None where that is nowhere."""
    for _ in range(_JUMPS):
        if not (isinstance(node, dict) and isinstance(node.get("$ref"), str)):
            return node
        found, place = document, node["$ref"]
        for step in place.removeprefix("#").strip("/").split("/") if place != "#" else ():
            found = found.get(step) if isinstance(found, dict) else None
        node = found
    return None
