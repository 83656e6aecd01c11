"""The benchmark's own arithmetic, on timings that are known; and its prompts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from rich.console import Console

from slipstream.bench import baseline, memory, report
from slipstream.bench import run as bench
from slipstream.bench.prompts import BenchPrompt, load_prompts, select
from slipstream.cli import options
from slipstream.cli.bench import closing_lines, startup_options
from slipstream.core.errors import CapacityError, ConfigError, ModelError
from slipstream.core.outputs import DrafterStats, SpeculationStats, parting
from slipstream.core.params import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

CATEGORIES = ["chat", "code", "code_editing", "summarization", "extraction", "math", "translation"]
PARAMS = SamplingParams(temperature=0, max_tokens=64)


@dataclass
class FakeRunner:
    """Answers with given tokens in given times, one after another, and logs when it was asked."""

    name: str
    log: list[str]
    times: list[float] = field(default_factory=lambda: [1.0])
    tokens: tuple[int, ...] = (5, 6, 7, 8)
    stats: SpeculationStats | None = None
    asked: list[tuple[list[list[int]], list[SamplingParams]]] = field(default_factory=list)

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> bench.Measured:
        self.log.append(self.name)
        self.asked.append(([list(ids) for ids in prompts], list(params)))
        seconds = self.times[(len(self.asked) - 1) % len(self.times)]
        answer = bench.Answer(self.tokens, seconds / 4, seconds, self.stats)
        return bench.Measured(tuple(answer for _ in prompts), seconds)


def unit(category: str, *names: str) -> bench.Unit:
    prompts = tuple(BenchPrompt(name, category, name) for name in names)
    return bench.Unit(category, prompts, tuple((1, 2, 3) for _ in names), tuple(PARAMS for _ in names))


def test_our_prompts_are_well_formed() -> None:
    lines = (files("slipstream.bench") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(set(json.loads(line)) == {"id", "category", "prompt"} for line in lines)
    prompts = load_prompts()
    assert list(dict.fromkeys(p.category for p in prompts)) == CATEGORIES
    assert set(Counter(p.category for p in prompts).values()) == {6}
    assert len({p.id for p in prompts}) == len({p.text for p in prompts}) == 42
    for prompt in prompts:
        words, lines_of_it = len(prompt.text.split()), prompt.text.count("\n")
        assert 20 <= words <= 450, prompt.id
        if prompt.category == "summarization":
            assert 250 <= words <= 400, prompt.id
        if prompt.category == "code_editing":
            assert 25 <= lines_of_it <= 52, prompt.id
            assert prompt.text.count("```") == 2, prompt.id


def test_prompt_files_of_both_forms(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"question_id": 81, "category": "writing", "turns": ["b", "c"]}\n')
    assert load_prompts(file) == [BenchPrompt("1", "all prompts", "a"), BenchPrompt("81", "writing", "b")]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "a"}', '{"turns": []}', '{"prompt": " "}', ""])
def test_bad_prompt_files_say_where(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"p\.jsonl"):
        load_prompts(file)


@pytest.mark.parametrize(
    ("limit", "counts"), [(1, [1]), (3, [1, 1, 1]), (7, [3, 2, 2]), (8, [4, 2, 2]), (99, [6, 2, 2])]
)
def test_a_limit_is_spread_over_the_categories(limit: int, counts: list[int]) -> None:
    sizes = {"a": 6, "b": 2, "c": 2}
    prompts = [BenchPrompt(f"{name}{i}", name, "x") for name, size in sizes.items() for i in range(size)]
    chosen = select(prompts, limit=limit)
    assert list(Counter(p.category for p in chosen).values()) == counts
    assert chosen == [p for p in prompts if p in chosen], "order is kept"
    assert [p.id for p in select(prompts, ["c"], limit)] == ["c0", "c1"][:limit]


def test_modes_take_turns_and_the_order_rotates() -> None:
    log: list[str] = []
    runners = [FakeRunner(name, log) for name in "abc"]
    steps: list[tuple[str, str]] = []
    units = [unit("x", "p"), unit("x", "q"), unit("y", "r")]
    samples = list(bench.measure(units, runners, repeats=2, on_step=lambda *step: steps.append(step)))
    assert "".join(log) == "abc" + "bca" + "cab" + "bca" + "cab" + "abc"
    assert [s.mode for s in samples] == log
    assert steps[3] == ("x", "b")
    assert [(s.unit, s.repeat) for s in samples[::3]] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


def test_of_a_run_that_broke_off_whole_units_are_kept() -> None:
    log: list[str] = []
    samples = list(bench.measure([unit("x", "p"), unit("x", "q")], [FakeRunner(n, log) for n in "ab"], repeats=2))
    assert bench.in_all_modes(samples, 2) == samples
    assert bench.in_all_modes(samples[:7], 2) == samples[:6], "the second time of the second prompt"
    assert bench.in_all_modes(samples[:1], 2) == []


def test_warm_up_is_short_and_reaches_every_mode() -> None:
    log: list[str] = []
    runners = [FakeRunner(name, log) for name in "ab"]
    bench.warm_up(unit("x", "p"), runners)
    assert log == ["a", "b"]
    assert runners[0].asked[0][1][0].max_tokens == bench.WARM_UP_TOKENS


def test_speed_ups_come_from_sums_not_from_means_of_ratios() -> None:
    log: list[str] = []
    units = [unit("x", "p"), unit("x", "q"), unit("y", "r")]
    stats = SpeculationStats(rounds=2, emitted=4, drafted=5, accepted=2, draft_s=0.1, verify_s=0.2, host_s=0.3)
    plain = FakeRunner("plain", log, [4.0, 8.0, 2.0], stats=SpeculationStats(rounds=4, emitted=4))
    ngram = FakeRunner("ngram", log, [1.0, 3.0, 4.0], stats=stats)
    summary = report.summarize(units, list(bench.measure(units, [plain, ngram])), ["plain", "ngram"])
    x = summary.row("x", "ngram")
    assert (x.tokens, x.seconds, x.prompts, x.prompt_tokens) == (8, 4.0, 2, 6)
    assert x.tokens_per_s == 2.0
    assert summary.row("x", "plain").tokens_per_s == pytest.approx(8 / 12)
    assert summary.speedup(x) == pytest.approx(3.0)
    assert summary.speedup(summary.row("y", "ngram")) == pytest.approx(0.5)
    whole = summary.row(report.ALL, "ngram")
    assert summary.speedup(whole) == pytest.approx(14 / 8)
    assert (whole.stats.tau, whole.stats.alpha) == (2.0, 0.4)
    assert whole.stats.verify_s == pytest.approx(0.6)
    assert x.prefill_s == pytest.approx(1.0)
    assert x.decode_tokens_per_s == pytest.approx(6 / 3)
    assert summary.differences == ()
    payload = report.summary_json(summary)
    assert payload["all"]["ngram"]["speedup"] == 1.75
    assert list(payload["categories"]) == ["x", "y"]
    out = StringIO()
    Console(file=out, width=80).print(*report.tables([summary]))
    assert "3.00x" in out.getvalue()
    assert "yes" in out.getvalue()


@pytest.mark.parametrize(
    ("declined", "said"),
    [(3, "were not expected to pay enough in 6 of 8 rounds; --min-gain"), (0, "its drafter never had a guess")],
)
def test_a_mode_that_never_drafted_says_why(declined: int, said: str) -> None:
    log: list[str] = []
    units = [unit("x", "p"), unit("x", "q")]
    by_drafter = {"model": DrafterStats(declined=declined)} if declined else {}
    stats = SpeculationStats(rounds=4, emitted=4, by_drafter=by_drafter)
    runners = [
        FakeRunner("plain", log, stats=SpeculationStats(rounds=4, emitted=4)),
        FakeRunner("model:d", log, stats=stats),
    ]
    summary = report.summarize(units, list(bench.measure(units, runners)), ["plain", "model:d"])
    used = memory.MemoryReport(imports=1, peak=2, weights=1, draft_weights=0, cache=0, device_peak=None)
    about = {"skipped_prompts": 0, "hardware": {"busy": False}}
    lines = closing_lines([summary], bench.PrefillReport(10, {"plain": 1.0}), used, about)
    told = [line for line in lines if "nothing drafted" in line]
    assert len(told) == 1, "plain decoding was not asked to"
    assert told[0].startswith("model:d: ")
    assert said in told[0]
    times = [line for line in lines if line.startswith("time, ")]
    assert [line.split(", ")[1].split()[0] for line in times] == ["plain:", "model:d:"]
    assert ["draft" in line for line in times] == [False, True]


def test_the_table_fits_80_columns() -> None:
    log: list[str] = []
    units = [unit("code_editing", "p"), unit("summarization", "q")]
    stats = SpeculationStats(rounds=1, emitted=4, drafted=5, accepted=2)
    runners = [FakeRunner("plain", log), FakeRunner("transformers", log, [0.001], (5, 6), stats)]
    summary = report.summarize(units, list(bench.measure(units, runners)), ["plain", "transformers"])
    out = StringIO()
    Console(file=out, width=80).print(*report.tables([summary]))
    assert "no: 0/1" in out.getvalue()
    assert "…" not in out.getvalue()


def test_of_repeats_the_median_counts() -> None:
    log: list[str] = []
    units = [unit("x", "p")]
    plain = FakeRunner("plain", log, [9.0, 2.0, 1.0])
    summary = report.summarize(units, list(bench.measure(units, [plain], repeats=3)), ["plain"])
    assert summary.row("x", "plain").seconds == 2.0
    assert summary.row("x", "plain").tokens == 4


def test_tokens_that_differ_are_counted_and_named() -> None:
    log: list[str] = []
    units = [unit("x", "p", "q")]
    plain = FakeRunner("plain", log, tokens=(5, 6, 7, 2))
    wrong = FakeRunner("wrong", log, tokens=(5, 6, 9))
    other = FakeRunner("transformers", log, tokens=(5, 6, 7))
    modes = ["plain", "wrong", "transformers"]
    samples = list(bench.measure(units, [plain, wrong, other]))
    summary = report.summarize(units, samples, modes, eos={2})
    assert summary.differences == (report.Difference("p", "wrong", 2), report.Difference("q", "wrong", 2))
    assert (summary.row("x", "wrong").same, summary.row("x", "wrong").compared) == (0, 2)
    assert summary.row("x", "transformers").same == 2, "the end-of-text token does not count"
    sampled = report.summarize(units, samples, modes, eos={2}, incomparable=["wrong"])
    assert sampled.differences == ()
    assert sampled.row("x", "wrong").compared == 0


@pytest.mark.parametrize(
    ("left", "right", "at"), [([1, 2], [1, 2], None), ([1, 2], [1], 1), ([1], [3], 0), ([], [], None)]
)
def test_where_answers_part(left: list[int], right: list[int], at: int | None) -> None:
    assert parting(left, right) == at


def test_prefill_is_measured_without_help_from_a_cached_prefix() -> None:
    log: list[str] = []
    runner = FakeRunner("plain", log, [8.0, 4.0, 40.0, 2.0])
    ids = list(range(100))
    result = bench.measure_prefill(ids, [runner])
    assert result.tokens_per_s == {"plain": 100.0}, "the first warms up; median of 1, 10 and 0.5 seconds"
    starts = [prompts[0][0] for prompts, _ in runner.asked]
    assert len(set(starts)) == 4
    assert all(sorted(prompts[0]) == ids for prompts, _ in runner.asked)


def fake_llm(**more: Any) -> LLM:
    def chat_prompt(messages: list[dict[str, str]]) -> list[int]:
        return [ord(letter) for letter in messages[0]["content"]]

    return cast("LLM", SimpleNamespace(**{"chat_prompt": chat_prompt, "max_model_len": 100, **more}))


def test_a_unit_has_as_many_prompts_as_run_at_once() -> None:
    prompts = [BenchPrompt("1", "a", "xy"), BenchPrompt("2", "b", "z" * 50), BenchPrompt("3", "a", "w")]
    alone = bench.plan_work(fake_llm(), prompts, PARAMS, concurrency=1)
    assert [[p.id for p in u.prompts] for u in alone.units] == [["1"], ["3"]]
    assert alone.skipped == 1, "50 + 64 tokens do not fit 100"
    together = bench.plan_work(fake_llm(), prompts, PARAMS, concurrency=4)
    assert [[p.id for p in u.prompts] for u in together.units] == [["1", "3", "1", "3"]], "filled up"
    assert together.units[0].token_ids == ((120, 121), (119,)) * 2
    with pytest.raises(CapacityError, match="max_model_len=10"):
        bench.plan_work(fake_llm(max_model_len=10), prompts, PARAMS, concurrency=1)


def test_sampled_prompts_have_own_seeds() -> None:
    prompts = [BenchPrompt("1", "a", "x"), BenchPrompt("2", "a", "y")]
    params = SamplingParams(temperature=1, seed=40, max_tokens=4)
    work = bench.plan_work(fake_llm(), prompts, params, concurrency=2)
    assert [p.seed for p in work.units[0].params] == [40, 41]


def test_rejection_sampling_runs_beside_the_exact_verifier() -> None:
    asked = SpeculationParams(draft_tokens=4, verifier="rejection")
    both = bench.engine_runners(fake_llm(), ["ngram", "model:x"], asked)
    found = [(r.name, r.speculation.enabled, r.speculation.drafter, r.speculation.verifier) for r in both]
    assert found == [
        ("plain", False, None, "exact"),
        ("ngram", True, "ngram", "exact"),
        ("ngram, rejection", True, "ngram", "rejection"),
        ("model:x", True, "model", "exact"),
        ("model:x, rejection", True, "model", "rejection"),
    ]
    assert {r.speculation.draft_tokens for r in both[1:]} == {4}
    exact = bench.engine_runners(fake_llm(), ["ngram"], SpeculationParams())
    assert [r.name for r in exact] == ["plain", "ngram"]


def test_nobody_remembers_what_was_said_to_the_same_prompt(open_llm: Callable[..., LLM]) -> None:
    """In another mode or repeat; what was said to other prompts may be remembered, as it is for users."""
    llm = open_llm(drafter="suffix", planner="fixed")
    plain, suffix = bench.engine_runners(llm, ["suffix"], SpeculationParams())
    prompt, params = list(range(40, 70)), [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)]
    plain.answer([prompt], params)
    first, again = (suffix.answer([prompt], params).answers[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    assert first.stats is not None
    assert again.stats is not None
    assert again.stats.accepted == first.stats.accepted
    other = suffix.answer([[*prompt, first.token_ids[0]]], params).answers[0].stats
    assert other is not None
    assert other.accepted > first.stats.accepted  # it goes on as the other one did


def test_memory_ratio() -> None:
    on_cpu = memory.MemoryReport(imports=100, peak=460, weights=200, draft_weights=40, cache=60)
    assert on_cpu.ratio == pytest.approx(1.2)
    on_gpu = memory.MemoryReport(imports=100, peak=900, weights=200, draft_weights=0, cache=100, device_peak=330)
    assert on_gpu.ratio == pytest.approx(1.1)
    assert on_gpu.to_json()["ratio"] == 1.1


@pytest.mark.parametrize(
    ("load", "cores", "busy"), [(4.0, 2, True), (0.3, 2, False), (1.5, 4, False), (None, 2, False)]
)
def test_a_busy_machine_is_noticed(load: float | None, cores: int, busy: bool) -> None:
    assert memory.busy(load, cores) is busy


def test_resident_memory_is_read() -> None:
    status = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"
    assert memory.status_bytes("VmHWM", status) == 2 * 2**20
    assert memory.status_bytes("VmSwap", status) is None
    before = memory.peak_rss()
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert memory.peak_rss() >= before
    assert memory.current_rss() >= len(block)


def test_a_peer_that_cannot_load_says_so(tmp_path: Path) -> None:
    config = baseline.PeerConfig(str(tmp_path / "nothing"), "float32", "cpu", threads=1)
    with pytest.raises(ModelError, match="--peers transformers: it ended with 1"):
        baseline.TransformersPeer(config)


def test_a_peer_answers_a_batch(tiny_target: Path) -> None:
    config = baseline.PeerConfig(str(tiny_target), "float32", "cpu", threads=1)
    prompts, params = [[5, 6, 7], [8, 9]], [SamplingParams(temperature=0, max_tokens=4, seed=1)] * 2
    with baseline.TransformersPeer(config) as peer:
        together = peer.answer(prompts, params)
        alone = [peer.answer([ids], params[:1]).answers[0] for ids in prompts]
    assert [answer.token_ids for answer in together.answers] == [answer.token_ids for answer in alone]
    assert all(0 < answer.first_token_s <= answer.total_s <= together.wall_s for answer in together.answers)


def test_a_fresh_process_is_timed_with_the_same_options() -> None:
    common = options.Common(
        threads=3, trust_remote_code=True, engine={"memory": "1GiB", "max_model_len": 64, "planner": "fixed"}
    )
    given = " ".join(startup_options(common, ()))
    assert given == (
        "--model default --dtype auto --device auto --drafter none --memory 1GiB --max-model-len 64 "
        "--planner fixed --threads 3 --trust-remote-code"
    )
