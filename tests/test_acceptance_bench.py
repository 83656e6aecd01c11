"""tools/acceptance.py: what it counts is what the engine counted, task by task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_scripts import acceptance, results
from medusa_checkpoints import knowing_medusa


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    lines = [{"question_id": i, "category": "math" if i % 3 else "qa", "turns": [f"Ask {i}", "no"]} for i in range(7)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_tau_by_task_and_temperature(
    tiny_target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = knowing_medusa(tmp_path / "heads", tiny_target)
    words = f"--model {tiny_target} --drafter medusa:{heads} ngram --prompts {prompts} --device cpu --max-tokens 24"
    words += f" --draft-tokens 12 --at-once 4 --memory 64MiB --json {tmp_path / 'found.json'}"
    acceptance.main(words.split())
    found = json.loads((tmp_path / "found.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["prompts"] == 7
    assert found["settings"]["prompts"] == "tasks.jsonl"
    assert [(r["drafter"].partition(":")[0], r["temperature"]) for r in found["results"]] == [
        ("medusa", 0.0),
        ("medusa", 1.0),
        ("ngram", 0.0),
        ("ngram", 1.0),
    ]
    for result in found["results"]:
        tasks = result["categories"]
        assert {name: task["prompts"] for name, task in tasks.items()} == {"qa": 3, "math": 4}
        for key in ("rounds", "tokens", "drafted", "accepted"):
            assert result[key] == sum(task[key] for task in tasks.values())
        for part in (result, *tasks.values()):
            assert part["tau"] == pytest.approx(part["tokens"] / part["rounds"], abs=1e-4)
            assert sum(part["by_position"]) == part["accepted"]
            assert part["tokens"] == part["rounds"] + part["accepted"]
            assert part["by_position"] == sorted(part["by_position"], reverse=True)
    medusa = found["results"][0]
    assert medusa["accepted"] > 0
    assert len(medusa["by_position"]) <= 3  # it has three heads
    # whole trees: in a crowd, and where few tokens are left; the first token of an answer, and a last one, need none
    assert medusa["drafted"] % 12 == 0
    assert medusa["rounds"] - 2 * medusa["prompts"] <= medusa["drafted"] / 12 < medusa["rounds"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("eagle3:?depth=6&width=8", "eagle3:?depth=6&width=8"),
        ("medusa:/home/me/runs/medusa/drafter?width=8", "medusa:drafter?width=8"),
        ("suffix+model:../runs/draft", "suffix+model:draft"),
        ("ngram,model:/models/small/", "ngram,model:small/"),
        ("--target=/models/big", "--target=big"),
        ("draft", "draft"),
    ],
)
def test_what_is_kept_says_nothing_of_the_machine(given: str, told: str) -> None:
    assert results.told(given) == told


def test_the_settings_that_are_kept() -> None:
    given = "--prompts /data/p.jsonl --json /out/a.json --model /models/m --drafter eagle3:/runs/e?depth=6 --limit 3"
    found = results.settings(acceptance.parser().parse_args(given.split()))
    assert "json" not in found
    assert (found["prompts"], found["model"], found["limit"]) == ("p.jsonl", "m", 3)
    assert (found["drafter"], found["temperature"]) == (["eagle3:e?depth=6"], [0.0, 1.0])
