"""Text as it comes: whole characters only, stop strings wherever token borders fall, and nothing ever taken back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer

from conftest import EOS, save_tokenizer
from slipstream.engine import text as module
from slipstream.engine.text import Remembered, TextStream

BROKEN = "\ufffd"

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = {b: chr(b) for b in _PRINTABLE} | {
    b: chr(256 + i) for i, b in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
TOKEN_OF_BYTE = {byte: sorted(_LETTERS.values()).index(letter) for byte, letter in _LETTERS.items()}
"""The byte-level alphabet: every byte is a letter, and tokens are in the order of the letters."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token a byte."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


class Pieces:
    """Decodes as sentencepiece does: "_" is a space, the text's first one goes, bytes (ints below 0) join into UTF-8.

    A run of bytes that is no UTF-8 becomes one mark a byte, also where part of it was a character before.
    """

    def __init__(self, *pieces: str | int) -> None:
        self.pieces = pieces

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text, run = "", b""
        for token in [*token_ids, None]:
            piece = "" if token is None else self.pieces[token]
            if isinstance(piece, int):
                run += bytes([piece])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += BROKEN * len(run)
            run = b""
            if not (piece.startswith("<") and skip_special_tokens):
                text += piece
        return text.replace("_", " ").removeprefix(" ")


def play(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    """What is visible after each token and at the end. Checks what must hold for every stream."""
    seen = [""]
    for token in tokens:
        stop = stream.push(token)
        seen.append(stream.visible)
        assert seen[-1].startswith(seen[-2])
        if stop is not None:
            return seen[1:]
    stream.finish()
    assert stream.visible.startswith(seen[-1])
    return [*seen[1:], stream.visible]


@settings(deadline=None, max_examples=200)
@given(text=st.text(), prompt=st.text(max_size=4))
@example(text="naïve 😀 テスト 👩‍👩‍👧 \x00", prompt="é")
def test_unicode_comes_in_whole_characters(tokenizer: Any, text: str, prompt: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, tokenizer.encode(prompt, add_special_tokens=False))
    seen = play(stream, tokens)
    assert seen[-1] == text
    boundaries = {len(text[:i].encode()): text[:i] for i in range(len(text) + 1)}
    for count, visible in enumerate(seen[:-1], 1):
        if BROKEN not in text:  # a real mark looks like half a character, and comes one token later
            whole = max(end for end in boundaries if end <= count)
            assert visible == boundaries[whole]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([0x41, 0x80, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98]), max_size=40))
@example([0x80] * 40)
@example([0xF0, 0x9F] * 10)
def test_bytes_that_are_no_text(tokenizer: Any, values: list[int]) -> None:
    """Whatever a model emits, the end is what the tokenizer makes of the whole, and only a little waits for it."""
    tokens = [TOKEN_OF_BYTE[value] for value in values]
    seen = play(TextStream(tokenizer, []), tokens)
    assert seen[-1] == tokenizer.decode(tokens) == bytes(values).decode(errors="replace")
    for count, visible in enumerate(seen[:-1], 1):
        assert len(visible) >= len(tokenizer.decode(tokens[: max(0, count - 6)]))


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Any) -> None:
    tokens = tokenizer.encode("a€", add_special_tokens=False)[:-1]
    assert play(TextStream(tokenizer, []), tokens) == ["a", "a", "a", "a" + BROKEN]


