"""The GPU benchmark without a GPU: its parts, its reports, its peers and its table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from gpu_bench import (
    CPU,
    ROOT_FOLDER,
    FakeClock,
    gpu,
    install_vllm,
    ours,
    peers,
    reports,
    tables,
    write_prompts,
)
from slipstream.core.errors import ConfigError


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


# --- parts, reports, peers --------------------------------------------------------------------------------------------


def test_parts_are_chosen_by_name() -> None:
    assert gpu.chosen("--parts", "peers,tree,tokens,", gpu.PARTS) == ("tokens", "tree", "peers")
    assert gpu.chosen("--parts", gpu.parser().get_default("parts"), gpu.PARTS) == gpu.PARTS
    assert set(gpu.PARTS) == {*ours.PARTS, "peers"}
    with pytest.raises(ConfigError, match=r"--parts='tree,leaf': 'leaf' is unknown; choose from tokens, tree"):
        gpu.chosen("--parts", "tree,leaf", gpu.PARTS)


@pytest.mark.parametrize(
    "wrong", [["--parts", "leaf"], ["--peers", "leaf"], ["--peer-parts", "leaf"], ["--requests", "leaf"]]
)
def test_a_wrong_name_is_refused_before_anything_runs(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--target", "t", "--draft", "d", "--prompts", "p", *wrong])
    assert f"{wrong[0]}='leaf'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["--target", "t"])
    assert "--prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ('{"category": "qa", "turns": ["a"]}\n\n{"turns"', ":3: not JSON"),
        ('{"prompt": "a"}', ":1: needs 'category' and 'turns'"),
    ],
)
def test_prompts_of_another_form_are_refused_before_anything_runs(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        gpu.main(["--target", "t", "--draft", "d", "--prompts", str(file)])
    told = capsys.readouterr().err
    assert f"--prompts {file}" in told
    assert said in told


def test_a_picture_is_refused_where_it_could_not_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        gpu.main(["--plot", "p.png", "--show", "results.json"])
    assert "--plot: needs matplotlib" in capsys.readouterr().err


def test_a_shown_file_is_drawn_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[tuple[Any, Path]] = []
    monkeypatch.setattr(gpu, "find_spec", lambda _: True)
    monkeypatch.setattr(tables, "plot", lambda *given: drawn.append(given))
    results, picture = tmp_path / "results.json", tmp_path / "p.png"
    results.write_text('{"ours": {}}')
    gpu.main(["--show", str(results), "--plot", str(picture)])
    assert drawn == [({"ours": {}}, picture)]


def test_a_part_that_fails_costs_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    report = reports.Report({}, path)
    with report.part("first"):
        report.put(1, "a", "b")
    with report.part("second"):
        report.put(2, "a", "c")
        assert json.loads(path.read_text())["a"] == {"b": 1, "c": 2}, "at once"
        raise ValueError("no room")
    with pytest.raises(KeyboardInterrupt), report.part("third"):
        raise KeyboardInterrupt
    found = json.loads(path.read_text())
    assert found["failed"] == {"second": "ValueError: no room"}
    assert list(found["seconds"]) == ["first", "second", "third"]
    assert "no room" in capsys.readouterr().err
    with report.part("second"):
        pass
    assert json.loads(path.read_text())["failed"] == {}


def test_what_peers_are_asked_for() -> None:
    found = peers.tasks(("plain", "ngram"), ("tokens", "prefill", "small"), "big", "tiny", "d", Path("p"), 9)
    assert {name: (task.mode, task.model, task.parts) for name, task in found.items()} == {
        "plain": ("plain", "big", ("tokens", "prefill")),
        "ngram": ("ngram", "big", ("tokens",)),
        "small": ("plain", "tiny", ("tokens",)),
    }
    assert list(peers.tasks(("plain", "ngram"), ("prefill",), "big", "tiny", "d", Path("p"), 9)) == ["plain"]
    assert list(peers.tasks(("draft",), ("tokens", "small"), "big", None, "d", Path("p"), 9)) == ["draft"]
    assert list(peers.tasks(("plain",), ("small",), "big", "tiny", "d", Path("p"), 9)) == ["small"]
    assert not peers.tasks((), ("tokens", "prefill", "small"), "big", "tiny", "d", Path("p"), 9)
    options = gpu.parser().parse_args(found["plain"].arguments)
    assert (options.as_peer, options.target, options.max_tokens) == ("plain", "big", 9)
    assert options.peer_parts == "tokens,prefill"


def test_a_peer_does_the_same_work(
    tiny_target: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its process does, with a vLLM that answers anything at once."""
    opened: list[dict[str, Any]] = []
    asked: list[tuple[int, int, int]] = []  # prompts, tokens of the first, tokens wanted

    class FakeVllm:
        def __init__(self, **options: Any) -> None:
            opened.append(options)

        def get_tokenizer(self) -> Any:
            return AutoTokenizer.from_pretrained(tiny_target)

        def generate(self, prompts: Sequence[Any], params: Any, use_tqdm: bool) -> list[Any]:
            asked.append((len(prompts), len(prompts[0]["prompt_token_ids"]), params.max_tokens))
            answer = SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1,) * params.max_tokens)])
            return [answer for _ in prompts]

    install_vllm(monkeypatch, FakeVllm)
    (task,) = peers.tasks(("plain",), ("tokens", "prefill"), str(tiny_target), None, "d", prompts_file, 9).values()
    gpu.main(task.arguments)
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert "prefill" not in first
    assert first["tokens"] == 8 * 9
    assert {"start", "tok_s@1", "tok_s@8", "tok_s@32", "prefill"} <= set(last)
    assert last["version"] == "0.26"
    assert (last["prefill"]["tokens"], last["prefill"]["first_tokens"]) == (255, 255)
    assert (opened[0]["max_model_len"], opened[0]["speculative_config"]) == (256, None)
    assert opened[0]["enable_prefix_caching"] is False
    assert asked.count((1, 255, 1)) == 12
    assert [wanted for count, _, wanted in asked if count == 32] == [9] * 4
    gpu.main(peers.PeerTask("draft", str(tiny_target), "d", prompts_file, 9, ("tokens",)).arguments)
    assert opened[1]["speculative_config"] == {"method": "draft_model", "model": "d", "num_speculative_tokens": 5}


