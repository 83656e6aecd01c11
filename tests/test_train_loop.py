"""The trainer: the same weights however a run is cut into passes, ranks and sessions, and a drafter that drafts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.core.errors import CapacityError, ConfigError, NumericError
from slipstream.train import loop, teacher
from slipstream.train.batch import Batch
from slipstream.train.checkpoint import Best, keep_best, load_best, load_checkpoint
from slipstream.train.config import TrainConfig
from slipstream.train.loop import Trainer, learning_rate
from slipstream.train.measure import Measure, Measured
from slipstream.train.plot import Panel, draw
from slipstream.train.progress import Stop, stop_asked
from slipstream.train.recipe import Losses
from slipstream.train.run import Finished, train
from tiny_recipe import TinyRecipe
from training_scenes import killed_before, small_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return small_run(
        tmp_path_factory.mktemp("training"),
        tiny_target,
        "tiny",
        prompts=20,
        max_tokens=24,
        max_prompt_tokens=60,
        temperatures=(0.0,),
        steps=12,
        rows=2,
        row_tokens=128,
        learning_rate=0.02,
        warmup=2,
        log_every=4,
        checkpoint_every=5,
        measure_every=0,
        measure_tokens=16,
    )


def run(config: TrainConfig, lines: list[str] | None = None) -> dict[str, Tensor]:
    """Train, and return the weights and their average."""
    train(config, (lines if lines is not None else []).append, recipe=TinyRecipe)
    return weights(config)


def weights(config: TrainConfig) -> dict[str, Tensor]:
    found = load_checkpoint(config.out, CPU)
    assert found is not None
    assert found.step == config.steps
    return {**found.weights, **{f"average.{name}": tensor for name, tensor in found.average.items()}}


@pytest.fixture(scope="module")
def whole(base: TrainConfig) -> dict[str, Tensor]:
    return run(base)


def test_a_run_leaves_a_drafter_and_a_record(
    base: TrainConfig, whole: dict[str, Tensor], open_llm: Callable[..., LLM], tiny_target: Path
) -> None:
    record = json.loads((base.out / "run.json").read_text())
    assert record["steps_done"] == 12
    assert record["data"]["answers"] == 18
    assert {"torch", "transformers", "slipstream", "python"} <= set(record["versions"])
    losses = [point["loss"] for point in record["curves"]]
    assert losses[-1] < losses[0]
    assert record["measured"][-1]["tau"].keys() == {"0"}
    assert "<polyline" in (base.out / "curves.svg").read_text()
    llm = open_llm(tiny_target, drafter=f"medusa:{base.out / 'drafter'}")
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5))[0].outputs[0].error is None


def test_a_killed_run_ends_with_the_same_bits(
    base: TrainConfig, whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(base, out=base.out.parent / "killed")
    killed_before(monkeypatch, 8, lambda: run(config))  # three steps behind the last checkpoint
    lines: list[str] = []
    resumed = run(config, lines)
    assert "resumed at step 5 of 12" in lines
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_stopped_run_saves_and_goes_on(
    base: TrainConfig, whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(base, out=base.out.parent / "stopped")
    step = Trainer._train_step

    def stopped(self: Trainer) -> None:
        if self.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    lines: list[str] = []
    resumed = run(config, lines)
    assert "resumed at step 7 of 12" in lines
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    monkeypatch.setattr("slipstream.train.run.resolve", None)  # checked before anything is fetched or loaded
    with pytest.raises(ConfigError, match=r"learning_rate=0\.5: the run in"):
        run(replace(config, learning_rate=0.5))


def test_passes_add_up(base: TrainConfig, whole: dict[str, Tensor]) -> None:
    parts = run(replace(base, out=base.out.parent / "parts", rows=1, accumulate=2))
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-4, rtol=1e-3)


def test_two_ranks_are_one(base: TrainConfig, whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is this process, so that only the other one must import everything."""
    config = replace(base, out=base.out.parent / "ranks", rows=1, data=str(base.out.parent / "ranks-data"))
    monkeypatch.setattr("slipstream.train.ranks._TIMEOUT", timedelta(seconds=200))
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", free_port()), ("WORLD_SIZE", 2), ("RANK", 0)):
        monkeypatch.setenv(name, str(value))
    code = (
        "import json, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "from slipstream.train.config import TrainConfig\n"
        "from slipstream.train.run import train\n"
        "from tiny_recipe import TinyRecipe\n"
        "train(TrainConfig.from_dict(json.loads(sys.argv[1])), print, recipe=TinyRecipe)\n"
    )
    second = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(config.as_dict())],
        env={**os.environ, "RANK": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    try:
        found = run(config, lines)
        said = second.communicate(timeout=100)
    finally:
        second.kill()
    assert second.returncode == 0, said
    assert any("12 of 12" in line for line in lines)
    assert not said[0]
    assert len(list((base.out.parent / "ranks-data").glob("part-001-*.npz"))) == 1  # both wrote answers
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-3)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_kept_states_make_room_for_a_step(
    base: TrainConfig, whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails for want of memory begins anew, with nothing of its first half; the run ends as it would have."""
    monkeypatch.setattr(teacher, "worth_keeping", lambda *_: True)
    loss, passes = TinyRecipe.loss, list[None]()

    def short(self: TinyRecipe, batch: Batch) -> Losses:
        passes.append(None)
        if len(passes) == 6:  # the second pass of the third step
            raise torch.OutOfMemoryError("no memory")
        return loss(self, batch)

    monkeypatch.setattr(TinyRecipe, "loss", short)
    lines: list[str] = []
    config = replace(base, out=base.out.parent / "room", rows=1, accumulate=2)
    found = run(config, lines)
    assert len(passes) == 2 * config.steps + 2
    assert sum("keeping the target's states" in line for line in lines) == 1
    assert sum("releasing the target's kept states" in line for line in lines) == 1
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, msg=name)
    passes.clear()
    monkeypatch.setattr(teacher, "worth_keeping", lambda *_: False)
    with pytest.raises(CapacityError, match="halve rows and double accumulate=2"):
        run(replace(config, out=base.out.parent / "no-room"))


def test_bad_news_is_clear(base: TrainConfig, whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Trainer, turn: int) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Trainer, "_pass", full)
    with pytest.raises(CapacityError, match="halve rows and double accumulate=1"):
        run(replace(base, out=base.out.parent / "full"))
    monkeypatch.undo()
    loss = TinyRecipe.loss

    def broken(self: TinyRecipe, batch: Batch) -> Losses:
        found = loss(self, batch)
        return replace(found, total=found.total * float("nan"))

    monkeypatch.setattr(TinyRecipe, "loss", broken)
    with pytest.raises(NumericError, match="the loss is nan before step 4: lower learning_rate"):
        run(replace(base, out=base.out.parent / "nan"))
    assert load_checkpoint(base.out.parent / "nan", CPU) is None


def test_a_damaged_checkpoint_is_named(base: TrainConfig, whole: dict[str, Tensor]) -> None:
    config = replace(base, out=base.out.parent / "damaged", steps=5)
    run(config)
    (config.out / "checkpoint" / "optimizer.pt").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="checkpoint: cannot read this checkpoint"):
        run(config)


def test_the_learning_rate_rises_and_falls(base: TrainConfig) -> None:
    config = replace(base, steps=100, warmup=10, learning_rate=1.0, final_rate=0.1)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert loop._expected_tau([0.5, 0.5]) == 1.75


def test_a_picture_from_zero_on() -> None:
    drawn = draw([Panel("speeds", {"a": [(1, 10.0), (4, 12.0)]}, {1: "one", 4: "four"}, from_zero=True)], "t")
    assert ">0</text>" in drawn
    assert ">one</text>" in drawn
    assert "-0" not in draw([Panel("nothing good", {"a": [(1, 0.0), (2, 0.0)]}, from_zero=True)], "t")


def test_who_asks_it_to_stop_hears_of_it_at_once() -> None:
    """A step may take minutes on a CPU. The second time it does not wait."""
    said: list[str] = []
    heard = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        heard.set()

    with stop_asked(say) as stop:
        signal.raise_signal(signal.SIGINT)
        assert heard.wait(10)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(said) == 1
    assert "after this step" in said[0]


@pytest.fixture(scope="module")
def short_run(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
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


def finish(config: TrainConfig, lines: list[str] | None = None) -> Finished:
    return train(config, (lines if lines is not None else []).append, recipe=TinyRecipe)


def exported_weights(folder: Path) -> torch.Tensor:
    return load_file(folder / "medusa_lm_head.safetensors")["0.0.linear.weight"]


def test_the_best_measured_is_the_finished_one(short_run: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    exported: dict[int, torch.Tensor] = {}
    keep = Trainer._measure_now

    def noted(self: Trainer, stop: Stop) -> None:
        keep(self, stop)
        with self.averaged():
            self.recipe.export(short_run.out / "now")
        exported[self.step] = exported_weights(short_run.out / "now")

    monkeypatch.setattr(Trainer, "_measure_now", noted)
    measured(monkeypatch, [1.5, 1.9, 1.9, 1.7])
    lines: list[str] = []
    finished = finish(short_run, lines)
    assert finished.tau == {"0": 1.0, "1": 0.9}
    assert torch.equal(exported_weights(finished.folder), exported[4])  # not step 6, which is no better
    assert not torch.equal(exported[4], exported[6])
    record = json.loads((short_run.out / "run.json").read_text())
    assert record["best"] == {"step": 4, "tau": {"0": 1.0, "1": 0.9}}
    assert [point["step"] for point in record["measured"]] == [2, 4, 6, 8]
    assert any("the drafter of step 4" in line for line in lines)
    again = finish(short_run)  # nothing is left to do
    assert again.tau == finished.tau
    assert torch.equal(exported_weights(again.folder), exported[4])


def test_a_resumed_run_keeps_it(short_run: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed behind the best measurement, at whose checkpoint it goes on."""
    config = replace(short_run, out=short_run.out.parent / "killed")
    measured(monkeypatch, [1.5, 1.9])
    killed_before(monkeypatch, 5, lambda: finish(config))
    assert load_best(config.out) == Best(4, {"0": 1.0, "1": 0.9})
    kept = exported_weights(config.out / "best" / "drafter")
    measured(monkeypatch, [1.6, 1.7])  # steps 6 and 8
    finished = finish(config)
    assert sum(finished.tau.values()) == 1.9
    assert torch.equal(exported_weights(finished.folder), kept)


def test_ctrl_c_in_the_first_measurement_loses_nothing(short_run: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any checkpoint was due. The measurement is broken off, and the run goes on with it."""
    config = replace(short_run, out=short_run.out.parent / "interrupted", checkpoint_every=100)
    measuring = False

    def interrupted(self: Measure) -> list[Measured]:
        nonlocal measuring
        measuring = True
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it goes on measuring")

    with monkeypatch.context() as patch:
        patch.setattr(Measure, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finish(config)
    assert measuring
    found = load_checkpoint(config.out, torch.device("cpu"))
    assert found is not None
    assert found.step == 2
    measured(monkeypatch, [1.9, 1.6, 1.7, 1.8])  # step 2, which was broken off, 4, 6 and 8
    lines: list[str] = []
    finished = finish(config, lines)
    assert "resumed at step 2 of 8" in lines
    assert sum(finished.tau.values()) == 1.9
    record = json.loads((config.out / "run.json").read_text())
    assert [point["step"] for point in record["measured"]] == [2, 4, 6, 8]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_while_the_best_is_replaced_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """renames: number of renames before the kill."""

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


def test_a_run_that_begins_anew_forgets_it(short_run: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(short_run, out=short_run.out.parent / "anew")
    keep_best(config.out, Best(400, {"0": 9.0}), lambda folder: folder.mkdir(parents=True))
    measured(monkeypatch, [1.1, 1.2, 1.3, 1.4])
    assert sum(finish(config).tau.values()) == 1.4
