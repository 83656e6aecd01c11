"""The meaning of JSON schemas for values: which schemas exclude each other, and what a finished answer breaks.

"One of" means the same as "any of" where no value fits two of the schemas (`Comparer`), and "any of" can be followed.
Rules that a grammar cannot hold are checked in the finished answer (`Checker`). So are all others but patterns and
formats, to find out which of several schemas a value is meant for.

Clients write schemas, and a check runs on the engine's thread: each node is read once, and the work on an answer is
bounded.
"""

from __future__ import annotations

import base64
import ipaddress
import json
from collections.abc import Callable, Mapping
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction
from typing import Any

_JUMPS = 32
"""Most references in a chain."""
MOST_STEPS = 5_000
"""Values that are compared with schemas or with each other: about 20 ms."""
_NAMES_A_STEP = 64
"""Required names that are looked up in the time of one step."""
_MOST_DIGITS = 400
_EXACT = Context(prec=10_000, Emax=MAX_EMAX, Emin=MIN_EMIN)

FORMATS: Mapping[str, Callable[[str], object]] = {
    **{f"ip{which}address": ipaddress.ip_address for which in ("", "vany")},
    **{f"ip{which}network": ipaddress.ip_network for which in ("", "vany", "v4", "v6")},
    **{f"ip{which}interface": ipaddress.ip_interface for which in ("", "vany", "v4", "v6")},
    "base64": base64.b64decode,
}
"""Formats that are checked in the finished answer: functions that raise `ValueError` for other texts."""


