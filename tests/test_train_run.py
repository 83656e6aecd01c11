"""`slipstream train` from options to a drafter, for every recipe, and the card that goes with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench_scripts import ship
from slipstream import LLM, SamplingParams
from slipstream.cli import train as command
from slipstream.cli.main import main
from slipstream.core.settings import settings_of
from slipstream.drafters.medusa import ChainedMedusaDrafter, MedusaDrafter, best_tree, usual_table
from slipstream.models.identity import TRAINED_FOR, identity_of
from slipstream.train.config import TrainConfig
from slipstream.train.record import model_card
from slipstream.train.run import Finished, train
from training_scenes import check_resumed, measure_on_known, questions, small_run


class Stub:
    defaults: ClassVar[Mapping[str, Any]] = {"steps": 77, "learning_rate": 0.5, "temperatures": (0.0, 1.0)}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    seen: list[TrainConfig] = []

    def run(config: TrainConfig) -> Finished:
        seen.append(config)
        return Finished(config.out / "drafter", f"medusa:{config.out / 'drafter'}", {"0": 2.5})

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "recipe_class", lambda name: Stub)
    return seen


def called(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    return int(ended.value.code or 0)


def test_options_become_a_configuration(
    seen: list[TrainConfig],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    given = f"medusa --target {tiny_target} --out {out} --self-prompts 9 --learning-rate 0.25 --set heads=3"
    assert called(*given.split(), "--prompts", "a.jsonl", "--prompts", "b.jsonl", "--trust-remote-code") == 0
    config = seen[0]
    assert config.steps == 77  # the recipe's own default
    assert config.learning_rate == 0.25  # the user's word
    assert config.temperatures == (0.0, 1.0)
    assert config.prompts == ("a.jsonl", "b.jsonl")
    assert config.trust_remote_code
    assert dict(config.options) == {"heads": "3"}
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["tau"] == {"0": 2.5}
    assert f"--drafter 'medusa:{out / 'drafter'}'" in printed.err
    assert called(*given.split(), "--temperature", "0.7") == 0
    assert seen[1].temperatures == (0.7,)
    capsys.readouterr()
    monkeypatch.setenv("RANK", "1")
    assert called(*given.split()) == 0
    assert not capsys.readouterr().out  # of several processes the first one speaks


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("medusa", "error: --out: name the folder of the run, such as --out runs/medusa"),
        ("medusa --out R", "error: there is nothing to learn from: name prompt files (--prompts FILE)"),
        (
            "medusa --out R --self-prompts 9 --row-tokens 5",
            "error: --row-tokens 5: must be 16 or more",
        ),
    ],
)
def test_errors_are_said_in_flags(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    assert called(*arguments.split()) == 2
    assert capsys.readouterr().err.replace("\n", " ").startswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("eagle3 --set heads=5", "--set heads=5: must divide the hidden size of the target, 32"),
        ("eagle3 --set draft_vocab=9999", "--set draft_vocab=9999: the target's vocabulary has 300 tokens"),
        ("draft --held-out 9", "--held-out=9: only 9 prompts have at most 512 tokens (--max-prompt-tokens)"),
        ("draft --prompts missing.jsonl", "--prompts missing.jsonl: there is no file"),
    ],
)
def test_all_is_checked_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_target: Path,
    tmp_path: Path,
    arguments: str,
    said: str,
) -> None:
    def costly(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("slipstream.train.data.open_model", costly)
    out = tmp_path / "run"
    common = ["--target", str(tiny_target), "--out", str(out), "--self-prompts", "9", "--held-out", "2"]
    recipe, *others = arguments.split()
    assert called(recipe, *common, *others, "--device", "cpu") == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (out / "data").exists()


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    named = set(TrainConfig.__dataclass_fields__) - {"recipe", "target", "out", "options"}
    declared = settings_of(TrainConfig)
    assert {name for name, one in declared.items() if one.option(name) and one.help} == named


def test_ctrl_c_says_how_to_go_on(
    seen: list[TrainConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    def stopped(config: TrainConfig) -> Finished:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", stopped)
    assert called("draft", "--target", str(tiny_target), "--out", str(tmp_path), "--self-prompts", "5") == 130
    assert "run the same command again" in capsys.readouterr().err


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


@pytest.mark.parametrize("chained", [True])
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


RECORD: dict[str, Any] = {
    "config": {
        "recipe": "medusa",
        "target": "/somewhere/of/mine/tiny-model",
        "steps": 1600,
        "rows": 8,
        "row_tokens": 2048,
        "accumulate": 1,
        "learning_rate": 0.002,
        "final_rate": 0.02,
        "warmup": 50,
        "weight_decay": 0.0,
        "average": 0.99,
        "seed": 0,
        "measure_prompts": 96,
        "measure_tokens": 128,
        "options": {"heads": "3", "start": "/somewhere/of/mine/first-draft"},
    },
    "data": {
        "made_of": {
            "self_prompts": 20000,
            "prompts": ["/somewhere/of/mine/code.jsonl"],
            "temperatures": [0.0, 1.0],
            "samples": 2,
            "max_tokens": 512,
            "held_out": 64,
        },
        "answers": 41234,
        "answer_tokens": 9876543,
    },
    "parameters": 2874624,
    "steps_done": 1600,
    "training_seconds": 171.0,
    "best": {"step": 1200, "tau": {"0": 2.4567, "1": 2.1}},
    "versions": {"slipstream": "0.1.0", "torch": "2.13.0"},
    "device": "NVIDIA H200",
}


ACCEPTANCE: dict[str, Any] = {
    "settings": {"prompts": "spec_bench.jsonl", "max_tokens": 256},
    "prompts": 480,
    "results": [
        {
            "drafter": "medusa",
            "temperature": 0.0,
            "tau": 2.51,
            "categories": {"math": {"tau": 2.9}, "qa": {"tau": 2.2}},
        },
        {"drafter": "medusa:/x?a=1&b=2+suffix", "temperature": 1.0, "tau": 2.0, "categories": {"math": {"tau": 2.1}}},
        {"drafter": "eagle3", "temperature": 0.0, "tau": 3.7, "categories": {"math": {"tau": 3.9}}},
    ],
}


def test_the_card_is_filled_in_from_the_records() -> None:
    card = model_card(RECORD, "medusa", acceptance=ACCEPTANCE, licence="Apache-2.0")
    assert "On 64 held-out prompts" in card  # there are no more
    assert card.startswith("# medusa for tiny-model\n")
    assert "slipstream generate --model tiny-model --drafter 'medusa'" in card
    assert "Adds 2,874,624 parameters." in card
    assert "Licence: Apache-2.0." in card
    assert "20,000 user turns that the target wrote itself" in card
    assert "prompts of `code.jsonl`" in card
    assert "41,234 of them, 9,876,543 tokens, sampled at temperature 0 and 1, 2 to a prompt" in card
    assert "1,600 steps in 2.9 minutes on NVIDIA H200; kept: the weights of step 1,200." in card
    assert "| learning_rate | 0.002 |" in card
    assert "| --set heads | 3 |" in card
    assert "| --set start | first-draft |" in card
    assert "weight_decay" not in card  # it was off
    assert "| tau by task | medusa, T=0 | medusa (a=1, b=2) + suffix, T=1 |" in card
    assert "| math | 2.90 | 2.10 |" in card
    assert "| qa | 2.20 |  |" in card
    assert "| all | 2.51 | 2.00 |" in card
    assert "3.70" not in card  # another drafter's
    assert "tau 2.46 at temperature 0, 2.10 at temperature 1." in card
    assert "somewhere" not in card


def trained(folder: Path, dtype: torch.dtype, size: int = 8) -> Path:
    (folder / "drafter" / "speculators").mkdir(parents=True)
    save_file({"w": torch.zeros(size, dtype=dtype)}, folder / "drafter" / "medusa_lm_head.safetensors")
    (folder / "drafter" / "config.json").write_text("{}")
    (folder / "drafter" / "speculators" / "config.json").write_text("{}")
    (folder / "run.json").write_text(json.dumps(RECORD))
    return folder


def test_shipping_copies_weights_and_writes_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, into = trained(tmp_path / "run", torch.float16), tmp_path / "heads"
    (into / "medusa").mkdir(parents=True)
    (into / "medusa" / "stale").touch()
    measured = tmp_path / "acceptance.json"
    measured.write_text(json.dumps(ACCEPTANCE))
    folder = ship.ship(run, into, measured)
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "medusa_lm_head.safetensors"]
    assert "| all | 2.51 |" in (folder / "README.md").read_text()
    broken = trained(tmp_path / "broken", torch.float16)
    (broken / "drafter" / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ValueError, match=r"drafter: has no \*\.safetensors"):
        ship.ship(broken, into, None)
    assert (folder / "medusa_lm_head.safetensors").is_file(), "what is there stays"
    with pytest.raises(ValueError, match="has fp32 weights; train with --set kept=fp16"):
        ship.ship(trained(tmp_path / "wide", torch.float32), into, None)
    (into / "eagle3").mkdir()
    (into / "eagle3" / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(ship, "MOST_BYTES", 1050)
    with pytest.raises(ValueError, match="at most 64 are shipped"):
        ship.ship(run, into, None)
