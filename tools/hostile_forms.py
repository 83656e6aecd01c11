"""Forms of answers that try to hang a server: schemas, patterns and grammars without end, or with too much of anything.

`hostile.py` sends them to a real server; the tests send them to a tiny one.
"""

from __future__ import annotations

import json
from typing import Any

Form = dict[str, Any]


def _nested(levels: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _object(required: bool = True, /, **properties: Any) -> Form:
    return {"type": "object", "properties": properties, "required": list(properties) if required else []}


def _ambiguous(rules: int) -> str:
    """Every text of letters can be read in very many ways."""
    lines = (f'r{i} ::= [a-z]+ r{(i + 1) % rules} | [0-9a-z]+ " " r{(7 * i + 3) % rules} | "x"' for i in range(rules))
    return "\n".join(["root ::= r0", *lines])


def _doubling(levels: int) -> str:
    """Text without a choice, twice as long with every rule."""
    lines = (f"r{i} ::= r{i + 1} r{i + 1}" for i in range(levels))
    return "\n".join(["root ::= r0", *lines, f'r{levels} ::= "ab"'])


_REF = {"$ref": "#"}

SCHEMAS: dict[str, Any] = {
    "a required property of its own kind": _object(a=_REF),
    "… behind a free text": _object(text={"type": "string"}, a=_REF),
    "nothing but itself": _REF,
    "two that refer to each other": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        **_object(x={"$ref": "#/$defs/a"}),
    },
    "two that need each other": {
        "$defs": {"a": _object(b={"$ref": "#/$defs/b"}), "b": _object(a={"$ref": "#/$defs/a"})},
        "$ref": "#/$defs/a",
    },
    "items of its own kind": {"type": "array", "minItems": 1, "items": _REF},
    "trees of its own kind": {"type": "array", "minItems": 2, "items": {"anyOf": [_REF, _object(a=_REF)]}},
    "100,000 items that are known": {"type": "array", "minItems": 100_000, "items": {"const": 1}},
    "10^18 items": {"type": "array", "minItems": 10**18, "maxItems": 10**18, "items": {"const": "x"}},
    "2,000 items of 2,000": {
        "type": "array",
        "minItems": 2000,
        "items": {"type": "array", "minItems": 2000, "items": {"const": 0}},
    },
    "at most 10^9 items": {"type": "array", "maxItems": 10**9, "items": {"type": "boolean"}},
    "a text of 10^9 characters": {"type": "string", "minLength": 10**9},
    "a text of 20,000 to 30,000 characters": {"type": "string", "minLength": 20_000, "maxLength": 30_000},
    "40 texts of different lengths": {
        "prefixItems": [{"type": "string", "minLength": n, "maxLength": 3 * n} for n in range(40)]
    },
    "bounds of 300 digits": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "a bound of 10^308": {"type": "number", "minimum": -1e308, "maximum": 1e308},
    "multiples of 999,983": {"type": "integer", "multipleOf": 999_983},
    "multiples of 997": {"type": "integer", "multipleOf": 997},
    "3,000 values": {"enum": [f"value {i}" for i in range(3000)]},
    "2,000 values in 30 places": {
        "$defs": {"e": {"enum": [f"v{i}" for i in range(2000)]}},
        **_object(**{f"p{i}": {"$ref": "#/$defs/e"} for i in range(30)}),
    },
    "a value of 60,000 characters": {"const": "x" * 60_000},
    "values that part late": {"enum": ["a" * 4000 + str(i) for i in range(14)]},
    "256 optional properties": _object(False, **{f"p{i}": {"type": "string"} for i in range(256)}),
    "256 optional ones and free names": {
        **_object(False, **{f"p{i}": {"type": "integer"} for i in range(256)}),
        "additionalProperties": True,
    },
    "900 kinds of objects": {"anyOf": [_object(**{f"p{i % 7}": {"const": i}}) for i in range(440)]},
    "kinds of kinds of kinds": {
        "$defs": {f"k{i}": {"anyOf": [{"$ref": f"#/$defs/k{i + 1}"}] * 8} for i in range(30)}
        | {"k30": {"type": "null"}},
        "$ref": "#/$defs/k0",
    },
    "objects within objects, 8 each": {
        "$defs": {f"k{i}": _object(**{f"p{j}": {"$ref": f"#/$defs/k{i + 1}"} for j in range(8)}) for i in range(20)}
        | {"k20": {"type": "null"}},
        "$ref": "#/$defs/k0",
    },
    "32 levels": _nested(31),
    "300 levels": _nested(300),
    "a pattern in a pattern in a pattern": {"type": "string", "pattern": "((a{1,30}){1,30}){1,30}"},
    "60 patterns": {"prefixItems": [{"type": "string", "pattern": f"^[a-z]{{{n},200}}x$"} for n in range(60)]},
    "a pattern that blows up backwards": {"type": "string", "pattern": "^(a|b)*a(a|b){90}$"},
    "any pattern of names": {"type": "object", "patternProperties": {"^(a+)+$": _REF}},
    "64 tags": {"oneOf": [_object(t={"const": i}, a=_REF) for i in range(64)]},
}

