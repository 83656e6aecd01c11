"""`slipstream tune` on a tiny model; its recommendations, and the file that `serve` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream import LLM, SamplingParams
from slipstream.bench import memory
from slipstream.bench import tune as tuning
from slipstream.bench.tune import (
    Candidate,
    Tuned,
    best,
    best_of_all,
    configuration,
    doubts,
    how_sure,
    measure,
    read_engine,
)
from slipstream.cli.main import main
from slipstream.cli.options import Common
from slipstream.cli.serve import _with_config
from slipstream.cli.tune import _noting_levels
from slipstream.core.errors import ConfigError


def told(*speeds: tuple[int, str, float]) -> list[Tuned]:
    return [Tuned(n, name, None if name == "plain" else name, None, "exact", speed) for n, name, speed in speeds]


def prompts(folder: Path) -> Path:
    file = folder / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"one two {n} one two {n}"}) + "\n" for n in range(3)))
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    return run_aloud(capsys, *arguments)[0]


def run_aloud(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, object], str]:
    """The result, and what was said to people."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert not ended.value.code, err
    result = json.loads(out.splitlines()[-1])
    assert isinstance(result, dict)
    return result, err


def test_the_fastest_is_recommended_and_plain_where_none_is_clearly_faster() -> None:
    rows = told((1, "plain", 10), (1, "a", 20), (1, "b", 15), (8, "plain", 50), (8, "a", 30), (8, "b", 50.5))
    assert {level: row.name for level, row in best(rows).items()} == {1: "a", 8: "plain"}
    assert best_of_all(rows).name == "b", "a loses at 8 what it wins at 1"
    assert best_of_all(told((1, "plain", 10), (1, "a", 10.1))).name == "plain"


class Timed:
    """Answers with so many tokens a second, by the first token of a prompt."""

    def __init__(self, name: str, rates: dict[int, float]) -> None:
        self.name, self._rates = name, rates
        self.asked: list[list[int]] = []

    def answer(self, prompts: Any, params: Any) -> Any:
        self.asked.append([ids[0] for ids in prompts])
        answers = [SimpleNamespace(token_ids=[0] * 10) for _ in prompts]
        return SimpleNamespace(answers=answers, wall_s=10 * len(prompts) / self._rates[prompts[0][0]])


def test_all_prompts_are_asked_and_it_is_said_how_sure_a_recommendation_is() -> None:
    count = 3
    plain, fast = Timed("plain", dict.fromkeys(range(count), 10.0)), Timed("x", {0: 30.0, 1: 9.0, 2: 30.0})
    options = [Candidate(plain, None), Candidate(fast, "x")]
    found = measure(options, [[i] for i in range(count)], [SamplingParams()] * count, [1, 2])
    rows = [row for own in found for row in own]
    assert fast.asked == [[0], [1], [2], [0, 1], [2, 0]]
    alone = rows[1]
    assert (alone.prompts, alone.batches, alone.gain) == (3, 3, (0.9, 3.0))
    assert alone.tokens_per_s == pytest.approx(30 / (10 / 30 + 10 / 9 + 10 / 30))
    assert how_sure(alone, rows) == "1.69 times as fast as plain (0.90 to 3.00 in single runs; 3 prompts in 3 runs)"
    few, mixed = doubts(rows)
    assert few == "only 3 prompts were asked: give at least 8 (--prompts) of your own kind"
    assert mixed == (
        "1 at once: x was slower than plain in some runs; measure more (--repeats 3), or prompts of one kind: some may "
        "be faster without it"
    )


def test_many_prompts_of_one_mind_leave_no_doubt() -> None:
    many = [[i] for i in range(20)]
    plain, fast = Timed("plain", dict.fromkeys(range(20), 10.0)), Timed("x", dict.fromkeys(range(20), 20.0))
    (rows,) = measure([Candidate(plain, None), Candidate(fast, "x")], many, [SamplingParams()] * 20, [1])
    assert len(fast.asked) == rows[1].prompts == 8, "enough, where requests come alone"
    assert not doubts(rows)


