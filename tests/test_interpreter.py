"""Processes that we start import what we import, whatever lies in the folder that the program was started in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slipstream.constrain.source import Source
from slipstream.constrain.trials import TRIALS, Outcome, Sample
from slipstream.core import interpreter


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules of names that are taken, in which the program was started."""
    for name in ("json", "socket", "slipstream"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('from the folder')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("program", [["-c", "import json, slipstream"], ["-m", "slipstream.core.interpreter"]])
def test_modules_are_not_taken_from_the_folder(trapped: Path, program: list[str]) -> None:
    done = subprocess.run(
        interpreter.command(*program), env=interpreter.surroundings(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_unless_this_process_does_so_too(trapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("")
    assert interpreter.surroundings(A="b")["PYTHONPATH"].startswith(f"{trapped}:")
    assert interpreter.surroundings(A="b")["A"] == "b"


def test_forms_are_tried_out_there_as_elsewhere(trapped: Path) -> None:
    TRIALS.close()  # one that runs was started elsewhere
    try:
        tried = TRIALS.try_out(Source("grammar", 'root ::= "a"'), Sample((b"a", b"b")), 30.0)
    finally:
        TRIALS.close()
    assert tried == Outcome(True)