PATTERNS: dict[str, str] = {
    "repeats within repeats": "((a{1,30}){1,30}){1,30}",
    "a million": "a{1000000}",
    "2,000 that are known": "a{2000}",
    "stars within stars": "((((a*)*)*)*)*b",
    "the same twice": "(x+x+)+y",
    "a or aa": "(a|aa){1,900}b",
    "what stood 200 before the end": "(a|b)*a(a|b){200}",
    "three that overlap": "(.*a.{60}|.*b.{60}|.*c.{59})*",
    "all but a few characters": r"([^a]{1,300}[^b]{1,300}[^c]{1,300})+",
    "Unicode classes": "([一-鿿]|[\\u0400-\\u04ff]|[^\\x00-\\x7f]){1,900}",
    "every plane": "([\\U00010000-\\U0010ffff]|.){400}",
    "properties": r"\p{L}{1,500}",
    "words of words": r"(\w+\s?){1,400}",
    "400 brackets": "(" * 400 + "a" + ")" * 400,
    "60 brackets with stars": "(" * 60 + "a" + ")*" * 60,
    "400 choices": "(" + "|".join(f"{'a' * (i % 4)}b{i}" for i in range(280)) + ")+",
}

GRAMMARS: dict[str, str] = {
    "a text without end": 'root ::= "a" root',
    "a text without end, once there was a choice": 'root ::= [xy] tail\ntail ::= "ab" tail',
    "itself first": 'root ::= root "a"',
    "itself twice": 'root ::= root root | "a"',
    "itself three times": "root ::= root root root | [a-z]",
    "itself and nothing": 'root ::= root root | "" | "a"',
    "nothing, often": 'root ::= (("")*)* "a"',
    "in turn": 'root ::= a | "x"\na ::= b | "x"\nb ::= root | "x" a',
    "8 rules that begin alike": _ambiguous(8),
    "22 rules that begin alike": _ambiguous(22),
    "text that doubles 30 times": _doubling(30),
    "text that doubles 400 times": _doubling(400),
    "brackets that close": 'root ::= "(" root ")" root | "[" root "]" root | ""',
    "an even number of letters": 'root ::= [a-z] root [a-z] | [a-z] [a-z] | ""',
    "repeats of 4,000": "root ::= ([a-z]{1,60}){1,60}",
    "repeats of repeats": 'root ::= (("a"{1,99}){1,99}){1,99}',
    "5,000 rules": "root ::= r0\n" + "\n".join(f'r{i} ::= "a" | r{i + 1}' for i in range(3000)) + '\nr3000 ::= "b"',
    "400 rules in a row": "root ::= r0\n"
    + "\n".join(f'r{i} ::= "" r{i + 1} | r{i + 1} "a"' for i in range(400))
    + '\nr400 ::= "b"',
    "4,000 characters, each of two kinds": "root ::= " + " ".join(["[ab]"] * 3900),
    "a text of 60,000 characters": f'root ::= "{"ab" * 30_000}"',
    "1,900 choices": "root ::= (" + " | ".join(f'"{"a" * (i % 9)}{i}"' for i in range(1900)) + ")+",
    "all of Unicode": "root ::= ([\\u0080-\\U0010ffff] | [^\\u0080-\\U0010ffff])+",
    "letters and letters": "root ::= ([a-z]+ [a-z]+ [a-z]+ [a-z]+)+",
    "sums without brackets": 'root ::= e\ne ::= e "+" e | e "*" e | e e | [a-z0-9]+',
}


def _tagged(schema: Any, tags: int = 1, **more: Any) -> Form:
    parts = [
        {"type": "tag", "begin": f"<t{i}>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</t>"}
        for i in range(tags)
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<t"], "tags": parts, **more}}


TAGS: dict[str, Form] = {
    "a call of its own kind": _tagged(SCHEMAS["a required property of its own kind"], at_least_one=True),
    "128 calls of 7 properties": _tagged(_object(**{f"p{i}": {"type": "string"} for i in range(7)}), 128),
    "3,000 triggers": _tagged({}, triggers=["<t", *(f"<{'a' * (i % 9)}{i}" for i in range(3000))]),
}

FORMS: dict[str, Form] = {
    **{f"json: {name}": {"json": schema} for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": {"regex": pattern} for name, pattern in PATTERNS.items()},
    **{f"grammar: {name}": {"grammar": grammar} for name, grammar in GRAMMARS.items()},
    **{f"structural_tag: {name}": {"structural_tag": tag} for name, tag in TAGS.items()},
    "choice: 1,000 that part late": {"choice": ["a" * 50 + str(i) for i in range(1000)]},
}


if __name__ == "__main__":
    print(json.dumps({name: len(json.dumps(form)) for name, form in FORMS.items()}, indent=1, ensure_ascii=False))
