"""Values that an option cannot have: one line with the option, the value, and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.cli.flags import flagged, naming_memory_flags
from slipstream.cli.main import main
from slipstream.core.errors import CapacityError


def refused(capsys: pytest.CaptureFixture[str], words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    return err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("explain --min-gain 0", "--min-gain 0: must be 1 or more, such as 1.1"),
        ("generate Hi --min-gain nan", "--min-gain nan: must be 1 or more, such as 1.1"),
        ("chat --min-gain abc", "--min-gain abc: must be a number, 1 or more, such as 1.1"),
        ("generate Hi --draft-tokens 64", "--draft-tokens 64: must be 0 to 63, such as 8"),
        ("bench --top-k x", "--top-k x: must be a whole number, such as 40"),
        ("bench --repeats 0", "--repeats 0: must be 1 or more, such as 3"),
        ("bench --repeats 1.5", "--repeats 1.5: must be a whole number, 1 or more, such as 3"),
        ("bench --requests 0", "--requests 0: must be 1 or more"),
        ("serve --port 99999", "--port 99999: must be 0 to 65535"),
        ("generate Hi -t warm", "--temperature warm: must be a number"),
    ],
)
def test_numbers_are_refused_as_the_library_does_it(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    assert refused(capsys, words) == f"error: {said}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate Hi --planner foo", "--planner foo: must be one of adaptive, fixed"),
        (
            "generate Hi --max-draft-memory lots",
            "--max-draft-memory lots: must be a part such as 0.2 or 20%, or a size",
        ),
        ("generate Hi --presence-penalty 9", "--presence-penalty 9.0: must be"),
        ("tune --drafters ngram,sufix", "--drafters: drafter 'sufix' is unknown: must be one of"),
        ("tune --drafters model:/nope", "--drafters model:/nope: '/nope': no such folder"),
    ],
)
def test_the_option_is_named_that_was_written(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_messages_of_no_key_stay_as_they_are() -> None:
    assert flagged("a prompt is empty: it must not be") == "a prompt is empty: it must not be"
    assert flagged("structured_outputs.json='x': must be JSON") == "structured_outputs.json='x': must be JSON"


def test_what_is_no_number_is_said_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Missing argument 'PROMPT'" in refused(capsys, "generate")
    assert "No such option" in refused(capsys, "bench --no-such")


@pytest.mark.parametrize("words", ["generate Hi", "bench", "serve"])
def test_nobody_stands_alone(capsys: pytest.CaptureFixture[str], words: str) -> None:
    said = "error: --drafter: drafter 'none': cannot be combined with other drafters; give it alone or leave it out\n"
    assert refused(capsys, f"{words} --drafter suffix --drafter none") == said


def test_where_memory_is_too_little_options_are_named(tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "Hi", "--model", str(tiny_target), "--memory", "20000", "--max-model-len", "256"]
    with pytest.raises(SystemExit):
        main(words)
    said = capsys.readouterr().err
    assert "error: --memory 20,000 bytes: a context of 256 tokens needs" in said
    assert "; give --memory " in said
    assert "memory=" not in said


def test_both_bounds_of_memory_are_named() -> None:
    with (
        pytest.raises(CapacityError, match=r"^--max-draft-memory 20: drafters keep much; --max-model-len 8 would do$"),
        naming_memory_flags(),
    ):
        raise CapacityError("max_draft_memory=20: drafters keep much; max_model_len=8 would do")


def test_what_a_page_takes_is_known_when_the_model_is_loaded(
    tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "Hi", "--model", str(tiny_target), "--memory", "2MiB", "--max-draft-memory", "4096"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "error: --max-draft-memory 4096: must be as many bytes as a page has, " in capsys.readouterr().err


def test_what_is_drawn_is_svg(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "tune --plot x.png")
    assert said == "error: --plot x.png: is drawn as SVG; name it x.svg\n"
