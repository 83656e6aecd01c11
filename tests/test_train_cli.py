"""`slipstream train`: options become one configuration, and what a run says reaches the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slipstream.cli import train as command
from slipstream.cli.main import main
from slipstream.core.errors import ConfigError
from slipstream.core.settings import settings_of
from slipstream.train.config import TrainConfig
from slipstream.train.recipe import recipe_class
from slipstream.train.run import Finished


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


def test_recipes_are_known_by_name() -> None:
    with pytest.raises(ConfigError, match="recipe 'bogus' is unknown"):
        recipe_class("bogus")
    for name in ("eagle3", "medusa", "draft"):
        assert recipe_class(name).name == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("foo", "error: recipe 'foo' is unknown: must be one of eagle3, medusa, draft"),
        ("medusa", "error: --out: name the folder of the run, such as --out runs/medusa"),
        ("medusa --out R", "error: there is nothing to learn from: name prompt files (--prompts FILE)"),
        (
            "medusa --out R --self-prompts 9 --row-tokens 5",
            "error: --row-tokens 5: must be 16 or more",
        ),
        ("draft --out R --self-prompts 9 --temperature -1", "error: --temperature=(-1.0,): must name at least one"),
        ("draft --out R --self-prompts 9 --beta1 2", "error: --beta1 2: must be 0 to 0.9999, such as 0.9"),
    ],
)
def test_errors_are_said_in_flags(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    assert called(*arguments.split()) == 2
    assert capsys.readouterr().err.replace("\n", " ").startswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("medusa --set bogus=1", "--set bogus is unknown: this recipe has"),
        ("medusa --set heads=99", "--set heads=99: must be between"),
        ("eagle3 --set heads=5", "--set heads=5: must divide the hidden size of the target, 32"),
        ("eagle3 --set draft_vocab=9999", "--set draft_vocab=9999: the target's vocabulary has 300 tokens"),
        ("eagle3 --set steps=0", "--set steps=0: must be at least 1"),
        ("draft --set start=0,9,1", "--set start='0,9,1': must be below 3"),
        ("draft --set hidden=64", "--set hidden=64: must be at most the target's hidden size, 32"),
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
