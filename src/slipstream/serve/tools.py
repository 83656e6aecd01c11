"""Tool calls in an answer's text, by the formats in which models write them.

`hermes` (Hermes, Qwen, SmolLM3): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, among other text.
`llama3_json` (Llama 3.1 and later): the whole answer is `{"name": …, "parameters": {…}}`, several parted by `;`.

A call is handed on when it is whole. Text that could be the beginning of one is held back until that is certain; text
that looked like a call and is none comes out as text.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from slipstream.serve.config import ToolFormat

MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class Call:
    """One call: `arguments` is JSON, as the model wrote it but for spaces."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text came to."""

    text: str = ""
    calls: tuple[Call, ...] = ()


class ToolParser(ABC):
    """Reads one answer as it grows. names: the tools that there are; a call of any other is text."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self._parts: list[str] = []  # text that waits: put together once, not with every piece

    @abstractmethod
    def feed(self, text: str, *, last: bool) -> Parsed:
        """The next piece of the answer; `last`: there will be no more."""

    def _whole(self) -> str:
        """All that waited."""
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


class HermesParser(ToolParser):
    """No character is looked at twice, however long a call goes on: what is inside one waits in `_parts`."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._inside = False
        self._held = ""  # the end of the text, where it may be the beginning of a mark

    def feed(self, text: str, *, last: bool) -> Parsed:
        rest, at = self._held + text, 0
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            mark = self._CLOSE if self._inside else self._OPEN
            place = rest.find(mark, at)
            until = place if place >= 0 else len(rest) - (0 if last else _overlap(rest, at, mark))
            (self._parts if self._inside else shown).append(rest[at:until])
            at = until if place < 0 else place + len(mark)
            if self._inside and (place >= 0 or last):
                self._close(shown, calls, mark if place >= 0 else "")
            elif place >= 0:
                self._inside = True
            if place < 0:
                break
        self._held = rest[at:]
        said = "".join(shown)
        return Parsed(said if said.strip() or not calls else "", tuple(calls[:MAX_CALLS]))

    def _close(self, shown: list[str], calls: list[Call], mark: str) -> None:
        """What was inside is a call, or it was text after all."""
        inside, self._inside = self._whole(), False
        if call := self._call(_loads(inside)):
            calls.append(call)
        else:
            shown.append(f"{self._OPEN}{inside}{mark}")


class LlamaParser(ToolParser):
    _TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._opened = False  # a call may have begun

    def feed(self, text: str, *, last: bool) -> Parsed:
        self._parts.append(text)
        if self._opened and not last:
            return Parsed()
        held = self._whole()
        body = held.lstrip()
        if self._TAG.startswith(body) or body.startswith(self._TAG):
            body = body[len(self._TAG) :].lstrip()
        if body and not body.startswith("{"):  # it is not going to be one
            self.feed = _as_text  # type: ignore[method-assign]
            return Parsed(held)
        if not last:
            self._opened = bool(body)
            self._parts.append(held)
            return Parsed()
        calls: list[Call] = []
        decoder = json.JSONDecoder()
        at = 0
        while at < len(body):
            try:
                value, at = decoder.raw_decode(body, at)
            except (ValueError, RecursionError):
                return Parsed(held)
            call = self._call(value)
            if call is None:
                return Parsed(held)
            calls.append(call)
            while at < len(body) and body[at] in "; \n\t":
                at += 1
        return Parsed("" if calls else held, tuple(calls[:MAX_CALLS]))


def _as_text(text: str, *, last: bool) -> Parsed:
    return Parsed(text)


class NamedParser(ToolParser):
    """Where the answer was made to be one tool's arguments: the whole of it is."""

    def feed(self, text: str, *, last: bool) -> Parsed:
        self._parts.append(text)
        (name,) = self.names
        return Parsed(calls=(Call(name, self._whole()),)) if last else Parsed()


class RequiredParser(ToolParser):
    """Where the answer was made to be a list of calls. One that was cut off comes out as text."""

    def feed(self, text: str, *, last: bool) -> Parsed:
        self._parts.append(text)
        if not last:
            return Parsed()
        held = self._whole()
        calls = [self._call(value) for value in _loads(held) or ()]
        whole = tuple(call for call in calls if call is not None)
        return Parsed(calls=whole) if whole and len(whole) == len(calls) else Parsed(held)


PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": LlamaParser}


def parser_for(wanted: ToolFormat, template: str | None) -> type[ToolParser]:
    """The named one, or the one whose format the model's chat template speaks of."""
    if wanted != "auto":
        return PARSERS[wanted]
    template = template or ""
    llama = '"parameters"' in template and "<tool_call>" not in template
    return LlamaParser if llama else HermesParser


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, begin: int, mark: str) -> int:
    """Length of the longest end of `text`, from `begin` on, that `mark` begins with."""
    most = min(len(mark) - 1, len(text) - begin)
    return next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
