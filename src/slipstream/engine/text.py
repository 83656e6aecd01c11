"""Tokens into text as they come: never half a character, never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_BROKEN = "\ufffd"
_CONTEXT = 6
"""Prompt tokens decoded along: whether a first token begins with a space depends on what stands before it."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class TextStream:
    """One answer's text. `push` takes tokens one at a time, and says whether a stop string is complete.

    A token may end inside a UTF-8 character; its text then waits for the next one. `visible` is what may be shown:
    while the answer runs it holds back what could become a stop string.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        *,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._stops = tuple(stops)
        self._keep_stop = keep_stop
        self._hold = max((len(s) for s in stops), default=1) - 1
        self._ids = list(prompt[-_CONTEXT:])
        self._shown = len(self._ids)  # tokens whose text is in `_text`, the context's counted as such
        self._from = 0  # tokens before this one no longer matter for decoding
        self._text = ""
        self._done = False

    @property
    def visible(self) -> str:
        if self._done or self._hold == 0:
            return self._text
        return self._text[: max(0, len(self._text) - self._hold)]

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Append one token. Returns the stop string that it completed, with the text cut there; else None."""
        self._ids.append(token)
        before = len(self._text)
        self._advance(final=False)
        if not (may_stop and self._stops) or len(self._text) == before:
            return None
        return self._find_stop(max(0, before - self._hold))

    def finish(self) -> None:
        """No more tokens: what waited for the rest of a character is shown as it is."""
        if not self._done:
            self._advance(final=True)
            self._done = True

    def _advance(self, *, final: bool) -> None:
        if self._done or self._shown == len(self._ids):
            return
        known = self._decode(self._ids[self._from : self._shown])
        both = self._decode(self._ids[self._from :])
        if both.endswith(_BROKEN) and not final:
            return
        if not both.startswith(known):  # a decoder that changes earlier text: start afresh behind it
            known, both = "", self._decode(self._ids[self._shown :])
        self._text += both[len(known) :]
        self._from, self._shown = self._shown, len(self._ids)

    def _find_stop(self, start: int) -> str | None:
        found = [(at, s) for s in self._stops if (at := self._text.find(s, start)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self._text = self._text[: at + len(stop) if self._keep_stop else at]
        self._done = True
        return stop

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip) if ids else ""
