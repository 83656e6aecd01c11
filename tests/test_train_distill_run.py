"""`slipstream train draft` from prompts to a drafter, stopped on the way and gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.train.config import TrainConfig
from slipstream.train.loop import Trainer
from slipstream.train.run import train


def questions(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Question {i}?"}) + "\n" for i in range(12)))
    return file


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
    config = TrainConfig(
        recipe="draft",
        target=str(tiny_target),
        out=tmp_path / "whole",
        data=str(tmp_path / "data"),
        prompts=(str(questions(tmp_path)),),
        held_out=2,
        max_tokens=16,
        lanes=8,
        device="cpu",
        steps=5,
        rows=1,
        row_tokens=64,
        accumulate=2,
        warmup=1,
        average=0.9,
        checkpoint_every=2,
        measure_every=2,
        measure_prompts=2,
        measure_tokens=8,
        options={"layers": 1, "hidden": hidden},
    )
    whole = train(config, print).folder
    step = Trainer._train_step

    def killed(self: Trainer) -> None:
        if self.step == 3:
            raise RuntimeError("killed")
        step(self)

    other = replace(config, out=tmp_path / "killed")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(other, print)
    resumed = train(other, print).folder
    theirs = load_file(resumed / "model.safetensors")
    for name, tensor in load_file(whole / "model.safetensors").items():
        assert torch.equal(tensor, theirs[name]), name
