"""Traffic on the real engine: rates, targets, long prompts beside streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import VOCAB
from slipstream import LLM
from slipstream.bench import memory, traffic
from slipstream.bench.load import STREAMS, Ask, Heard, at_a_rate, beside_long_prompts, library, play, prompt_of, summary
from slipstream.bench.traffic import Outcome, Served, Spread, Targets
from slipstream.cli import bench
from slipstream.cli.main import main
from slipstream.core.errors import ConfigError


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def usual(tiny_target: Path, tmp_path: Path) -> list[str]:
    """A tiny model and three prompts."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"one two {n} one two {n}"}) + "\n" for n in range(3)))
    return ["--model", str(tiny_target), "--prompts", str(prompts), "--max-tokens", "4", "--drafter", "ngram"]


def test_each_rate_is_a_row(
    capsys: pytest.CaptureFixture[str], usual: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "load_average", lambda: 1000.0)
    code, out, _ = run(
        capsys, *usual, "--rate", "100,200", "--requests", "5", "-t", "0.5", "--dtype", "bf16", "--json", "-"
    )
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert [(row["requests"], row["rate"], row["speculation"]) for row in result["rows"]] == [
        (5, 100.0, "ngram"),
        (5, 200.0, "ngram"),
    ]
    assert isinstance(result["seed"], int)
    assert (result["busy"], result["load_before"]) == (True, 1000.0)
    assert "warning: the machine was busy" in out
    assert "bfloat16 on cpu" in result["remarks"][0]
    assert result["remarks"][0] in out
    assert all(len(line) <= 80 for line in out.splitlines()[:3])


