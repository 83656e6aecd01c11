"""The command behind the table of exactness: what it compares, and where it writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench_scripts import shapes
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import DraftRequest


def test_what_is_guessed_is_right_in_part() -> None:
    drafter = shapes.Rehearsed()
    drafter.answers[(1, 2)] = list(range(10, 30))
    request = DraftRequest("a", [1, 2, 10], 2, SamplingParams(), 0)
    (tree,) = drafter.propose([request], [7])
    assert tree.tokens == (10, 11, 11, 12, 12, 13)  # beside each right one stands a wrong one
    assert tree.parents == (-1, -1, 1, 1, 3, 3)
    (tree,) = drafter.propose([DraftRequest("a", [1, 2, *range(10, 15)], 2, SamplingParams(), 0)], [12])
    assert tree.tokens == (14, 15, 15)  # and every seventh is missing
    assert drafter.propose([DraftRequest("b", [3], 1, SamplingParams(), 0)], [12])[0].tokens == ()


@pytest.mark.parametrize("family", shapes.FAMILIES)
def test_every_shape_makes_a_configuration(family: str) -> None:
    tiny, whole = shapes.config_of(family, tiny=True, whole=False), shapes.config_of(family, tiny=False, whole=True)
    assert tiny.hidden_size == 256
    assert whole.num_hidden_layers >= tiny.num_hidden_layers
    assert whole.vocab_size > tiny.vocab_size


def test_a_run_and_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shapes, "TINY", {**shapes.TINY, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 300})
    results, document = tmp_path / "cpu.json", tmp_path / "page.md"
    options = ["--tiny", "--only", "smollm3", "--requests", "2", "--max-tokens", "4", "--folder", str(tmp_path)]
    shapes.main([*options, "--json", str(results)])
    row: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert json.loads(results.read_text())["rows"] == [row]
    assert row["ours"] <= row["most"]
    assert row["drafts"] == row["company"] == row["both"] == [4, 4]
    assert row["accepted"] > 0

    broken = {**row, "company": [3, 4]}
    results.write_text(json.dumps({**json.loads(results.read_text()), "rows": [broken]}))
    document.write_text(f"before\n{shapes.MARKS[0]}\nobsolete\n{shapes.MARKS[1]}\nafter\n")
    shapes.main(["--table", str(results), "--document", str(document)])
    text = document.read_text()
    assert "| smollm3 | **same** | 3 of 4 |" in text
    assert "obsolete" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
