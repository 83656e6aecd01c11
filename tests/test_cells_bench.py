"""tools/cells.py without a GPU: the same command on tiny models, with a vLLM that gives a token a step."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from transformers import AutoTokenizer

from conftest import VOCAB
from gpu_bench import (
    WIDE,
    cells,
    cells_ours,
    cells_peers,
    cells_work,
    install_vllm,
    measure_here,
    widen,
    write_heads,
)
from slipstream.core.errors import InvalidRequest
from slipstream.drafters.suffix import SuffixDrafter

Beat, Cell = cells_work.Beat, cells_work.Cell
SETTINGS = ["plain", "auto", "eagle3", "eagle3-3", "suffix", "eagle3+suffix", "draft", "medusa", "ngram"]


@pytest.fixture(scope="module")
def small_heads(tmp_path_factory: pytest.TempPathFactory, tiny_draft: Path) -> Path:
    return write_heads(tmp_path_factory.mktemp("heads"), tiny_draft)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """Two tasks, of which one has long prompts."""
    rows = [{"category": "math", "turns": [f"What is {i} and {i}?"]} for i in range(3)]
    rows += [{"category": "rag", "turns": [f"{i}: " + "the sea is wide and deep, " * 12]} for i in range(3)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class FakeVllm:
    """Every request gets a token a step, two where something is guessed, as long as it may."""

    opened: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any) -> None:
        FakeVllm.opened.append(options)
        self.options, self.llm_engine = options, self
        self.running: dict[str, int] = {}
        self.names: list[str] = []
        self.most = 0

    def get_tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.options["model"])

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> str:
        assert name not in self.names
        assert params.output_kind == "delta"
        assert len(prompt["prompt_token_ids"]) + params.max_tokens < self.options["max_model_len"]
        self.names.append(name)
        self.running[name] = params.max_tokens
        self.most = max(self.most, len(self.running))
        return name

    def step(self) -> list[Any]:
        each = 2 if self.options["speculative_config"] else 1
        found = []
        for name in list(self.running):
            self.running[name] -= each
            finished = self.running[name] <= 0
            found.append(
                SimpleNamespace(request_id=name, finished=finished, outputs=[SimpleNamespace(token_ids=(1,) * each)])
            )
            if finished:
                del self.running[name]
        return found

    def abort_request(self, names: Sequence[str]) -> None:
        assert set(names) == set(self.running)
        self.running.clear()

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> type[FakeVllm]:
    """In this process, where the command would start another one."""
    install_vllm(monkeypatch, FakeVllm)
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)

    def check(script: str, peer_path: str | None, timeout: float) -> None:
        assert script == "cells.py"

    measure_here(monkeypatch, cells, cells_peers, check)
    monkeypatch.setattr(FakeVllm, "opened", [])
    return FakeVllm


def test_the_whole_command(
    tiny_target: Path,
    small_heads: Path,
    prompts_file: Path,
    fake_vllm: type[FakeVllm],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A widened target in queued rounds, as on a GPU."""
    monkeypatch.setattr(widen, "SHAPE", WIDE)
    result = tmp_path / "found.json"
    words = f"--small {tiny_target} --target {tmp_path / 'big'} --work {tmp_path / 'work'} --heads {small_heads} "
    words += (
        f"--prompts {prompts_file} --max-tokens 12 --at-once 1,3 --temperatures 0,1 --seconds 0.02,0.01 --repeats 2 "
    )
    words += f"--trial-seconds 0.02 --trials 1,2 --phase 10 --eagle depth=3&width=2 --settings {','.join(SETTINGS)} "
    words += f"--parts cells,adversaries,switches,peers --device cpu --rounds queued --json {result}"
    words += f" --rounds-to {tmp_path / 'rounds.jsonl'}"
    cells.main([*words.split(), "--cells", "multi_turn x1 T=0,rag x3 T=1"])
    printed = capsys.readouterr().out.splitlines()
    found = json.loads(result.read_text())
    assert json.loads(printed[-1]) == found
    assert "failed" not in found, found["failed"]
    assert (found["left_out"], found["cells_left"], found["auto"]) == ([], [], ["suffix"])
    names = ["multi_turn x1 T=0", "rag x3 T=1"]
    assert list(found["cells"]) == names
    for name, settings in found["cells"].items():
        assert list(settings) == SETTINGS, name
        for setting, point in settings.items():
            assert len(point["runs"]) == 2, (name, setting)
            assert point["rounds"] >= 2 * cells_work.FEW, (name, setting)
            assert point["tok_s"] > 0
            assert point["tau"] >= 1, (name, setting)
            assert [part > 0 for part in point["parts_ms"]][2:] == [True], (name, setting)
        assert settings["plain"]["tau"] == 1.0, name
        assert settings["plain"]["drafted_per_turn"] == 0.0, name
        assert settings["eagle3"]["drafted_per_turn"] > 3, "a tree in every round, whatever the planner thinks of it"
        assert 0 < settings["eagle3-3"]["drafted_per_turn"] <= 3, name
    kept = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    trials = {(f"adversaries x{n}", who) for n in (1, 2) for who in ("plain", "wrong", "slow", "alternating")}
    assert {(one["cell"], one["setting"]) for one in kept} == trials | {
        (name, setting) for name in names for setting in SETTINGS
    }
    assert all(len(row) == len(one["columns"]) for one in kept for row in one["rounds"])
    assert list(found["adversaries"]) == ["1", "2"]
    assert list(found["adversaries"]["2"]) == ["plain", "wrong", "slow", "alternating"]
    assert found["adversaries"]["1"]["wrong"]["tau"] == 1.0
    assert list(found["switches"]) == [
        "echoing, surprising, echoing; 1 at once",
        "echoing, surprising, echoing; 2 at once",
        "1, 2, 1 at once",
    ]
    assert all(len(part["levels"]) == 3 and len(part["rounds"]) == 2 for part in found["switches"].values())
    assert list(found["vllm"]) == ["plain", "eagle3", "ngram"]
    assert list(found["vllm"]["plain"]["cells"]) == names
    assert [found["vllm"][mode]["cells"]["rag x3 T=1"]["tau"] for mode in found["vllm"]] == [1.0, 2.0, 2.0]
    assert [options["enable_prefix_caching"] for options in fake_vllm.opened] == [True] * 3
    assert fake_vllm.opened[1]["speculative_config"]["model"] == str(tmp_path / "work" / "eagle3" / "speculators")
    shown = "\n".join(printed)
    assert "| cell | plain, tok/s | best fixed |" in shown
    assert "2 cells. auto / plain is" in shown
    assert "| drafter: slow |" in shown