class Comparer:
    """Compares schemas of one document, which must not change."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._targets: dict[int, Any] = {}  # the target of a reference, by the id of its node
        self._listed: dict[int, set[str] | None] = {}
        self._apart: dict[tuple[int, int], bool] = {}

    def disjoint(self, one: Any, other: Any) -> bool:
        """True if no value fits both, by their types, their values, or a property that distinguishes them."""
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
        return any(self._distinguished(name, left, right) for name in _names(left) & _names(right))

    def _distinguished(self, name: str, left: dict[str, Any], right: dict[str, Any]) -> bool:
        mine, theirs = (self.resolved(side["properties"][name]) for side in (left, right))
        return self._of_other_values(mine, theirs)

    def _of_other_values(self, left: Any, right: Any) -> bool:
        """True if both list their values and share none."""
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
        """The node behind references; None if there is none."""
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
    """The properties that are required and described."""
    named, required = node.get("properties", {}), node.get("required", [])
    return set(named).intersection(required) if isinstance(named, dict) and isinstance(required, list) else set()


def _values(node: Any) -> set[str] | None:
    """The listed values as JSON, by which 1 and true differ; equal numbers are the same."""
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


class Checker:
    """Checks answers against one schema document."""

    def __init__(self, rule: str) -> None:
        self._schema = json.loads(rule)
        self._comparer = Comparer(self._schema)
        self._listed: dict[int, frozenset[Any]] = {}  # keys of the values of an enum, by the id of its node
        self._left = MOST_STEPS

    def fault(self, text: str) -> str | None:
        """The rule that the answer breaks, and its place; None: it breaks none."""
        self._left = MOST_STEPS
        try:
            return self._fault(self._schema, json.loads(text, parse_float=Decimal), "$")
        except (ValueError, ArithmeticError, RecursionError) as error:
            return f"it was not checked: {error}"

    def _step(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise ArithmeticError(f"it would take more than {MOST_STEPS:,} steps")

    def _fault(self, node: Any, value: Any, at: str) -> str | None:
        self._step()
        node = self._comparer.resolved(node)
        if not isinstance(node, dict):
            return f"{at}: nothing may stand here" if node is False else None
        for key in ("anyOf", "oneOf", "allOf"):
            if key in node:
                faults = [self._fault(part, value, at) for part in node[key]]
                return None if None in faults else max((fault for fault in faults if fault), key=_depth)
        if "const" in node or "enum" in node:
            if id(node) not in self._listed:
                self._listed[id(node)] = frozenset(map(self._key, node.get("enum", [node.get("const")])))
            return None if self._key(value) in self._listed[id(node)] else f"{at}: is none of the values"
        kinds = type_names(float(value) if isinstance(value, Decimal) else value)
        wanted = node.get("type")
        if wanted is not None and kinds.isdisjoint([wanted] if isinstance(wanted, str) else wanted):
            return f"{at}: is not of type {wanted}"
        if isinstance(value, str):
            return _text_fault(node, value, at)
        if isinstance(value, list):
            return self._list_fault(node, value, at)
        if isinstance(value, dict):
            return self._object_fault(node, value, at)
        return _number_fault(node, Decimal(value), at) if "number" in kinds else None

    def _list_fault(self, node: Any, value: list[Any], at: str) -> str | None:
        if not node.get("minItems", 0) <= len(value) <= node.get("maxItems", len(value)):
            return f"{at}: has {len(value)} items"
        if node.get("uniqueItems") and len({self._key(part) for part in value}) < len(value):
            return f"{at}: its items are not all different"
        first = node.get("prefixItems", [])
        for i, part in enumerate(value):
            if fault := self._fault(first[i] if i < len(first) else node.get("items", True), part, f"{at}[{i}]"):
                return fault
        return None

    def _object_fault(self, node: Any, value: dict[str, Any], at: str) -> str | None:
        named = node.get("properties", {})
        self._step(len(node.get("required", ())) // _NAMES_A_STEP)
        for name in node.get("required", ()):
            if name not in value:
                return f"{at}: {name!r} is missing"
        others = next(iter(node.get("patternProperties", {}).values()), node.get("additionalProperties", True))
        for name, part in value.items():
            if fault := self._fault(named.get(name, others), part, f"{at}.{name}"):
                return fault
        return None

    def _key(self, value: Any) -> Any:
        """A key that is equal for equal values of JSON: 1 and 1.0 are equal, 1 and true are not."""
        self._step()
        if isinstance(value, list):
            return "list", tuple(map(self._key, value))
        if isinstance(value, dict):
            return "object", frozenset((name, self._key(part)) for name, part in value.items())
        if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
            return "number", Decimal(repr(value) if isinstance(value, float) else value).normalize(_EXACT)
        return type(value).__name__, value


def _text_fault(node: Any, value: str, at: str) -> str | None:
    if not node.get("minLength", 0) <= len(value) <= node.get("maxLength", len(value)):
        return f"{at}: has {len(value)} characters"
    try:
        FORMATS.get(node.get("format"), str)(value)
    except ValueError:
        return f"{at}: is no {node['format']}"
    return None


def _number_fault(node: Any, value: Decimal, at: str) -> str | None:
    bounds = {key: Decimal(repr(node[key])) for key in _BOUNDS if key in node}
    if any(not holds(value, bounds[key]) for key, holds in _BOUNDS.items() if key in bounds):
        return f"{at}: {value} is out of bounds"
    if (step := node.get("multipleOf")) is not None:
        if max(abs(value.adjusted()), len(value.as_tuple().digits)) > _MOST_DIGITS:  # its fraction would be huge
            raise ArithmeticError("a number is too long")
        if (Fraction(value) / Fraction(repr(step))).denominator != 1:
            return f"{at}: {value} is no multiple of {step}"
    return None


_BOUNDS: Mapping[str, Callable[[Decimal, Decimal], bool]] = {
    "minimum": Decimal.__ge__,
    "maximum": Decimal.__le__,
    "exclusiveMinimum": Decimal.__gt__,
    "exclusiveMaximum": Decimal.__lt__,
}


def _depth(fault: str) -> int:
    """The depth of the fault: of several schemas, the one that fits furthest was meant."""
    return fault.partition(": ")[0].count(".") + fault.partition(": ")[0].count("[")
