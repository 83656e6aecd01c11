"""Incremental detokenization: never shows part of a character or the beginning of a stop string."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers.decoders import Decoder as Base

_BROKEN = "\ufffd"
_CONTEXT = 6
"""Last prompt tokens that are decoded as context: a first token's space may depend on them."""
_UNFINISHED = 3
"""Most tokens of an unfinished character: with four bytes it is finished."""
_SPACED = "a . b ? c"
"""A text with spaces that some decoders remove."""
_SHORT = 3
"""Most tokens of a remembered run."""
_MOST_KNOWN = 1 << 16
"""Most remembered runs: about 20 MB."""


class Decoder(Protocol):
    """The part of a tokenizer that `TextStream` uses."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class _Pieces(dict[int, str | None]):
    """The text of each token, if its context does not change it; None: part of a character."""

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool) -> None:
        self._decoder, self._skip = decoder, skip_special_tokens

    def __missing__(self, token: int) -> str | None:
        text = self._decoder.decode([token], skip_special_tokens=self._skip)
        piece = self[token] = None if _BROKEN in text else text
        return piece


class Remembered:
    """A decoder that remembers short runs of tokens, since a tokenizer takes 10 us a call and most runs come again.

    pieces: texts of single tokens, by whether special tokens are skipped; empty if a token's text depends on its
    context.
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
                self._known.clear()  # frequent runs come back soon
            self._known[key] = found
        return found


class TextStream:
    """The text of one answer. `push` appends a token.

    A token may end inside a UTF-8 character; its text then waits for the next one. `visible` never shrinks: while the
    answer runs it leaves out an end that could become a stop string.
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
        self._shown = len(self._ids)  # tokens whose text is in `_text`, and those of the context
        self._from = 0  # first token that decoding needs as context
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
        """Characters, including those that are not visible yet."""
        return len(self._text)

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Append one token. Return the stop string that it completed, after cutting the text there, or None.

        may_stop: False ignores a stop string that this token completes.
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
        """End the text. Shows an unfinished character as it is."""
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
        if not both.startswith(known):  # the decoder changed earlier text: decode the new tokens alone
            known, both = "", self._decode(self._shown, end)
        self._append(both[len(known) :], end)

    def _append(self, new: str, end: int | None = None) -> None:
        """Append the new text of the tokens up to `end`; None: of all tokens."""
        self._text += new
        if new:  # tokens without text are no context
            self._from = self._shown
        self._shown = len(self._ids) if end is None else end

    def _unbroken(self, text: str) -> int:
        """The number of tokens whose text is final, when `text`, of all tokens, ends in a broken character.

        Usually that character is unfinished, and all new tokens wait. In a long run of bytes that are not UTF-8,
        older tokens are final: no further byte can complete them.
        """
        newest = len(self._ids) - _UNFINISHED
        for end in range(newest, max(self._shown, newest - _UNFINISHED), -1):
            if self._decode(self._from, end) + self._decode(end, len(self._ids)) == text:  # splits no character
                return end
        return self._shown

    def _find_stop(self, before: int) -> str | None:
        """Cut the text at the first stop string that ends behind `before`, the shortest if several begin there."""
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
    """Whether a text is the concatenation of its tokens' bytes. True for most tokenizers, but not for those that remove
    spaces before punctuation."""
    backend: Any = getattr(decoder, "backend_tokenizer", None)
    inner = getattr(backend, "decoder", None)
    if not isinstance(inner, Base):
        return False
    whole = json.loads(inner.__getstate__())
    parts: list[dict[str, Any]] = whole["decoders"] if whole["type"] == "Sequence" else [whole]
    if not parts or parts[-1]["type"] != "ByteLevel" or not all(map(_keeps_bytes, parts)):
        return False
    ids: list[int] = backend.encode(_SPACED, add_special_tokens=False).ids
    joined = "".join([decoder.decode([token], skip_special_tokens=False) for token in ids])
    return joined == decoder.decode(ids, skip_special_tokens=False) == _SPACED


def _keeps_bytes(part: dict[str, Any]) -> bool:
    """Whether this stage treats each character of a token alike in any context.

    After `Fuse`, `ByteLevel` does not decode a text at all if one token, such as a special one, has a character that
    stands for no byte. Joined pieces are then the better text.
    """
    if part["type"] == "Replace":
        return len(part["pattern"].get("String", "")) == 1
    return part["type"] in ("ByteLevel", "ByteFallback", "Fuse")


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is the beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