def test_a_small_model_on_a_cpu_and_a_call_that_goes_on(
    tiny_target: Path,
    prompts_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["tools/cells.py"])
    result = tmp_path / "found.json"
    words = f"--small {tiny_target} --prompts {prompts_file} --max-tokens 8 --seconds 0.01 --repeats 1 --device cpu "
    words += f"--parts cells --clock own --json {result} --add"
    cells.main([*words.split(), "--budget", "0"])
    assert "no time for 4 cells" in capsys.readouterr().out
    assert "cells" not in json.loads(result.read_text())
    cells.main([*words.split(), "--cells", "x1"])
    found = json.loads(result.read_text())
    assert list(found["cells"]) == ["multi_turn x1 T=0", "rag x1 T=0"]
    assert list(found["cells"]["rag x1 T=0"]) == ["plain", "auto", "suffix", "ngram"]
    asked: list[str] = []
    measure = cells_ours.Bench.measure

    def noted(self: Any, mode: Any, cell: Any, *others: Any) -> Any:
        asked.append(cell.name)
        return measure(self, mode, cell, *others)

    monkeypatch.setattr(cells_ours.Bench, "measure", noted)
    cells.main(words.split())
    assert set(asked) == {"multi_turn x4 T=0", "rag x4 T=0"}, "the others are there already"
    again = json.loads(result.read_text())
    assert again["cells"]["rag x1 T=0"] == found["cells"]["rag x1 T=0"]
    assert len(again["cells"]) == 4
    assert again["command"].count("&&") == 2


