"""Can no value fit both of two schemas? Then "one of them" means the same as "any of them", which can be followed.

Each node is looked at once, however many refer to it: who writes a schema decides how many do.
"""

from __future__ import annotations

import json
from typing import Any

_JUMPS = 32


class Comparer:
    """Compares schemas of one document, which nobody changes meanwhile."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._targets: dict[int, Any] = {}  # what a reference means, by the id of the node that has it
        self._listed: dict[int, set[str] | None] = {}
        self._apart: dict[tuple[int, int], bool] = {}

    def disjoint(self, one: Any, other: Any) -> bool:
        """True where it is plain to see: types, values, or a property that tells them apart."""
        left, right = self.resolved(one), self.resolved(other)
        if not isinstance(left, dict) or not isinstance(right, dict):
            return False
        if self._values(left) is not None and self._values(right) is not None:
            return self._of_other_values(left, right)
        types = _types(left), _types(right)
        if types[0] and types[1] and types[0].isdisjoint(types[1]):
            return True
        if types[0] != {"object"} or types[1] != {"object"}:
            return False
        return any(self._told_apart(name, left, right) for name in _names(left) & _names(right))

    def _told_apart(self, name: str, left: dict[str, Any], right: dict[str, Any]) -> bool:
        mine, theirs = (self.resolved(side["properties"][name]) for side in (left, right))
        return self._of_other_values(mine, theirs)

    def _of_other_values(self, left: Any, right: Any) -> bool:
        """Do both list their values, and share none?"""
        pair = id(left), id(right)
        if pair not in self._apart:
            mine, theirs = self._values(left), self._values(right)
            self._apart[pair] = mine is not None and theirs is not None and mine.isdisjoint(theirs)
        return self._apart[pair]

    def _values(self, node: Any) -> set[str] | None:
        if id(node) not in self._listed:
            self._listed[id(node)] = _values(node)
        return self._listed[id(node)]

    def resolved(self, node: Any) -> Any:
        """Where references lead to; None where that is nowhere."""
        for _ in range(_JUMPS):
            if not (isinstance(node, dict) and isinstance(node.get("$ref"), str)):
                return node
            if id(node) not in self._targets:
                self._targets[id(node)] = _target(node["$ref"], self._document)
            node = self._targets[id(node)]
        return None


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


def _target(place: str, document: Any) -> Any:
    found = document
    for step in place.removeprefix("#").strip("/").split("/") if place != "#" else ():
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, dict) else None
    return found
