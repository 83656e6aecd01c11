"""`bench/first_tokens.py`: what it tells of each number of tokens a pass, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench_scripts import first_tokens


def test_each_size_is_measured_and_all_first_tokens_told(
    tiny_target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_tokens, "LEADS", range(1, 250))
    given = f"--model {tiny_target} --sizes 32,64 --at-once 3 --tokens 20 --max-tokens 4 --long 90 --memory 32MiB"
    monkeypatch.setattr(sys, "argv", ["first_tokens.py", *given.split(), "--repeats", "2"])
    first_tokens.main()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [run["size"] for run in told[:-1]] == [32, 64] * 3, "in turns, the first of them to warm up"
    for found, size in zip(told[-1]["sizes"], (32, 64), strict=True):
        runs = [run for run in told[2:-1] if run["size"] == size]
        assert found["size"] == size
        assert len(found["first_s"]) == 3
        assert found["first_s"] == sorted(found["first_s"])
        assert 0 < found["first_s"][-1] <= found["total_s"] == min(run["total_s"] for run in runs)
        assert found["long_s"] == min(run["long_s"] for run in runs)
