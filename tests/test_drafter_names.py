"""Drafters by name: those that are shipped, those of users, and what is said of wrong ones."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import eagle_scenes
import slipstream
from medusa_checkpoints import tiny_medusa
from mtp_checkpoints import MTP, save_with_modules
from serving import engine_process
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams, drafters
from slipstream.cli.main import main
from slipstream.core.errors import CapacityError, ConfigError, InvalidRequest
from slipstream.drafters import DrafterSpec, base, opening, parse_merged, parse_spec, register, shipped_as
from slipstream.drafters.opening import HEADS, auto_specs, expanded, with_shipped
from slipstream.engine.config import EngineConfig
from slipstream.engine.reasons import SWITCHED_OFF
from slipstream.engine.remote import EngineProcess
from slipstream.models.default import default_folder
from slipstream.serve.admission import Admission, Drain
from slipstream.serve.config import ServeConfig
from slipstream.serve.metrics import Metrics
from test_remote import answered

Open = Callable[..., LLM]


def asked(llm: LLM, drafter: str | None) -> set[str]:
    """The drafters that drafted for a request with this setting."""
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, speculation=SpeculationParams(drafter=drafter, origins=True)
    )
    output = llm.generate([[5, 6, 7, 5, 6, 7, 5, 6]], params)[0].outputs[0]
    told = {name for origin in output.origins or () for name in origin.drafters}
    drafted = {name for name, stats in output.speculation.by_drafter.items() if stats.drafted}
    assert told <= drafted
    return drafted


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_it_is_shown_as_it_was_written(name: str, rounds: str, open_llm: Open, tmp_path: Path) -> None:
    head = eagle_scenes.eagle3().write(tmp_path / "head")
    llm = open_llm(drafter=f"{name}:{head}?depth=2", planner="fixed", rounds=rounds)
    for wanted in (None, "eagle", "eagle3"):  # both are names for it
        assert asked(llm, wanted) == {name}
    assert {found.name for found in llm.engine.drafting.drafters.values()} == {name, "prediction", "grammar"}
    assert set(llm.snapshot().drafters) == {name, "prediction", "grammar"}
    with pytest.raises(InvalidRequest, match=f"'medusa' is not loaded: must be one of {name}, prediction, grammar"):
        asked(llm, "medusa")
    with pytest.raises(InvalidRequest, match="must name each drafter once"):
        asked(llm, "eagle+eagle3")


ECHO = [5, 6, 7, 8, 9, 10] * 6


def params(**more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **more)  # type: ignore[arg-type]


def test_it_is_the_default(open_llm: Open) -> None:
    llm = open_llm(planner="fixed")
    assert llm.engine.drafting.default == "auto"
    assert llm.engine.drafting.auto == ("suffix",)
    assert set(llm.generate(ECHO, params())[0].outputs[0].speculation.by_drafter) == {"suffix"}


def test_the_default_model_has_its_head_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.drafters.opening._has_modules", lambda folder: False)
    head = DrafterSpec("eagle3", str(HEADS / "eagle3"))
    assert auto_specs(default_folder(), "cpu", {}) == (DrafterSpec("suffix"),)
    assert auto_specs(default_folder(), "cuda", {}) == (DrafterSpec("suffix"), head)


def test_it_stands_among_others() -> None:
    auto = (DrafterSpec("suffix"), DrafterSpec("mtp"))
    specs = parse_merged("ngram+auto+suffix+model:some/path")
    names = [spec.name for spec in expanded(specs, auto)]
    assert names == ["ngram", "suffix", "mtp", "model"]
    assert [spec.name for spec in parse_merged("model:a+b+auto")] == ["model", "auto"]
    with pytest.raises(ConfigError, match="taken"):
        register("auto", "nowhere:Nothing")


def test_the_same_tokens(open_llm: Open, tiny_draft: Path) -> None:
    llm = open_llm(drafter=f"auto+model:{tiny_draft}", planner="fixed")
    plain = llm.generate(ECHO, params(speculation=SpeculationParams(enabled=False)))[0].outputs[0]
    auto = llm.generate(ECHO, params())[0].outputs[0]
    assert auto.token_ids == plain.token_ids
    assert set(auto.speculation.by_drafter) == {"suffix", "model"}
    named = llm.generate(ECHO, params(speculation=SpeculationParams(drafter="auto")))[0].outputs[0]
    assert named.token_ids == plain.token_ids
    assert set(named.speculation.by_drafter) == {"suffix"}


def test_a_prediction_joins_it(open_llm: Open) -> None:
    llm = open_llm(drafter="auto", planner="fixed")
    plain = llm.generate(ECHO, params(speculation=SpeculationParams(enabled=False)))[0].outputs[0]
    guided = llm.generate(ECHO, params(prediction=plain.text))[0].outputs[0]
    assert guided.token_ids == plain.token_ids
    assert {"suffix", "prediction"} <= set(guided.speculation.by_drafter)


def test_modules_of_the_checkpoint_are_found(tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "mtp", MTP["deepseek"])
    assert auto_specs(folder, "cpu", {}) == (DrafterSpec("suffix"), DrafterSpec("mtp"))


def test_the_hard_switch_and_what_the_plan_says(open_llm: Open) -> None:
    llm = open_llm(drafter="auto", planner="adaptive", min_gain=1.05)
    llm.speculates = False
    off = llm.generate(ECHO, params())[0].outputs[0]
    assert off.speculation.drafted == 0
    assert llm.snapshot().decisions["off"] > 0
    assert off.speculation.plan == {"suffix": SWITCHED_OFF}
    assert set(llm.snapshot().plan.values()) == {SWITCHED_OFF}
    llm.speculates = True
    on = llm.generate(ECHO, params())[0].outputs[0]
    assert on.token_ids == off.token_ids
    assert set(on.speculation.plan) <= {"suffix"}
    assert (
        on.speculation.plan == {}
        or "x expected" in on.speculation.plan["suffix"]
        or "off" in on.speculation.plan["suffix"]
    )
    assert on.speculation.measured_gain is None or on.speculation.measured_gain > 0


def test_a_gain_is_not_asked_of_drafts_that_are_always_made(open_llm: Open) -> None:
    with pytest.raises(ConfigError, match=r"min_gain=1\.5: must be 1 with planner='fixed'"):
        EngineConfig(planner="fixed", min_gain=1.5)
    EngineConfig(planner="fixed", min_gain=1)
    llm = open_llm(drafter="suffix", planner="fixed")
    stats = llm.generate(ECHO, params())[0].outputs[0].speculation
    assert stats.drafted
    assert (stats.expected_gain, stats.measured_gain) == (None, None), "nothing was measured"


def test_it_goes_without_those_that_keep_too_much_of_the_cache(open_llm: Open, tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "mtp", MTP["deepseek"])
    said: list[str] = []
    llm = open_llm(folder, drafter="auto", max_draft_memory=0.001, on_progress=said.append)
    assert "mtp" not in llm.engine.drafting.drafters
    assert llm.engine.drafting.auto == ("suffix",)
    assert any("auto goes without mtp" in line for line in said)
    assert len(llm.generate(ECHO, params())[0].outputs[0].token_ids) == 24
    with pytest.raises(CapacityError, match="max_draft_memory"):
        open_llm(folder, drafter="mtp", max_draft_memory=0.001)


MOST_BYTES = 64 * 2**20


QUESTIONS = ("What are the three primary colours?", "Tom has 3 apples and buys 4 more. How many has he now?")


@pytest.fixture
def heads(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny target is the default model, and only Medusa heads are shipped for it."""
    monkeypatch.setattr(opening, "HEADS", tmp_path / "heads")
    monkeypatch.setattr(opening, "default_folder", lambda: tiny_target)
    tiny_medusa(tmp_path / "heads" / "medusa")
    return tmp_path / "heads"