def test_a_machine_that_is_full_is_called_so(
    capsys: pytest.CaptureFixture[str], usual: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two a second are served. The last of few answers alone makes no machine full."""

    def send(llm: Any, ids: Sequence[Any], params: Any, times: Sequence[float], *told: Any) -> list[Served]:
        ends = [max(at, number / 2) + 0.5 for number, at in enumerate(times)]
        return [Served(at, 5, 4, end, end, 4) for at, end in zip(times, ends, strict=True)]

    monkeypatch.setattr(traffic, "send", send)
    _, out, _ = run(capsys, *usual, "--rate", "1,50", "--requests", "40")
    (full,) = [line for line in out.splitlines() if "wait ever longer" in line]
    assert full.startswith("ngram, 50 a second: only 2 were served")


@pytest.mark.parametrize("terminal", [True, False])
def test_requests_are_counted_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, usual: list[str], terminal: bool
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take stderr for a terminal
        monkeypatch.setenv("TERM", "xterm")
    _, _, err = run(capsys, *usual, "--rate", "100")
    assert ("3/3" in err and "requests answered, 100 a second" in err) is terminal


def test_what_outcomes_are_made_of() -> None:
    served = [Served(0.0, 5, 3, 0.5, 1.5, 2), Served(1.0, 5, 5, 3.0, 4.0, 4)]
    found = Outcome.of(served, Targets.parse("ttft=1,tpot=0.5"))
    assert (found.requests, found.seconds, found.tokens_per_s, found.good, found.tau) == (2, 4.0, 2.0, 0.5, 8 / 6)
    assert (found.ttft, found.tpot) == (Spread.of([0.5, 2.0]), Spread.of([0.5, 0.25]))
    with pytest.raises(ConfigError, match="--latency-target ttft: must be seconds above 0"):
        Targets.parse("ttft")


def test_arrivals_are_random_and_the_same_for_a_seed() -> None:
    times = traffic.poisson_times(4.0, 2000, seed=1)
    assert times == traffic.poisson_times(4.0, 2000, seed=1) != traffic.poisson_times(4.0, 2000, seed=2)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500, rel=0.1)


def test_streams_beside_long_prompts_tell_of_the_model(
    capsys: pytest.CaptureFixture[str], usual: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def play(send: Any, length: int, *, streams: int, **_: Any) -> dict[str, float]:
        asked.append(streams)
        return dict.fromkeys(("kept", "gap_p99_ms", "gap_max_ms", "first_ms", "first_times_alone"), 1.0)

    monkeypatch.setattr(bench, "beside_long_prompts", play)
    model = usual[:2]
    code, out, _ = run(capsys, *model, "--long-prompts", "20", "--dtype", "bfloat16", "--json", "-")
    assert (code, asked) == (0, [1, STREAMS])
    result = json.loads(out.splitlines()[-1])
    assert len(result["rows"]) == 2
    assert any("bfloat16" in remark for remark in result["remarks"])
    assert result["remarks"][0] in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--rate x", "--rate x: must be requests a second above 0"),
        ("--rate 0", "--rate 0: must be"),
        ("--rate 1 --concurrency 4", "--concurrency with --rate: --rate says when requests come"),
        ("--rate 1 --peers transformers", "--peers with --rate: measured in a run of its own"),
        ("--rate 1 --repeats 2", "--repeats with --rate: requests come once; give --requests N"),
        ("--rate 1 --startup", "--startup with --rate: measured in a run of its own"),
        ("--rate 1 --drafter ngram --drafter suffix", "--drafter suffix with --rate: one is measured in a run"),
        ("--rate 1 --temperature 0,1", "--temperature 1 with --rate: one is measured in a run; give one"),
        ("--latency-target ttft=1", "--latency-target: only for traffic; give --rate R, too"),
        ("--requests 9", "--requests: only for traffic; give --rate R, too"),
        ("--long-prompts 9 --rate 1", "--rate with --long-prompts: measured in a run of its own"),
        ("--long-prompts 9 --peers transformers", "--peers with --long-prompts: measured in a run of its own"),
        ("--long-prompts 9 --startup", "--startup with --long-prompts: measured in a run of its own"),
        ("--long-prompts 9 --prompts x", "--prompts with --long-prompts: its prompts are random tokens"),
        ("--long-prompts 9 --limit 3", "--limit with --long-prompts: its prompts are random tokens"),
        ("--long-prompts 9 --category code", "--category with --long-prompts: its prompts are random tokens"),
        ("--long-prompts 9 --concurrency 2", "--concurrency with --long-prompts: 1 and 8 streams are measured"),
        ("--long-prompts 9 --temperature 1", "--temperature with --long-prompts: its answers are greedy"),
        ("--long-prompts 9 --top-k 4", "--top-k with --long-prompts: its answers are greedy"),
        ("--long-prompts 9 --max-tokens 4", "--max-tokens with --long-prompts: its answers are greedy"),
        ("--long-prompts 9 --verifier rejection", "--verifier with --long-prompts: its answers are greedy"),
        ("--long-prompts 9 --drafter ngram --drafter suffix", "--drafter suffix with --long-prompts: one is"),
        ("--temperature x", "--temperature x: must be 0 (greedy) to"),
        ("--concurrency 0", "--concurrency 0: must be whole numbers of 1 or more, such as 1,8,32"),
        ("--record r.json", "--record is gone: nothing is simulated any more; --rate R measures traffic"),
        ("--simulate=r.json", "--simulate is gone: nothing is simulated any more; --rate R measures traffic"),
        ("--traffic t.jsonl", "--traffic is gone: requests come at random times; give --rate R"),
        ("--replicas 2", "--replicas is gone: one engine is measured; start a server for each replica"),
        ("--speculation off", "--speculation is gone: give --drafter NAME or --drafter none"),
        ("--plot p.svg", "--plot is gone: draw the rows that --json FILE writes"),
    ],
)
def test_what_is_wrong_is_said_before_anything_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.setattr(bench, "loaded", pytest.fail)
    code, out, err = run(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert err.count("\n") == 1


def test_streams_beside_long_prompts(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter=None, max_num_seqs=4)
    length = llm.max_model_len // 2
    row = asyncio.run(beside_long_prompts(library(llm), length, streams=2, vocab_size=VOCAB))
    assert (row["prompt_tokens"], row["streams"]) == (length, 2)
    assert row["kept"] > 0
    assert row["gap_max_ms"] >= row["gap_p99_ms"] > 0
    assert row["first_times_alone"] > 0
    until = time.perf_counter() + 10
    while llm.engine.busy and time.perf_counter() < until:  # the streams are ended between two steps
        time.sleep(0.01)
    assert not llm.engine.busy


def test_what_is_heard_is_told() -> None:
    ask = Ask([1], 4)
    heard = [Heard(ask, 1.0, [(1.5, 1), (1.7, 2), (2.5, 1)]), Heard(ask, 1.0, [(1.1, 1), (1.2, 3)])]
    assert [round(gap, 6) for gap in heard[0].gaps] == [0.2, 0.8]
    told = summary(heard)
    assert (told["first_p50_ms"], told["gap_max_ms"]) == (300.0, 800.0)
    assert told["token_p50_ms"] == round(1e3 * (1.0 / 3 + 0.1 / 3) / 2, 2)
    assert told["tok_s"] == round(8 / 1.5, 2)


def test_requests_come_when_they_are_to() -> None:
    sent: list[Ask] = []

    async def send(ask: Ask) -> AsyncIterator[int]:
        sent.append(ask)
        yield 1

    asks = at_a_rate(1000, 5, 3, 8)
    assert [one.at for one in asks] == sorted(one.at for one in asks)
    heard = asyncio.run(play(send, asks))
    assert sent == asks
    assert all(one.tokens == 8 and one.first_s >= 0 for one in heard)  # as was asked for, in one event
    assert prompt_of(5) != prompt_of(5)  # nothing is found in a cache
