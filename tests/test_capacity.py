"""The options of `slipstream bench` about traffic: what they print, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM
from slipstream.bench import live, memory
from slipstream.bench.recording import Made, Recording
from slipstream.bench.simulate import doubts
from slipstream.cli.capacity import NOT_SIMULATED
from slipstream.cli.main import main
from slipstream.cli.options import Common
from test_simulate import machine, made_up


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments, *([] if "--json" in arguments else ["--json", "-"])])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_simulations_end_in_json_and_a_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, plot, kept = tmp_path / "r.json", tmp_path / "p.svg", tmp_path / "k.json"
    made_up(0.0005).save(file)
    options = ["--simulate", str(file), "--rate", "2,8", "--requests", "20", "--latency-target", "ttft=1,tpot=0.02"]
    code, out, _ = run(capsys, *options, "--replicas", "2", "--plot", str(plot), "--json", str(kept))
    assert code == 0
    assert "{" not in out, "with --json FILE none of it stands on stdout"
    result = json.loads(kept.read_text())
    ways = [(row["rate"], row["speculation"]) for row in result["rows"]]
    assert ways == [(rate, way) for rate in (2.0, 8.0) for way in ("off", "fixed", "planned")]
    assert all(row["requests"] == 20 and row["replicas"] == 2 for row in result["rows"])
    by_way = {row["speculation"]: row for row in result["rows"][:3]}
    assert by_way["planned"]["tpot"]["p50"] < by_way["off"]["tpot"]["p50"]
    assert by_way["off"]["tau"] == 1.0 < by_way["planned"]["tau"]
    assert plot.read_text().count("<polyline") == 9
    assert all(len(line) <= 80 for line in out.splitlines()[:-1])
    assert "2 replicas" in out
    assert ">2</text>" in plot.read_text()
    assert ">8</text>" in plot.read_text()
    assert "wait ever longer" not in out, "it keeps up"
    _, again, _ = run(capsys, *options, "--replicas", "2")
    assert json.loads(again.splitlines()[-1])["rows"] == result["rows"], "the same seed, the same numbers"


def test_a_machine_that_is_full_is_called_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    made_up(0.001).save(file)
    _, out, _ = run(capsys, "--simulate", str(file), "--rate", "1,1000", "--requests", "100", "--speculation", "off")
    (full,) = [line for line in out.splitlines() if "wait ever longer" in line]
    assert full.startswith("off, 1000 a second: only ")


def test_the_last_of_few_answers_makes_no_machine_full(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Four that come within a second, of which one says much and one is sent when the others' prompts are read."""
    file, traffic = tmp_path / "r.json", tmp_path / "t.jsonl"
    made_up(0.001).save(file)
    sizes = [(0.0, 50, 5), (0.3, 50, 5), (0.6, 50, 400), (1.0, 1500, 5)]
    lines = [{"arrival": at, "prompt_tokens": prompt, "output_tokens": output} for at, prompt, output in sizes]
    traffic.write_text("\n".join(map(json.dumps, lines)))
    _, out, _ = run(capsys, "--simulate", str(file), "--traffic", str(traffic), "--rate", "3", "--speculation", "off")
    row = json.loads(out.splitlines()[-1])["rows"][0]
    assert row["requests_per_s"] < 0.9 * 3
    assert row["ttft"]["p99"] > 0.5, "the long prompt"
    assert "wait ever longer" not in out


def test_times_of_a_file_are_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, traffic = tmp_path / "r.json", tmp_path / "t.jsonl"
    made_up(0.001).save(file)
    traffic.write_text('{"arrival": 1, "prompt_tokens": 5, "output_tokens": 5}\n')
    shown = {}
    for options in ((), ("--traffic", str(traffic))):
        _, out, _ = run(capsys, "--simulate", str(file), "--speculation", "off", *options)
        shown[len(options)] = out
    assert "recorded" in shown[0]
    assert "as in file" in shown[2]