def test_a_bare_name_means_what_is_shipped(heads: Path, tiny_target: Path, tmp_path: Path) -> None:
    found = DrafterSpec("medusa", str(heads / "medusa"))
    assert with_shipped(parse_spec("medusa"), tiny_target) == found
    assert with_shipped(parse_spec("medusa"), "default") == found
    assert with_shipped(parse_spec("medusa:own"), tmp_path) == DrafterSpec("medusa", "own")
    assert with_shipped(parse_spec("ngram"), tmp_path) == DrafterSpec("ngram")
    (heads / "eagle3").mkdir()
    (heads / "eagle3" / "config.json").write_text("{}")
    with_options = with_shipped(parse_spec("eagle3:?depth=2&width=3"), "default")
    assert str(with_options) == f"eagle3:{heads / 'eagle3'}?depth=2&width=3"
    assert [shipped_as(name) for name in ("eagle", "medusa", "model", "ngram")] == ["eagle3", "medusa", "draft", None]


def test_what_is_missing_says_how_to_have_it(heads: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'eagle3' without a path: its weights are not in this installation"
    ) as error:
        with_shipped(parse_spec("eagle3"), "default")
    assert "`slipstream train eagle3 --target default --out runs/eagle3 --self-prompts 20000`" in str(error.value)
    assert "then eagle3:runs/eagle3/drafter" in str(error.value)
    other = tmp_path / "other"
    with pytest.raises(ConfigError, match=rf"'draft' without a path: .* not for {other}; name .* draft:PATH") as error:
        with_shipped(parse_spec("draft"), other)
    assert f"slipstream train draft --target {other} " in str(error.value)


