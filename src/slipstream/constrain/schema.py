"""JSON schemas that can be followed: what would be ignored is refused by name, the rest is put in order.

The compiler knows most of JSON Schema and leaves the rest out without an error; an answer would then break its schema.
So every keyword is looked at here. Where a schema can be written in another way that the compiler does follow, it is;
the answers that remain are some of those that the schema allows. A few rules that most answers keep by themselves are
left out by name, and looked at in the finished answer (`leftover.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from slipstream.constrain import leftover
from slipstream.constrain.disjoint import Comparer, type_names
from slipstream.constrain.patterns import MAX_JSON_WEIGHT, check_pattern
from slipstream.core.errors import InvalidRequest

MAX_NESTING = 32
MAX_SUBSCHEMAS = 1000
MAX_PROPERTIES = 256
MAX_VALUES = 2000
MAX_MULTIPLE = 1000
MAX_ONE_OF = 64
MAX_TEXT_WEIGHT = 2 * MAX_JSON_WEIGHT
"""Limits of what is compiled: time grows with the square and the cube of some of them. Text has a weight: what its
patterns weigh, and what its lengths do; each part takes about 10 ms to compile with a vocabulary of 49,152. So do
multiples, long enums, and names beside free ones."""
_LIGHT_WEIGHT = 16
_LIGHT_SUBSCHEMAS = 128
_MULTIPLE_WEIGHT = 20
_ENUM_WEIGHT = 256
"""By how much to divide the step of a multiple, and the characters of an enum, for what they weigh."""
_DECIMALS = 6
"""Most that the compiler writes where numbers have bounds."""
_WIDEST = 10**18
_MOST_ITEMS = 2**31 - 1
_LONG = 512
"""Longer lengths take no longer."""
_AGAIN = 2
"""What a text weighs that is in the schema already."""

FORMATS = frozenset(
    (
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference",
        "uri-template", "uuid",
    )
)  # fmt: skip

_MAYBE_EMPTY = frozenset(("uri-reference", "uri-template"))
Schema = dict[str, Any]
_ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly",
        "writeOnly", "discriminator", "contentMediaType", "contentEncoding", "contentSchema",
    )
)  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")
_NUMBER = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems", "uniqueItems"]),
    "object": frozenset(
        (
            "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
            "maxProperties",
        )
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}  # fmt: skip
_OF_TYPES = frozenset().union(*_KEYWORDS.values())
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")


@dataclass(frozen=True, slots=True)
class ReadSchema:
    """A schema in the form in which the compiler follows all of it. light: that takes 0.2 s at most. left_out: rules
    that it is without, each with its place."""

    schema: Schema | bool
    light: bool
    left_out: tuple[str, ...] = ()


def read_schema(text: str) -> ReadSchema:
    """Raises `InvalidRequest` where the schema cannot be followed."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs.json is no JSON: {error}") from None
    reader = _Reader(given)
    try:
        schema = reader.read(given, "#", 0)
    except RecursionError:  # values, not schemas: those are counted
        raise InvalidRequest("structured_outputs.json: a value in it is nested too deep; make it simpler") from None
    light = reader.weight <= _LIGHT_WEIGHT and reader.count <= _LIGHT_SUBSCHEMAS
    return ReadSchema(schema, light, tuple(reader.left_out))


def lawful_schema(text: str) -> Schema | bool:
    """The schema alone."""
    return read_schema(text).schema


