"""`slipstream train` from prompts to a drafter, for every recipe; killed runs end with the drafter of whole ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.drafters.medusa import ChainedMedusaDrafter, MedusaDrafter, best_tree, usual_table
from slipstream.models.identity import TRAINED_FOR, identity_of
from slipstream.train.run import train
from training_scenes import check_resumed, measure_on_known, questions, small_run

MEDUSA = "medusa_lm_head.safetensors"


@pytest.mark.parametrize(
    ("recipe", "options", "spec", "curves"),
    [
        ("draft", "layers=2 variation=0.5", "model:{}", {"agreed", "divergence"}),
        ("eagle3", "inner=48 steps=2 depth=2 width=2", "eagle:{}?depth=2&width=2", {"agreed_1", "agreed_2"}),
        ("medusa", "heads=3", "medusa:{}", {"agreed_1", "agreed_3"}),
        ("medusa", "heads=3 chained=false", "medusa:{}", {"agreed_1", "agreed_3"}),
    ],
)
def test_from_prompts_to_a_drafter(
    recipe: str,
    options: str,
    spec: str,
    curves: set[str],
    tiny_target: Path,
    tmp_path: Path,
    open_llm: Callable[..., LLM],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    words = f"train {recipe} --target {tiny_target} --out {out} --device cpu --prompts {questions(tmp_path)}"
    words += " --held-out 2 --lanes 8 --max-tokens 16 --max-prompt-tokens 24 --measure-tokens 8 --measure-prompts 2"
    words += " --steps 4 --rows 1 --row-tokens 64 --warmup 1 --temperature 1"
    words += "".join(f" --set {option}" for option in options.split())
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 0, capsys.readouterr().err
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    folder = out / "drafter"
    assert printed["drafter"] == spec.format(folder)
    assert printed["tau"].keys() == {"0", "1"}
    assert curves | {"acceptance"} <= json.loads((out / "run.json").read_text())["curves"][0].keys()
    specs = [printed["drafter"], *([f"eagle:{folder / 'speculators'}"] if recipe == "eagle3" else [])]
    for named in specs:
        llm = open_llm(tiny_target, drafter=named, planner="fixed")
        answer = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6, ignore_eos=True))[0].outputs[0]
        assert answer.speculation.drafted > 0
    if recipe == "medusa":
        assert load_file(folder / MEDUSA)["2.1.linear.weight"].dtype == torch.float16
        drafter = llm.engine.drafting.drafters["medusa"]
        if isinstance(drafter, ChainedMedusaDrafter):
            assert (drafter.depth, drafter.width, drafter.most_nodes) == (3, 16, 63)
        else:
            table = json.loads((folder / "config.json").read_text())["medusa_acceptance"]
            assert table != [list(row) for row in usual_table(3)]  # it was measured
            assert cast(MedusaDrafter, drafter).tree == best_tree(table)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("draft", {"layers": 1}),
        ("draft", {"layers": 1, "hidden": 16}),
        ("eagle3", {"inner": 48, "steps": 3, "variation": 0.5}),
        ("medusa", {"heads": 2, "chained": False}),
        ("medusa", {"heads": 2}),
    ],
)
def test_a_killed_run_ends_with_the_same_drafter(
    recipe: str, options: dict[str, Any], tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(tmp_path, tiny_target, recipe, accumulate=2, options=options)
    check_resumed(config, monkeypatch, MEDUSA if recipe == "medusa" else "model.safetensors")


@pytest.mark.parametrize("chained", [False, True])
def test_training_raises_tau_in_the_engine(
    chained: bool, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On prompts of the training data: a random target has nothing that could be learnt for others."""
    measure_on_known(monkeypatch)
    config = replace(
        small_run(tmp_path, tiny_target, "medusa", prompts=20, max_tokens=24, temperatures=(0.0,)),
        steps=200,
        row_tokens=128,
        learning_rate=0.02,
        measure_every=100,
        measure_prompts=4,
        measure_tokens=24,
        average=0.0,
        options={"heads": 2, "layers": 2 if chained else 4, "sharpen": 1.0, "chained": chained},
    )
    lines: list[str] = []
    finished = train(config, lines.append)
    for what in ("loading the target as teacher", "opening the engine to measure with"):
        begun, ended = (line for line in lines if line.startswith(what))
        assert begun.endswith(" ...")
        assert ended.endswith(" s")  # how long it took
    assert any("acceptance" in line and "left" in line and "tok/s" in line for line in lines)
    assert any("tau" in line and "T=0" in line for line in lines)
    record = json.loads((config.out / "run.json").read_text())
    first, last = (point["tau"]["0"] for point in record["measured"])
    assert last > 1.7  # at most 3 with two heads
    assert finished.tau["0"] == max(first, last)
    assert record["curves"][-1]["agreed_1"] > 0.5
    config_json = json.loads((finished.folder / "config.json").read_text())
    assert config_json[TRAINED_FOR] == identity_of(Path(config.target))
    if chained:
        assert config_json["medusa_chained"]
        assert record["curves"][-1]["agreed_2"] > 0.5
    else:
        assert config_json["medusa_acceptance"][0][0] > 0.5
