"""All GPU figures in one call: commands that exist, run in order, once, and in the time that there is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench_scripts import acceptance, figures, http_cost
from gpu_bench import cells, curve, kernels


def asked(tmp_path: Path) -> Any:
    return figures.Asked(tmp_path / "out", tmp_path / "big", tmp_path / "spec_bench.jsonl", tmp_path / "heads", "site")


def part(name: str, code: str, seconds: int = 1) -> Any:
    return figures.Part(name, seconds, "a test", lambda _: ["-c", code])


def done(wanted: Any) -> dict[str, int]:
    return {name: told["code"] for name, told in json.loads((wanted.out / "done.json").read_text()).items()}


def test_parts_run_in_order_and_what_ended_well_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, notes = asked(tmp_path), tmp_path / "notes"
    write = f"open({str(notes)!r}, 'a').write"
    parts = [part("b", f"{write}('b'); print('said')"), part("a", f"{write}('a'); raise SystemExit(3)")]
    assert not figures.run(wanted, parts, 60)
    assert done(wanted) == {"b": 0, "a": 3}
    assert "a failed (3)" in capsys.readouterr().out
    assert (wanted.out / "b.txt").read_text() == "said\n"
    assert figures.run(wanted, [*parts[:1], part("a", f"{write}('A')")], 60)
    assert notes.read_text() == "baA"
    assert done(wanted) == {"b": 0, "a": 0}


def test_no_part_is_begun_that_would_not_end_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = asked(tmp_path)
    assert figures.run(wanted, [part("long", "pass", 61), part("short", "pass", 59)], 60)
    assert done(wanted) == {"short": 0}
    assert "long: no time" in capsys.readouterr().out


def test_a_part_that_outlasts_the_budget_is_ended(tmp_path: Path) -> None:
    wanted = asked(tmp_path)
    assert not figures.run(wanted, [part("stuck", "import time; time.sleep(600)")], 1.5)
    assert done(wanted) == {"stuck": -15}


def _parsed(command: Sequence[str]) -> None:
    """Ends the test where a command has an option that its script does not know."""
    script, *flags = command
    if script == "-m":
        told = subprocess.run([sys.executable, *command[:2], "--help"], capture_output=True, text=True, check=True)
        assert all(flag in told.stdout for flag in flags if flag.startswith("--"))
        return
    known = {"curve": curve, "cells": cells, "kernel_table": kernels, "acceptance": acceptance, "http_cost": http_cost}
    known[Path(script).stem].parser().parse_args(flags)


@pytest.mark.parametrize("name", [part.name for part in figures.PARTS])
def test_every_command_is_one_that_its_script_knows(name: str, tmp_path: Path) -> None:
    found = next(part for part in figures.PARTS if part.name == name)
    _parsed(found.command(asked(tmp_path)))
    _parsed(found.command(figures.Asked(tmp_path, tmp_path, tmp_path)))


def test_unknown_parts_and_missing_places_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        figures.main(["--parts", "cellz"])
    assert "'cellz' is unknown; choose from passes, crowds, curve" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        figures.main(["--out", "x"])
    assert "--target is needed" in capsys.readouterr().err
    assert figures.main(["--list"]) == 0
    assert "cells-peers" in capsys.readouterr().out
