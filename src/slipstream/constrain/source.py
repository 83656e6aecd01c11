"""What the compiler is given for a form: checked, put in order, and known to be little work or not.

What is surely little work is compiled in place. Of the rest nobody can tell by reading it how long it takes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from slipstream.constrain.ebnf import check_grammar
from slipstream.constrain.patterns import check_pattern, dotless
from slipstream.constrain.schema import read_schema
from slipstream.core.structured import StructuredOutputsParams

_MOST_SPACES = 40
"""Most white space in a row, where the model sets it: some small models would go on for ever."""
_LIGHT_PATTERN = 64
_LIGHT_CHOICE = 200
"""Weight of a pattern, and characters of the longest choice, that take about 0.1 s with 49,152 tokens at most."""


@dataclass(frozen=True, slots=True)
class Source:
    """A form in the compiler's own terms."""

    kind: str  # regex, grammar or json
    text: str
    free: bool = False  # of JSON: white space is the model's own
    light: bool = False  # takes 0.2 s at most

    def compile(self, compiler: Any) -> Any:
        """By xgrammar. Raises whatever it raises."""
        if self.kind == "regex":
            return compiler.compile_regex(self.text)
        if self.kind == "grammar":
            return compiler.compile_grammar(self.text)
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
    free = not form.disable_any_whitespace
    if form.kind == "json_object":
        return Source("json", '{"type": "object", "additionalProperties": true}', free, light=True)
    read = read_schema(form.rule)
    return Source("json", json.dumps(read.schema, ensure_ascii=False), free, read.light)