def test_settings_are_measured_in_one_engine_and_leave_its_planner(tiny_target: Path) -> None:
    from slipstream import LLM
    from slipstream.plan.planner import AdaptivePlanner

    with LLM(str(tiny_target), drafter=["auto", "ngram"], memory="64MiB", max_model_len=128) as llm:
        bench = cells_ours.Bench(llm, "auto")
        prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8]]
        by_name = {mode.name: mode for mode in cells_ours.SETTINGS}
        seen = {
            name: bench.measure(by_name[name], Cell("t", 2, 0.0), prompts, 40, 0.01)
            for name in ("plain", "suffix", "ngram", "auto")
        }
        drafted = {name: sum(span.beat.drafted for span in one.spans) for name, one in seen.items()}
        assert drafted["plain"] == 0 < drafted["suffix"]
        assert isinstance(llm.engine.drafting.planner, AdaptivePlanner)
        assert llm.engine.drafting.planner is bench.planner
        assert llm.engine.listener is None
        assert not llm.engine.busy
        with_sizes = [by_name["suffix"], replace(by_name["suffix"], name="s-40", draft_tokens=40)]
        assert bench.distinct(with_sizes, 1) == {"suffix": "suffix", "s-40": "s-40"}
        assert bench.distinct(with_sizes, 16) == {"suffix": "suffix", "s-40": "suffix"}, "15 nodes are what fits"
        suffix = llm.engine.drafting.drafters["suffix"]
        assert isinstance(suffix, SuffixDrafter)
        assert suffix.store.tokens == 0, "no answer is remembered"
        with pytest.raises(InvalidRequest, match="token"):
            bench.window(lambda _: ([VOCAB + 5], bench.params(by_name["plain"], 0.0, 0, 5)), 1, 0.01)
        assert not llm.engine.busy