def test_a_simulated_planner_asks_for_the_gain_that_was_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    made_up(0.0005).save(file)
    drafted = []
    for gain in ("1", "50"):
        options = ("--simulate", str(file), "--rate", "2", "--requests", "20", "--speculation", "planned")
        _, out, _ = run(capsys, *options, "--min-gain", gain)
        drafted.append(json.loads(out.splitlines()[-1])["rows"][0]["tau"])
    assert drafted[0] > 1.5 > 1.1 > drafted[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--simulate nowhere.json", "nowhere.json; make one with `slipstream bench --record FILE`"),
        ("--simulate FILE --traffic nowhere.jsonl", "--traffic nowhere.jsonl: there is no file /"),
        ("--simulate FILE --rate x", "--rate x"),
        ("--simulate FILE --rate 0", "--rate 0"),
        ("--simulate FILE --speculation on", "--speculation on"),
        ("--simulate FILE --drafter suffix", "the recording, which has ngram"),
        ("--simulate FILE --record r.json", "nothing to record"),
        ("--simulate FILE --no-speculation", "--no-speculation with --simulate: simulate it by --speculation off"),
        ("--simulate FILE --drafter none", "--drafter none with --simulate: simulate it by --speculation off"),
        ("--simulate FILE --drafter ngram --drafter suffix", "--drafter suffix with --simulate: one is simulated"),
        ("--simulate FILE --no-warm-up", "--no-warm-up with --simulate: the simulated engines are as"),
        ("--simulate FILE --warm-up", "--warm-up with --simulate: the simulated engines are as"),
        ("--simulate FILE --max-draft-memory 20%", "--max-draft-memory with --simulate: the simulated engines are as"),
        ("--simulate FILE --planner fixed", "--planner with --simulate: simulate it by --speculation fixed"),
        ("--simulate FILE --memory 1GiB", "--memory with --simulate: the simulated engines are as the recorded one"),
        ("--simulate FILE --max-tokens 9", "--max-tokens with --simulate: the simulated requests are the recorded"),
        ("--simulate FILE --temperature 0", "--temperature with --simulate: the simulated requests are the recorded"),
        ("--simulate FILE --concurrency 4", "--concurrency with --simulate: say when requests come by --rate"),
        ("--simulate FILE --prompts nowhere", "--prompts with --simulate: the simulated requests are the recorded"),
        ("--simulate FILE --limit 0", "--limit with --simulate: the simulated requests are the recorded"),
        ("--simulate FILE --peers transformers", "--peers with --simulate: only this engine is simulated"),
        ("--simulate FILE --repeats 2", "--repeats with --simulate: the same seed gives the same numbers"),
        ("--simulate FILE --requests 9", "--requests 9: only for a --rate without --traffic"),
        ("--latency-target ttft=1", "--latency-target: only for traffic; give --rate R, too"),
        ("--requests 9", "--requests: only for traffic; give --rate R, too"),
        ("--rate 1 --concurrency 4", "--concurrency with --rate: requests come when --rate says"),
        ("--rate 1 --peers transformers", "--peers with --rate: only this engine is sent requests"),
        ("--simulate FILE --latency-target ttft", "ttft=0.5,tpot=0.05"),
        ("--traffic t.jsonl", "--simulate FILE"),
        ("--replicas 2", "--simulate FILE"),
        ("--rate 1,2", "one rate"),
        ("--record nowhere/r.json", "no folder"),
        ("--record /", "--record /: is a folder; name a file in it"),
    ],
)
def test_what_is_wrong_is_said_before_anything_loads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, said: str
) -> None:
    file = tmp_path / "r.json"
    made_up(0.001).save(file)
    code, _, err = run(capsys, *arguments.replace("FILE", str(file)).split())
    assert code == 2
    assert said in " ".join(err.split())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"arrival": 1, "prompt_tokens": 5}', "output_tokens is missing"),
        (
            '{"arrival": "soon", "prompt_tokens": 5, "output_tokens": 5}',
            "arrival='soon': must be a number of seconds, 0",
        ),
        (
            '{"arrival": -1, "prompt_tokens": 5, "output_tokens": 5}',
            "arrival=-1: must be a number of seconds, 0 or more",
        ),
        ('{"arrival": 1, "prompt_tokens": 0, "output_tokens": 5}', "prompt_tokens=0: must be a number of tokens, 1 or"),
        ('{"arrival": 1, "prompt_tokens": 2.5, "output_tokens": 5}', "prompt_tokens=2.5: must be a number of tokens"),
        ('{"arrival": NaN, "prompt_tokens": 2, "output_tokens": 5}', "arrival=nan: must be a number of seconds"),
        ("[1]", "no JSON object; a line must be such as"),
        ("{", "not JSON (Expecting"),
        ('{"arrival": 1, "prompt_tokens": 2000, "output_tokens": 90}', "a request of 2000 and 90 tokens: the recorded"),
    ],
)
def test_wrong_traffic_is_named_by_file_line_and_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, said: str
) -> None:
    file, traffic = tmp_path / "r.json", tmp_path / "t.jsonl"
    made_up(0.001).save(file)
    traffic.write_text('{"arrival": 0, "prompt_tokens": 5, "output_tokens": 5}\n\n' + line + "\n")
    code, _, err = run(capsys, "--simulate", str(file), "--traffic", str(traffic))
    assert code
    assert f"--traffic {traffic}:3: {said}" in " ".join(err.split())


