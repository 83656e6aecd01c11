"""tools/curve.py without a GPU: the same command on tiny models, with a vLLM that answers anything at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from transformers import AutoTokenizer

from gpu_bench import (
    WIDE,
    curve,
    curve_peers,
    install_vllm,
    measure_here,
    widen,
    work,
    write_heads,
    write_prompts,
)
from slipstream.core.errors import ConfigError


@pytest.fixture(scope="module")
def small_heads(tmp_path_factory: pytest.TempPathFactory, tiny_draft: Path) -> Path:
    return write_heads(tmp_path_factory.mktemp("heads"), tiny_draft)


class FakeVllm:
    """Answers with ones; every pass after the first of an answer drafts five, of which two stand."""

    opened: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[list[tuple[int, float, int]]] = []  # requests, temperature, tokens wanted

    def __init__(self, **options: Any) -> None:
        FakeVllm.opened.append(options)
        self.options, self.drafts = options, 0

    def get_tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.options["model"])

    def generate(self, prompts: Sequence[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        FakeVllm.asked.append((len(prompts), params.temperature, params.max_tokens))
        self.drafts += len(prompts) * ((params.max_tokens - 1) // 3)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1,) * params.max_tokens)]) for _ in prompts]

    def get_metrics(self) -> list[Any]:
        assert self.options["disable_log_stats"] is False
        named = {"num_drafts": self.drafts, "num_draft_tokens": 5 * self.drafts, "num_accepted_tokens": 2 * self.drafts}
        found = [SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in named.items()]
        stood = [self.drafts, self.drafts, 0, 0, 0]
        found.append(SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=stood))
        others = [SimpleNamespace(name="vllm:time_to_first_token_seconds", buckets={})]
        return others + (found if self.options["speculative_config"] else [])


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> type[FakeVllm]:
    """In this process, where the command would start another one."""
    install_vllm(monkeypatch, FakeVllm)

    def check(script: str, peer_path: str | None, timeout: float) -> None:
        assert (script, peer_path, timeout) == ("curve.py", "site", 240)

    measure_here(monkeypatch, curve, curve_peers, check)
    monkeypatch.setattr(FakeVllm, "opened", [])
    monkeypatch.setattr(FakeVllm, "asked", [])
    return FakeVllm


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """The first lines of a whole file: two prompts of the spread."""
    whole = write_prompts(tmp_path).read_text().splitlines()[:25]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in whole))
    return few


def test_the_whole_command(
    tiny_target: Path,
    small_heads: Path,
    prompts_file: Path,
    fake_vllm: type[FakeVllm],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(widen, "SHAPE", WIDE)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- curve: begin -->\nold\n<!-- curve: end -->\nafter\n")
    result = tmp_path / "found.json"
    words = f"--small {tiny_target} --target {tmp_path / 'big'} --work {tmp_path / 'work'} --heads {small_heads} "
    words += f"--prompts {prompts_file} --max-tokens 7 --sizes 1,3 --repeats 2 --limit 4 --eagle depth=3&width=2 "
    words += f"--peer-path site --device cpu --json {result} --plot {tmp_path / 'curve.svg'}"
    curve.main(words.split())
    printed = capsys.readouterr().out.splitlines()
    found = json.loads(result.read_text())
    assert json.loads(printed[-1]) == found
    assert "failed" not in found, found["failed"]
    assert found["left_out"] == []
    assert found["drafters"] == ["draft", "eagle3", "medusa"]
    modes = ["plain", "eagle3", "eagle3+suffix", "draft", "medusa", "ngram"]
    assert {key: list(part) for key, part in found["curve"].items()} == {"T=0": modes, "T=1": modes}
    assert {size for points in found["curve"]["T=0"].values() for size in points} == {"1", "3"}
    assert {size for points in found["curve"]["T=1"].values() for size in points} == {"1"}
    for temperature, part in found["curve"].items():
        for mode, points in part.items():
            for size, point in points.items():
                where = (temperature, mode, size)
                assert len(point["runs"]) == 2, where
                assert point["answers"] == point["same_as_plain"] == (2 if size == "1" else 6), where
                assert (point["recorded_while_timed"], point["warm_ups"]) == (0, 1), where
                assert point["tau"] >= 1, where
                assert set(point["ms_per_round"]) == {"draft", "verify", "host"}
    assert found["curve"]["T=0"]["plain"]["1"]["tau"] == 1
    assert list(found["alone"]["T=0"]) == list(found["alone"]["T=1"]) == ["plain"]
    assert list(found["fixed"]["T=0"]) == modes[1:]
    assert found["fixed"]["T=0"]["eagle3"]["1"]["drafted_per_round"] > 3, "a tree, not a chain"
    assert found["fixed"]["T=0"]["draft"]["1"]["drafted_per_round"] <= 5
    check_peers(found, fake_vllm, tmp_path, tiny_target)
    shown = "\n".join(printed)
    assert "| vLLM, EAGLE-3 |" in shown
    assert "| EAGLE-3 with suffix |" in shown
    assert "Graphs recorded while it was timed: 0." in shown
    assert (tmp_path / "curve.svg").read_text().count("<polyline") == 8
    curve.main(["--show", str(result), "--into", str(page)])
    text = page.read_text()
    assert text.startswith("before\n<!-- curve: begin -->\n\n`tools/")
    assert text.endswith("<!-- curve: end -->\nafter\n")
    assert "old" not in text


def check_peers(found: dict[str, Any], fake: type[FakeVllm], folder: Path, small: Path) -> None:
    """The small model's acceptance, then plain and eagle3 on the large one, in this order."""
    first, plain, eagle = fake.opened
    assert (first["model"], plain["model"]) == (str(small), str(folder / "big"))
    head = folder / "work" / "small-speculators"
    assert first["speculative_config"] == {"method": "eagle3", "model": str(head), "num_speculative_tokens": 5}
    assert plain["speculative_config"] is None
    assert eagle["speculative_config"]["model"] == str(folder / "work" / "eagle3" / "speculators")
    config = json.loads((head / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["transformer_layer_config"]["model_type"] == "llama"
    sides = found["interchange"]
    assert sides["ours"]["prompts"] == sides["vllm"]["acceptance"]["prompts"] == 4
    assert sides["vllm"]["acceptance"]["tau"] == 4 * 7 / (4 + 4 * 2)
    ratio = sides["vllm"]["acceptance"]["tau"] / sides["ours"]["tau"]
    assert sides["compared"]["tau_ratio"] == pytest.approx(ratio)
    assert sides["compared"]["within_5_percent"] is False
    points = found["vllm"]["eagle3"]
    assert points["version"] == "0.26"
    assert points["T=0"]["3"]["tokens"] == 6 * 7
    assert (points["T=1"]["1"]["tau"], points["T=1"]["1"]["by_position"]) == (14 / (2 + 4), [4, 4, 0, 0, 0])
    assert "tau" not in found["vllm"]["plain"]["T=0"]["1"]
    assert (3, 0.0, 7) in fake.asked
    assert (1, 1.0, 7) in fake.asked


def test_a_second_call_adds_and_makes_nothing_anew(
    tiny_target: Path, small_heads: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widen, "SHAPE", WIDE)
    only = tmp_path / "heads"
    shutil.copytree(small_heads / "medusa", only / "medusa")
    monkeypatch.setattr("sys.argv", ["tools/curve.py"])
    result = tmp_path / "found.json"
    words = f"--small {tiny_target} --target {tmp_path / 'big'} --work {tmp_path / 'work'} --heads {only} --add "
    words += f"--prompts {prompts_file} --max-tokens 4 --sizes 1 --repeats 1 --device cpu --json {result} --parts"
    curve.main([*words.split(), "curve"])
    made = {path: path.stat().st_mtime_ns for name in ("big", "work") for path in (tmp_path / name).rglob("*.*")}
    assert made
    curve.main([*words.split(), "alone,fixed", "--modes", "plain,medusa"])
    assert {path: path.stat().st_mtime_ns for path in made} == made
    found = json.loads(result.read_text())
    assert "failed" not in found
    assert list(found["curve"]["T=0"]) == ["plain", "medusa", "ngram"]
    assert list(found["fixed"]["T=0"]) == ["medusa"]
    assert found["command"] == "tools/curve.py && tools/curve.py", "both calls"


# --- the work ---------------------------------------------------------------------------------------------------------


def test_every_prompt_comes_and_two_batches_at_least() -> None:
    assert work.batches(3, 1) == [[0], [1], [2]]
    assert work.batches(3, 2) == [[0, 1], [2, 0]]
    assert work.batches(3, 4) == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert [len(work.batches(14, size)) for size in work.SIZES] == [14, 7, 4, 2, 2, 2]


def test_runs_in_which_something_was_recorded_do_not_count() -> None:
    graphs = iter([0, 2, 2, 2, 2, 3, 3, 3])  # before and after each run
    runs = iter("wabcd")
    found = work.timed(lambda: next(runs), 2, recorded=lambda: next(graphs))
    assert (found.runs, found.before, found.recorded) == (("b", "d"), 3, 0)


@pytest.mark.parametrize(("drafts", "accepted", "tau"), [(30, 60, 100 / 40), (30, 70, 100 / 40), (10, 20, 100 / 80)])
def test_passes_without_a_draft_are_passes(drafts: int, accepted: int, tau: float) -> None:
    """A hundred tokens of ten prompts: what was not drafted came one by one. More may be accepted than came out."""
    counts = curve_peers.Counts(drafts, 5 * drafts, accepted)
    assert curve_peers.acceptance(counts, 100, 10)["tau"] == pytest.approx(tau)


def test_acceptance_within_five_percent_is_by_guesses_that_stood() -> None:
    assert curve_peers.compared({"tau": 3.0}, {"tau": 2.92})["within_5_percent"]
    found = curve_peers.compared({"tau": 3.0}, {"tau": 2.89})
    assert found["tau_ratio"] > 0.95
    assert found["accepted_ratio"] == pytest.approx(0.945)
    assert not found["within_5_percent"]
    assert not curve_peers.compared({"tau": 1.0}, {"tau": 1.0})["within_5_percent"]


# --- the table --------------------------------------------------------------------------------------------------------


def ours(tok_s: float, tau: float, recorded: int = 0) -> dict[str, Any]:
    return {
        "tok_s": tok_s,
        "tau": tau,
        "alpha": None if tau == 1 else 0.5,
        "ms_per_round": {"draft": 0.5, "verify": 4.0, "host": 0.01},
        "recorded_while_timed": recorded,
        "same_as_plain": 14,
        "answers": 14,
    }


RESULTS: dict[str, Any] = {
    "command": "tools/curve.py",
    "device": "H200",
    "date": "2026-11-15",
    "curve": {"T=0": {"plain": {"1": ours(250, 1), "8": ours(1300, 1)}, "eagle3": {"1": ours(650, 3.5, 1)}}},
    "alone": {"T=0": {"plain": {"1": ours(260, 1)}}},
    "fixed": {"T=0": {"eagle3": {"1": ours(640, 3.6)}}},
    "vllm": {
        "eagle3": {"T=0": {"1": {"tok_s": 400.0, "tau": 2.5, "alpha": 0.3}}},
        "draft": {"failed": "ended with 1: Traceback\nImportError: vllm\n"},
    },
    "interchange": {
        "ours": {"tau": 3.0, "prompts": 480},
        "vllm": {"acceptance": {"tau": 2.98}},
        "compared": {"tau_ratio": 0.993, "accepted_ratio": 0.99, "within_5_percent": True},
    },
    "left_out": ["medusa"],
    "failed": {"curve ngram T=0, 1 at once": "OutOfMemoryError: no"},
}


def test_the_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps(RESULTS))
    curve.main(["--show", str(path)])
    assert [line for line in capsys.readouterr().out.splitlines() if line] == [
        "`tools/curve.py`, H200, 2026-11-15",
        "| tok/s (times our plain), T=0 | 1 at once | 8 at once |",
        "| --- | --- | --- |",
        "| plain | 250 (0.96) | 1,300 (1.00) |",
        "| EAGLE-3 | 650 (2.50) | - |",
        "| vLLM, EAGLE-3 | 400 (1.54) | - |",
        "| one request, T=0 | tau | accepted | draft, ms | verify, ms | host, ms | always drafting, tok/s | its tau |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| plain | 1.00 | - | 0.50 | 4.00 | 0.01 | - | - |",
        "| EAGLE-3 | 3.50 | 50.0% | 0.50 | 4.00 | 0.01 | 640 | 3.60 |",
        "| vLLM, EAGLE-3, chains of 5 | 2.50 | 30.0% | - | - | - | - | - |",
        "Graphs recorded while it was timed: 1.",
        "Answers that are plain decoding's, token by token: 70 of 70.",
        "The same EAGLE-3 head on the small model, chains of 5, 480 prompts: tau 3.000 here, 2.980 in vLLM; "
        "guesses that stood there over here: 0.990, within 5%.",
        "Left out, because their drafters were not there: medusa.",
        "curve ngram T=0, 1 at once failed: OutOfMemoryError: no",
        "vLLM draft failed: ImportError: vllm",
    ]


def test_what_is_asked_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--sizes='1,x': must be numbers from 1 on"):
        curve.sizes("--sizes", "1,x")
    for words, said in (
        (["--parts", "curve,tree"], "'tree' is unknown"),
        (["--sizes", "0"], "--sizes='0'"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl: cannot be read"),
        ([], "--target, --work and --prompts are needed"),
    ):
        with pytest.raises(SystemExit):
            curve.main(words)
        assert said in capsys.readouterr().err