def test_the_last_line_of_a_peer_counts_however_it_ends() -> None:
    code = "import sys; print('{\"a\": 1}'); print('noise'); print('{\"a\": 2}'); sys.exit({})"
    assert peers.last_words([sys.executable, "-c", code.replace("{}", "0")], {}, 60) == {"a": 2}
    failed = peers.last_words([sys.executable, "-c", code.replace("{}", "'out of memory'")], {}, 60)
    assert failed == {"a": 2, "failed": "ended with 1: out of memory\n"}
    assert peers.last_words([sys.executable, "-c", "print('hm')"], {}, 60) == {"failed": "said nothing: hm\n"}


def test_a_peer_that_hangs_is_ended_with_all_its_children() -> None:
    hanging = ["sh", "-c", """tail -f /dev/null & echo '{"child":' $!'}'; tail -f /dev/null"""]
    found = peers.last_words(hanging, {"PATH": "/usr/bin:/bin"}, 1.0)
    assert found["failed"].startswith("did not end within 1 s")
    deadline = time.monotonic() + 30
    while runs(found["child"]):
        assert time.monotonic() < deadline


def runs(process: int) -> bool:
    """Does it run? Nobody may be there to bury it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ours_from_end_to_end(
    tiny_target: Path, tiny_draft: Path, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part that a CPU can do, on tiny models."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in prompts_file.read_text().splitlines()[:25]))
    parts = ("tokens", "tree", "small", "long", "heads", "sampling", "prefill")
    plan = ours.Plan(str(tiny_target), str(tiny_draft), str(tiny_draft), few, 3, CPU, parts)
    report = reports.Report({}, tmp_path / "results.json")
    ours.measure(plan, report, FakeClock())
    found = json.loads((tmp_path / "results.json").read_text())
    assert "failed" not in found
    assert set(parts) <= set(found["seconds"])
    assert list(found["ours"]) == ["plain", "ngram", "model", "deep"]
    assert all(mode["same_as_plain"] == 2 for name, mode in found["ours"].items() if name != "plain")
    assert found["ours"]["plain"]["tokens"] == found["ours"]["plain"]["rounds"] <= 6
    assert list(found["small"]) == ["plain"]
    assert found["tree"]["context"] == 192, "as far as the model goes"
    assert [step["context"] for step in found["long"]] == [8000, 32000]
    assert found["heads"]["nodes"] == found["heads_fp8"]["nodes"] == 63
    assert [step["vocab_size"] for step in found["sampling"]] == [300, 151936]
    assert (found["prefill"]["tokens"], found["prefill"]["first_tokens"]) == (255, 255)
    assert len(found["starts"]) == 2
    table = tables.markdown(found)
    assert "failed" not in table
    assert table.count("\n") == 1 + 12 + 3 + 6 + 2 + 3 + 3 + 6 + 2 + 2


# --- the table --------------------------------------------------------------------------------------------------------

RESULTS: dict[str, Any] = {
    "ours": {"plain": {"tok_s@1": 240.0, "tok_s@8": 1200.0}, "ngram": {"tok_s@1": 400.0}},
    "small": {"plain": {"tok_s@1": 1281.0}},
    "vllm": {
        "plain": {
            "tok_s@1": 200.0,
            "start": {"open_s": 50.0, "first_token_s": 1.0},
            "prefill": {"tokens": 8000, "tok_s": 40_000.0, "first_tokens": 1024, "first_ms": 30.0},
        },
        "ngram": {"tok_s@1": 200.0},
        "ngram_gpu": {"tok_s@1": 250.0},
        "draft": {"failed": "ended with 1: Traceback\nImportError: vllm"},
        "small": {"tok_s@1": 427.0},
    },
    "prefill": {"tokens": 8000, "tok_s": 50_000.0, "first_tokens": 1024, "first_ms": 20.0},
    "starts": [{"open_s": 16.0, "first_token_s": 1.0}, {"open_s": 8.0, "first_token_s": 2.2}],
    "idle": {"plain": 0.0123, "model": None},
    "idle_in_a_crowd": {"plain": 0.02},
    "failed": {"long": "OutOfMemoryError: no"},
}


def test_the_table_says_how_many_times_better() -> None:
    assert tables.markdown(RESULTS).splitlines() == [
        "|  | ours | vLLM | times better |",
        "| --- | --- | --- | --- |",
        "| plain, 1 at once, tok/s | 240 | 200 | 1.20 |",
        "| plain, 8 at once, tok/s | 1,200 | - | - |",
        "| n-gram, 1 at once, tok/s | 400 | 250 | 1.60 |",
        "| small model, plain, 1 at once, tok/s | 1,281 | 427 | 3.00 |",
        "| prompt of 8,000 tokens, tok/s | 50,000 | 40,000 | 1.25 |",
        "| first token after 1,024, ms | 20.0 | 30.0 | 1.50 |",
        "| start to first token, s | 17.0 | 51.0 | 3.00 |",
        "| the same, opened again, s | 10.2 | 51.0 | 5.00 |",
        "| device idle, plain, % | 1.2 | - | - |",
        "| device idle, plain, 32 at once, % | 2.0 | - | - |",
        "",
        "long failed: OutOfMemoryError: no",
        "",
        "vLLM draft failed: ImportError: vllm",
    ]


def test_kernels_have_a_table_for_each_work() -> None:
    found = {
        "plain step": [
            {"name": "product", "launches": 64.0, "us": 750.0},
            {"name": "norm", "launches": 1.5, "us": 250.0},
        ]
    }
    assert tables.kernel_lines(found) == [
        "",
        "**plain step**: 1.000 ms",
        "",
        "| kernel | launches | us | % |",
        "|---|---|---|---|",
        "| `product` | 64 | 750.0 | 75.0 |",
        "| `norm` | 1.5 | 250.0 | 25.0 |",
    ]


def test_passes_in_the_table() -> None:
    results = {
        "tree": {
            "context": 300,
            "rows_ms": {"1": 3.9},
            "tree_rows": 64,
            "tree_ms": 4.1,
            "tree_over_plain": 1.0513,
            "step_over_bytes": 1.2,
        },
        "long": [{"context": 32000, "ms": 5.0, "over_bytes": 1.31}],
        "heads": {"depth": 6, "nodes": 63, "ms": {"1": 1.5}, "over_bytes": 1.25},
        "sampling": [{"vocab_size": 151936, "ms": {"greedy": 4.0, "T=1": 4.1}, "over_greedy": {"T=1": 1.025}}],
    }
    assert [(row.what, row.ours) for row in tables.rows_of(results)] == [
        ("pass over 1 rows, a request each, at 300 tokens, ms", "3.900"),
        ("pass over a tree of 64 rows, at 300 tokens, ms", "4.100 (1.051 plain steps)"),
        ("plain step over its bytes at copy bandwidth", "1.200"),
        ("step at 32,000 tokens, ms", "5.000 (1.310 times its bytes)"),
        ("draft of an EAGLE-3 head, depth 6, 63 nodes, 1 at once, ms", "1.500"),
        ("draft of an EAGLE-3 head, depth 6, 63 nodes, over its bytes at copy bandwidth", "1.250"),
        ("step with its choice, greedy, 151,936 tokens to choose from, ms", "4.000"),
        ("step with its choice, T=1, 151,936 tokens to choose from, ms", "4.100 (1.025 greedy steps)"),
    ]


def test_an_old_file_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--show", str(ROOT_FOLDER / "docs" / "results" / "h200-2026-11-15.json")])
    shown = capsys.readouterr().out
    assert "| plain, 32 at once, tok/s | 4,059 | 3,678 | 1.10 |" in shown
    assert "| small model, plain, 8 at once, tok/s | 5,341 | - | - |" in shown


def test_a_command_names_no_folders() -> None:
    given = ["/home/me/bench/gpu.py", "--target", "/models/big", "--parts", "tokens,tree", "--add"]
    assert gpu.command_line(given) == "bench/gpu.py --target big --parts tokens,tree --add"
    given = ["bench/cells.py", "--cells", "qa x4,rag x1", "--sampled-sizes", ""]
    assert gpu.command_line(given) == "bench/cells.py --cells 'qa x4,rag x1' --sampled-sizes ''", "can be given again"


def test_results_are_added_to_a_file_only_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"command": "first", "tree": {"tree_ms": 1}}))
    common = ["--json", str(path), "--device", "cpu"]
    assert "tree" not in gpu.first_results(gpu.parser().parse_args(common))
    kept = gpu.first_results(gpu.parser().parse_args([*common, "--add"]))
    assert kept["tree"] == {"tree_ms": 1}
    assert kept["command"].startswith("first && ")
