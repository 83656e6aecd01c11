"""Forms in the compiler's terms: checked, with nothing that xgrammar would ignore, and known to be light or not.

xgrammar knows most of JSON Schema and leaves the rest out without an error; an answer would then break its schema. So
every keyword is read here: schemas are rewritten to what it follows where that is possible (with answers that the
schema allows, but not always all of them), and refused by name elsewhere. A few rules that most answers keep by
themselves are left out by name, and checked in the finished answer (`checker.py`).

Light forms are compiled in place. The time for other forms cannot be told by reading: they are tried out (`trials.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from slipstream.constrain import checker
from slipstream.constrain.checker import Comparer, type_names
from slipstream.constrain.syntax import MAX_JSON_WEIGHT, check_grammar, check_pattern, dotless
from slipstream.core.errors import InvalidRequest
from slipstream.core.structured import StructuredOutputsParams

_MOST_SPACES = 40
"""Most white space in a row where the model chooses it: some small models never end."""
_TAG_FORMATS = {
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first"},
    "tags_with_separator": {"separator", "tags", "at_least_one", "stop_after_first"},
    "tag": {"begin", "content", "end"},
    "or": {"elements"},
    "json_schema": {"json_schema"},
    "regex": {"pattern"},
}
"""Known formats of structural tags, and their keys."""
_NO_CONTROLS = (r"([^\"\\\r\n])", r"([^\0-\x1f\"\\\r\n])")
"""Characters of strings of a limited length, as the compiler has them and as JSON does."""
_MOST_TAGS = 128
_LIGHT_TAGS = 4
_LIGHT_PATTERN = 64
_LIGHT_CHOICE = 200
"""Weight of a pattern, and characters of the longest choice, that compile in about 0.1 s with 49,152 tokens."""

MAX_NESTING = 32
MAX_SUBSCHEMAS = 1000
MAX_PROPERTIES = 256
MAX_VALUES = 2000
MAX_MULTIPLE = 1000
MAX_ONE_OF = 64
MAX_TEXT_WEIGHT = 2 * MAX_JSON_WEIGHT
"""Limits of a schema: the time to compile grows with the square and the cube of some of them. Texts have a weight: that
of their patterns, and of their lengths; each part takes about 10 ms with a vocabulary of 49,152. So do multiples, long
enums, and names beside free ones."""
_LIGHT_WEIGHT = 16
_LIGHT_SUBSCHEMAS = 128
_MULTIPLE_WEIGHT = 20
_ENUM_WEIGHT = 256
"""Divisors of the step of a multiple, and of the characters of an enum, for their weight."""
_DECIMALS = 6
"""Most decimals that the compiler writes where numbers have bounds."""
_WIDEST = 10**18
_MOST_ITEMS = 2**31 - 1
_LONG = 512
"""Longer lengths take no more time."""
_AGAIN = 2
"""The weight of a text that is in the schema already."""

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
class Source:
    """A form in the compiler's own terms."""

    kind: str  # regex, grammar, json or structural_tag
    text: str
    free: bool = False  # of JSON: white space is the model's own
    light: bool = False  # takes 0.2 s at most
    left_out: tuple[str, ...] = ()  # rules of a schema that are checked in the finished answer

    def compile(self, compiler: Any) -> Any:
        """Compile with xgrammar, whose exceptions are not converted."""
        if self.kind == "regex":
            return compiler.compile_regex(self.text)
        if self.kind == "grammar":
            return compiler.compile_grammar(self.text)
        if self.kind == "structural_tag":
            format = _with_grammars(json.loads(self.text))
            return compiler.compile_structural_tag({"type": "structural_tag", "format": format})
        spaces = _MOST_SPACES if self.free else None
        return compiler.compile_json_schema(self.text, any_whitespace=self.free, max_whitespace_cnt=spaces)


def source_of(form: StructuredOutputsParams) -> Source:
    """Read a form. Raises `InvalidRequest` where it cannot be followed, as far as that is known before compiling."""
    key = f"structured_outputs.{form.kind}"
    if form.kind == "regex":
        weight = check_pattern(key, form.rule)
        return Source("regex", dotless(key, form.rule), light=weight <= _LIGHT_PATTERN)
    if form.kind == "grammar":
        check_grammar(key, form.rule)
        return Source("grammar", form.rule)
    if form.kind == "choice":
        texts = json.loads(form.rule)
        listed = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return Source("grammar", f"root ::= {listed}", light=max(map(len, texts)) <= _LIGHT_CHOICE)
    if form.kind == "structural_tag":
        return _tagged(key, form.rule)
    free = not form.disable_any_whitespace
    if form.kind == "json_object":
        return Source("json", '{"type": "object", "additionalProperties": true}', free, light=True)
    read = read_schema(form.rule)
    return Source("json", json.dumps(read.schema, ensure_ascii=False), free, read.light, read.left_out)


