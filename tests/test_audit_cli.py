"""`slipstream audit` as a user meets it: what is printed and written, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ran import Ran, Run
from slipstream import LLM
from slipstream.cli.main import main
from slipstream.engine import engine as engine_module
from test_audit import one_too_many

PROMPTS = [{"prompt": "abcabcabc"}, {"id": "two", "turns": ["one two one two", "never"]}]


@pytest.fixture
def run(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(prompt) for prompt in PROMPTS))

    def call(*arguments: str) -> Ran:
        small = ("--device", "cpu", "--memory", "64MiB")
        quick = ("--max-tokens", "8", "--concurrency", "2", "--samples", "64", "--no-transformers")
        with pytest.raises(SystemExit) as ended:
            main(["audit", "--model", str(tiny_target), "--prompts", str(prompts), *small, *quick, *arguments])
        captured = capsys.readouterr()
        return Ran(ended.value.code if isinstance(ended.value.code, int) else 0, captured.out, captured.err)

    return call


def test_a_lossless_engine_exits_0_and_writes_both_reports(run: Run, tmp_path: Path, tiny_draft: Path) -> None:
    drafters = ("--drafter", "ngram", "--drafter", f"draft:{tiny_draft}")
    done = run(*drafters, "--top-k", "20", "--max-tokens", "40", "--out", str(tmp_path / "new" / "folder"))
    assert done.code == 0, done.out
    told = done.json
    assert told == json.loads((tmp_path / "new" / "folder" / "audit.json").read_text())
    assert (told["passed"], told["lossless"]) == (True, False), "transformers was left out"
    assert told["not_tested"]["cache against transformers"] == "left out (--no-transformers)"
    assert "Lossless" not in told["verdict"]
    assert told["drafters"] == ["ngram", f"draft:{tiny_draft}"]
    assert told["settings"]["prompts"] == 2
    assert {"cpu", "cores", "gpu"} <= set(told["hardware"])
    assert {"slipstream", "torch", "transformers", "python"} <= set(told["versions"])
    titles = [check["title"] for check in told["checks"]]
    for title in ("greedy · ngram, alone", "greedy · draft, 2 at once", "T=1, top-k 20 · draft, alone"):
        assert title in titles
    assert next(c for c in told["checks"] if c["title"] == "greedy · draft, alone")["drafted"] > 0
    text = (tmp_path / "new" / "folder" / "audit.md").read_text()
    assert told["verdict"] in text
    assert told["verdict"] in done.out
    assert "greedy · draft, 2 at once: pass" in done.err


def test_a_bug_exits_1(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "verify_exact", one_too_many)
    done = run("--markdown", str(tmp_path / "x.md"), "--json", str(tmp_path / "x.json"), "--drafter", "none")
    assert done.code == 1
    assert "NOT lossless" in done.out
    assert "NOT lossless" in (tmp_path / "x.md").read_text()
    assert json.loads((tmp_path / "x.json").read_text())["lossless"] is False
    assert "greedy · probe, alone: bug" in done.err


def test_ctrl_c_writes_what_is_known_and_exits_130(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def interrupted(self: LLM, *given: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 5:
            raise KeyboardInterrupt
        return generate(self, *given, **more)

    generate = LLM.generate
    monkeypatch.setattr(LLM, "generate", interrupted)
    done = run("--json", str(tmp_path / "x.json"))
    assert done.code == 130
    told = json.loads((tmp_path / "x.json").read_text())
    assert told["interrupted"] is True
    assert [check["outcome"] for check in told["checks"]][:3] == ["pass", "stopped", "not tested"]
    assert any("Interrupted in stage 3 of " in note for note in told["notes"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--no-speculation", "--no-speculation: an audit is about speculation"),
        ("--verifier rejection", "--verifier rejection: an audit checks both verifiers by itself"),
        ("--json no/such/folder/x.json", "there is no folder"),
        ("--out prompts.jsonl/below", "cannot be made"),
        ("--limit 0", "--limit 0: must be 1 or more"),
        ("--drafter bogus", "drafter 'bogus' is unknown"),
        ("--concurrency 0", "--concurrency"),
        ("--top-p 3", "--top-p 3.0: must be above 0"),
        ("--prompts nowhere.jsonl", "--prompts nowhere.jsonl: there is no file"),
    ],
)
def test_bad_options_exit_2(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments.split())
    assert done.code == 2
    assert said in " ".join(done.err.split())
    assert done.out == ""


def test_prompts_that_do_not_fit_are_left_out_and_counted(run: Run) -> None:
    done = run("--drafter", "none", "--max-model-len", "24")
    assert done.json["settings"]["prompts"] == 1
    assert done.json["settings"]["skipped_prompts"] == 1
    assert run("--max-model-len", "16").code == 1


def test_temperature_0_samples_nothing(run: Run) -> None:
    done = run("--temperature", "0", "--top-p", "0.9", "--drafter", "none")
    assert done.code == 0, done.out
    titles = [check["title"] for check in done.json["checks"]]
    assert any(title.startswith("greedy") for title in titles)
    assert not [title for title in titles if "T=" in title or "rejection" in title]
    assert done.json["not_tested"]["sampled answers"] == "left out (--temperature 0)"


@pytest.mark.parametrize(
    ("arguments", "code", "title", "why"),
    [
        ("--samples 0", 0, "rejection sampling", "left out (--samples 0)"),
        ("--concurrency 1", 0, "answers in a batch", "left out (--concurrency 1)"),
        ("--limit 1", 1, "answers in a batch", "there was one prompt only; give more (--limit, --prompts)"),
        ("--samples 8", 1, "rejection sampling · probe", "no 40 answers share a beginning"),
    ],
)
def test_a_check_that_is_not_made_is_not_tested(run: Run, arguments: str, code: int, title: str, why: str) -> None:
    """What an option leaves out is named; what was asked for and could not be made fails the audit as well."""
    done = run("--drafter", "none", "--temperature", "1", *arguments.split())
    assert done.code == code, done.out
    assert done.json["not_tested"][title].startswith(why)
    assert f"{title} ({why}" in done.json["verdict"]
    assert done.json["verdict"].startswith("No difference in what was tested." if code == 0 else "Not shown")


def test_as_many_answers_are_drawn_as_were_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    generate = LLM.generate

    def counting(self: LLM, prompts: Any, params: Any = None, **more: Any) -> Any:
        drawn.extend(p.n for p in params if p.speculation.verifier == "rejection")
        return generate(self, prompts, params, **more)

    monkeypatch.setattr(LLM, "generate", counting)
    assert run("--samples", "7", "--concurrency", "3", "--drafter", "none").code == 1
    assert drawn == [3, 3, 1], "of the probe, three at a time: too few to test"
