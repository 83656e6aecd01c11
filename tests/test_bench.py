"""`slipstream bench`, `tune` and the demo: their arithmetic on timings that are known, and their tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from rich.console import Console

from slipstream import LLM
from slipstream.bench import baseline, demo, memory, report
from slipstream.bench import run as bench
from slipstream.bench import tune as tuning
from slipstream.bench.prompts import BenchPrompt, load_prompts, select
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
from slipstream.cli import options
from slipstream.cli.bench import closing_lines, startup_options
from slipstream.cli.main import main
from slipstream.cli.options import Common
from slipstream.cli.serve import _with_config
from slipstream.cli.tune import _noting_levels
from slipstream.core.errors import CapacityError, ConfigError, ModelError, ModelNotFound
from slipstream.core.outputs import CompletionOutput, DrafterStats, RequestOutput, SpeculationStats, Timing
from slipstream.core.params import SamplingParams, SpeculationParams
from slipstream.plan.types import Curve, MeasuredCosts

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


DEAR = MeasuredCosts(Curve((1, 2, 4), (0.010, 0.022, 0.030)))


@dataclass
class DemoLLM:
    """Four tokens a second plainly, sixteen with speculation."""

    tokens_with: tuple[int, ...] = (1, 2, 3, 4, 5)
    text: str = "class Rectangle"
    drafted_s: float = 1.25
    costs: MeasuredCosts | None = None
    tenants: list[str] = field(default_factory=list)

    def generate(self, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
        drafts = params.speculation.enabled
        self.tenants.append(params.speculation.tenant)
        tokens = list(self.tokens_with) if drafts else [1, 2, 3, 4, 5]
        timing = Timing(0.0, 1.0, self.drafted_s if drafts else 2.0)
        stats = SpeculationStats(rounds=2, emitted=5) if drafts else SpeculationStats(rounds=5, emitted=5)
        answer = CompletionOutput(0, self.text, tokens, timing=timing, speculation=stats)
        return [RequestOutput("0", None, [1, 2, 3], [answer], True)]

    def __enter__(self) -> DemoLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("tokens", "code", "said"), [((1, 2, 3, 4, 5), 0, "yes"), ((1, 2, 9, 4, 5), 1, "NO")])
def test_demo_compares_and_exits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokens: tuple[int, ...], code: int, said: str
) -> None:
    monkeypatch.setattr(demo, "load", lambda model, progress: DemoLLM(tokens))
    assert demo.main([]) == code
    out = capsys.readouterr().out
    assert f"same tokens: {said}" in out
    assert "4.0 tok/s" in out
    assert "16.0 tok/s" in out
    assert "4.00x" in out
    assert "tau 2.50" in out


@pytest.mark.parametrize(("text", "said"), [(demo.CODE, "right answer: yes"), ("class Rectangle", "right answer: no")])
def test_demo_says_whether_the_answer_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    monkeypatch.setattr(demo, "load", lambda model, progress: DemoLLM(text=text))
    assert demo.main([]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_the_default_model_gets_the_demo_right() -> None:
    with demo.load("default", lambda line: None) as llm:
        params = SamplingParams(temperature=0, max_tokens=256, stop="```")
        assert llm.generate([demo.PROMPT], params)[0].outputs[0].text.strip() == demo.CODE.strip()


def test_nobody_remembers_the_demos_answers() -> None:
    llm = DemoLLM()
    demo.compare(cast(Any, llm), 5)
    assert len(set(llm.tenants)) == len(llm.tenants) == 2 * (demo.ROUNDS + 1)


@pytest.mark.parametrize(
    ("drafted_s", "costs", "said"),
    [
        (1.25, DEAR, "so guessing pays well here"),
        (2.0, DEAR, "hardly paid here: rows are dear on this machine: a pass over two takes 2.2 times as long"),
        (2.0, None, "hardly paid here: to check several tokens takes this machine about as long as to say them"),
    ],
)
def test_demo_says_why_guessing_did_not_pay(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    drafted_s: float,
    costs: MeasuredCosts | None,
    said: str,
) -> None:
    monkeypatch.setattr(demo, "load", lambda model, progress: DemoLLM(drafted_s=drafted_s, costs=costs))
    assert demo.main([]) == 0
    assert said in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_demo_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def load(model: str, progress: object) -> DemoLLM:
        raise ModelNotFound("no network")

    monkeypatch.setattr(demo, "load", load)
    assert demo.main([]) == 1
    assert capsys.readouterr().err.strip() == "error: no network"


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


def test_what_is_measured_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    tell = _noting_levels()
    for level in (1, 4):
        for name in ("plain", "suffix"):
            tell(level, name)
    assert capsys.readouterr().err.splitlines() == ["measuring with 1 at once", "measuring with 4 at once"]


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