def _tagged(key: str, rule: str) -> Source:
    """The format of a structural tag, its schemas and patterns checked."""
    seen: list[ReadSchema | None] = []  # by schema; None: a pattern
    left_out: list[str] = []

    def read(node: Any, at: str) -> Any:
        kind = node.get("type") if isinstance(node, dict) else None
        if kind not in _TAG_FORMATS:
            raise InvalidRequest(f"{key}: at {at}: its type must be one of {', '.join(_TAG_FORMATS)}")
        if unknown := node.keys() - _TAG_FORMATS[kind] - {"type"}:
            raise InvalidRequest(f"{key}: at {at}: {sorted(unknown)[0]!r} cannot be followed; leave it out")
        made = dict(node)
        for name in ("tags", "elements"):
            if name in node:
                parts = node[name] if isinstance(node[name], list) else []
                if not 1 <= len(parts) <= _MOST_TAGS:
                    raise InvalidRequest(f"{key}: at {at}: {name} must be a list of 1 to {_MOST_TAGS}")
                made[name] = [read(part, f"{at}/{name}/{i}") for i, part in enumerate(parts)]
        if kind == "tag":
            made["content"] = read(node.get("content"), f"{at}/content")
        if kind == "regex":
            pattern = str(node.get("pattern"))
            seen.append(None)
            check_pattern(f"{key}: at {at}: pattern", pattern)
            made["pattern"] = dotless(f"{key}: at {at}: pattern", pattern)
        if kind == "json_schema":
            try:
                seen.append(found := read_schema(json.dumps(node.get("json_schema"), ensure_ascii=False)))
            except InvalidRequest as error:
                raise InvalidRequest(f"{key}: at {at}{str(error).removeprefix('structured_outputs.json')}") from None
            made["json_schema"] = found.schema
            left_out.extend(f"{rule} of {at}, not checked" for rule in found.left_out)
        return made

    try:
        given = json.loads(rule)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{key} is no JSON: {error}") from None
    if not isinstance(given, dict) or given.get("type") != "structural_tag":
        raise InvalidRequest(f'{key}: must be {{"type": "structural_tag", "format": …}}')
    try:
        format = read(given.get("format"), "#/format")
    except RecursionError:
        raise InvalidRequest(f"{key}: it is nested too deep; make it simpler") from None
    light = len(seen) <= _LIGHT_TAGS and all(one is None or one.light for one in seen)
    return Source("structural_tag", json.dumps(format, ensure_ascii=False), False, light, tuple(left_out))


def _with_grammars(format: Any) -> Any:
    """The format with its JSON as a grammar, the only way to ask for JSON in one line."""
    import xgrammar

    if format["type"] == "json_schema":
        schema = json.dumps(format["json_schema"], ensure_ascii=False)
        grammar = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False))
        return {"type": "grammar", "grammar": grammar.replace(*_NO_CONTROLS)}
    made = dict(format)
    for name in ("tags", "elements"):
        if name in format:
            made[name] = [_with_grammars(part) for part in format[name]]
    if "content" in format:
        made["content"] = _with_grammars(format["content"])
    return made


@dataclass(frozen=True, slots=True)
class ReadSchema:
    """A schema that the compiler follows as a whole. light: that takes 0.2 s at most. left_out: the rules that are
    missing from it, each with its place."""

    schema: Schema | bool
    light: bool
    left_out: tuple[str, ...] = ()


def read_schema(text: str) -> ReadSchema:
    """Read a schema. Raises `InvalidRequest` where it cannot be followed."""
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
        else:  # the compiler ignores keywords without a type
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
            self._leave_out(made, "format", at, "" if form in checker.FORMATS else f": {form} is not checked")
        if "pattern" in made or "format" in made:  # the compiler ignores the lengths of such strings
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
    """True if a number that the compiler can write is within the bounds. If none is, it would accept no text."""
    given = {key: Decimal(repr(value)) for key, value in made.items() if type(value) in (int, float)}
    units = {key: bound.scaleb(_DECIMALS) for key, bound in given.items() if bound.is_finite()}  # of the last decimal
    least = [units[key].to_integral_value(ROUND_CEILING) for key in ("minimum",) if key in units]
    least += [units[key].to_integral_value(ROUND_FLOOR) + 1 for key in ("exclusiveMinimum",) if key in units]
    most = [units[key].to_integral_value(ROUND_FLOOR) for key in ("maximum",) if key in units]
    most += [units[key].to_integral_value(ROUND_CEILING) - 1 for key in ("exclusiveMaximum",) if key in units]
    return not (least and most) or max(least) <= min(most)


def _deeper(value: Any, most: int) -> bool:
    """True if the value has more levels of lists and objects. Without recursion, which a client could exhaust."""
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
    """A bound such as minItems; 0 where there is none."""
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
        raise _wrong(at, f"{_shown(value)} must be a list with one part at least")
    return value


def _wrong(at: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.json: at {at}: {why}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:60] + "…"
