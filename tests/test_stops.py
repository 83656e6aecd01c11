"""Where an answer ends, and its text as it grows: never half a character, nothing behind a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer

from conftest import EOS, save_tokenizer
from scripted import Answers, Right
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams
from slipstream.engine import text as module
from slipstream.engine.text import Remembered, TextStream

PROMPT = list(range(40, 52))


LETTERS = dict.fromkeys(range(40, 90), 8.0)  # tokens that are text, so that stop strings can be found


PLAIN = SpeculationParams(enabled=False)


class Eager(Right):
    """Always right, and many tokens at once."""

    name: ClassVar[str] = "eager"
    default_draft_tokens: ClassVar[int] = 30


@dataclass(frozen=True)
class Stage:
    """An engine whose drafter knows how answers go on when nothing ends them."""

    llm: LLM
    answers: Answers
    known: dict[str, CompletionOutput] = field(default_factory=dict)

    def unbounded(self) -> CompletionOutput:
        """60 tokens of text, whatever they are; the drafter hears of them."""
        if "whole" not in self.known:
            params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias=LETTERS, seed=1, speculation=PLAIN)
            output = self.llm.generate(PROMPT, params)[0].outputs[0]
            assert len(output.token_ids) == 60
            self.answers.tell(PROMPT, 1, output.token_ids)
            self.known["whole"] = output
        return self.known["whole"]

    def both(self, params: SamplingParams) -> CompletionOutput:
        """The answer with guesses, after a check that it is the one without."""
        params = replace(params, logit_bias={**LETTERS, **params.logit_bias}, logprobs=2)
        plain = self.llm.generate(PROMPT, replace(params, speculation=PLAIN))[0].outputs[0]
        drafted = self.llm.generate(PROMPT, params)[0].outputs[0]
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text
        assert (drafted.finish_reason, drafted.stop_reason) == (plain.finish_reason, plain.stop_reason)
        assert (drafted.error, plain.error) == (None, None)
        for output in (drafted, plain):
            stats = output.speculation
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids) == stats.emitted
            assert all(token in at for token, at in zip(output.token_ids, output.logprobs, strict=True))
            assert stats.accepted <= min(stats.drafted, stats.emitted)
            assert stats.tau == stats.emitted / stats.rounds
        assert plain.speculation.rounds == len(plain.token_ids)
        assert drafted.logprobs is not None
        assert plain.logprobs is not None
        for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
            assert list(ours) == list(theirs)
            assert [x.logprob for x in ours.values()] == pytest.approx([x.logprob for x in theirs.values()], abs=1e-4)
        return drafted


@pytest.fixture(scope="module")
def stage(tiny_target: Path) -> Iterator[Stage]:
    answers = Answers()
    with LLM(tiny_target, drafter=Eager(answers), planner="fixed", memory="64MiB", max_num_seqs=8) as llm:
        yield Stage(llm, answers)
    assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


def first_at(values: list[Any], low: int) -> int:
    """The first place from `low` on of a value that did not come before: somewhere inside an accepted run."""
    return next(i for i in range(low, len(values)) if values[i] not in values[:i])


def test_a_long_run_is_accepted_at_once(stage: Stage) -> None:
    whole = stage.unbounded()
    output = stage.both(SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    assert output.token_ids == whole.token_ids
    assert output.finish_reason == "length"
    assert output.speculation.rounds == 3  # 1 + 31 + 28
    assert output.speculation.tau == 20
    assert output.speculation.accepted == 57
    assert output.speculation.by_drafter["eager"].accepted == 57


@pytest.mark.parametrize("limit", [1, 2, 3, 31, 32, 33, 59])
def test_max_tokens(stage: Stage, limit: int) -> None:
    whole = stage.unbounded()
    output = stage.both(SamplingParams(max_tokens=limit, ignore_eos=True, seed=1))
    assert output.token_ids == whole.token_ids[:limit]
    assert (output.finish_reason, output.stop_reason) == ("length", None)


@pytest.mark.parametrize("low", [0, 3, 12, 20])
@pytest.mark.parametrize("keep", [False, True])
def test_stop_ids(stage: Stage, low: int, keep: bool) -> None:
    whole = stage.unbounded()
    at = first_at(whole.token_ids, low)
    token = whole.token_ids[at]
    output = stage.both(
        SamplingParams(max_tokens=60, ignore_eos=True, seed=1, stop_token_ids=[token], include_stop_str_in_output=keep)
    )
    assert output.token_ids == whole.token_ids[: at + 1]
    assert output.text == whole.text[: at + keep]  # one letter a token
    assert (output.finish_reason, output.stop_reason) == ("stop", token)


@pytest.mark.parametrize("low", [1, 8, 16])
@pytest.mark.parametrize("ignored", [False, True])
def test_end_of_text(stage: Stage, low: int, ignored: bool) -> None:
    """The drafter goes on behind the end, and is right about it: nothing of that may come out."""
    common = SamplingParams(max_tokens=60, logit_bias={**LETTERS, EOS: 13.0}, temperature=2)
    tries = [replace(common, ignore_eos=True, seed=seed, speculation=PLAIN) for seed in range(24)]
    found = [output.outputs[0] for output in stage.llm.generate([PROMPT] * 24, tries)]
    seed, whole = next(
        (i, o) for i, o in enumerate(found) if EOS in o.token_ids[low:50] and EOS not in o.token_ids[:low]
    )
    at = whole.token_ids.index(EOS)
    stage.answers.tell(PROMPT, seed, whole.token_ids)
    output = stage.both(replace(common, seed=seed, ignore_eos=ignored))
    if ignored:
        assert output.token_ids == whole.token_ids
        assert output.finish_reason == "length"
    else:
        assert output.token_ids == whole.token_ids[: at + 1]
        assert output.text == stage.llm.tokenizer.decode(whole.token_ids[:at])
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert output.speculation.emitted == at + 1


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("at", [0, 25, 40])
def test_stop_strings(stage: Stage, at: int, length: int, keep: bool) -> None:
    whole = stage.unbounded()
    stop = whole.text[at : at + length]
    found = whole.text.find(stop)
    output = stage.both(
        SamplingParams(
            max_tokens=60, ignore_eos=True, seed=1, stop=["never this", stop], include_stop_str_in_output=keep
        )
    )
    assert output.text == whole.text[: found + length * keep]
    assert output.token_ids == whole.token_ids[: found + length]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_the_end_of_the_context(open_llm: Callable[..., LLM]) -> None:
    answers = Answers()
    stage = Stage(open_llm(drafter=Eager(answers), planner="fixed", max_model_len=40), answers)
    params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias=LETTERS, seed=1, speculation=PLAIN)
    whole = stage.llm.generate(PROMPT, params)[0].outputs[0]
    assert len(whole.token_ids) == 40 - len(PROMPT)
    answers.tell(PROMPT, 1, whole.token_ids + [50] * 40)  # guesses beyond the end
    output = stage.both(SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert output.token_ids == whole.token_ids


@pytest.mark.parametrize("least", [1, 7, 30, 60])
def test_min_tokens_keeps_ends_away(stage: Stage, least: int) -> None:
    """End-of-text and stop ids are not chosen before, however likely; a stop string before is only text."""
    bias = {EOS: 15.0, 60: 15.0}
    params = SamplingParams(
        max_tokens=61, min_tokens=least, seed=2, logit_bias={**LETTERS, **bias}, stop_token_ids=[60], speculation=PLAIN
    )
    whole = stage.llm.generate(PROMPT, params)[0].outputs[0]
    stage.answers.tell(PROMPT, 2, whole.token_ids + [EOS] * 60)
    output = stage.both(replace(params, speculation=SpeculationParams(), logit_bias=bias))
    assert not {EOS, 60} & set(output.token_ids[:least])
    assert len(output.token_ids) == least + 1  # the first that may end it does
    assert output.finish_reason == "stop"
    assert output.stop_reason == (None if output.token_ids[-1] == EOS else 60)


@pytest.mark.parametrize("least", [0, 1, 9, 40, None])
def test_min_tokens_and_stop_strings(stage: Stage, least: int | None) -> None:
    """None: as many tokens as there are where a stop string is complete, which ends the answer there."""
    whole = stage.unbounded()
    common = max(set(whole.text), key=whole.text.count)
    least = whole.text.find(common, 5) + 1 if least is None else least
    output = stage.both(SamplingParams(max_tokens=60, min_tokens=least, ignore_eos=True, seed=1, stop=common))
    end = whole.text.find(common, max(0, least - 1))
    if end < 0:
        assert output.finish_reason == "length"
        end = 60
    else:
        assert output.stop_reason == common
        assert len(output.token_ids) == end + 1 >= least
    assert output.text == whole.text[:end]


def test_a_stop_that_nobody_meets_changes_nothing(stage: Stage) -> None:
    whole = stage.unbounded()
    output = stage.both(SamplingParams(max_tokens=60, ignore_eos=True, seed=1, stop=["nowhere"], stop_token_ids=[299]))
    assert (output.text, output.token_ids, output.finish_reason) == (whole.text, whole.token_ids, "length")


def test_streamed_outputs_never_show_what_is_cut(stage: Stage) -> None:
    whole = stage.unbounded()
    stop = whole.text[33:38]
    at = whole.text.find(stop)
    for speculation in (SpeculationParams(), PLAIN):
        params = SamplingParams(
            max_tokens=60, ignore_eos=True, seed=1, stop=stop, logit_bias=LETTERS, speculation=speculation, logprobs=0
        )
        outputs = [output.outputs[0] for output in stage.llm.stream(PROMPT, params)]
        assert outputs[-1].text == whole.text[:at]
        assert all(whole.text[:at].startswith(output.text) for output in outputs)
        for output in outputs:
            assert output.token_ids == whole.token_ids[: len(output.token_ids)]
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids) == output.speculation.emitted
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["stop"]


def test_siblings_end_each_in_its_own_way(stage: Stage) -> None:
    """Samples of one request stop at different places; each has its own counts."""
    params = SamplingParams(n=4, max_tokens=30, temperature=2, seed=5, logit_bias={**LETTERS, EOS: 8.5}, logprobs=0)
    (plain,) = stage.llm.generate(PROMPT, replace(params, speculation=PLAIN))
    for output in plain.outputs:
        stage.answers.tell(PROMPT, 5, output.token_ids + [50] * 40, output.index)
    (drafted,) = stage.llm.generate(PROMPT, params)
    assert [o.token_ids for o in drafted.outputs] == [o.token_ids for o in plain.outputs]
    assert len({len(o.token_ids) for o in drafted.outputs}) > 1
    assert [o.speculation.emitted for o in drafted.outputs] == [len(o.token_ids) for o in plain.outputs]
    assert [o.text for o in drafted.outputs] == [o.text for o in plain.outputs]


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
