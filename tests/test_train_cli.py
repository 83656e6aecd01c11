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
from slipstream.train import recipe
from slipstream.train.config import TrainConfig
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


def test_recipes_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipe._recipes, "later", "slipstream.train.later:LaterRecipe")
    with pytest.raises(ConfigError, match="recipe 'later': this installation does not have it"):
        recipe.recipe_class("later")
    with pytest.raises(ConfigError, match="recipe 'bogus' is unknown"):
        recipe.recipe_class("bogus")
    assert recipe.recipe_class("eagle3").name == "eagle3"


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    named = set(TrainConfig.__dataclass_fields__) - {"recipe", "target", "out", "options"}
    assert set(command._OPTIONS) == named


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
