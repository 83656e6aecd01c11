"""Schemas of all kinds, bounded so that a tiny model with random weights comes to their end, and drafters for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from scripted import Scripted
from slipstream.core.draft import ROOT, Tree
from slipstream.drafters.base import DraftRequest

Schema = dict[str, Any]

_WORD: Schema = {"type": "string", "pattern": "^[a-z]{1,6}$"}
_SHORT: Schema = {"type": "string", "maxLength": 5}
_SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 99}


def _object(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


SCHEMAS: dict[str, Schema] = {
    "flat": _object(name=_SHORT, age=_SMALL),
    "nested": _object(a=_object(b=_object(c=_object(d=_SMALL)))),
    "deep array": {"type": "array", "items": {"type": "array", "items": _SMALL, "maxItems": 2}, "maxItems": 2},
    "enum": _object(colour={"enum": ["red", "green", "dark green", None, 7, True]}),
    "enum of objects": {"enum": [{"a": [1, 2]}, {"a": [1, 3]}, []]},
    "const": _object(kind={"const": "point"}, at={"const": [0, 0.5]}),
    "pattern": _object(plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"}),
    "pattern with choices": {"type": "string", "pattern": "^(cat|dog|cow)( (and|or) (cat|dog))?$"},
    "pattern with classes": {"type": "string", "pattern": "^\\w{1,4}\\.\\d+[^\\s]$"},
    "boolean and null": _object(yes={"type": "boolean"}, nothing={"type": "null"}),
    "unicode keys": _object(**{"größe": _SMALL, "名前": _WORD, "é\"\\": {"type": "boolean"}}),
    "unicode values": {"enum": ["naïve", "日本語", "😀 ok", "\u202e"]},
    "unicode text": _object(text={"type": "string", "minLength": 1, "maxLength": 4}),
    "any of": {"anyOf": [_SMALL, _WORD, {"type": "null"}]},
    "any of objects": {"anyOf": [_object(a=_SMALL), _object(b=_WORD, c={"type": "boolean"})]},
    "one of by tag": {
        "oneOf": [
            _object(kind={"const": "circle"}, radius=_SMALL),
            _object(kind={"const": "square"}, side=_SMALL),
        ]
    },
    "integer bounds": _object(low={"type": "integer", "minimum": -5, "maximum": 17}),
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    "number bounds": _object(x={"type": "number", "minimum": -1.5, "maximum": 2.25}),
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "array bounds": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [_SMALL, _WORD, {"type": "boolean"}], "items": False, "minItems": 3},
    "no more properties": {**_object(a=_SMALL), "additionalProperties": False},
    "more properties": {
        "type": "object",
        "properties": {"id": _SMALL},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "free names": {"type": "object", "additionalProperties": _SMALL, "propertyNames": _WORD, "maxProperties": 2},
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": _SMALL},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "optional": {
        "type": "object",
        "properties": {"a": _SMALL, "b": _WORD, "c": {"type": "boolean"}},
        "required": ["b"],
    },
    "all optional": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}}},
    "references": {
        "$defs": {"point": _object(x=_SMALL, y=_SMALL)},
        **_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "recursion": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": _SMALL, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["v", "next"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "definitions of old": {"definitions": {"w": _WORD}, **_object(w={"$ref": "#/definitions/w"})},
    "several types": _object(v={"type": ["integer", "null"], "minimum": 3, "maximum": 30}),
    "dates": _object(day={"type": "string", "format": "date"}, at={"type": "string", "format": "time"}),
    "addresses": _object(id={"type": "string", "format": "uuid"}, ip={"type": "string", "format": "ipv4"}),
    "an invoice": _object(
        number={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        paid={"type": "boolean"},
        lines={
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": _object(item=_WORD, count=_SMALL, unit={"enum": ["kg", "piece", "hour"]}),
        },
        customer={"anyOf": [_object(company=_WORD), _object(first=_WORD, last=_WORD)]},
    ),
    "annotated": {
        "title": "Vote",
        "description": "Of one person",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_object(vote={"enum": ["yes", "no"], "type": "string", "default": "no", "title": "The vote"}),
    },
    "required but not described": {"type": "object", "required": ["x"], "additionalProperties": {"type": "boolean"}},
    "type left out": {"properties": {"n": {"minimum": 0, "maximum": 9, "type": "integer"}}, "required": ["n"]},
}  # fmt: skip


class Unlawful(Scripted):
    """Hides the right path among guesses that no grammar allows: special tokens, quotes, nonsense, too long chains."""

    name: ClassVar[str] = "unlawful"
    default_draft_tokens: ClassVar[int] = 24

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        dice = random.Random(1000 * (request.params.seed or 0) + len(request.tokens))
        tokens: list[int] = []
        parents: list[int] = []
        tip = ROOT
        for right in rest[: dice.randint(0, 4)]:
            wrong = [token for token in dice.sample(range(300), 3) if token != right]
            for token in [*wrong, right]:
                tokens.append(token)
                parents.append(tip)
            for child in dice.sample(range(300), 2):  # below a wrong one
                tokens.append(child)
                parents.append(len(tokens) - 3)
            tip = len(tokens) - 3
        return Tree(tuple(tokens[:budget]), tuple(parents[:budget]))


class Nonsense(Scripted):
    """Chains of anything, of which the first token is nearly always against the grammar."""

    name: ClassVar[str] = "nonsense"

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        dice = random.Random(len(request.tokens))
        return Tree.chain(dice.choices(range(300), k=budget))


def schema_names() -> Sequence[str]:
    return list(SCHEMAS)