def test_speeds_that_contradict_each_other_are_doubted() -> None:
    def row(at_once: int, name: str, speed: float) -> Tuned:
        return replace(told((at_once, name, speed))[0], prompts=8, gain=(1.1, 4.0))

    good = [row(1, "plain", 10), row(1, "x", 20), row(4, "plain", 30), row(4, "x", 60)]
    assert not doubts(good)
    assert doubts([*good[:2], row(4, "plain", 9), row(4, "x", 28)]) == [
        "plain was slower with 4 at once (9.0 tok/s in all) than with 1 (10.0); measure again (--repeats 3)"
    ]
    assert not doubts([*good, row(1, "y", 5), row(4, "y", 4)]), "y is not recommended"


def test_one_prompt_is_one() -> None:
    assert doubts([replace(told((1, "plain", 10))[0], prompts=1)])[0].startswith("only 1 prompt was asked")


def test_tune_measures_and_writes_what_serve_and_llm_take(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, plot = tmp_path / "tuned.json", tmp_path / "tuned.svg"
    result, said = run_aloud(
        capsys,
        *("tune", "--model", str(tiny_target), "--drafters", "ngram,suffix", "--sizes", "2"),
        *("--prompts", str(prompts(tmp_path)), "--concurrency", "1,3", "--max-tokens", "8"),
        *("--config", str(config), "--plot", str(plot)),
    )
    rows = result["rows"]
    assert isinstance(rows, list)
    names = ["plain", "ngram", "ngram, 2", "suffix", "suffix, 2"]
    assert [(row["concurrency"], row["name"]) for row in rows] == [(n, name) for n in (1, 3) for name in names]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert all((row["prompts"], row["batches"]) == (3, {1: 3, 3: 1}[row["concurrency"]]) for row in rows)
    assert all(row["gain"] == [1, 1] for row in rows if row["name"] == "plain")
    assert plot.read_text().count("<polyline") == 5
    assert json.loads(config.read_text())["doubts"] == result["doubts"] != [], "only three prompts"
    engine = read_engine(config)
    assert f"wrote {config}: " in said
    assert ", the best with 1, 3 at once together" in said
    assert result["not_measured"] == []
    assert engine["model"] == str(tiny_target)
    with LLM(**engine, max_model_len=64) as llm:
        assert llm.generate("one two")[0].finished


def test_what_was_measured_before_ctrl_c_is_told(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def until_two(*arguments: Any, **more: Any) -> Iterator[list[Tuned]]:
        yield next(measure(*arguments, **more))
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "measure", until_two)
    config = tmp_path / "tuned.json"
    options = f"--model {tiny_target} --drafters ngram --concurrency 1,2,4 --max-tokens 8 --config {config}"
    with pytest.raises(SystemExit) as ended:
        main(["tune", *options.split(), "--prompts", str(prompts(tmp_path))])
    out, err = capsys.readouterr()
    assert ended.value.code == 130
    result = json.loads(out.splitlines()[-1])
    assert {row["concurrency"] for row in result["rows"]} == {1}
    assert result["not_measured"] == [2, 4]
    assert "stopping: the results so far follow" in err
    assert "not measured: 2, 4 at once" in err
    assert ", the best with 1 at once" in err
    assert read_engine(config)["model"] == str(tiny_target)
    assert json.loads(config.read_text())["not_measured"] == [2, 4]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--sizes 0", "--sizes 0: must be whole numbers of 1 or more"),
        ("--concurrency 1,x", "--concurrency 1,x: must be"),
        ("--no-speculation", "tune measures plain decoding beside its candidates anyway"),
        ("--planner fixed", "--planner fixed: tune measures what the planner drafts; leave it out"),
    ],
)
def test_what_tune_refuses(capsys: pytest.CaptureFixture[str], options: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *options.split()])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_its_help_has_only_what_it_heeds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    text = capsys.readouterr().out
    assert [option in text for option in ("--sizes", "--no-speculation", "--planner")] == [True, False, False]


def test_what_is_measured_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    tell = _noting_levels()
    for level in (1, 4):
        for name in ("plain", "suffix"):
            tell(level, name)
    assert capsys.readouterr().err.splitlines() == ["measuring with 1 at once", "measuring with 4 at once"]


