"""What must hold with every drafter, eager and queued: the same tokens as without it, whatever it guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import eagle_scenes
from exactness import FEW, Case, cases, differences, plain, run
from medusa_checkpoints import chained_medusa, knowing_medusa
from mtp_checkpoints import MTP, save_with_modules
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams
from stepping import Arrival, Stepper

OFF = SpeculationParams(enabled=False)


@dataclass(frozen=True)
class Drafted:
    """A drafter and the target that it drafts for."""

    name: str
    spec: str
    target: Path


Make = Callable[[Path, Path, Path], Drafted]
"""From a new folder, the tiny target and a tiny draft model."""


def eagle(stored: Callable[[], eagle_scenes.Stored], options: str) -> Make:
    return lambda folder, target, draft: Drafted("eagle", f"eagle:{stored().write(folder / 'head')}{options}", target)


def mtp(family: str, modules: int) -> Make:
    return lambda folder, target, draft: Drafted("mtp", "mtp", save_with_modules(folder / "t", MTP[family], modules))


KINDS: dict[str, Make] = {
    "lookahead": lambda folder, target, draft: Drafted("lookahead", "lookahead", target),
    "model": lambda folder, target, draft: Drafted("model", f"model:{draft}", target),
    "medusa": lambda folder, target, draft: Drafted("medusa", f"medusa:{knowing_medusa(folder / 'h', target)}", target),
    "chained": lambda folder, target, draft: Drafted(
        "medusa", f"medusa:{chained_medusa(folder / 'h', noise=0.05)}", target
    ),
    "eagle1": eagle(eagle_scenes.eagle1, "?width=1&depth=4"),
    "eagle3": eagle(eagle_scenes.eagle3, ""),
    "mtp": mtp("deepseek", 1),
    "mtp-3": mtp("mimo", 3),
}


@dataclass(frozen=True)
class Bench:
    """An engine with the drafter and `ngram`, and the plain answers to all cases."""

    drafted: Drafted
    rounds: str
    llm: LLM
    batch: list[Case]
    expected: list[CompletionOutput]

    def few(self) -> tuple[list[Case], list[CompletionOutput]]:
        """Cases with few likely tokens, which are often guessed right."""
        pairs = [(case, output) for case, output in zip(self.batch, self.expected, strict=True) if case.few]
        return [case for case, _ in pairs], [output for _, output in pairs]


@pytest.fixture(
    scope="module", params=[(kind, rounds) for kind in KINDS for rounds in ("eager", "queued")], ids="-".join
)
def bench(
    request: pytest.FixtureRequest, tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    kind, rounds = request.param
    drafted = KINDS[kind](tmp_path_factory.mktemp("drafter"), tiny_target, tiny_draft)
    with LLM(
        drafted.target,
        device="cpu",
        drafter=[drafted.spec, "ngram"],
        planner="fixed",
        rounds=rounds,
        max_num_seqs=8,
        memory="64MiB",
    ) as llm:
        batch = cases()
        yield Bench(drafted, rounds, llm, batch, plain(llm, batch))


def test_the_same_tokens_in_company_and_alone(bench: Bench) -> None:
    """Every parameter at every temperature, 27 requests on 8 seats, though it does guess right."""
    name = bench.drafted.name
    got = run(bench.llm, bench.batch, name)
    assert not differences(bench.batch, bench.expected, got)
    assert sum(output.speculation.drafted for output in got) > sum(output.speculation.accepted for output in got)
    if name != "mtp":  # random modules are seldom right
        assert sum(output.speculation.accepted for output in got) > 0
    assert not any(output.speculation.by_drafter[name].failures for output in got)
    alone = run(bench.llm, bench.batch[::4], name, alone=True)
    assert not differences(bench.batch[::4], bench.expected[::4], alone)


def test_drafts_of_any_size(bench: Bench) -> None:
    """One size for all, then sizes that differ in one batch, where some have no draft."""
    batch, expected = bench.few()
    for draft_tokens in (1, 7, 63):
        got = run(bench.llm, batch[:6], bench.drafted.name, draft_tokens=draft_tokens)
        assert not differences(batch[:6], expected[:6], got)
    hows = [
        SpeculationParams(draft_tokens=(1, 3, 20, 63)[i % 4], enabled=i % 5 > 0, drafter=bench.drafted.name)
        for i in range(len(batch))
    ]
    assert not differences(batch, expected, generate(bench.llm, batch, hows))


def test_beside_another_drafter_and_merged_with_it(bench: Bench) -> None:
    name = bench.drafted.name
    batch, expected = bench.few()
    beside = generate(bench.llm, batch, [SpeculationParams(drafter=(name, "ngram")[i % 2]) for i in range(len(batch))])
    assert not differences(batch, expected, beside)
    merged = run(bench.llm, batch, f"ngram+{name}")
    assert not differences(batch, expected, merged)
    assert all(name in output.speculation.by_drafter for output in merged)


def test_a_prompt_of_one_token(bench: Bench) -> None:
    batch = [Case("one", (7,), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))]
    assert not differences(batch, plain(bench.llm, batch), run(bench.llm, batch, bench.drafted.name))


@pytest.mark.parametrize("n", [1, 3])
def test_short_of_pages(bench: Bench, n: int) -> None:
    """Requests are preempted and come back, samples share pages, trees are cut."""
    drafted = bench.drafted
    small = Stepper(
        drafted.target,
        drafted.spec,
        pages=18,
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=48,
        draft_tokens=6,
        rounds=bench.rounds,
    )
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, logit_bias=FEW, n=n)
    together = [Arrival(5 + 3 * i, replace(params, seed=i, temperature=i % 2)) for i in range(5)]
    on = small.run(together)
    assert small.engine.scheduler.preemptions > 0
    off = [replace(job, params=replace(job.params, speculation=OFF)) for job in together]
    assert [answer.token_ids for answer in on] == [answer.token_ids for answer in small.run(off)]
    assert sum(answer.speculation.drafted for answer in on) > 20


def generate(llm: LLM, batch: list[Case], hows: list[SpeculationParams]) -> list[CompletionOutput]:
    params = [replace(case.params, speculation=how) for case, how in zip(batch, hows, strict=True)]
    return [output.outputs[0] for output in llm.generate([list(case.prompt) for case in batch], params)]
