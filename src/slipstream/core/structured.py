"""The form of an answer: a JSON schema, any JSON object, a regular expression, one of several texts, a grammar.

Plain data, checked for shape and size. `slipstream.constrain` reads and compiles the rules with an optional package.
Names follow vLLM's `StructuredOutputsParams`.
"""

from __future__ import annotations

import json as json_text
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from slipstream.core.errors import InvalidRequest

MAX_RULE_CHARACTERS = 64 * 1024
"""Of a schema as JSON, a grammar, or all choices together."""
MAX_REGEX_CHARACTERS = 2048
MAX_CHOICES = 1000

RuleKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
_KINDS: tuple[RuleKind, ...] = get_args(RuleKind)


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form of an answer: exactly one of the first six is given. It does not apply to the prompt.

    json: a JSON schema, as a mapping or as text. It is kept as text.
    json_object: True: any JSON object.
    regex: the whole answer matches it.
    choice: the answer is one of these texts.
    grammar: rules in the EBNF of GBNF files (`root ::= …`); the answer is a `root`.
    structural_tag: text with parts of a form, such as tool calls, in the formats of xgrammar's structural tags that
        `constrain/source.py` lists, as a mapping or as text.
    disable_any_whitespace: JSON is written in one line, ", " and ": " between its parts, which leaves fewer choices and
        makes drafts better; False lets the model choose white space.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = True

    def __post_init__(self) -> None:
        for key in ("json_object", "disable_any_whitespace"):
            _check(key, getattr(self, key), isinstance(getattr(self, key), bool), "True or False")
        given = [kind for kind in _KINDS if getattr(self, kind) is not None and getattr(self, kind) is not False]
        if len(given) != 1:
            named = " and ".join(given) or "none"
            raise InvalidRequest(f"structured_outputs has {named}: give exactly one of {', '.join(_KINDS)}")
        for key in ("json", "structural_tag"):
            if (given_json := getattr(self, key)) is not None:
                object.__setattr__(self, key, _as_text(key, given_json))
        if self.choice is not None:
            listed = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            _check("choice", self.choice, listed and len(self.choice) > 0, "a list of texts, one at least")
            _check("choice", len(self.choice), len(self.choice) <= MAX_CHOICES, f"at most {MAX_CHOICES} texts")
            right = all(isinstance(text, str) and text for text in self.choice)
            _check("choice", self.choice, right, "a list of non-empty texts")
            object.__setattr__(self, "choice", tuple(self.choice))
        for key in ("regex", "grammar"):
            rule = getattr(self, key)
            _check(key, rule, rule is None or (isinstance(rule, str) and bool(rule)), "a non-empty text")
        most = MAX_REGEX_CHARACTERS if self.kind == "regex" else MAX_RULE_CHARACTERS
        size = len(self.rule)
        _check(self.kind, f"{size} characters", size <= most, f"at most {most} characters")
        _check_encoding(self.kind, self.rule)

    @staticmethod
    def of(given: Mapping[str, Any]) -> StructuredOutputsParams:
        """From a mapping, as requests have it. Unknown keys are refused."""
        known = [field.name for field in fields(StructuredOutputsParams)]
        if unknown := sorted(set(given) - set(known)):
            raise InvalidRequest(f"structured_outputs: unknown keys {unknown}; known are {', '.join(known)}")
        return StructuredOutputsParams(**given)

    @property
    def kind(self) -> RuleKind:
        return next(kind for kind in _KINDS if getattr(self, kind) is not None and getattr(self, kind) is not False)

    @property
    def rule(self) -> str:
        """The rule itself as one text; of choices as a JSON list."""
        if self.choice is not None:
            return json_text.dumps(list(self.choice), ensure_ascii=False)
        if self.json_object:
            return "{}"
        return str(self.json or self.regex or self.grammar or self.structural_tag or "")


def renamed(message: str, name: str) -> str | None:
    """A message about a form with the name that its user gave it by; None: the message is about something else.

    The name also replaces a quoted rule (`structured_outputs.regex='a{'`).
    """
    found = re.match(r"structured_outputs(\.\w+)?(='(\\.|[^'\\])*'…?(?=: ))?", message)
    return None if found is None else name + message[found.end() :]


def _as_text(key: str, schema: object) -> str:
    """A schema as JSON. The answer has its keys in the same order."""
    if isinstance(schema, str):
        return schema
    wanted = "a JSON schema" if key == "json" else "a structural tag"
    _check(key, schema, isinstance(schema, Mapping), f"{wanted}, as a mapping or as text")
    try:
        return json_text.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs.{key} is no JSON: {error}; give {wanted}") from None


def _check_encoding(key: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"structured_outputs.{key} is not UTF-8 at character {error.start}: correct it") from None


def _check(key: str, value: object, right: bool, remedy: str) -> None:
    if not right:
        shown = repr(value) if not isinstance(value, str) or len(value) < 100 else f"{value[:100]!r}…"
        raise InvalidRequest(f"structured_outputs.{key}={shown}: must be {remedy}")