def test_prompts_are_read_for_all_drafters(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for one that the planner leaves out: or whoever is measured first with it pays for the others."""
    from slipstream import LLM

    spec = f"model:{tiny_target}"
    with LLM(str(tiny_target), drafter=[f"auto+{spec}"], memory="64MiB", max_model_len=128, rounds="queued") as llm:
        monkeypatch.setattr(llm.engine.drafting.planner, "follows", lambda drafter: False)
        bench, prompt = cells_ours.Bench(llm, f"auto+{spec}"), [5, 6, 7] * 20
        bench.read([prompt])
        known = []
        monkeypatch.setattr(
            type(llm.engine.backend.prefix_readers), "_resume", lambda _, answer, name, count: known.append(count)
        )
        bench.read([prompt])
        assert known == [48], "all whole pages but that of the last token"


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_a_window_begins_when_all_decode_and_leaves_recording_out() -> None:
    beats = [Beat(0.0, 1, 1), Beat(1.0, 2, 2)]
    beats += [Beat(2.0 + i, 2, 4, drafted=6, read_rows=5 * (i == 3)) for i in range(10)]
    beats += [Beat(20.0, 2, 4, recorded=3, recording_s=7.0)]
    found = cells_work.window(beats, 2)
    assert (found.tokens, len(found.spans), found.recorded) == (44, 11, 3)
    assert found.seconds == 19.0 - 7.0
    with pytest.raises(ValueError, match="more --seconds"):
        cells_work.window(beats[:6], 2)
    told = cells_work.point([found, found])
    assert (told["tok_s"], told["tau"], told["drafted_per_turn"], told["rounds"]) == (44 / 12, 2.0, 60 / 22, 22)
    assert told["decode_tok_s"] == 40 / 11
    stalled = [Beat(float(i) + 50 * (i > 5), 1, 3) for i in range(12)]
    told = cells_work.point([cells_work.window(stalled, 1)])
    assert told["steady_tok_s"] == 3.0 > 2 * told["tok_s"], "a stall is not the setting's"


def beats_of(gaps: list[tuple[float, float, float]]) -> list[Any]:
    """gaps: seconds from beat to beat, what the process computed, and the device in the round that ends then."""
    at = cpu_s = 0.0
    beats = [Beat(0.0, 1, 1, cpu_s=0.0)]
    for gap, computed, on_device in gaps:
        at, cpu_s = at + gap, cpu_s + computed
        beats.append(Beat(at, 1, 1, parts_s=(0.0, 0.0, on_device), cpu_s=cpu_s))
    return beats


def test_time_that_a_machine_gives_nobody_is_not_the_settings() -> None:
    usual = (0.005, 0.005, 0.0045)
    found = cells_work.window(beats_of([usual] * 6 + [(0.065, 0.006, 0.0045)] + [usual] * 6), 1)
    assert found.withheld == [pytest.approx(0.059)]
    assert found.seconds == pytest.approx(12 * 0.005 + 0.006)
    assert cells_work.point([found])["withheld_ms"] == [59.0]


@pytest.mark.parametrize(
    "gaps",
    [
        [(0.065, 0.064, 0.0045)],  # the host computed: it may have looked for garbage
        [(0.065, 0.006, 0.064)],  # the device did: it may have read a prompt
        [(0.065, 0.006, 0.0045), (0.005, 0.005, 0.0045), (0.005, 0.005, 0.064)],  # … of which the host heard later
        [(0.025, 0.005, 0.0045)],
    ],
)
def test_what_somebody_computed_counts(gaps: list[tuple[float, float, float]]) -> None:
    usual = [(0.005, 0.005, 0.0045)] * 6
    found = cells_work.window(beats_of([*usual, *gaps, *usual]), 1)
    assert not found.withheld
    assert found.seconds == pytest.approx(12 * 0.005 + sum(gap for gap, _, _ in gaps))


def test_settings_come_in_turn_and_what_recorded_much_again() -> None:
    asked: list[str] = []

    def measure(name: str) -> Any:
        asked.append(name)
        recorded = 9 if asked.count("b") < 3 and name == "b" else 0
        return cells_work.Window((cells_work.Span(1.0, Beat(0.0, 1, 10 * len(asked), read_rows=1)),), recorded)

    found = cells_work.side_by_side("abcd", measure, 2)
    assert asked == ["a", "b", "b", "b", "c", "d", "c", "d", "a", "b"]
    assert found["b"]["runs"] == [40.0, 100.0]
    assert found["b"]["decode_tok_s"] is None


def test_prompts_are_cut_in_the_middle(tiny_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    text = "begin " + "x" * 300 + " end"
    whole = cells_work.shortened(tokenizer, text, 1000)
    short = cells_work.shortened(tokenizer, text, 60)
    assert len(whole) > 300
    assert 50 <= len(short) <= 60
    said = tokenizer.decode(short)
    assert "begin" in said
    assert said.count("end") == 1
    assert short[-1] == whole[-1], "the answer begins where it began"
    assert cells_work.longest_of(64, 4000) < cells_work.longest_of(4, 4000)
    prompts = cells_work.prompts_of(tokenizer, [f"{i}" for i in range(80)], 64, 200, 16)
    assert len(prompts) == 64
    assert len(cells_work.prompts_of(tokenizer, [f"{i}" for i in range(80)], 4, 200, 16)) == 16


# --- the tables -------------------------------------------------------------------------------------------------------


def rates(**tok_s: float) -> dict[str, dict[str, float]]:
    return {name: {"tok_s": rate, "tau": 1.5} for name, rate in tok_s.items()}


RESULTS: dict[str, Any] = {
    "command": "tools/cells.py",
    "device": "H200",
    "date": "2026-11-15",
    "on": "cuda",
    "cells": {
        "qa x1 T=0": rates(plain=100, auto=390, eagle3=400, suffix=190),
        "rag x64 T=0": rates(plain=400, auto=388, eagle3=80, suffix=200),
        "rag x64 T=1": rates(plain=400),
    },
    "adversaries": {"1": rates(plain=100, wrong=98, slow=96)},
    "switches": {
        "1, 64, 1 at once": {"levels": [6.0, 0.5, 6.0], "rounds": [4, None]},
        "echoing, surprising, echoing; 64 at once": {"levels": [3.0, 0.0, 0.0], "rounds": [20, 50]},
    },
    "vllm": {"plain": {"cells": {"qa x1 T=0": {"tok_s": 195.0}}}, "eagle3": {"failed": "died\nImportError: vllm"}},
    "failed": {"cell rag x64 T=1": "RuntimeError: no"},
}


def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps(RESULTS))
    cells.main(["--show", str(path)])
    assert [line for line in capsys.readouterr().out.splitlines() if line] == [
        "`tools/cells.py`, H200, 2026-11-15",
        "| cell | plain, tok/s | best fixed | tok/s | auto, tok/s | its tau | auto / plain | auto / best |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| qa x1 T=0 | 100 | eagle3 | 400 | 390 | 1.50 | 3.900 | 0.975 |",
        "| rag x64 T=0 | 400 | plain | 400 | 388 | 1.50 | **0.970** | 0.970 |",
        "| times plain, mean over tasks | x1 T=0 | x64 T=0 |",
        "| --- | --- | --- |",
        "| auto | 3.90 | 0.97 |",
        "| eagle3 | 4.00 | 0.20 |",
        "| suffix | 1.90 | 0.50 |",
        "2 cells. auto / plain is 0.970 at the least (bar 0.98), auto / best 0.970 (bar 0.93). Geometric means, tok/s: "
        "best single setting (plain) 200.0, auto 389.0, best of each cell 400.0: auto is 94% of the way (bar 90%).",
        "| times plain, at once | 1 |",
        "| --- | --- |",
        "| drafter: wrong | 0.980 |",
        "| drafter: slow | **0.960** |",
        "| change | nodes of a request, phase by phase | rounds until followed (bar 20) |",
        "| --- | --- | --- |",
        "| 1, 64, 1 at once | 6 → 0.5 → 6 | 4, no change |",
        "| echoing, surprising, echoing; 64 at once | 3 → 0 → 0 | 20, **50** |",
        "| tok/s | auto | vLLM, plain | auto / best of vLLM |",
        "| --- | --- | --- | --- |",
        "| qa x1 T=0 | 390 | 195 | 2.00 |",
        "auto over the best of vLLM's settings in each cell: 2.00 in the mean.",
        "cell rag x64 T=1 failed: RuntimeError: no",
        "vLLM eagle3 failed: ImportError: vllm",
    ]
    assert cells.verdict({}) is None
    alike = cells.verdict({"c": {"plain": 5.0, "auto": 5.0}})
    assert alike is not None
    assert alike.of_the_way is None


def test_what_is_asked_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--parts", "cells,tree"], "'tree' is unknown"),
        (["--settings", "plain,fast"], "'fast' is unknown"),
        (["--at-once", "0"], "--at-once='0'"),
        (["--temperatures", "warm"], "--temperatures='warm'"),
        (["--at-once", "1,4,16", "--seconds", "2,1"], "--seconds='2,1': must be one number above 0"),
        (["--seconds", "0"], "--seconds='0'"),
        (["--cells", "x3"], "none is called so"),
        (["--target", "big"], "--target needs --work"),
        (["--clock", "own"], "only for --device cpu"),
    ):
        with pytest.raises(SystemExit):
            cells.main(words)
        assert said in capsys.readouterr().err