def test_half_a_character_in_the_prompt_is_not_the_answers(tokenizer: Any) -> None:
    euro = tokenizer.encode("€", add_special_tokens=False)
    letters = tokenizer.encode("ab", add_special_tokens=False)
    assert play(TextStream(tokenizer, euro[:2]), letters)[-1] == "ab"
    assert play(TextStream(tokenizer, euro[:2]), [euro[2], *letters])[-1] == BROKEN + "ab"


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<eos>b")])
def test_special_tokens(tokenizer: Any, skip: bool, text: str) -> None:
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    stream = TextStream(tokenizer, [], skip_special_tokens=skip)
    assert play(stream, [a, EOS, b])[-1] == text


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(st.text("abc", min_size=1, max_size=4), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    keep=st.booleans(),
)
@example(pieces=["aab"], stops=["aab", "ab"], keep=False)
@example(pieces=["a", "ab", "b"], stops=["abb", "b"], keep=True)
@example(pieces=["a", "b", "ab", "c"], stops=["abac", "babc"], keep=False)
def test_stop_strings_against_a_plain_search(pieces: list[str], stops: list[str], keep: bool) -> None:
    """The first token that completes any stop string ends the text, at the earliest of them."""
    stream = TextStream(Pieces(*pieces), [], stops=stops, keep_stop=keep)
    seen = play(stream, range(len(pieces)))
    text = ""
    for count, piece in enumerate(pieces, 1):
        text += piece
        hits = sorted((text.find(s), len(s), s) for s in stops if s in text)
        if hits:
            at, length, _ = hits[0]
            assert len(seen) == count
            assert stream.visible == text[: at + length * keep]
            assert stream.push(0) is None  # nothing comes after
            assert stream.visible == text[: at + length * keep]
            return
        held = text[len(seen[count - 1]) :]
        assert all(not s.startswith(text[i:]) for s in stops for i in range(len(seen[count - 1])))
        assert held == "" or any(s.startswith(held) for s in stops)  # no more is held back than could become one
    assert seen[-1] == text


def test_the_stop_that_was_found_is_named() -> None:
    stream = TextStream(Pieces("so", "me EN", "D x"), [], stops=["x", "END", "E"])
    assert stream.push(0) is None
    assert stream.push(1) == "E"
    stream = TextStream(Pieces("so", "me EN", "D x"), [], stops=["x", "END"])
    assert [stream.push(i) for i in range(3)] == [None, None, "END"]
    assert stream.visible == "some "


def test_what_may_not_stop_passes_for_good() -> None:
    """With min_tokens a stop string that came too early is text; one that is completed later still ends it."""
    stream = TextStream(Pieces("ab", "a", "b", "ab"), [], stops=["b", "longer"])
    assert stream.push(0, may_stop=False) is None
    assert stream.push(1) is None  # not the "b" of before
    assert stream.push(2) == "b"
    assert stream.visible == "aba"
    border = TextStream(Pieces("x", "ST", "OP"), [], stops=["STOP"])
    assert [border.push(0), border.push(1, may_stop=False), border.push(2)] == [None, None, "STOP"]
    assert border.visible == "x"


def test_a_stop_inside_a_character_that_waits() -> None:
    euro = "€".encode()
    stream = TextStream(Pieces("end", *euro, "."), [], stops=["d€"])
    assert [stream.push(i) for i in range(4)] == [None, None, None, "d€"]
    assert stream.visible == "en"


def test_leading_spaces_of_sentencepiece() -> None:
    decoder = Pieces("_The", "_cat", "<skip>", "_sat")
    assert play(TextStream(decoder, []), [0, 1, 3])[-1] == "The cat sat"
    assert play(TextStream(decoder, [0]), [1, 3])[-1] == " cat sat"  # behind a prompt the space is the answer's
    assert play(TextStream(decoder, [0]), [2, 1, 2, 2, 3])[-1] == " cat sat"
    assert play(TextStream(decoder, [0], skip_special_tokens=False), [1, 2, 3])[-1] == " cat<skip> sat"


def test_bytes_behind_bytes_of_sentencepiece() -> None:
    """The second character's first byte makes the first one's bytes undecodable, until it is complete."""
    values = "é€x".encode()
    seen = play(TextStream(Pieces(*values), []), range(len(values)))
    assert seen == ["", "é", "é", "é", "é€", "é€x", "é€x"]
    assert play(TextStream(Pieces(*values), []), range(3))[-1] == "é" + BROKEN


def test_a_decoder_that_changes_what_it_said() -> None:
    class Fickle:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return "it's" if token_ids == [0, 1, 2] else "".join(("it", " '", "s", "!")[t] for t in token_ids)

    assert play(TextStream(Fickle(), []), [0, 1, 2, 3])[-1] == "it 's!"


