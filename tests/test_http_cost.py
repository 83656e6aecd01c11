"""The measurement of what HTTP costs: both ways are asked the same, in turn, and compared pair by pair."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path

import pytest

import inside
from conftest import save_model, tiny_llama
from serving import engine_process, serving
from slipstream import LLM

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


def test_each_answer_of_a_place_has_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a limit that counts answers instead of seconds: a steady run is several times as long as a burst."""
    given: list[float] = []

    @asynccontextmanager
    async def limit(seconds: float) -> AsyncIterator[None]:
        given.append(seconds)
        yield

    event = b'data: {"choices":[{"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(4):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
            writer.write(answer)
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            connection = await asyncio.open_connection(*server.sockets[0].getsockname())
            await cost.ask_in_turn(connection, Asked(1, 8, 1).steady(0))
            connection[1].close()

    monkeypatch.setattr(cost.asyncio, "timeout", limit)
    asyncio.run(main())
    assert given == [cost.ANSWER_S] * 4


def test_the_command_writes_one_json(tiny_target: Path, tmp_path: Path) -> None:
    written = tmp_path / "cost.json"
    options = ["--model", str(tiny_target), "--device", "cpu", "--memory", "64MiB", "--json", str(written)]
    counts = ["--requests", "2", "--max-tokens", "4", "--repeats", "1"]
    command = [sys.executable, str(cost.__file__), *options, *counts]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told == json.loads(written.read_text())
    assert told["throughput"]["ratio"] == pytest.approx(1 - told["throughput"]["lost"])
    assert told["first_token"]["pairs"] == cost.FIRST_TOKENS
    assert {"requests": 2, "max_tokens": 4, "repeats": 1}.items() <= told.items()
    assert told["machine"]["httptools"] is True


def test_numbers_that_make_no_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cost.main(["--each", "0"])
    assert "--each 0: must be at least 1" in capsys.readouterr().err
