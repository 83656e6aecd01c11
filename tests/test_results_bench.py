"""What the benchmarks of tools/ share: results that survive a crash, prompts, and vLLM in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gpu_bench import curve, results, vllm_peer, work, write_prompts
from slipstream.core.errors import ConfigError


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
