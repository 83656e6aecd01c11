"""The commands of tools/ that measure: what they count, on tiny models and on texts known by heart."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import inside
from bench_scripts import acceptance, beside, exact, figures, http_cost, shapes
from conftest import save_model, tiny_llama
from gpu_bench import cells, cells_ours, curve, kernels, results, vllm_peer, work, write_prompts
from medusa_checkpoints import knowing_medusa
from serving import engine_process, serving
from slipstream import LLM
from slipstream.bench.run import Answer, Measured
from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import DraftRequest


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


def test_the_spread_is_four_of_the_multi_turn_group_and_two_of_each_other(prompts_file: Path) -> None:
    assert work.spread(prompts_file) == [
        *("coding 0?", "humanities 20?", "reasoning 40?", "stem 60?"),
        *("qa 83?", "qa 110?", "rag 163?", "rag 190?"),
    ]


def test_prompts_are_encoded_as_a_chat_and_cut(tiny_target: Path, prompts_file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    ids = work.encode(tokenizer, "Hi")
    assert tokenizer.decode(ids) == "<|user|>Hi\n<|assistant|>"
    assert work.encode(tokenizer, "Hi", 2) == ids[:2]
    assert {len(ids) for ids in work.prompts_for(tokenizer, prompts_file, context=10, max_tokens=4)} == {5}


def test_names_and_numbers_of_lists() -> None:
    known = ("tokens", "tree", "peers")
    assert results.chosen("--parts", "peers,tree,tokens,", known) == known
    with pytest.raises(ConfigError, match=r"--parts='tree,leaf': 'leaf' is unknown; choose from tokens, tree"):
        results.chosen("--parts", "tree,leaf", known)
    assert results.sizes("--sizes", "8,1,8") == (1, 8)
    with pytest.raises(ConfigError, match=r"--sizes='0': must be numbers from 1 on"):
        results.sizes("--sizes", "0")


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
        curve.main(["--target", "t", "--work", "w", "--prompts", str(file)])
    told = capsys.readouterr().err
    assert f"--prompts {file}" in told
    assert said in told


def test_a_part_that_fails_costs_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    report = results.Report({}, path)
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


def test_the_last_line_of_a_peer_counts_however_it_ends() -> None:
    code = "import sys; print('{\"a\": 1}'); print('noise'); print('{\"a\": 2}'); sys.exit({})"
    assert vllm_peer.last_words([sys.executable, "-c", code.replace("{}", "0")], {}, 60) == {"a": 2}
    failed = vllm_peer.last_words([sys.executable, "-c", code.replace("{}", "'out of memory'")], {}, 60)
    assert failed == {"a": 2, "failed": "ended with 1: out of memory\n"}
    assert vllm_peer.last_words([sys.executable, "-c", "print('hm')"], {}, 60) == {"failed": "said nothing: hm\n"}


def test_a_peer_that_hangs_is_ended_with_all_its_children() -> None:
    hanging = ["sh", "-c", """tail -f /dev/null & echo '{"child":' $!'}'; tail -f /dev/null"""]
    found = vllm_peer.last_words(hanging, {"PATH": "/usr/bin:/bin"}, 1.0)
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


def test_a_command_names_no_folders() -> None:
    given = ["/home/me/tools/kernel_table.py", "--target", "/models/big", "--parts", "tokens,tree", "--add"]
    assert results.command_line(given) == "tools/kernel_table.py --target big --parts tokens,tree --add"
    given = ["tools/cells.py", "--cells", "qa x4,rag x1", "--sampled-sizes", ""]
    assert results.command_line(given) == "tools/cells.py --cells 'qa x4,rag x1' --sampled-sizes ''", (
        "can be given again"
    )


def test_results_are_added_to_a_file_only_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"command": "first", "tree": {"tree_ms": 1}}))
    common = ["--json", str(path), "--device", "cpu"]
    assert "tree" not in results.first_results(curve.parser().parse_args(common))
    kept = results.first_results(curve.parser().parse_args([*common, "--add"]))
    assert kept["tree"] == {"tree_ms": 1}
    assert kept["command"].startswith("first && ")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    lines = [{"question_id": i, "category": "math" if i % 3 else "qa", "turns": [f"Ask {i}", "no"]} for i in range(7)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_tau_by_task_and_temperature(
    tiny_target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = knowing_medusa(tmp_path / "heads", tiny_target)
    words = f"--model {tiny_target} --drafter medusa:{heads} ngram --prompts {prompts} --device cpu --max-tokens 24"
    words += f" --draft-tokens 12 --at-once 4 --memory 64MiB --json {tmp_path / 'found.json'}"
    acceptance.main(words.split())
    found = json.loads((tmp_path / "found.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["prompts"] == 7
    assert found["settings"]["prompts"] == "tasks.jsonl"
    assert [(r["drafter"].partition(":")[0], r["temperature"]) for r in found["results"]] == [
        ("medusa", 0.0),
        ("medusa", 1.0),
        ("ngram", 0.0),
        ("ngram", 1.0),
    ]
    for result in found["results"]:
        tasks = result["categories"]
        assert {name: task["prompts"] for name, task in tasks.items()} == {"qa": 3, "math": 4}
        for key in ("rounds", "tokens", "drafted", "accepted"):
            assert result[key] == sum(task[key] for task in tasks.values())
        for part in (result, *tasks.values()):
            assert part["tau"] == pytest.approx(part["tokens"] / part["rounds"], abs=1e-4)
            assert sum(part["by_position"]) == part["accepted"]
            assert part["tokens"] == part["rounds"] + part["accepted"]
            assert part["by_position"] == sorted(part["by_position"], reverse=True)
    medusa = found["results"][0]
    assert medusa["accepted"] > 0
    assert len(medusa["by_position"]) <= 3  # it has three heads
    # whole trees: in a crowd, and where few tokens are left; the first token of an answer, and a last one, need none
    assert medusa["drafted"] % 12 == 0
    assert medusa["rounds"] - 2 * medusa["prompts"] <= medusa["drafted"] / 12 < medusa["rounds"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("eagle3:?depth=6&width=8", "eagle3:?depth=6&width=8"),
        ("medusa:/home/me/runs/medusa/drafter?width=8", "medusa:drafter?width=8"),
        ("suffix+model:../runs/draft", "suffix+model:draft"),
        ("ngram,model:/models/small/", "ngram,model:small/"),
        ("--target=/models/big", "--target=big"),
        ("draft", "draft"),
    ],
)
def test_what_is_kept_says_nothing_of_the_machine(given: str, told: str) -> None:
    assert results.told(given) == told


def test_the_settings_that_are_kept() -> None:
    given = "--prompts /data/p.jsonl --json /out/a.json --model /models/m --drafter eagle3:/runs/e?depth=6 --limit 3"
    found = results.settings(acceptance.parser().parse_args(given.split()))
    assert "json" not in found
    assert (found["prompts"], found["model"], found["limit"]) == ("p.jsonl", "m", 3)
    assert (found["drafter"], found["temperature"]) == (["eagle3:e?depth=6"], [0.0, 1.0])


def test_prompts_and_decoding_are_compared_by_the_middle_repeat() -> None:
    class Fake:
        def __init__(self, name: str, seconds: float, wrong: int = -1) -> None:
            self.name, self.seconds, self.wrong = name, seconds, wrong
            self.asked: list[Sequence[int]] = []

        def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
            self.asked += prompts
            tokens = tuple(range(params[0].max_tokens or 0)) if len(self.asked) != self.wrong else (9,)
            late = self.seconds * len(self.asked)
            return Measured((Answer(tokens, late, late + len(tokens) * 0.5),), 0.0)

    ours, theirs = Fake("slipstream", 1), Fake("transformers", 2)
    read = beside.compared([ours, theirs], 1000, 20, 1, 3)
    assert read["seconds"] == {"slipstream": 3, "transformers": 6}, "the first repeat warms up"
    assert (read["of_transformers"], read["same_tokens"]) == (0.5, True)
    assert ours.asked == theirs.asked
    assert len({tuple(ids) for ids in ours.asked}) == 4, "nothing that the cache knows"
    said = beside.compared([Fake("slipstream", 1), Fake("transformers", 1, wrong=2)], 1000, 20, 5, 3)
    assert said["seconds"]["slipstream"] == 0.625
    assert not said["same_tokens"]


def test_busy_programs_end_with_the_measurement() -> None:
    with beside.beside(2, 60) as running:
        assert [process.poll() for process in running] == [None, None]
    assert None not in [process.poll() for process in running]


def figures_asked(tmp_path: Path) -> Any:
    return figures.Asked(tmp_path / "out", tmp_path / "big", tmp_path / "spec_bench.jsonl", tmp_path / "heads", "site")


def part(name: str, code: str, seconds: int = 1) -> Any:
    return figures.Part(name, seconds, "a test", lambda _: ["-c", code])


def parts_done(wanted: Any) -> dict[str, int]:
    return {name: told["code"] for name, told in json.loads((wanted.out / "done.json").read_text()).items()}


def test_parts_run_in_order_and_what_ended_well_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, notes = figures_asked(tmp_path), tmp_path / "notes"
    write = f"open({str(notes)!r}, 'a').write"
    parts = [part("b", f"{write}('b'); print('said')"), part("a", f"{write}('a'); raise SystemExit(3)")]
    assert not figures.run(wanted, parts, 60)
    assert parts_done(wanted) == {"b": 0, "a": 3}
    assert "a failed (3)" in capsys.readouterr().out
    assert (wanted.out / "b.txt").read_text() == "said\n"
    assert figures.run(wanted, [*parts[:1], part("a", f"{write}('A')")], 60)
    assert notes.read_text() == "baA"
    assert parts_done(wanted) == {"b": 0, "a": 0}


def test_no_part_is_begun_that_would_not_end_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = figures_asked(tmp_path)
    assert figures.run(wanted, [part("long", "pass", 61), part("short", "pass", 59)], 60)
    assert parts_done(wanted) == {"short": 0}
    assert "long: no time" in capsys.readouterr().out


def test_a_part_that_outlasts_the_budget_is_ended(tmp_path: Path) -> None:
    wanted = figures_asked(tmp_path)
    assert not figures.run(wanted, [part("stuck", "import time; time.sleep(600)")], 1.5)
    assert parts_done(wanted) == {"stuck": -15}


def _parsed(command: Sequence[str]) -> None:
    """Ends the test where a command has an option that its script does not know."""
    script, *flags = command
    if script == "-m":
        told = subprocess.run([sys.executable, *command[:2], "--help"], capture_output=True, text=True, check=True)
        assert all(flag in told.stdout for flag in flags if flag.startswith("--"))
        return
    known = {"curve": curve, "cells": cells, "kernel_table": kernels, "acceptance": acceptance, "http_cost": http_cost}
    known[Path(script).stem].parser().parse_args(flags)


@pytest.mark.parametrize("name", [part.name for part in figures.PARTS])
def test_every_command_is_one_that_its_script_knows(name: str, tmp_path: Path) -> None:
    found = next(part for part in figures.PARTS if part.name == name)
    _parsed(found.command(figures_asked(tmp_path)))
    _parsed(found.command(figures.Asked(tmp_path, tmp_path, tmp_path)))


def test_what_is_guessed_is_right_in_part() -> None:
    drafter = shapes.Rehearsed()
    drafter.answers[(1, 2)] = list(range(10, 30))
    request = DraftRequest("a", [1, 2, 10], 2, SamplingParams(), 0)
    (tree,) = drafter.propose([request], [7])
    assert tree.tokens == (10, 11, 11, 12, 12, 13)  # beside each right one stands a wrong one
    assert tree.parents == (-1, -1, 1, 1, 3, 3)
    (tree,) = drafter.propose([DraftRequest("a", [1, 2, *range(10, 15)], 2, SamplingParams(), 0)], [12])
    assert tree.tokens == (14, 15, 15)  # and every seventh is missing
    assert drafter.propose([DraftRequest("b", [3], 1, SamplingParams(), 0)], [12])[0].tokens == ()


@pytest.mark.parametrize("family", shapes.FAMILIES)
def test_every_shape_makes_a_configuration(family: str) -> None:
    tiny, whole = shapes.config_of(family, tiny=True, whole=False), shapes.config_of(family, tiny=False, whole=True)
    assert tiny.hidden_size == 256
    assert whole.num_hidden_layers >= tiny.num_hidden_layers
    assert whole.vocab_size > tiny.vocab_size


def test_a_run_and_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shapes, "TINY", {**shapes.TINY, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 300})
    results, document = tmp_path / "cpu.json", tmp_path / "page.md"
    options = ["--tiny", "--only", "smollm3", "--requests", "2", "--max-tokens", "4", "--folder", str(tmp_path)]
    shapes.main([*options, "--json", str(results)])
    row: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert json.loads(results.read_text())["rows"] == [row]
    assert row["ours"] <= row["most"]
    assert row["drafts"] == row["company"] == row["both"] == [4, 4]
    assert row["accepted"] > 0

    broken = {**row, "company": [3, 4]}
    results.write_text(json.dumps({**json.loads(results.read_text()), "rows": [broken]}))
    document.write_text(f"before\n{shapes.MARKS[0]}\nobsolete\n{shapes.MARKS[1]}\nafter\n")
    shapes.main(["--table", str(results), "--document", str(document)])
    text = document.read_text()
    assert "| smollm3 | **same** | 3 of 4 |" in text
    assert "obsolete" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_every_mode_is_compared_at_each_temperature(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, kept = tmp_path / "prompts.jsonl", tmp_path / "exact.json"
    file.write_text("".join(json.dumps({"prompt": f"Tell me {i} " * 40 * (i % 2 + 1)}) + "\n" for i in range(3)))
    words = f"--model {tiny_target} --prompts {file} --max-tokens 8 --limit 2 --device cpu --json {kept}"
    exact.main(words.split())
    found = json.loads(kept.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["prompts"] == 2
    runs = {name: part for name, part in found.items() if name.startswith("T=")}
    assert list(runs) == [f"T={t} {mode} x32" for t in (0, 1) for mode in ("plain", "ngram")]
    assert all(part["same"] + len(part["wrong"]) == 2 for part in runs.values())


def test_where_answers_part_is_told() -> None:
    assert exact.differences([[1, 2], [1, 2, 3], [4]], [[1, 2], [1, 5, 3], [4, 4]]) == [
        {"prompt": 1, "position": 1},
        {"prompt": 2, "position": 1},
    ]


sys.path.append(str(Path(__file__).parent.parent / "tools"))


cost = import_module("http_cost")


Asked = cost.Asked


class Scripted:
    """Takes these seconds for all, and for a first token; a slower machine doubles the burst after a while."""

    def __init__(self, all_s: float, first_s: float) -> None:
        self.bursts = 0
        self._all_s, self._first_s = all_s, first_s

    def run(self, what: str) -> float:
        if what == "all":
            self.bursts += 1
            return self._all_s * (2 if self.bursts > cost.WARM_UP + 3 else 1)
        return self._all_s if what == "steady" else self._first_s


def test_a_machine_that_changes_its_pace_is_no_cost_of_http() -> None:
    library, http = Scripted(1.0, 0.010), Scripted(1.04, 0.0115)
    found = cost.measure(library.run, http.run, Asked(4, 8, 7))
    assert found["burst"]["lost"] == found["throughput"]["lost"] == pytest.approx(0.0385, abs=1e-3)
    assert found["first_token"]["difference_ms"] == pytest.approx(1.5)
    assert library.bursts == http.bursts == cost.WARM_UP + 7
    assert found["burst"]["library_tok_s"] == pytest.approx(4 * 8 / 2.0)
    assert found["burst"]["server_tok_s"] == pytest.approx(4 * 8 / 2.08, rel=1e-2)
    assert found["throughput"]["met"] is found["first_token"]["met"] is True
    slow = cost.measure(Scripted(1.0, 0.010).run, Scripted(1.06, 0.0125).run, Asked(4, 8, 4))
    assert slow["throughput"]["met"] is slow["first_token"]["met"] is False


def test_no_pair_begins_when_time_is_over() -> None:
    library = Scripted(1.0, 0.010)
    found = cost.measure(library.run, Scripted(1.0, 0.010).run, Asked(4, 8, 50, seconds=0))
    assert found["throughput"]["pairs"] == found["burst"]["pairs"] == cost.FEWEST
    assert library.bursts == cost.WARM_UP + cost.FEWEST


def test_answers_of_a_steady_run_have_many_lengths() -> None:
    asked = Asked(32, 256, 1)
    lengths = [tokens for place in range(32) for _, tokens in asked.steady(place)]
    assert len(lengths) == 4 * 32
    assert asked.steady_tokens == sum(lengths) == pytest.approx(256 * len(lengths), rel=0.05)
    assert len(set(lengths)) > 100
    assert 128 <= min(lengths) <= 140
    assert 350 <= max(lengths) <= 384


@pytest.mark.parametrize("each", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 5, 256])
def test_no_place_is_empty_before_the_others(each: int, tokens: int) -> None:
    """Or most of a run that is called one of 32 at a time would be one of fewer, of which HTTP takes less."""
    asked = Asked(32, tokens, 1, each=each)
    places = [[length for _, length in asked.steady(place)] for place in range(32)]
    assert len({sum(lengths) for lengths in places}) == 1
    assert min(map(min, places)) >= 1
    assert len({prompt for place in range(32) for prompt, _ in asked.steady(place)}) == 32 * each
    if tokens == 256 and each > 1:
        ends = [sum(lengths[:done]) for lengths in places for done in range(1, each)]
        assert len(set(ends)) > 0.9 * len(ends), "and until then they do not end together"


def test_both_ways_on_a_real_server(tiny_target: Path) -> None:
    asked = Asked(3, 8, 2)
    with engine_process(tiny_target) as process, serving(process, models=("measured",)) as server:
        http = cost.Http(server.url, asked)
        try:
            found = cost.measure(cost.Library(process.call, asked).run, http.run, asked)
        finally:
            http.close()
        tokens = process.call(inside.generated_tokens)
    assert tokens == 2 * ((cost.WARM_UP + 2) * (3 * 8 + asked.steady_tokens) + (cost.WARM_UP + cost.FIRST_TOKENS) * 2)
    assert found["first_token"]["library_ms"] > 0
    assert found["first_token"]["server_ms"] > 0
    assert found["throughput"]["lost"] < 1


def test_answers_longer_than_the_readers_window(tmp_path: Path) -> None:
    """A stream of some 400 events is longer than asyncio's `readuntil` looks."""
    folder = save_model(tmp_path / "long", tiny_llama(max_position_embeddings=1024, num_hidden_layers=1))
    asked = Asked(1, 900, 1)
    with LLM(folder, device="cpu", drafter="none", memory="64MiB") as llm, serving(llm, models=("measured",)) as server:
        http = cost.Http(server.url, asked)
        try:
            assert http.run("all") > 0
        finally:
            http.close()


def test_processes_with_the_same_file_measure_in_turn(tmp_path: Path) -> None:
    with (tmp_path / "turn").open("w") as other:
        with cells_ours.turn(tmp_path / "turn"), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
