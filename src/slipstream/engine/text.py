"""Tokens into text as they come: never half a character, never the beginning of a stop string."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers.decoders import Decoder as Base

_BROKEN = "\ufffd"
_CONTEXT = 6
"""Prompt tokens decoded along: whether a first token begins with a space depends on what stands before it."""
_UNFINISHED = 3
"""Most tokens that the beginning of a character can have: four bytes are a whole one."""
_SPACED = "a . b ? c"
"""A text with spaces that some decoders take out."""
_SHORT = 3
_MOST_KNOWN = 1 << 16
"""Tokens of a run that is remembered, and such runs: about 20 MB."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class _Pieces(dict[int, str | None]):
    """By token, its text wherever it stands; None: it has only a part of a character."""

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool) -> None:
        self._decoder, self._skip = decoder, skip_special_tokens

    def __missing__(self, token: int) -> str | None:
        text = self._decoder.decode([token], skip_special_tokens=self._skip)
        piece = self[token] = None if _BROKEN in text else text
        return piece


class Remembered:
    """A decoder that knows short runs of tokens again: a text is decoded two or three tokens at a time, and of those
    most were decoded before. A call of a real tokenizer takes ten microseconds, which is much for each of a hundred
    tokens of a round.

    pieces: by whether special tokens are skipped, the texts of single tokens; nothing where what a token says depends
    on those around it.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._known: dict[tuple[bool, tuple[int, ...]], str] = {}
        skips = (False, True) if _joins_bytes(decoder) else ()
        self.pieces = {skip: _Pieces(decoder, skip_special_tokens=skip) for skip in skips}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        if len(token_ids) > _SHORT:
            return self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)
        key = (skip_special_tokens, tuple(token_ids))
        found = self._known.get(key)
        if found is None:
            found = self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()  # what is still said comes back soon
            self._known[key] = found
        return found


class TextStream:
    """One answer's text. `push` takes tokens one at a time, and says whether a stop string is complete.

    A token may end inside a UTF-8 character; its text then waits for the next one. `visible` is what may be shown:
    while the answer runs it holds back what could become a stop string. It only ever grows.
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
        self._pieces = decoder.pieces.get(skip_special_tokens) if isinstance(decoder, Remembered) else None
        self._stops = tuple(stops)
        self._keep_stop = keep_stop
        self._ids = list(prompt[-_CONTEXT:])
        self._shown = len(self._ids)  # tokens whose text is in `_text`, the context's counted as such
        self._from = 0  # tokens before this one no longer matter for decoding
        self._text = ""
        self._done = False

    @property
    def visible(self) -> str:
        if self._done or not self._stops:
            return self._text
        held = max((_overlap(self._text, stop) for stop in self._stops), default=0)
        return self._text[: len(self._text) - held]

    @property
    def length(self) -> int:
        """Characters, those included that are held back."""
        return len(self._text)

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Append one token. Returns the stop string that it completed, with the text cut there; else None.

        may_stop: False lets a stop string that this token completes pass, now and later.
        """
        waits = self._shown < len(self._ids) or self._done
        piece = None if waits or self._pieces is None else self._pieces[token]
        self._ids.append(token)
        before = len(self._text)
        if piece is None:
            self._advance(final=False)
        else:
            self._append(piece)
        if not (may_stop and self._stops) or len(self._text) == before:
            return None
        return self._find_stop(before)

    def finish(self) -> None:
        """No more tokens: what waited for the rest of a character is shown as it is."""
        if not self._done:
            self._advance(final=True)
            self._done = True

    def _advance(self, *, final: bool) -> None:
        end = len(self._ids)
        if self._done or self._shown == end:
            return
        known = self._decode(self._from, self._shown)
        both = self._decode(self._from, end)
        if both.endswith(_BROKEN) and not final:
            end = self._unbroken(both)
            both = self._decode(self._from, end)
        if not both.startswith(known):  # a decoder that changes earlier text: start afresh behind it
            known, both = "", self._decode(self._shown, end)
        self._append(both[len(known) :], end)

    def _append(self, new: str, end: int | None = None) -> None:
        """The text of the tokens up to there that was not shown yet; None: of all tokens."""
        self._text += new
        if new:  # tokens without text are no context for what follows
            self._from = self._shown
        self._shown = len(self._ids) if end is None else end

    def _unbroken(self, text: str) -> int:
        """Where the tokens end whose text is final, when `text`, that of all of them, ends in a broken character.

        Usually that character is not finished yet, and everything new waits. In a long run of bytes that are no
        text at all, the older ones need not wait: nothing will make characters of them.
        """
        newest = len(self._ids) - _UNFINISHED
        for end in range(newest, max(self._shown, newest - _UNFINISHED), -1):
            if self._decode(self._from, end) + self._decode(end, len(self._ids)) == text:  # no character is split here
                return end
        return self._shown

    def _find_stop(self, before: int) -> str | None:
        """The earliest of the stop strings that end behind `before`; of those that begin together the shortest."""
        places = ((self._text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stops)
        found = [(at, len(stop), stop) for at, stop in places if at >= 0]
        if not found:
            return None
        at, length, stop = min(found)
        self._text = self._text[: at + length if self._keep_stop else at]
        self._done = True
        return stop

    def _decode(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        return self._decoder.decode(ids, skip_special_tokens=self._skip) if ids else ""


def _joins_bytes(decoder: Decoder) -> bool:
    """Is a text nothing but the bytes of its tokens, one after the other? So it is with most tokenizers of today, but
    not where they take out spaces before punctuation."""
    backend: Any = getattr(decoder, "backend_tokenizer", None)
    parts = _parts(getattr(backend, "decoder", None))
    if not parts or parts[-1]["type"] != "ByteLevel" or not all(map(_keeps_bytes, parts)):
        return False
    ids: list[int] = backend.encode(_SPACED, add_special_tokens=False).ids
    joined = "".join([decoder.decode([token], skip_special_tokens=False) for token in ids])
    return joined == decoder.decode(ids, skip_special_tokens=False) == _SPACED


def _parts(decoder: Any) -> list[dict[str, Any]]:
    """What a tokenizer's decoder does, one thing after the other; nothing: it is none of the library's."""
    if not isinstance(decoder, Base):
        return []
    whole = json.loads(decoder.__getstate__())
    parts: list[dict[str, Any]] = whole["decoders"] if whole["type"] == "Sequence" else [whole]
    return parts


def _keeps_bytes(part: dict[str, Any]) -> bool:
    """Does it make the same of a token's letters wherever they stand, before they become bytes? Each is in one token.

    Behind `Fuse` a decoder gives up on the whole text where one token, as a special one may, has a letter that is no
    byte. There joined pieces are what was meant.
    """
    if part["type"] == "Replace":
        return len(part["pattern"].get("String", "")) == 1
    return part["type"] in ("ByteLevel", "ByteFallback", "Fuse")


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with and goes on from."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