@pytest.mark.parametrize(("load", "warned"), [(1000.0, True), (0.0, False), (None, False)])
@pytest.mark.parametrize("command", ["tune --concurrency 1", "bench --rate 200 --requests 2 --json -"])
def test_a_busy_machine_is_warned_of(
    command: str,
    load: float | None,
    warned: bool,
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "load_average", lambda: load)
    given = f"{command} --model {tiny_target} --prompts {prompts(tmp_path)} --drafter ngram --max-tokens 4"
    with pytest.raises(SystemExit):
        main(given.split())
    out, err = capsys.readouterr()
    assert ("warning: the machine was busy before this run (load 1000.0" in out + err) is warned
    result = json.loads(out.splitlines()[-1])
    assert (result["load_before"], result["busy"]) == (load, warned)


def test_auto_is_the_usual_candidate(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = f"tune --model {tiny_target} --prompts {prompts(tmp_path)} --concurrency 2 --max-tokens 8"
    given += " -t 0.5 --dtype bfloat16"
    result = run(capsys, *given.split())
    rows = result["rows"]
    assert isinstance(rows, list)
    assert [row["name"] for row in rows] == ["plain", "auto"]
    assert isinstance(result["seed"], int), "a drawn seed is shown, so that it can be had again"
    assert any("bfloat16 on cpu" in remark for remark in cast(list[str], result["remarks"]))


def test_serve_takes_the_file_and_options_win(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.json"
    chosen = configuration(str(tiny_target), [*told((1, "plain", 1.0)), Tuned(1, "x", "suffix", 6, "exact", 9.0)])
    file.write_text(json.dumps(chosen))
    common = _with_config(Common(), file)
    assert (common.model, common.drafters, common.draft_tokens) == (str(tiny_target), ("suffix",), 6)
    assert "".join(capsys.readouterr().err.split()) == f"from{file}:--model{tiny_target}--draftersuffix--draft-tokens6"
    common = _with_config(Common(drafter=["ngram"]), file)
    assert (common.drafters, common.draft_tokens) == (("ngram",), None), "six guesses were measured for another"
    file.write_text(json.dumps(configuration("default", told((1, "plain", 1.0)))))
    capsys.readouterr()
    assert _with_config(Common(), file).drafters == ()
    assert capsys.readouterr().err.split()[-2:] == ["--drafter", "none"]
    file.write_text('{"engine": {"draft_tokens": 6}}')
    assert _with_config(Common(), file).draft_tokens == 6
    file.write_text('{"engine": {}}')
    _with_config(Common(), file)
    assert "nothing, since it has none" in " ".join(capsys.readouterr().err.split())
    file.write_text(json.dumps(configuration("default", told((1, "plain", 1.0)))))
    _with_config(Common(model=str(tiny_target), drafter=["ngram"], engine={"min_gain": 1.5}), file)
    assert "nothing, since options win over it" in " ".join(capsys.readouterr().err.split())
    for text, said in (
        ("[", "cannot be read"),
        ("[]", "engine"),
        ('{"engine": {"size": 1}}', r"engine\.size is unknown; must be one of model, drafter, draft_tokens, min_gain"),
        ('{"engine": {"draft_tokens": "many"}}', r'engine\.draft_tokens="many": must be a whole number, or null for'),
        ('{"engine": {"draft_tokens": 64}}', r"engine\.draft_tokens=64: must be 0 to 63"),
        ('{"engine": {"min_gain": null}}', r"engine\.min_gain=null: must be a number, 1 or more"),
        ('{"engine": {"min_gain": 0.5}}', r"engine\.min_gain=0\.5: must be 1 or more"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_engine(file)
    file.write_text('{"engine": {"drafter": "sufix"}}')
    with pytest.raises(ConfigError, match=r"--config .*c\.json: engine\.drafter: drafter 'sufix' is unknown"):
        _with_config(Common(), file)


def test_the_least_gain_that_was_measured_with_is_served(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(configuration("default", told((1, "plain", 1.0)), 1.2)))
    assert _with_config(Common(), file).min_gain == 1.2
    assert _with_config(Common(engine={"min_gain": 1.1}), file).min_gain == 1.1
    assert "min_gain" not in configuration("default", told((1, "plain", 1.0)))["engine"]
