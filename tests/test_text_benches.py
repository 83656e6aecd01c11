"""The commands behind the figures of drafters that draft from text alone: what they count, on texts known by heart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from bench_scripts import exact, replay
from slipstream.core.draft import Tree
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.drafters.suffix import SuffixDrafter


class Next(HostDrafter):
    """Guesses that numbers go on, so many of them."""

    name: ClassVar[str] = "next"

    def __init__(self, right: int) -> None:
        self.right = right
        self.heard: list[Verdict] = []
        self.texts: list[list[int]] = []

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        last = requests[0].tokens[-1]
        self.texts.append(list(requests[0].tokens))
        return [Tree((99, *range(last + 1, last + 1 + self.right), 98), (-1, -1, *range(1, self.right + 1)))]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.heard += verdicts


@pytest.mark.parametrize(("right", "tau"), [(1, 2.0), (3, 4.0), (7, 8.0), (20, 16.0)])
def test_tau_counts_what_stands_and_the_targets_own(right: int, tau: float) -> None:
    answer = list(range(10, 27))  # the first comes from the prompt, and 16 of rounds
    drafter = Next(right)
    assert replay.tau(drafter, [replay.Recorded("x", [1, 2], answer)], 63) == tau
    assert [token for verdict in drafter.heard for token in verdict.tokens] == answer[1:]
    assert drafter.texts[0] == [1, 2, 10]
    assert all(verdict.path == tuple(range(1, verdict.accepted + 1)) for verdict in drafter.heard)


def test_past_outputs_are_kept_from_answer_to_answer() -> None:
    answers = [replay.Recorded("x", [1], [(7 * i * i + i) % 97 for i in range(60)])] * 2
    assert replay.tau(SuffixDrafter(), answers, 16) > 1.5 * replay.tau(SuffixDrafter(store_tokens=0), answers, 16)


def test_answers_are_taken_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"task": "second turns", "prompt": [1], "answer": [2, 3]}\n')
    options = type("Options", (), {"answers": file})()
    assert replay.recorded(options) == [replay.Recorded("second turns", [1], [2, 3])]


def test_a_limit_takes_from_all_parts() -> None:
    assert replay.spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert replay.spread([1, 2], None) == replay.spread([1, 2], 9) == [1, 2]


def test_conversations_that_do_not_fit_are_left_out(tiny_target: Path, tmp_path: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    turns = (["Hi", "And?"], ["far too long " * 30, "And?"], ["Hello", "And then?"])
    file.write_text("".join(json.dumps({"turns": asked}) + "\n" for asked in turns))
    answers, kept = tmp_path / "answers.jsonl", tmp_path / "kept.json"
    words = f"--model {tiny_target} --conversations {file} --max-tokens 12 --nodes 4 --answers {answers} --json {kept}"
    replay.main(words.split())
    tasks = [json.loads(line)["task"] for line in answers.read_text().splitlines()]
    assert tasks.count("second turns") == 2
    found = json.loads(kept.read_text())
    assert found["settings"]["model"] == tiny_target.name
    assert found["settings"]["conversations"] == "conversations.jsonl"
    assert [row["answers"] for row in found["rows"] if row["task"] == "second turns"] == [2]


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
