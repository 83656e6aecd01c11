"""`slipstream explain`: what would be chosen follows the costs, and the command says it in words and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli.explain import ALPHAS, BATCHES, choice_table, context_lines, in_words, pass_table
from slipstream.cli.forecast import Choice, Engine, Guesser, forecast
from slipstream.cli.main import main
from slipstream.plan.types import Curve, DraftSeen, Levels, MeasuredCosts

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GPU = MeasuredCosts(
    Curve(SIZES, (4.0, 4.0, 4.1, 4.1, 4.2, 4.4, 4.6, 5.0, 7.6)),
    drafts={"head": (DraftSeen(1, Curve((1, 5), (0.2, 1.0))), DraftSeen(64, Curve((1, 5), (1.0, 5.0))))},
)
CPU = MeasuredCosts(Curve(SIZES, tuple(10.0 + 2.2 * (n - 1) for n in SIZES)), 0.0, 0.002)


def test_more_is_chosen_where_more_is_right_and_fewer_are_at_once() -> None:
    engine = Engine(GPU, 0.001, True, 256, 100)
    free = Guesser("free", 16)
    alone = [forecast(engine, free, 1, alpha) for alpha in ALPHAS]
    assert [choice.nodes for choice in alone] == sorted(choice.nodes for choice in alone)
    assert alone[-1].nodes == 15, "16 rows are nearly free"
    assert alone[-1].gain > 5
    crowd = forecast(engine, free, 64, 0.95)
    assert crowd.nodes <= 3
    full = forecast(Engine(GPU, 0.001, True, 64, 100), free, 64, 0.95)
    assert (full.nodes, full.gain) == (0, 1.0)
    assert "64 rows" in full.why


def test_guesses_that_take_time_are_weighed() -> None:
    engine = Engine(GPU, 0.001, True, 256, 100)
    head = Guesser("head", 5, is_free=False)
    assert forecast(engine, head, 1, 0.8).nodes > 0
    assert forecast(engine, head, 64, 0.5).nodes == 1, "64 * 1.5 / (5 + 1) is more than 64 / 4.6"
    assert forecast(engine, head, 64, 0.3).nodes == 0
    assert "off" in forecast(engine, head, 64, 0.3).why
    tree = Guesser("head", 40, levels=(Levels(2, 40), Levels(5, 40)), is_free=False)
    assert forecast(engine, tree, 1, 0.8).nodes > 5


def test_drafts_that_are_taken_whole() -> None:
    """All of their nodes, or none: at few right guesses as at many."""
    gpu, cpu = Engine(GPU, 0.001, True, 256, 100), Engine(CPU, 0.15, False, 256, 100)
    whole = Guesser("whole", 16, whole=True)
    assert {forecast(gpu, whole, 1, alpha).nodes for alpha in (0.3, 0.9)} == {16}
    assert forecast(gpu, Guesser("part", 16), 1, 0.3).nodes < 16
    assert forecast(cpu, whole, 1, 0.3).nodes == 0, "0.4 tokens are not worth 16 rows"
    assert forecast(cpu, whole, 1, 0.95).nodes == 16


def test_what_drafts_may_take_of_the_cache_bounds_them() -> None:
    free = Guesser("free", 16)
    none, few = (Engine(GPU, 0.001, True, 256, 100, places=places) for places in (0, 6))
    assert forecast(none, free, 1, 0.95).why == "off: drafts may take no memory (max_draft_memory)"
    assert forecast(few, free, 2, 0.95).nodes == 3
    assert forecast(few, free, 8, 0.95).why.startswith("off: memory for 6 guesses is too little for 8 requests")
    assert forecast(few, Guesser("none", 0), 1, 0.95).why == "off: drafts may have 0 tokens (draft_tokens)"


def test_long_contexts_make_rows_dear_on_a_cpu() -> None:
    free = Guesser("free", 16)
    short, long = (forecast(Engine(CPU, 0.15, False, 256, context), free, 1, 0.9) for context in (100, 8000))
    assert short.nodes > long.nodes


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((10.0, 11.0, 14.0, 25.0), ""),
        ((10.0, 18.5, 30.0, 50.0), "1.9 times as long as over one, so a single guess must be right 85% of the time"),
        ((10.0, 24.0, 36.0, 44.0), "2.4 times as long as over one, so drafts pay from 3 guesses on, if nearly all"),
        ((10.0, 24.0, 50.0, 90.0), "so no guesses can pay, however right they are"),
    ],
)
def test_why_guesses_do_not_pay_where_rows_are_dear(seconds: tuple[float, ...], said: str) -> None:
    told = MeasuredCosts(Curve(SIZES[:4], seconds)).why_dear()
    assert said in told
    assert bool(said) == told.startswith("Rows are dear on this machine: ")
    assert not MeasuredCosts(Curve((1,), (10.0,))).why_dear(), "nobody knows"


def test_tables_and_words() -> None:
    choices = [
        Choice("d", 1, 0.3, 0, 1.0, "off: x"),
        Choice("d", 1, 0.9, 4, 2.5, ""),
        Choice("d", 8, 0.9, 0, 1.0, "off: y"),
    ]
    assert in_words(choices) == [
        "1 at once: drafts pay from 90% right guesses on, with 4 guesses; at 90% 4 guesses make it 2.50x as fast.",
        "8 at once: off: y.",
    ]
    lowest = in_words([Choice("d", 1, 0.9, 1, 1.5, "")])[0]
    assert (
        lowest
        == "1 at once: drafts pay already at 90% right guesses, with 1 guess; at 90% 1 guess makes it 1.50x as fast."
    )
    assert choice_table(choices[:2]).row_count == 2
    assert pass_table(GPU).row_count == len(SIZES)
    assert "nothing" in context_lines(GPU)[0]
    assert "16.00 ms" in context_lines(CPU)[2] or "16000.00 ms" in context_lines(CPU)[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *arguments])
    out, err = capsys.readouterr()
    assert not ended.value.code, err
    return out


def test_the_command(tiny_target: Path, tiny_draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--model",
        str(tiny_target),
        "--drafter",
        "suffix",
        "--drafter",
        f"model:{tiny_draft}",
        "--memory",
        "256MiB",
    ]
    told = json.loads(run(capsys, *options, "--json"))
    assert {choice["drafter"] for choice in told["choices"]} == {"suffix", "model"}
    assert len(told["choices"]) == 2 * len(BATCHES) * len(ALPHAS)
    assert told["costs"]["passes"][0][0] == 1
    assert told["why_dear"] is None or told["why_dear"].startswith("Rows are dear")
    assert "model" in told["costs"]["drafts"]
    text = run(capsys, *options)
    for words in ("x one row", "█", "batch 64", "64 at once", "What would be drafted with suffix", "Guesses of model"):
        assert words in text


def test_its_help_has_only_what_it_heeds(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--help")
    assert "--min-gain" in text
    assert all(option not in text for option in ("--temperature", "--no-speculation", "--planner"))


def test_where_drafts_may_take_no_memory_it_says_so(tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(tiny_target), "--drafter", "lookahead", "--memory", "256MiB", "--max-draft-memory", "0"]
    options += ["--dtype", "bfloat16"]
    text = " ".join(run(capsys, *options).split())
    assert "bfloat16 on cpu has no row-independent passes" in text
    assert "taken whole or not at all" in text
    assert text.count("at once: off: drafts may take no memory (max_draft_memory)") == len(BATCHES)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--drafter none", "nothing to explain"),
        ("--no-speculation", "nothing to explain"),
        ("--no-measure-costs", "--no-measure-costs: explain shows what was measured"),
        ("--planner fixed", "--planner fixed: nothing is planned then"),
        ("--temperature 1", "--temperature: nothing is sampled by explain"),
        ("--verifier rejection", "--verifier: nothing is sampled by explain"),
        ("--context 99999999", "--context 99999999: requests have 256 tokens here at the most"),
    ],
)
def test_what_cannot_be_explained(
    tiny_target: Path, capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    drafter = [] if "--drafter" in options else ["--drafter", "ngram"]
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--model", str(tiny_target), *drafter, "--memory", "256MiB", *options.split()])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
