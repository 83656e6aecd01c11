"""The finished drafter is the one that was measured best, whenever that was, and however often the run was stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.core.errors import ConfigError
from slipstream.train.best import Best, keep_best, load_best
from slipstream.train.checkpoint import load_checkpoint
from slipstream.train.config import TrainConfig
from slipstream.train.loop import Trainer
from slipstream.train.measure import Measure, Measured
from slipstream.train.run import Finished, train
from slipstream.train.stop import Stop
from tiny_recipe import TinyRecipe
from training_scenes import killed_before, small_run


@pytest.fixture(scope="module")
def base(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return small_run(
        tmp_path_factory.mktemp("best"),
        tiny_target,
        "tiny",
        prompts=8,
        steps=8,
        learning_rate=0.02,
        average=0.5,
        checkpoint_every=3,
    )


def measured(monkeypatch: pytest.MonkeyPatch, taus: Sequence[float]) -> None:
    """Measurements give these together, one after the other; at temperature 0 alone they rise always."""
    left: Iterator[float] = iter(taus)
    rising = iter(range(100))

    def measure(self: Measure) -> list[Measured]:
        tau, greedy = next(left), float(next(rising))
        return [Measured(0.0, greedy, 0.5, 10, 20), Measured(1.0, tau - greedy, 0.5, 10, 20)]

    monkeypatch.setattr(Measure, "__call__", measure)


def run(config: TrainConfig, lines: list[str] | None = None) -> Finished:
    return train(config, (lines if lines is not None else []).append, recipe=TinyRecipe)


def weights(folder: Path) -> torch.Tensor:
    return load_file(folder / "medusa_lm_head.safetensors")["0.0.linear.weight"]


def test_the_best_measured_is_the_finished_one(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    exported: dict[int, torch.Tensor] = {}
    keep = Trainer._measure_now

    def noted(self: Trainer, stop: Stop) -> None:
        keep(self, stop)
        with self.averaged():
            self.recipe.export(base.out / "now")
        exported[self.step] = weights(base.out / "now")

    monkeypatch.setattr(Trainer, "_measure_now", noted)
    measured(monkeypatch, [1.5, 1.9, 1.9, 1.7])
    lines: list[str] = []
    finished = run(base, lines)
    assert finished.tau == {"0": 1.0, "1": 0.9}
    assert torch.equal(weights(finished.folder), exported[4])  # not step 6, which is no better
    assert not torch.equal(exported[4], exported[6])
    record = json.loads((base.out / "run.json").read_text())
    assert record["best"] == {"step": 4, "tau": {"0": 1.0, "1": 0.9}}
    assert [point["step"] for point in record["measured"]] == [2, 4, 6, 8]
    assert any("the drafter of step 4" in line for line in lines)
    again = run(base)  # nothing is left to do
    assert again.tau == finished.tau
    assert torch.equal(weights(again.folder), exported[4])


def test_a_resumed_run_keeps_it(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed behind the best measurement, at whose checkpoint it goes on."""
    config = replace(base, out=base.out.parent / "killed")
    measured(monkeypatch, [1.5, 1.9])
    killed_before(monkeypatch, 5, lambda: run(config))
    assert load_best(config.out) == Best(4, {"0": 1.0, "1": 0.9})
    kept = weights(config.out / "best" / "drafter")
    measured(monkeypatch, [1.6, 1.7])  # steps 6 and 8
    finished = run(config)
    assert sum(finished.tau.values()) == 1.9
    assert torch.equal(weights(finished.folder), kept)


def test_ctrl_c_in_the_first_measurement_loses_nothing(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any checkpoint was due. The measurement is broken off, and the run goes on with it."""
    config = replace(base, out=base.out.parent / "interrupted", checkpoint_every=100)
    measuring = False

    def interrupted(self: Measure) -> list[Measured]:
        nonlocal measuring
        measuring = True
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it goes on measuring")

    with monkeypatch.context() as patch:
        patch.setattr(Measure, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    assert measuring
    found = load_checkpoint(config.out, torch.device("cpu"))
    assert found is not None
    assert found.step == 2
    measured(monkeypatch, [1.9, 1.6, 1.7, 1.8])  # step 2, which was broken off, 4, 6 and 8
    lines: list[str] = []
    finished = run(config, lines)
    assert "resumed at step 2 of 8" in lines
    assert sum(finished.tau.values()) == 1.9
    record = json.loads((config.out / "run.json").read_text())
    assert [point["step"] for point in record["measured"]] == [2, 4, 6, 8]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_while_the_best_is_replaced_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """renames: so many were done when it came."""

    def export(text: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(text)

    keep_best(tmp_path, Best(1, {"0": 1.5}), partial(export, "old"))
    rename, done = Path.rename, 0

    def killed(self: Path, to: Path) -> Path:
        nonlocal done
        if done == renames:
            raise RuntimeError("killed")
        done += 1
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(RuntimeError, match="killed"):
            keep_best(tmp_path, Best(2, {"0": 1.6}), partial(export, "new"))
    assert load_best(tmp_path) == Best(1, {"0": 1.5})
    assert (tmp_path / "best" / "drafter" / "weights").read_text() == "old"
    keep_best(tmp_path, Best(3, {"0": 1.7}), partial(export, "newer"))
    assert load_best(tmp_path) == Best(3, {"0": 1.7})
    assert (tmp_path / "best" / "drafter" / "weights").read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_run_that_begins_anew_forgets_it(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(base, out=base.out.parent / "anew")
    keep_best(config.out, Best(400, {"0": 9.0}), lambda folder: folder.mkdir(parents=True))
    measured(monkeypatch, [1.1, 1.2, 1.3, 1.4])
    assert sum(run(config).tau.values()) == 1.4


def test_a_damaged_note_is_named(tmp_path: Path) -> None:
    keep_best(tmp_path, Best(1, {"0": 1.5}), lambda folder: folder.mkdir(parents=True))
    (tmp_path / "best" / "best.json").write_text("{")
    with pytest.raises(ConfigError, match=r"best\.json: cannot be read .* remove"):
        load_best(tmp_path)