def test_who_breaks_traffic_off_hears_that_nothing_is_kept(
    capsys: pytest.CaptureFixture[str], tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, kept, real = tmp_path / "p.jsonl", tmp_path / "r.json", live.send

    def broken_off(llm: LLM, ids: Sequence[Any], params: Sequence[Any], times: Sequence[float], *told: Any) -> Any:
        if told:  # no rehearsal, which nobody counts
            raise KeyboardInterrupt
        return real(llm, ids, params, times)

    monkeypatch.setattr(live, "send", broken_off)
    prompts.write_text(json.dumps({"prompt": "again and again"}) + "\n")
    words = f"--model {tiny_target} --prompts {prompts} --rate 50 --drafter ngram --planner fixed --max-tokens 4"
    code, _, err = run(capsys, *words.split(), "--record", str(kept))
    assert code == 130
    assert f"{kept} is not written" in " ".join(err.split())
    assert not kept.exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_requests_are_counted_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_target: Path,
    tmp_path: Path,
    terminal: bool,
) -> None:
    file, prompts = tmp_path / "r.json", tmp_path / "p.jsonl"
    many = made_up(0.0005)
    replace(many, traces=many.traces * 20).save(file)
    prompts.write_text(json.dumps({"prompt": "again and again"}) + "\n")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take stderr for a terminal
        monkeypatch.setenv("TERM", "xterm")
    _, _, err = run(capsys, "--simulate", str(file), "--rate", "5", "--requests", "7", "--speculation", "off")
    assert ("7/7" in err and "simulating 5 a second, off" in err) is terminal
    real = f"--model {tiny_target} --prompts {prompts} --rate 100 --requests 3 --drafter ngram --max-tokens 4"
    _, _, err = run(capsys, *real.split())
    assert ("3/3" in err and "requests answered" in err) is terminal


def test_every_option_is_heeded_or_refused_by_a_simulation() -> None:
    """Who adds an option says which: one that is taken and ignored would be believed."""
    heeded = {"drafter", "draft_tokens", "min_gain", "seed", "debug"}
    without_effect = {"model"}  # of which the help says that none is loaded
    shared = {field.name for field in fields(Common)}
    assert shared == heeded | without_effect | (shared & set(NOT_SIMULATED))
    assert not (heeded | without_effect) & set(NOT_SIMULATED)
    own = {"prompts", "limit", "category", "concurrency", "repeats", "peers", "startup", "record", "long_prompts"}
    assert set(NOT_SIMULATED) - shared == own


def test_no_model_need_be_there_for_a_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    made_up(0.0005).save(file)
    code, out, _ = run(capsys, "--simulate", str(file), "--model", "/nope", "--drafter", "ngram")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["drafter"] == "ngram"


def test_what_a_recording_cannot_answer_well_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, one = tmp_path / "r.json", made_up(0.0005, max_num_seqs=1)
    replace(one, made=Made("adaptive", True, alone_s=(0.2, 0.3))).save(file)
    _, out, err = run(capsys, "--simulate", str(file), "--rate", "2", "--requests", "3")
    doubted = json.loads(out.splitlines()[-1])["doubts"]
    assert [f"not sure: {doubt}" for doubt in doubted] == err.splitlines()
    assert doubted == [
        "the recorded engine serves 1 request at a time (max_num_seqs): record with --rate for one that serves more",
        "recorded with the adaptive planner: what drafters that it let rest would have guessed is not known; record "
        "with --planner fixed",
        "the machine was busy before it was recorded: do not trust what passes cost; record it again",
        "the machine did not keep its speed while it was recorded: one answer alone took between 0.2 and 0.3 s; record "
        "it again when nothing else runs, or elsewhere",
        "only 1 request was recorded: record at least 20 (--requests 20)",
    ]
    many = replace(one, traces=one.traces * 20, made=Made())
    assert not doubts(many, "ngram", together=False), "requests that come one by one need one seat"
    assert doubts(many, "ngram", together=True)
    assert not doubts(replace(many, machine=machine()), "ngram", together=True)
    assert not doubts(replace(many, made=Made("adaptive")), None, together=False), "nobody guesses"
    assert not doubts(replace(many, made=Made(alone_s=(0.2, 0.22))), None, together=False)


def test_how_a_recording_was_made_is_kept(tmp_path: Path) -> None:
    file, made = tmp_path / "r.json", Made("adaptive", True, False, (0.25, 0.5))
    replace(made_up(0.0005), made=made).save(file)
    assert Recording.load(file).made == made


def test_a_recorded_run_knows_small_passes_and_its_own_requests(
    capsys: pytest.CaptureFixture[str], tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of one row are there though all requests draft, and who answered for their sake is not replayed."""
    monkeypatch.setattr(memory, "load_average", lambda: 1000.0)
    prompts, kept = tmp_path / "p.jsonl", tmp_path / "r.json"
    prompts.write_text("".join(json.dumps({"prompt": f"again and again {i} " * 4}) + "\n" for i in range(3)))
    words = f"--model {tiny_target} --prompts {prompts} --rate 50 --drafter ngram --planner fixed --max-tokens 12"
    code, _, _ = run(capsys, *words.split(), "--record", str(kept))
    assert code == 0
    recording = Recording.load(kept)
    before, behind = recording.made.alone_s
    assert recording.made == Made("fixed", True, alone_s=(before, behind))
    assert min(before, behind) > 0
    sizes = {seen.rows for seen in recording.costs.passes if seen.requests == 1 and not seen.read_rows}
    assert 1 in sizes
    assert [trace.drafters for trace in recording.traces] == [("ngram",)] * 3
    code, out, _ = run(capsys, "--simulate", str(kept))
    assert code == 0
    assert {row["requests"] for row in json.loads(out.splitlines()[-1])["rows"]} == {3}