class Counted:
    """A tokenizer's decoding, and how often it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.asked = tokenizer, 0
        self.backend_tokenizer: Any = None
        self.cleans_up = False

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        self.asked += 1
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
        return text.replace(" .", ".") if self.cleans_up else text


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="ab é😀", max_size=30), st.booleans())
def test_remembered_runs_are_decoded_as_new_ones(tokenizer: Any, text: str, skip: bool) -> None:
    tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    remembered = Remembered(tokenizer)
    wanted = play(TextStream(tokenizer, [], skip_special_tokens=skip), tokens)
    for _ in range(2):
        assert play(TextStream(remembered, [], skip_special_tokens=skip), tokens) == wanted


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same, as some converters write it: they join bytes, too, but say so in more words."""
    folder = tmp_path_factory.mktemp("converted")
    save_tokenizer(folder)
    made = AutoTokenizer.from_pretrained(folder)
    made.backend_tokenizer.decoder = decoders.Sequence([*CONVERTED, decoders.ByteLevel()])
    return made


CONVERTED = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]


@pytest.mark.parametrize("which", ["tokenizer", "converted"])
@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, EOS + 2), max_size=24), skip=st.booleans())
def test_pieces_of_bytes_are_joined_as_they_would_be_decoded(
    tokenizer: Any, converted: Any, which: str, tokens: list[int], skip: bool
) -> None:
    """Also broken ones, and special tokens between them."""
    tokenizer = tokenizer if which == "tokenizer" else converted
    remembered = Remembered(tokenizer)
    assert remembered.pieces
    wanted = play(TextStream(tokenizer, [], stops=["ab"], skip_special_tokens=skip), tokens)
    assert play(TextStream(remembered, [], stops=["ab"], skip_special_tokens=skip), tokens) == wanted


@pytest.mark.parametrize(
    "parts",
    [
        [decoders.Strip(" ", 1, 0), decoders.ByteLevel()],
        [decoders.Replace(" a", "b"), decoders.ByteLevel()],
        CONVERTED,
        [decoders.ByteLevel(), decoders.Replace("é", "e")],
        [decoders.Sequence([decoders.ByteLevel()])],
    ],
)
def test_what_depends_on_the_tokens_around_it_is_not_joined(tokenizer: Any, parts: list[Any]) -> None:
    counted = Counted(tokenizer)
    counted.backend_tokenizer = SimpleNamespace(
        encode=tokenizer.backend_tokenizer.encode, decoder=decoders.Sequence(parts)
    )
    assert not Remembered(counted).pieces


def test_a_token_that_is_a_text_of_its_own_is_looked_up(tokenizer: Any) -> None:
    counted = Counted(tokenizer)
    counted.backend_tokenizer = tokenizer.backend_tokenizer
    tokens = tokenizer.encode("abcabcabc", add_special_tokens=False)
    remembered, counted.asked = Remembered(counted), 0
    assert play(TextStream(remembered, []), tokens)[-1] == "abcabcabc"
    assert counted.asked == 3
    assert not Remembered(Pieces("a")).pieces


def test_texts_that_are_cleaned_up_are_not_joined(tokenizer: Any) -> None:
    counted = Counted(tokenizer)
    counted.backend_tokenizer = tokenizer.backend_tokenizer
    assert Remembered(counted).pieces
    counted.cleans_up = True
    assert not Remembered(counted).pieces


def test_what_was_said_before_is_not_decoded_again(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(tokenizer)
    remembered = Remembered(counted)
    tokens = tokenizer.encode("all said", add_special_tokens=False)
    play(TextStream(remembered, []), tokens)
    first = counted.asked
    play(TextStream(remembered, []), tokens)
    assert counted.asked == first
    special = [EOS]
    assert remembered.decode(special, skip_special_tokens=True) != remembered.decode(special)
    long = tokens[:4]
    asked = counted.asked
    assert remembered.decode(long) == remembered.decode(long)
    assert counted.asked == asked + 2  # whole texts are not kept
    monkeypatch.setattr(module, "_MOST_KNOWN", 2)
    for token in tokens:
        remembered.decode([token])
        assert len(remembered._known) <= 2 or token == tokens[0]