def test_an_engine_opens_them(heads: Path, tiny_target: Path, open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    llm = open_llm(tiny_target, drafter=["medusa", "medusa+ngram"], planner="fixed")
    answer = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6, ignore_eos=True))[0].outputs[0]
    assert answer.speculation.by_drafter["medusa"].drafted > 0
    with pytest.raises(ConfigError, match="its weights are not in this installation"):
        open_llm(tiny_target, drafter="eagle3")
    with pytest.raises(ConfigError, match="'medusa' is given twice"):
        open_llm(tiny_target, drafter=["medusa", "medusa:elsewhere"])


def test_it_is_found_without_torch() -> None:
    code = "import sys, slipstream.drafters.opening; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_the_package_holds_no_more_than_it_may() -> None:
    """Whatever is shipped has weights in fp16 or less, a card that names its data, and 64 MiB at most in all."""
    files = [file for file in opening.HEADS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    folders = {file.parent for file in files}
    assert folders == {opening.HEADS / name for name in ("eagle3", "medusa", "draft")}
    for folder in folders:
        json.loads((folder / "config.json").read_text())
        card = (folder / "README.md").read_text()
        assert "## Data" in card
        assert "| tau by task |" in card
        assert not re.search(r"[`: ]/\w", card)  # no paths of the machine that made it
        for weights in folder.glob("*.safetensors"):
            with safe_open(weights, "pt") as tensors:
                kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
            assert not kinds & {"F32", "F64"}


@pytest.mark.slow
def test_the_default_model_answers_with_them() -> None:
    """What is shipped is what the code computes: heads that were trained otherwise are seldom right."""
    least = {"eagle3": 3.0, "medusa": 2.0, "draft": 2.0}
    with LLM("default", drafter=[*least], device="cpu", planner="fixed", max_num_seqs=2, max_model_len=256) as llm:
        prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]

        def answered(how: SpeculationParams) -> list[CompletionOutput]:
            params = SamplingParams(temperature=0, max_tokens=32, speculation=how)
            return [output.outputs[0] for output in llm.generate(prompts, params)]

        plain = answered(SpeculationParams(enabled=False))
        for name, tau in least.items():
            answers = answered(SpeculationParams(drafter=name))
            assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
            did = [answer.speculation for answer in answers]
            assert sum(one.emitted for one in did) > tau * sum(one.rounds for one in did), name


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
@pytest.mark.parametrize("drafter", ["followers+ngram"])
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
