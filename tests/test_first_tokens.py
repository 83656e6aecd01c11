"""`tools/first_tokens.py` and `tools/beside.py`: what they tell, on tiny models and none."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench_scripts import beside, first_tokens
from slipstream.bench.run import Answer, Measured
from slipstream.core.params import SamplingParams


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


def test_prompts_and_decoding_are_compared_by_the_middle_repeat() -> None:
    class Fake:
        def __init__(self, name: str, seconds: float, wrong: int = -1) -> None:
            self.name, self.seconds, self.wrong = name, seconds, wrong
            self.asked: list[Sequence[int]] = []

        def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
            self.asked += prompts
            tokens = tuple(range(params[0].max_tokens or 0)) if len(self.asked) != self.wrong else (9,)
            late = self.seconds * len(self.asked)
            return Measured((Answer(tokens, late, late + len(tokens) * 0.5),), 0.0)

    ours, theirs = Fake("slipstream", 1), Fake("transformers", 2)
    read = beside.compared([ours, theirs], 1000, 20, 1, 3)
    assert read["seconds"] == {"slipstream": 3, "transformers": 6}, "the first repeat warms up"
    assert (read["of_transformers"], read["same_tokens"]) == (0.5, True)
    assert ours.asked == theirs.asked
    assert len({tuple(ids) for ids in ours.asked}) == 4, "nothing that the cache knows"
    said = beside.compared([Fake("slipstream", 1), Fake("transformers", 1, wrong=2)], 1000, 20, 5, 3)
    assert said["seconds"]["slipstream"] == 0.625
    assert not said["same_tokens"]


def test_busy_programs_end_with_the_measurement() -> None:
    with beside.beside(2, 60) as running:
        assert [process.poll() for process in running] == [None, None]
    assert None not in [process.poll() for process in running]
