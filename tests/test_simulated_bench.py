"""Real runs of traffic beside what is simulated of them, as bench/simulated.py has it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_scripts import simulated, simulated_held
from slipstream.bench.costs import RoundCosts
from slipstream.bench.outcome import Served, Speculation, Targets
from slipstream.bench.recording import Costs, HostSeen, PassSeen, Planning, Recording, WaitSeen
from slipstream.bench.replica import Setting
from slipstream.bench.simulate import simulate
from slipstream.bench.traffic import Coming
from test_simulate import made_up


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rates 1,x", "--rates: '1,x' must be numbers above 0"),
        ("--rates 1,0", "--rates: '1,0' must be numbers above 0"),
        ("--rates 2,1,2", "--rates: '2,1,2' must be numbers above 0 by commas, each once"),
        ("--windows 0", "--windows: '0' must be a number of 1 or more"),
        ("--max-tokens 1", "--max-tokens: '1' must be a number of 2 or more"),
        ("--latency-target tftt=1", "--latency-target tftt=1: must be seconds above 0"),
        ("--requests 9999", "--requests 9999 in --windows 1: 9999 prompts, of which there are "),
        ("--clock own --memory 1GiB", "--memory 1GiB: not with --clock own"),
        (
            "--again FOLDER",
            "--again FOLDER: there is no measured.json; name a folder that --record made, with all runs",
        ),
        ("--again FOLDER --windows 2", "--windows: the runs in --again FOLDER are made already; leave it out"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_anything_runs(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        simulated.main(words.replace("FOLDER", str(tmp_path)).split())
    assert said in capsys.readouterr().err.replace(str(tmp_path), "FOLDER")


@pytest.mark.parametrize("clock", ["wall", "own"])
def test_a_real_run_beside_what_is_simulated_of_it(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: str
) -> None:
    """How near they are is a matter of the machine: here only that every figure is there, of both."""
    file, kept = tmp_path / "p.jsonl", tmp_path / "k.json"
    file.write_text("".join(json.dumps({"prompt": f"tell me {i} " * 3}) + "\n" for i in range(6)))
    words = f"--model {tiny_target} --drafter ngram --rates 40,80 --requests 3 --windows 2 --max-tokens 12"
    folder = str(tmp_path / "runs")
    simulated.main([*words.split(), "--prompts", str(file), "--clock", clock, "--record", folder, "--json", str(kept)])
    assert len(Recording.load(tmp_path / "runs" / "80.json").traces) == 6, "of both windows"
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(kept.read_text()) == result
    ways = [(row["rate"], row["way"], row["figure"]) for row in result["rows"]]
    figures = ("tokens_per_s", "good", "ttft", "tpot", "ttft_mean", "tpot_mean")
    assert ways == [(r, way, figure) for r in (40, 80) for way in ("fixed", "off", "planned") for figure in figures]
    timed = [row for row in result["rows"] if row["figure"] != "good"]
    assert all(row["real"] > 0 and row["simulated"] > 0 and len(row["each"]) == 2 for row in timed)
    assert all(row["off_by"] == row["simulated"] / row["real"] - 1 for row in timed)
    shares = [row for row in result["rows"] if row["figure"] == "good"]
    assert all(0 <= row["simulated"] <= 1 and row["off_by"] == row["simulated"] - row["real"] for row in shares)
    assert result["worst"] == max(abs(row["off_by"]) for row in timed)
    assert result["worst_good"] == max(abs(row["off_by"]) for row in shares)
    runs = [(one["rate"], one["window"], one["way"]) for one in result["runs"]]
    turns = ("fixed", "off", "planned"), ("off", "planned", "fixed")
    assert runs == [(r, window, way) for r in (40, 80) for window in (0, 1) for way in turns[window]]
    assert all(one["alone_s"] > 0 for one in result["runs"])
    told = {one["way"]: one["costs_off_by"] for one in result["runs"]}
    assert not told["fixed"], "it is the recorded one"
    assert {"decodes", "prompts"} <= told["off"].keys()
    simulated.main(["--again", folder])
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again.pop("simulated_again")
    assert result.pop("simulated_again") is None
    assert again == result, "nothing is simulated otherwise from files, and what was measured is told of"


WINDOWS = 2
EACH = 3


def recorded() -> Recording:
    """Requests of two windows. Those of the second one are longer, and nobody guesses right for them."""
    recording = made_up(0.0004)
    (trace,) = recording.traces
    first = [replace(trace, output_tokens=20 + i, arrived=0.3 * i) for i in range(EACH)]
    second = [replace(trace, output_tokens=40 + i, arrived=9 + 0.3 * i, offers={}) for i in range(EACH)]
    return replace(recording, traces=(*first, *second))


def runs_of(recording: Recording, way: Speculation) -> list[Any]:
    """As the recorded engine would do it; the first one twice, of which one does not count."""
    found = []
    for window in range(WINDOWS):
        traces = recording.traces[EACH * window :][:EACH]
        coming = [Coming(0.3 * i, t.prompt_tokens, t.output_tokens, i) for i, t in enumerate(traces)]
        served = sorted(simulate(recording, Setting(way, "ngram"), coming, traces), key=lambda one: one.arrived)
        counts = [True] if window else [False, True]
        found += [simulated_held.Run(1.0, window, way, count, 0.2, tuple(served)) for count in counts]
    return found


def test_each_run_is_simulated_with_its_own_requests() -> None:
    recording = recorded()
    runs = [one for way in simulated_held.WAYS for one in runs_of(recording, way)]
    found = simulated_held.held(runs, recording, "ngram", simulated_held.targets_of(runs))
    figures = {(one.way, one.figure): one for one in found}
    for way in ("fixed", "off"):  # a planner has learned from one run by the next
        for figure in ("tokens_per_s", "good", "ttft", "tpot", "ttft_mean", "tpot_mean"):
            assert figures[way, figure].off_by == pytest.approx(0, abs=1e-6), (way, figure)
            assert len(figures[way, figure].each) == WINDOWS
    first, second = figures["fixed", "tpot"].each
    assert second > 2 * first, "or it would not matter whose requests they are"
    assert figures["off", "good"].real == 1


def test_runs_that_are_not_the_recorded_ones_are_refused() -> None:
    recording = recorded()
    runs = [one for way in simulated_held.WAYS for one in runs_of(recording, way)]
    other = replace(recording, traces=(*recording.traces[:-1], replace(recording.traces[-1], output_tokens=7)))
    with pytest.raises(ValueError, match="not those that were recorded"):
        simulated_held.held(runs, other, "ngram", Targets(1, 1))


def test_how_far_off_recorded_costs_are_is_told_by_kind() -> None:
    recording = made_up(0.0, queued=True)
    reading = PassSeen(0, 0, 50, 0, 0.020, 9)
    costs = replace(recording.costs, passes=(*recording.costs.passes, reading), waits=(WaitSeen(1, 1, 0, 0.002, 9),))
    recording = replace(recording, costs=costs)
    own = Costs(
        (PassSeen(1, 1, 0, 100, 0.012, 30), PassSeen(1, 1, 0, 100, 0.006, 10), replace(reading, seconds=0.016)),
        (),
        (HostSeen(1, 0.5, 9),),
        (WaitSeen(1, 1, 0, 0.001, 4),),
    )
    run = simulated_held.Run(1.0, 0, "off", True, 0.2, (Served(0, 1, 1),), own)
    told = RoundCosts(recording.costs, apart=True)
    planning = Planning(0.0005, 0.0005)
    off_by = simulated_held.costs_off_by(run, told, planning)
    assert off_by == pytest.approx({"decodes": 0.4 / 0.42 - 1, "prompts": 0.25, "waits": 1.0}, abs=1e-3)
    assert simulated_held.costs_off_by(replace(run, way="planned"), told, planning)["waits"] == pytest.approx(2.0)
    assert not simulated_held.costs_off_by(replace(run, costs=None), told, planning)
    assert simulated_held.Run.unpacked(run.packed()) == run
