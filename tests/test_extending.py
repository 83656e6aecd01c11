"""docs/extending.md is right: its code makes a drafter that works, by name, merged, and in both engines."""

from __future__ import annotations

import io
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import slipstream
from serving import engine_process
from slipstream import LLM, SamplingParams, SpeculationParams, drafters
from slipstream.cli.main import main
from slipstream.core.errors import ConfigError, InvalidRequest
from slipstream.drafters import DrafterSpec, base, parse_merged
from slipstream.engine.remote import EngineProcess
from slipstream.serve.admission import Admission, Drain
from slipstream.serve.config import ServeConfig
from slipstream.serve.metrics import Metrics
from test_remote import answered

PAGE = Path(slipstream.__file__).parents[2] / "docs" / "extending.md"
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, logit_bias={10: 8.0, 20: 8.0, 30: 8.0})


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tiny_target: Path) -> dict[str, Any]:
    """What the page's code leaves behind, run from top to bottom with a tiny model for the default one."""
    monkeypatch.setattr(drafters, "_entries", dict(drafters._entries))
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    assert code.count('"default"') == 1
    names: dict[str, Any] = {"__name__": "followers"}
    future, rest = "from __future__ import annotations\n", code.replace('"default"', repr(str(tiny_target)))
    exec(compile(future + rest.replace(future, ""), str(PAGE), "exec"), names)
    return names


def test_the_page_runs(capsys: pytest.CaptureFixture[str], page: dict[str, Any]) -> None:
    assert "DrafterStats(drafts=" in capsys.readouterr().out
    stats = page["drafted"].speculation.by_drafter["followers"]
    assert (stats.failures, stats.drafts > 0, stats.drafted > 0) == (0, True, True)
    assert drafters.drafter_factory("followers") is page["FollowersDrafter"]


def test_the_example_of_the_contract_drafts(tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    example = re.findall(r"^    .*\n|^\n(?=    )", base.__doc__ or "", re.MULTILINE)
    file = tmp_path / "repeat.py"
    file.write_text(textwrap.dedent("".join(example)))
    (output,) = open_llm(drafter=f"{file}:RepeatDrafter", planner="fixed").generate([[5, 6, 7]], PARAMS)
    stats = output.outputs[0].speculation.by_drafter["RepeatDrafter"]
    assert (stats.failures, stats.drafted > 0) == (0, True)


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("drafter", ["followers", "followers+ngram"])
def test_its_drafter_is_exact_and_right_now_and_then(
    page: dict[str, Any], open_llm: Callable[..., LLM], rounds: str, drafter: str
) -> None:
    llm = open_llm(drafter=drafter, planner="fixed", rounds=rounds)
    prompts = [[10, 20, 30, 10, 20], [30, 10, 30, 10], [20]]
    off = replace(PARAMS, speculation=SpeculationParams(enabled=False))
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, off)]
    got = [output.outputs[0] for output in llm.generate(prompts, PARAMS)]
    assert [answer.token_ids for answer in got] == plain
    for answer in got:
        stats = answer.speculation.by_drafter["followers"]
        assert stats.failures == 0
        assert 0 < stats.accepted < stats.drafted


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The page's class in a file of its own."""
    found = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    path = tmp_path / "followers.py"
    path.write_text(found[1], encoding="utf-8")
    return path


