"""`slipstream train medusa` from prompts to a drafter with a tree of its own, stopped on the way and gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM
from slipstream.cli.main import main
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.drafters.medusa_chain import ChainedMedusaDrafter
from slipstream.drafters.medusa_tree import best_tree, usual_table
from slipstream.models.identity import TRAINED_FOR, identity_of
from slipstream.train.config import TrainConfig
from slipstream.train.run import train
from training_scenes import check_resumed, measure_on_known, small_run

WEIGHTS = "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def base(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return small_run(
        tmp_path_factory.mktemp("medusa"),
        tiny_target,
        "medusa",
        prompts=20,
        max_tokens=24,
        temperatures=(0.0,),
        steps=6,
        row_tokens=128,
        learning_rate=0.01,
        measure_prompts=4,
        measure_tokens=24,
        options={"heads": 2, "layers": 2},
    )


@pytest.mark.parametrize("chained", [False, True])
def test_training_raises_tau_in_the_engine(base: TrainConfig, chained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On prompts that it has seen: a random target has nothing that could be learnt for others."""
    measure_on_known(monkeypatch)
    config = replace(
        base,
        out=base.out.parent / f"long_{chained}",
        steps=200,
        learning_rate=0.02,
        measure_every=100,
        average=0.0,
        options={"heads": 2, "layers": 2 if chained else 4, "sharpen": 1.0, "chained": chained},
    )
    finished = train(config, print)
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


@pytest.mark.parametrize("chained", [False, True])
def test_from_prompts_to_a_drafter(
    base: TrainConfig,
    chained: bool,
    tiny_target: Path,
    open_llm: Callable[..., LLM],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = base.out.parent / f"said_{chained}"
    words = f"train medusa --target {tiny_target} --out {out} --device cpu --prompts {base.prompts[0]}"
    words += " --held-out 2 --lanes 8 --max-tokens 16 --measure-tokens 8 --measure-prompts 2 --temperature 1"
    words += " --steps 2 --rows 1 --row-tokens 64 --warmup 1 --set heads=3"
    words += "" if chained else " --set chained=false"
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 0, capsys.readouterr().err
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["tau"].keys() == {"0", "1"}
    drafter = open_llm(tiny_target, drafter=said["drafter"]).engine.drafting.drafters["medusa"]
    if chained:
        assert isinstance(drafter, ChainedMedusaDrafter)
        assert (drafter.depth, drafter.width, drafter.most_nodes) == (3, 16, 63)
    else:
        table = json.loads((out / "drafter" / "config.json").read_text())["medusa_acceptance"]
        assert table != [list(row) for row in usual_table(3)]  # it was measured
        assert cast(MedusaDrafter, drafter).tree == best_tree(table)
    assert load_file(out / "drafter" / WEIGHTS)["2.1.linear.weight"].dtype == torch.float16


@pytest.mark.parametrize("chained", [False, True])
def test_a_killed_run_ends_with_the_same_heads(
    base: TrainConfig, chained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(base, out=tmp_path / "whole", options={**base.options, "chained": chained})
    check_resumed(config, monkeypatch, WEIGHTS)
