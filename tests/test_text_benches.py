"""tools/exact.py: what it compares and counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_scripts import exact


def test_every_mode_is_compared_at_each_temperature(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, kept = tmp_path / "prompts.jsonl", tmp_path / "exact.json"
    file.write_text("".join(json.dumps({"prompt": f"Tell me {i} " * 40 * (i % 2 + 1)}) + "\n" for i in range(3)))
    words = f"--model {tiny_target} --prompts {file} --max-tokens 8 --limit 2 --device cpu --json {kept}"
    exact.main(words.split())
    found = json.loads(kept.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["prompts"] == 2
    runs = {name: part for name, part in found.items() if name.startswith("T=")}
    assert list(runs) == [f"T={t} {mode} x32" for t in (0, 1) for mode in ("plain", "ngram")]
    assert all(part["same"] + len(part["wrong"]) == 2 for part in runs.values())


def test_where_answers_part_is_told() -> None:
    assert exact.differences([[1, 2], [1, 2, 3], [4]], [[1, 2], [1, 5, 3], [4, 4]]) == [
        {"prompt": 1, "position": 1},
        {"prompt": 2, "position": 1},
    ]