COMMANDS = re.findall(r"^    slipstream (.* followers\.py:.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
SHORT: dict[str, list[str]] = {
    "generate": [],
    "audit": ["--no-transformers", "--samples", "0", "--limit", "2", "--concurrency", "1"],
    "bench": ["--limit", "2"],
    "chat": ["--planner", "fixed", "--max-tokens", "90"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_run(
    file: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abcabcabc\n"))
    name, *arguments = shlex.split(command.replace("followers.py", str(file)))
    small = ["--model", str(tiny_target), "--device", "cpu", "--memory", "64MiB", "--max-tokens", "6"]
    with pytest.raises(SystemExit) as ended:
        main([name, *arguments, *small, *SHORT[name]])
    captured = capsys.readouterr()
    assert not ended.value.code, captured.err
    assert "FollowersDrafter" in captured.out + captured.err


def test_the_engines_process_reads_the_file(file: Path, tiny_target: Path) -> None:
    named = [f"{file}:FollowersDrafter", "ngram"]
    with engine_process(tiny_target, drafter=named) as process:
        assert process.drafters[:2] == ("FollowersDrafter", "ngram")
    with pytest.raises(ConfigError, match="there is no such class; HostDrafters of the file: FollowersDrafter"):
        EngineProcess(tiny_target, device="cpu", drafter=f"{file}:Folowers")


def test_a_drafter_that_raises_in_the_engines_process_is_told(
    file: Path, tiny_target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback in the log, the counter, the word for who asked."""
    file.write_text(file.read_text().replace("follows, text = ", "raise KeyError(17)\n        follows, text = "))
    with engine_process(tiny_target, drafter=f"{file}:FollowersDrafter", planner="fixed") as process:
        answer = answered(process, ("abcabc", SamplingParams(max_tokens=8)))[-1].outputs[0]
        config = ServeConfig(models=("tiny",))
        metrics = Metrics(process, config, Admission(2, config, Drain(0))).text().decode()
    assert "raise KeyError(17)" in caplog.text
    assert answer.speculation.why == "off: it raised KeyError"
    labels = 'drafter="FollowersDrafter",model_name="tiny",reason="raised"'
    assert f"slipstream_drafter_dropped_total{{{labels}}} 1.0" in metrics


def test_a_strict_command_ends_with_the_drafters_error(
    file: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(file.read_text().replace("follows, text = ", "raise KeyError(17)\n        follows, text = "))
    command = ["generate", "abcabc", "--model", str(tiny_target), "--device", "cpu", "--memory", "64MiB"]
    command += ["--max-tokens", "6", "--drafter", f"{file}:FollowersDrafter", "--planner", "fixed"]
    for more, code, said in (([], 0, "it raised KeyError"), (["--strict-drafter"], 1, "it raised KeyError: 17\n")):
        with pytest.raises(SystemExit) as ended:
            main([*command, *more])
        assert (ended.value.code or 0) == code
        assert said in capsys.readouterr().err


def test_a_file_and_a_class_are_a_name() -> None:
    spec = DrafterSpec("Mine", file="a/my.py")
    assert parse_merged("a/my.py:Mine") == (spec,)
    assert parse_merged("ngram+a/my.py:Mine+suffix")[1:] == (spec, DrafterSpec("suffix"))
    assert parse_merged("model:x+a/my.py:Mine") == (DrafterSpec("model", "x"), spec)
    assert (str(spec), spec.kind, spec.place) == ("a/my.py:Mine", "Mine", None)


WRONG = {
    "Missing": ("x = 1", "there is no such class; HostDrafters of the file: none"),
    "number": ("number = 3", "number is no class that derives from HostDrafter"),
    "ngram": ("class ngram: pass", "'ngram' is another drafter's name; rename the class"),
    "Raises": ("import json\n\nimport no_such_module", "line 3: ModuleNotFoundError: No module named 'no_such_module'"),
    "Spelt": ("class Spelt:\n    def f(self)\n        pass", "line 2: SyntaxError: expected ':'"),
    "Leaves": ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
    "Bare": (
        "from slipstream.drafters.base import HostDrafter\nclass Bare(HostDrafter): name = 'bare'",
        "TypeError: Can't instantiate abstract class Bare",
    ),
    "": ("x = 1", "must name a class in the file, .*:CLASS"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, open_llm: Callable[..., LLM], name: str) -> None:
    code, said = WRONG[name]
    (tmp_path / "my.py").write_text(code)
    with pytest.raises(ConfigError, match=f"drafter '.*my.py:?{name}': (.*: )?{said}"):
        open_llm(drafter=f"{tmp_path / 'my.py'}:{name}".removesuffix(":"))


def test_a_file_is_named_by_operators_only(tmp_path: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.py").write_text("raise SystemError('it was run')")
    wanted = SpeculationParams(drafter=f"{tmp_path / 'my.py'}:Mine")
    with pytest.raises(InvalidRequest, match="is not loaded"):
        llm.generate([[1, 2]], SamplingParams(max_tokens=2, speculation=wanted))
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--drafter", f"{tmp_path}/none.py:Mine", "hi"])
    assert ended.value.code == 2
    assert f"there is no file {tmp_path}/none.py" in " ".join(capsys.readouterr().err.split())