@dataclass(slots=True)
class _Reader:
    """Reads one schema document."""

    document: Any
    count: int = 0
    texts: set[Any] = field(default_factory=set)  # patterns and lengths so far
    weight: int = 0  # … of all of them
    left_out: list[str] = field(default_factory=list)
    comparer: Comparer = field(init=False)

    def __post_init__(self) -> None:
        self.comparer = Comparer(self.document)

    def read(self, node: Any, at: str, depth: int) -> Schema | bool:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise _wrong(at, f"{_shown(node)} is no schema: must be an object, true or false")
        self.count += 1
        if depth > MAX_NESTING:
            raise _wrong(at, f"it is nested more than {MAX_NESTING} deep")
        if self.count > MAX_SUBSCHEMAS:
            raise _wrong(at, f"there are more than {MAX_SUBSCHEMAS} schemas in it")
        known = _ANNOTATIONS | _OF_TYPES | {"type", *_COMBINED, *_DEFINITIONS}
        for key in node:
            if key not in known:
                raise _wrong(at, f"{key!r} cannot be followed; leave it out")
        made = self._meaning({k: v for k, v in node.items() if k not in _ANNOTATIONS}, at, depth)
        for key in _DEFINITIONS:
            if key in node:
                parts = _mapping(node[key], f"{at}/{key}")
                made[key] = {name: self.read(part, f"{at}/{key}/{name}", depth + 1) for name, part in parts.items()}
        return made

    def _meaning(self, node: Schema, at: str, depth: int) -> Schema:
        node = {key: value for key, value in node.items() if key not in _DEFINITIONS}
        combined = [key for key in _COMBINED if key in node]
        if not combined:
            return self._typed(node, at, depth)
        key = combined[0]
        others = sorted(node.keys() - {key} - ({"type"} if key in ("const", "enum") else set()))
        if others:
            raise _wrong(at, f"{key!r} beside {', '.join(map(repr, others))} cannot be followed; write one schema")
        read: Callable[[Schema, str, int], Schema] = {
            "$ref": self._reference,
            "anyOf": self._any_of,
            "oneOf": self._any_of,
            "allOf": self._all_of,
        }.get(key, self._values)
        return read(node, at, depth)

    def _reference(self, node: Schema, at: str, depth: int) -> Schema:
        target = node["$ref"]
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise _wrong(at, f"$ref {_shown(target)} must be a place in this document, such as #/$defs/name")
        if self.comparer.resolved(node) is None:
            raise _wrong(at, f"$ref {target!r} cannot be followed: nothing is there, or it leads back to itself")
        return {"$ref": target}

    def _any_of(self, node: Schema, at: str, depth: int) -> Schema:
        key = "anyOf" if "anyOf" in node else "oneOf"
        given = _listed(node[key], f"{at}/{key}")
        if key == "oneOf" and len(given) > MAX_ONE_OF:
            raise _wrong(at, f"oneOf has {len(given)} schemas: must be at most {MAX_ONE_OF}; use anyOf")
        if key == "oneOf":  # "exactly one" is "any" where no value fits two of them
            for i, one in enumerate(given):
                for j in range(i):
                    if not self.comparer.disjoint(given[j], one):
                        raise _wrong(at, f"oneOf: nothing tells schemas {j} and {i} apart; use anyOf")
        return {"anyOf": [self.read(part, f"{at}/{key}/{i}", depth + 1) for i, part in enumerate(given)]}

    def _all_of(self, node: Schema, at: str, depth: int) -> Schema:
        given = _listed(node["allOf"], f"{at}/allOf")
        if len(given) > 1:
            raise _wrong(at, "allOf of several schemas cannot be followed; write one schema")
        made = self.read(given[0], f"{at}/allOf/0", depth + 1)
        return made if isinstance(made, dict) else {"anyOf": [made]}

    def _values(self, node: Schema, at: str, depth: int) -> Schema:
        key = "const" if "const" in node else "enum"
        values = [node["const"]] if key == "const" else _listed(node["enum"], f"{at}/enum")
        if len(values) > MAX_VALUES:
            raise _wrong(at, f"enum has {len(values)} values: must be at most {MAX_VALUES}")
        if _deeper(values, 1 + MAX_NESTING):
            raise _wrong(at, f"{key} has a value that is nested more than {MAX_NESTING} deep")
        self._add(at, len(json.dumps(values, ensure_ascii=False)) // _ENUM_WEIGHT)
        if "type" in node:
            types = self._types(node, at)
            for value in values:
                if types.isdisjoint(type_names(value)):
                    raise _wrong(at, f"{_shown(value)} is not of type {_shown(node['type'])}")
        return {key: node[key]}

    def _types(self, node: Schema, at: str) -> set[str]:
        given = node["type"]
        types = given if isinstance(given, list) else [given]
        if not types or not all(isinstance(one, str) and one in _KEYWORDS for one in types):
            raise _wrong(at, f"type {_shown(given)} must be one or some of {', '.join(_KEYWORDS)}")
        return set(types)

    def _typed(self, node: Schema, at: str, depth: int) -> Schema:
        if "type" in node:
            types = self._types(node, at)
        else:  # a keyword of strings means nothing to numbers; the compiler takes it to mean nothing at all
            meant = [name for name, keys in _KEYWORDS.items() if not keys.isdisjoint(node) and name != "integer"]
            if not node:
                return {}
            if len(meant) > 1:
                raise _wrong(at, f"keywords of {' and '.join(meant)} without a type; say which it is")
            types = set(meant)
        wanted = frozenset().union(*(_KEYWORDS[name] for name in types))
        made: Schema = {key: value for key, value in node.items() if key in wanted}
        made["type"] = node.get("type", next(iter(types)))
        if "string" in types:
            self._string(made, at)
        if "multipleOf" in made:
            self._multiple(made, types, at)
        for key in _NUMBER:
            if key in made and not -_WIDEST < made[key] < _WIDEST if isinstance(made.get(key), int) else False:
                raise _wrong(at, f"{key} {_shown(made[key])} must be within ±{_WIDEST:.0e}")
        if "number" in types and not _room_for_number(made):
            raise _wrong(at, f"no number of at most {_DECIMALS} decimals is within its bounds; widen them")
        if made.get("format") == "ipvanyaddress" and types == {"string"}:
            return {"anyOf": [{"type": "string", "format": one} for one in ("ipv4", "ipv6")]}
        if "array" in types:
            self._array(made, at, depth)
        if "object" in types:
            self._object(made, at, depth)
        return made

    def _leave_out(self, made: Schema, key: str, at: str, told: str = "") -> None:
        del made[key]
        self.left_out.append(f"{key} at {at}{told}")

    def _string(self, made: Schema, at: str) -> None:
        if "pattern" in made and not isinstance(made["pattern"], str):
            raise _wrong(at, f"pattern {_shown(made['pattern'])} must be a text")
        if "format" in made and not isinstance(made["format"], str):
            raise _wrong(at, f"format {_shown(made['format'])} must be a text")
        least, most = (_count(made, key, at) for key in ("minLength", "maxLength"))
        form = made.get("format")
        if form is not None and (form not in (*FORMATS, "ipvanyaddress") or "pattern" in made):
            self._leave_out(made, "format", at, "" if form in leftover.FORMATS else f": {form} is not checked")
        if "pattern" in made or "format" in made:  # that is all that is followed of a string
            if least <= 1 and made.get("format") in FORMATS - _MAYBE_EMPTY:
                made.pop("minLength", None)
            for key in ("minLength", "maxLength"):
                if key in made:
                    self._leave_out(made, key, at)
        if "pattern" in made:
            self._weigh_pattern(at, "pattern", made["pattern"])
        if "minLength" in made or "maxLength" in made:
            least, most = min(least, _LONG), min(most, _LONG)
            self._weigh(at, (least, most), 2 * least + most // 3)

    def _weigh_pattern(self, at: str, key: str, pattern: str) -> None:
        self._weigh(at, pattern, check_pattern(f"structured_outputs.json: at {at}: {key}", pattern, in_json=True))

    def _weigh(self, at: str, text: Any, weight: int) -> None:
        again = text in self.texts
        self.texts.add(text)
        self._add(at, _AGAIN if again else weight)

    def _add(self, at: str, weight: int) -> None:
        self.weight += weight
        if self.weight > MAX_TEXT_WEIGHT:
            raise _wrong(
                at,
                "patterns and lengths of strings, multiples, enums and names beside free ones are too dear together, "
                f"more than {MAX_TEXT_WEIGHT}; use fewer, simpler or equal ones",
            )

    def _multiple(self, made: Schema, types: set[str], at: str) -> None:
        step = made["multipleOf"]
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step <= MAX_MULTIPLE:
            raise _wrong(at, f"multipleOf {_shown(step)} must be above 0, and {MAX_MULTIPLE} at most")
        if isinstance(step, float) or "number" in types:
            self._leave_out(made, "multipleOf", at)
        else:
            self._add(at, step // _MULTIPLE_WEIGHT)

    def _array(self, made: Schema, at: str, depth: int) -> None:
        for key in ("minItems", "maxItems"):
            if _count(made, key, at) > _MOST_ITEMS:
                raise _wrong(at, f"{key} {made[key]} must be at most {_MOST_ITEMS}")
        if "uniqueItems" in made:
            if made["uniqueItems"] is False:
                del made["uniqueItems"]
            else:
                self._leave_out(made, "uniqueItems", at)
        if "items" in made:
            made["items"] = self.read(made["items"], f"{at}/items", depth + 1)
        if "prefixItems" in made:
            parts = _listed(made["prefixItems"], f"{at}/prefixItems")
            made["prefixItems"] = [self.read(p, f"{at}/prefixItems/{i}", depth + 1) for i, p in enumerate(parts)]

    def _object(self, made: Schema, at: str, depth: int) -> None:
        named = _mapping(made.get("properties", {}), f"{at}/properties")
        required = made.get("required", [])
        if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
            raise _wrong(at, f"required {_shown(required)} must be a list of names")
        if len(named) + len(required) > MAX_PROPERTIES:
            raise _wrong(at, f"it has more than {MAX_PROPERTIES} properties")
        others = made.get("additionalProperties", False)
        for key in ("patternProperties", "propertyNames"):
            if key in made and (named or required):
                raise _wrong(at, f"{key} beside named properties cannot be followed; leave one of them out")
        missing = [name for name in dict.fromkeys(required) if name not in named]
        if missing and made.get("additionalProperties", True) is False:
            raise _wrong(at, f"{missing[0]!r} is required, but no such property is allowed")
        named = {**named, **{name: made.get("additionalProperties", True) for name in missing}}
        if named:
            read = {name: self.read(part, f"{at}/properties/{name}", depth + 1) for name, part in named.items()}
            made["properties"] = read
        if others is not False:
            self._add(at, len(named))
        if "additionalProperties" in made:
            made["additionalProperties"] = self.read(others, f"{at}/additionalProperties", depth + 1)
        if "patternProperties" in made:
            self._pattern_properties(made, at, depth)
        if "propertyNames" in made:
            names = self.read(made["propertyNames"], f"{at}/propertyNames", depth + 1)
            if not isinstance(names, dict) or names.get("type") != "string":
                raise _wrong(at, "propertyNames must be a schema of strings")
            made["propertyNames"] = names
        least = made.get("minProperties", 0)
        free = others is not False or "patternProperties" in made
        if isinstance(least, int) and free and least > len(set(required)):  # the same name twice would count twice
            raise _wrong(at, "minProperties cannot be counted where names are free; name them in required")

    def _pattern_properties(self, made: Schema, at: str, depth: int) -> None:
        parts = _mapping(made["patternProperties"], f"{at}/patternProperties")
        if len(parts) != 1:
            raise _wrong(at, "patternProperties of other than one pattern cannot be followed: they may overlap")
        for pattern in parts:
            self._weigh_pattern(at, "patternProperties", pattern)
        made["patternProperties"] = {
            pattern: self.read(part, f"{at}/patternProperties", depth + 1) for pattern, part in parts.items()
        }


def _room_for_number(made: Schema) -> bool:
    """Is a number that can be written within its bounds? Where none is, the compiler would take no text at all."""
    given = {key: Decimal(repr(value)) for key, value in made.items() if type(value) in (int, float)}
    units = {key: bound.scaleb(_DECIMALS) for key, bound in given.items() if bound.is_finite()}  # of the last decimal
    least = [units[key].to_integral_value(ROUND_CEILING) for key in ("minimum",) if key in units]
    least += [units[key].to_integral_value(ROUND_FLOOR) + 1 for key in ("exclusiveMinimum",) if key in units]
    most = [units[key].to_integral_value(ROUND_FLOOR) for key in ("maximum",) if key in units]
    most += [units[key].to_integral_value(ROUND_CEILING) - 1 for key in ("exclusiveMaximum",) if key in units]
    return not (least and most) or max(least) <= min(most)


def _deeper(value: Any, most: int) -> bool:
    """Are there more levels of lists and objects in it? Goes by levels: the compiler would go down by calls."""
    level = [value]
    for _ in range(most + 1):
        level = [
            part
            for one in level
            if isinstance(one, dict | list)
            for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


def _count(made: Schema, key: str, at: str) -> int:
    """How many at least or at most; 0 where it is not said."""
    value = made.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(at, f"{key} {_shown(value)} must be a whole number, 0 or more")
    return value


def _mapping(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(at, f"{_shown(value)} must be an object")
    return value


def _listed(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _wrong(at, f"{_shown(value)} must be a list, one at least")
    return value


def _wrong(at: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.json: at {at}: {why}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:60] + "…"
