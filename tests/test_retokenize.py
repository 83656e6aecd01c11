"""Between two tokenizers: the same text in other tokens, as it grows; which tokens mean the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafters.retokenize import GrowingText, Recut, decode, translate
from slipstream.drafters.vocabularies import Shared, meanings
from tokenizers_of_two_kinds import byte_level, permuted, with_marks

SMALL, LARGE, MARKED = byte_level(300), byte_level(420), with_marks(400)
KINDS = {"small": SMALL, "large": LARGE, "marked": MARKED}
pairs = pytest.mark.parametrize(
    ("target", "own"), [("small", "large"), ("large", "small"), ("small", "marked"), ("marked", "large")]
)

words = st.sampled_from(
    ["the", " cat", " sat", "sea", " shells", "é", "日本", "🙂", "\n", "  ", ", ", "x", " question"]
)
texts = st.lists(words | st.text(max_size=4).filter(lambda text: "\ufffd" not in text), min_size=1, max_size=60)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(parts=texts)
def test_a_growing_text_is_cut_as_a_whole_one(kind: str, parts: list[str]) -> None:
    """Not always at the same places, but it says the same, and what is called unchanged is."""
    tokenizer = KINDS[kind]
    recut = Recut(tokenizer)
    text = ""
    for part in parts:
        text += part
        before = list(recut.ids)
        same = recut.update(text)
        assert recut.ids[:same] == before[:same]
        assert decode(tokenizer, recut.ids) == decode(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    again = tokenizer.encode(text, add_special_tokens=False)
    assert len(recut.ids) <= 2 * len(again) + 8


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(parts=texts, data=st.data())
def test_text_grows_with_its_tokens_and_never_by_half_a_character(
    kind: str, parts: list[str], data: st.DataObject
) -> None:
    tokenizer = KINDS[kind]
    tokens = tokenizer.encode("".join(parts), add_special_tokens=False)
    growing = GrowingText(tokenizer)
    at = 0
    while at < len(tokens):
        at += data.draw(st.integers(1, 5))
        growing.update(tokens[:at])
        if growing.whole:
            assert growing.text == decode(tokenizer, tokens[:at])
            assert growing.tokens == min(at, len(tokens))
        assert "\ufffd" not in growing.text
    assert growing.text == decode(tokenizer, tokens)


def test_half_a_character_waits() -> None:
    tokens = SMALL.encode("ok 🙂", add_special_tokens=False)
    growing = GrowingText(SMALL)
    growing.update(tokens[:-1])
    assert not growing.whole
    growing.update(tokens)
    assert (growing.whole, growing.text) == (True, "ok 🙂")


@pairs
@settings(deadline=None, max_examples=80)
@given(said=texts, parts=texts)
def test_a_guess_means_the_same_in_the_targets_tokens(target: str, own: str, said: list[str], parts: list[str]) -> None:
    theirs, mine = KINDS[target], KINDS[own]
    text, guess = "".join(said).strip() + "\n", "".join(parts)
    tail = theirs.encode(text, add_special_tokens=False)
    context = mine.encode(text, add_special_tokens=False)
    ids = mine.encode(text + guess, add_special_tokens=False)[len(context) :]
    spoken = decode(mine, [*context, *ids])
    got = translate(ids, context, mine, theirs, tail)
    if got is not None and spoken.startswith(text) and spoken == text + guess:
        assert decode(theirs, [*tail, *got]) == decode(theirs, theirs.encode(spoken, add_special_tokens=False))


def test_a_guess_that_ends_in_half_a_character_is_cut_there() -> None:
    context = SMALL.encode("ok", add_special_tokens=False)
    ids = SMALL.encode(" the 🙂", add_special_tokens=False)
    assert decode(LARGE, translate(ids[:-1], context, SMALL, LARGE, LARGE.encode("ok")) or []) == " the "


def test_a_guess_that_goes_on_a_word_is_not_cut_across_the_end() -> None:
    context, tail = SMALL.encode("she", add_special_tokens=False), LARGE.encode("she", add_special_tokens=False)
    assert "shells" in LARGE.get_vocab() or "Ġshells" in LARGE.get_vocab()
    whole = LARGE.encode("a shells", add_special_tokens=False)
    half = LARGE.encode("a she", add_special_tokens=False)
    assert whole[: len(half)] != half  # the target has one token for what is said in two
    assert translate(SMALL.encode("lls"), [*SMALL.encode("a "), *context], SMALL, LARGE, half) is None
    assert tail


@pairs
def test_shared_tokens_have_the_same_bytes(target: str, own: str) -> None:
    theirs, mine = KINDS[target], KINDS[own]
    shared = Shared.of(mine, theirs, len(mine), len(theirs))
    mine_mean, theirs_mean = meanings(mine), meanings(theirs)
    found = [(token, their) for token, their in enumerate(shared.target_of.tolist()) if their >= 0]
    assert all(mine_mean[token] == theirs_mean[their] for token, their in found)
    assert (shared.target_of >= 0).sum() >= 250  # every byte, at least
    assert shared.target_of[mine.eos_token_id] == theirs.eos_token_id
    assert not shared.alike
    the = [tokenizer.encode("a the", add_special_tokens=False)[-1] for tokenizer in (mine, theirs)]
    if b" the" in mine_mean.values() and b" the" in theirs_mean.values():
        assert shared.own_of[the[1]] == the[0]


def test_other_ids_for_the_same_tokens_are_alike() -> None:
    order = [(7 * token + 3) % len(LARGE) for token in range(len(LARGE))]
    assert sorted(order) == list(range(len(LARGE)))
    other: Any = permuted(LARGE, order)
    shared = Shared.of(other, LARGE, len(LARGE), len(LARGE) + 5)
    assert shared.alike
    assert shared.own_of.tolist() == [*order, *[-1] * 5]
