"""What the compiler is given for a form: checked, put in order, and known to be little work or not.

What is surely little work is compiled in place. Of the rest nobody can tell by reading it how long it takes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from slipstream.constrain.ebnf import check_grammar
from slipstream.constrain.patterns import check_pattern, dotless
from slipstream.constrain.schema import ReadSchema, read_schema
from slipstream.core.errors import InvalidRequest
from slipstream.core.structured import StructuredOutputsParams

_MOST_SPACES = 40
"""Most white space in a row, where the model sets it: some small models would go on for ever."""
_TAG_FORMATS = {
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first"},
    "tags_with_separator": {"separator", "tags", "at_least_one", "stop_after_first"},
    "tag": {"begin", "content", "end"},
    "or": {"elements"},
    "json_schema": {"json_schema"},
    "regex": {"pattern"},
}
"""Formats of structural tags that are taken, and their keys."""
_NO_CONTROLS = (r"([^\"\\\r\n])", r"([^\0-\x1f\"\\\r\n])")
"""What the compiler lets into strings of a limited length, and what JSON does."""
_MOST_TAGS = 128
_LIGHT_TAGS = 4
_LIGHT_PATTERN = 64
_LIGHT_CHOICE = 200
"""Weight of a pattern, and characters of the longest choice, that take about 0.1 s with 49,152 tokens at most."""


@dataclass(frozen=True, slots=True)
class Source:
    """A form in the compiler's own terms."""

    kind: str  # regex, grammar, json or structural_tag
    text: str
    free: bool = False  # of JSON: white space is the model's own
    light: bool = False  # takes 0.2 s at most
    left_out: tuple[str, ...] = ()  # of a schema: what is looked at in the finished answer

    def compile(self, compiler: Any) -> Any:
        """By xgrammar. Raises whatever it raises."""
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
    """Raises `InvalidRequest` where the form cannot be followed, as far as that can be seen without compiling it."""
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
    seen: list[ReadSchema | None] = []  # of each schema; None: a pattern
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
    """The same format, its JSON in one line: that can be asked for in a grammar only."""
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
