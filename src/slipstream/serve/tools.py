"""Parsers of tool calls in an answer's text, one for each format that models write.

`hermes` (Hermes, Qwen, SmolLM3): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, among other text. Models whose
chat template has no tools are told to write it (`prompts.py`).
`llama3_json` (Llama 3.1 and later): the whole answer is `{"name": …, "parameters": {…}}`, with `;` between calls.

A call is returned when it is complete. Text that may begin a call is held back until that is certain. Text that looked
like a call and is none is returned as text.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slipstream.serve.config import ToolFormat

MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class Call:
    """arguments: JSON, as the model wrote it except for spaces."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class Parsed:
    """The text and the calls that a piece of an answer completes."""

    text: str = ""
    calls: tuple[Call, ...] = ()


class ToolParser(ABC):
    """Reads one answer in pieces. It looks at no character twice, however long a call gets.

    names: the tools; a call of another is text. most: calls to return; the rest of the answer is left out.
    quiet: return calls only: a grammar makes the answer calls, so other text is a call that was cut off.
    """

    begin: ClassVar[str]
    end: ClassVar[str]
    separator: ClassVar[str]

    def __init__(self, names: Collection[str], most: int = MAX_CALLS, *, quiet: bool = False) -> None:
        self.names = frozenset(names)
        self._left = most
        self._quiet = quiet
        self._parts: list[str] = []  # text that waits, joined only once

    @classmethod
    def tag(cls, name: str, schema: dict[str, Any]) -> dict[str, Any]:
        """A call of this tool, as a part of a structural tag."""
        content = {"type": "json_schema", "json_schema": schema}
        return {"type": "tag", "begin": cls.begin % name, "content": content, "end": cls.end}

    @staticmethod
    @abstractmethod
    def among_text(calls: dict[str, Any]) -> dict[str, Any]:
        """A format of free text with optional calls."""

    def feed(self, text: str, *, last: bool) -> Parsed:
        """The next piece of the answer. last: there are no more."""
        if not self._left:
            return Parsed()
        parsed = self._read(text, last)
        self._left -= len(parsed.calls)
        return Parsed(calls=parsed.calls) if self._quiet else parsed

    @abstractmethod
    def _read(self, text: str, last: bool) -> Parsed:
        """`feed`, for at most `_left` calls."""

    def _whole(self) -> str:
        """Take the text that waits."""
        whole = "".join(self._parts)
        self._parts.clear()
        return whole

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in self.names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            return Call(value["name"], arguments)
        return Call(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


class _Scan:
    """Finds braces outside strings, and the closing mark, in JSON that comes in pieces."""

    def __init__(self, close: str = "") -> None:
        self._marks = re.compile(r'["\\{}]' + (f"|{re.escape(close)}" if close else ""))
        self.reset()

    def reset(self) -> None:
        """Start another text."""
        self.depth = 0  # of braces; outside them there are no strings
        self._quoted = self._escaped = False  # the text so far ends inside a string; and there behind a backslash

    def marks(self, text: str, begin: int, end: int) -> Iterator[tuple[int, str]]:
        """Positions and marks in the next piece, `text[begin:end]`. `depth` includes the yielded mark."""
        skip = begin if self._escaped else -1
        for found in self._marks.finditer(text, begin, end):
            at, mark = found.start(), found[0]
            if at == skip:
                continue
            if self._quoted:
                self._quoted = mark != '"'
                skip = at + 1 if mark == "\\" else -1
            elif mark == '"':
                self._quoted = self.depth > 0
            elif mark != "\\" and (mark != "}" or self.depth):
                self.depth += {"{": 1, "}": -1}.get(mark, 0)
                yield at, mark
        self._escaped = self._quoted and skip == end


class HermesParser(ToolParser):
    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    begin, end, separator = _OPEN + '\n{"name": "%s", "arguments": ', "}\n" + _CLOSE, "\n"

    def __init__(self, names: Collection[str], most: int = MAX_CALLS, *, quiet: bool = False) -> None:
        super().__init__(names, most, quiet=quiet)
        self._inside = False
        self._scan = _Scan(self._CLOSE)
        self._held = ""  # the end of the text, if it may begin a mark

    @staticmethod
    def among_text(calls: dict[str, Any]) -> dict[str, Any]:
        rules = {key: calls[key] for key in ("tags", "stop_after_first")}
        return {"type": "triggered_tags", "triggers": [HermesParser._OPEN], **rules}

    def _read(self, text: str, last: bool) -> Parsed:
        rest, at = self._held + text, 0
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            mark = self._CLOSE if self._inside else self._OPEN
            certain = len(rest) - (0 if last else _overlap(rest, at, mark))
            place = self._end(rest, at, certain) if self._inside else rest.find(mark, at)
            until = place if place >= 0 else certain
            (self._parts if self._inside else shown).append(rest[at:until])
            at = until if place < 0 else place + len(mark)
            if self._inside and (place >= 0 or last):
                self._close(shown, calls, mark if place >= 0 else "")
                if len(calls) == self._left:
                    break
            elif place >= 0:
                self._inside = True
            if place < 0:
                break
        self._held = rest[at:]
        text = "".join(shown)
        return Parsed(text if text.strip() or not calls else "", tuple(calls))

    def _end(self, text: str, begin: int, end: int) -> int:
        """The position of the closing mark outside strings; -1: not in this piece."""
        found = next((at for at, mark in self._scan.marks(text, begin, end) if mark == self._CLOSE), -1)
        if found >= 0:
            self._scan.reset()
        return found

    def _close(self, shown: list[str], calls: list[Call], mark: str) -> None:
        """Add the inside as a call, or as text if it is none."""
        inside, self._inside = self._whole(), False
        if call := self._call(_loads(inside)):
            calls.append(call)
        else:
            shown.append(f"{self._OPEN}{inside}{mark}")


class LlamaParser(ToolParser):
    """If the first object of an answer is no call, the whole answer is text. After a call only calls are returned."""

    _TAG = "<|python_tag|>"
    begin, end, separator = '{"name": "%s", "parameters": ', "}", "; "

    def __init__(self, names: Collection[str], most: int = MAX_CALLS, *, quiet: bool = False) -> None:
        super().__init__(names, most, quiet=quiet)
        self._said: list[str] = []  # the whole text, until a call was found
        self._opened = self._called = False  # an object has begun; a call was found
        self._scan = _Scan()

    @staticmethod
    def among_text(calls: dict[str, Any]) -> dict[str, Any]:
        """Text that does not begin with a brace, or calls."""
        return {"type": "or", "elements": [calls, {"type": "regex", "pattern": r"([^{\s][\s\S]*)?"}]}

    def _read(self, text: str, last: bool) -> Parsed:
        if not self._called:
            self._said.append(text)
        if not self._opened:
            self._said = ["".join(self._said)]
            body = self._said[0].lstrip()
            if self._TAG.startswith(body) or body.startswith(self._TAG):
                body = body[len(self._TAG) :].lstrip()
            if not body and not last:
                return Parsed()
            if not body.startswith("{"):
                return self._no_call()
            self._opened, text = True, body
        calls: list[Call] = []
        for found in self._objects(text):
            call = self._call(_loads(found))
            if call is None and not (calls or self._called):
                return self._no_call()
            if call is not None and len(calls) < self._left:
                calls.append(call)
        if calls:
            self._called = True
            self._said.clear()
        return self._no_call() if last and not self._called else Parsed(calls=tuple(calls))

    def _objects(self, text: str) -> Iterator[str]:
        """The objects that this piece completes. An incomplete one waits in `_parts`."""
        begin = 0
        for at, mark in self._scan.marks(text, 0, len(text)):
            if mark == "{" and self._scan.depth == 1:
                begin = at
            elif not self._scan.depth:
                self._parts.append(text[begin : at + 1])
                yield self._whole()
        if self._scan.depth:
            self._parts.append(text[begin:])

    def _no_call(self) -> Parsed:
        self._read = _as_text  # type: ignore[method-assign]
        return Parsed("".join(self._said))


def _as_text(text: str, last: bool) -> Parsed:
    return Parsed(text)


PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": LlamaParser}


def parser_for(wanted: ToolFormat, template: str | None) -> type[ToolParser]:
    """The parser of this format; "auto": of the format in the model's chat template."""
    if wanted != "auto":
        return PARSERS[wanted]
    template = template or ""
    llama = '"parameters"' in template and "<tool_call>" not in template
    return LlamaParser if llama else HermesParser


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False)  # a grammar may allow control characters in strings
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, begin: int, mark: str) -> int:
    """Length of the longest end of `text[begin:]` that `mark` begins with."""
    most = min(len(mark) - 1, len(text) - begin)
    return next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
