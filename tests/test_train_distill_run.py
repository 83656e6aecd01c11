"""`slipstream train draft` from prompts to a drafter, stopped on the way and gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from training_scenes import check_resumed, questions, small_run


def test_from_prompts_to_a_drafter(
    tiny_target: Path, tmp_path: Path, open_llm: Callable[..., LLM], capsys: pytest.CaptureFixture[str]
) -> None:
    """The target answers, the draft learns; what comes out drafts, with the target's embeddings."""
    out = tmp_path / "run"
    words = f"train draft --target {tiny_target} --out {out} --device cpu --prompts {questions(tmp_path)}"
    words += " --held-out 2 --lanes 8 --max-tokens 16 --max-prompt-tokens 24 --measure-tokens 8 --measure-prompts 2"
    words += " --steps 4 --rows 1 --row-tokens 64 --warmup 1 --set layers=2 --set variation=0.5"
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 0, capsys.readouterr().err
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["drafter"] == f"model:{out / 'drafter'}"
    assert said["tau"].keys() == {"0", "1"}
    record = json.loads((out / "run.json").read_text())
    assert {"agreed", "divergence", "acceptance"} <= record["curves"][0].keys()
    llm = open_llm(tiny_target, drafter=said["drafter"], planner="fixed")
    answer = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6, ignore_eos=True))[0].outputs[0]
    assert answer.speculation.drafted > 0


@pytest.mark.parametrize("hidden", [0, 16])
def test_a_killed_run_ends_with_the_same_draft(
    hidden: int, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_resumed(
        small_run(tmp_path, tiny_target, "draft", accumulate=2, options={"layers": 1, "hidden": hidden}), monkeypatch
    )
