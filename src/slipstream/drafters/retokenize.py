"""A request's text in another tokenizer's tokens, as it grows, and guesses brought back.

Tokens of the two sides do not end at the same places. A growing text may change how its last words are cut, so only the
end is tokenized again, from a little before, and joined where the new cut falls on the old. Whatever comes out here can
only make guesses better or worse, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"
_CONTEXT = 6
"""Tokens decoded along: what a token's text is may depend on those before it."""
_UNFINISHED = 3
"""Most tokens that the beginning of a character can have: four bytes are a whole one."""
_AGAIN = 32
"""Tokens at the end of a text that are cut anew when it grows."""
_AGREE = 2
"""So many tokens of the new cut in a row must be those of the old one before it is believed."""


class GrowingText:
    """The text of a list of tokens that only ever grows. Half a character waits for its other half."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""
        self.tokens = 0  # so many are in `text`
        self.whole = True  # … and no more are there

    def update(self, tokens: Sequence[int]) -> None:
        known = self.tokens
        start = 1 if tokens and tokens[0] == self._tokenizer.bos_token_id else 0
        known = max(known, start)
        begin = max(start, known - _CONTEXT)
        before = self._decode(tokens[begin:known])
        now = self._decode(tokens[begin:])
        if not now.startswith(before) or _BROKEN in before:  # what is before them matters further back: take it all
            self.text, known, begin, before, now = "", start, start, "", self._decode(tokens[start:])
        end = len(tokens)
        while now.endswith(_BROKEN) and end > max(known, len(tokens) - _UNFINISHED):
            end -= 1
            now = self._decode(tokens[begin:end])
        if now.endswith(_BROKEN) and end > known:  # no character will come of it: it stands as it is
            end, now = len(tokens), self._decode(tokens[begin:])
        self.whole = end == len(tokens)
        self.text += now[len(before) :]
        self.tokens = end

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens)


class Recut:
    """A growing text in one tokenizer's own tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._first: list[int] = _beginning(tokenizer)
        self.ids: list[int] = list(self._first)
        self._ends: list[int] = [0] * len(self._first)  # where in the text each of them ends

    def update(self, text: str) -> int:
        """Take the text as it is now; returns how many tokens are still the same ones."""
        kept = max(len(self._first), len(self.ids) - _AGAIN)
        while kept < len(self.ids) and self._ends[kept] == self._ends[kept - 1] and kept > len(self._first):
            kept += 1  # not inside a character
        begin = self._ends[kept - 1] if kept else 0
        found = self._tokenizer.backend_tokenizer.encode(text[begin:], add_special_tokens=False)
        ids, ends = found.ids, [begin + end for _, end in found.offsets]
        joined = self._join(kept, ids, ends)
        if joined is None:  # no common cut: from the beginning
            found = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            ids, ends = [*self._first, *found.ids], [*[0] * len(self._first), *[end for _, end in found.offsets]]
            old, self.ids, self._ends = self.ids, ids, ends
            return _common(old, ids, 0)
        at, new = joined
        old = self.ids
        self.ids = old[:at] + ids[new:]
        self._ends = self._ends[:at] + ends[new:]
        return _common(old, self.ids, at)

    def _join(self, kept: int, ids: list[int], ends: list[int]) -> tuple[int, int] | None:
        """From which of the old and which of the new tokens on the new cut counts."""
        if kept <= len(self._first):
            return kept, 0
        old = {end: kept + i for i, end in enumerate(self._ends[kept:])}  # the last token that ends there
        for new in range(_AGREE - 1, len(ids)):
            if ends[new : new + 2] == [ends[new]] * 2 or ends[new] not in old:
                continue  # inside a character, or where no old token ends
            at, first = old[ends[new]] + 1, new + 1 - _AGREE
            mine, theirs = slice(at - _AGREE, at), slice(first, new + 1)
            if at - _AGREE >= kept and self.ids[mine] == ids[theirs] and self._ends[mine] == ends[theirs]:
                return at, new + 1
        return None


def translate(
    ids: Sequence[int], context: Sequence[int], own: Any, target: Any, tail: Sequence[int]
) -> list[int] | None:
    """The target's tokens for what the draft's tokens `ids` say behind `context`; `tail`: the target's last tokens.

    None where the target would cut the text across the end of its own last token.
    """
    context = _end(own, context)
    before, said = decode(own, context), decode(own, [*context, *ids])
    if not said.startswith(before):
        return None
    said = said[len(before) :].rstrip(_BROKEN)
    known = decode(target, _end(target, tail))
    found = target.backend_tokenizer.encode(known + said, add_special_tokens=False)
    cut = [i for i, (_, end) in enumerate(found.offsets) if end > len(known)]
    if not cut:
        return []
    if found.offsets[cut[0]][0] < len(known):
        return None
    return list(found.ids[cut[0] :])


def _end(tokenizer: Any, tokens: Sequence[int]) -> Sequence[int]:
    """The last few tokens, of whole characters."""
    count = _CONTEXT
    while count < len(tokens) and _BROKEN in decode(tokenizer, tokens[-count:]):
        count *= 2
    return tokens[-count:]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _beginning(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text."""
    ids: list[int] = tokenizer.encode("", add_special_tokens=True)
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _common(old: Sequence[int], new: Sequence[int], at: int) -> int:
    """How many tokens the two begin with together; the first `at` are known to."""
    while at < len(old) and at < len(new) and old[at] == new[at]:
        at += 1
    return at
