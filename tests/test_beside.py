"""tools/beside.py: the comparison with transformers, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from bench_scripts import beside
from slipstream.bench.run import Answer, Measured
from slipstream.core.params import SamplingParams


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
