"""Prompts that begin alike: what is found is what would have been computed, and never another tenant's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import eagle_scenes
from queueing import Queue
from slipstream import LLM, RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.outputs import CompletionOutput
from slipstream.engine import queued
from slipstream.engine.chunks import Chunk, OwnChunks
from slipstream.engine.queued import QueuedBackend
from slipstream.engine.step import Engine
from slipstream.kv.pages import OutOfPages, PagePool, PageTable
from slipstream.kv.prefix import PrefixStore
from slipstream.models.batch import PassBatch
from stepping import Stepper

BEGINS = [(7 * i) % 250 for i in range(33)]


PROMPTS = [[*BEGINS, *end] for end in ([1], [2, 3, 4], list(range(60, 72)), [251, 252])]


PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=14, ignore_eos=True) for i in range(len(PROMPTS))]


OFF = SpeculationParams(enabled=False)


ROUNDS = ["eager", "queued"]


def one_by_one(llm: LLM, params: Sequence[SamplingParams] = PARAMS) -> list[RequestOutput]:
    return [llm.generate([prompt], p)[0] for prompt, p in zip(PROMPTS, params, strict=True)]


def facts(outputs: Sequence[RequestOutput]) -> list[tuple[Any, ...]]:
    """What was said, and how it was drafted."""
    answers: list[CompletionOutput] = [output.outputs[0] for output in outputs]
    stats = [answer.speculation for answer in answers]
    return [(a.token_ids, s.rounds, s.drafted, s.accepted, a.error) for a, s in zip(answers, stats, strict=True)]


@pytest.fixture(scope="module")
def drafters(tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    eagle = eagle_scenes.eagle3().write(tmp_path_factory.mktemp("heads") / "eagle3")
    return {
        "none": None,
        "ngram": "ngram",
        "model": f"model:{tiny_draft}",
        "eagle": f"eagle:{eagle}?width=1&depth=4",
        "eagle tree": f"eagle:{eagle}?width=3&depth=3",
    }


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", ["none", "ngram", "model", "eagle", "eagle tree"])
def test_the_same_answers_and_the_same_guesses(
    name: str, rounds: str, drafters: dict[str, str | None], open_llm: Callable[..., LLM]
) -> None:
    how: dict[str, Any] = {"drafter": drafters[name], "planner": "fixed", "rounds": rounds}
    fresh = one_by_one(open_llm(prefix_caching=False, **how))
    assert [output.num_cached_tokens for output in fresh] == [0] * 4
    llm = open_llm(**how)
    plain = one_by_one(llm, [replace(p, speculation=OFF) for p in PARAMS])  # nobody reads along
    assert [a.outputs[0].token_ids for a in plain] == [a.outputs[0].token_ids for a in fresh]
    assert [output.num_cached_tokens for output in plain] == [0, 32, 32, 32]
    for _ in range(2):  # at first drafters must read what they have not; then it is all there
        again = one_by_one(llm)
        assert facts(again) == facts(fresh)
        assert [output.num_cached_tokens for output in again] == [32, 32, 32, 32]
    seen = llm.snapshot()
    assert (seen.prefix_hits, seen.prefix_queries) == (32 * 11, 3 * sum(map(len, PROMPTS)))
    assert 0 < seen.pages_cached <= seen.pages // 4
    together = llm.generate(PROMPTS, PARAMS)
    assert [row[0] for row in facts(together)] == [row[0] for row in facts(fresh)]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_model_reads_only_what_it_has_not(
    rounds: str, drafters: dict[str, str | None], open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(drafter=drafters["model"], planner="fixed", rounds=rounds)
    drafter: Any = llm.engine.drafting.drafters["model"]
    rows: list[int] = []
    forward = drafter.runner.forward

    def noting(batch: PassBatch, cache: Any) -> Tensor:
        rows.append(batch.num_rows)
        return torch.as_tensor(forward(batch, cache))

    monkeypatch.setattr(drafter.runner, "forward", noting)
    read = []
    for _ in range(2):
        rows.clear()
        llm.generate([PROMPTS[0]], replace(PARAMS[0], max_tokens=3))
        read.append(max(rows))
    assert read[0] >= 34
    assert read[1] <= 4


@pytest.mark.parametrize("rounds", ROUNDS)
def test_several_answers_to_a_prompt_that_was_found(
    rounds: str, drafters: dict[str, str | None], open_llm: Callable[..., LLM]
) -> None:
    """Siblings share what their leader found, also where its drafter has still to read it."""
    params = replace(PARAMS[1], n=3)
    how: dict[str, Any] = {"drafter": drafters["model"], "planner": "fixed", "rounds": rounds}
    fresh = open_llm(prefix_caching=False, **how).generate([PROMPTS[0]], params)[0]
    llm = open_llm(**how)
    llm.generate([PROMPTS[1]], replace(params, speculation=OFF))
    for _ in range(2):
        again = llm.generate([PROMPTS[0]], params)[0]
        assert again.num_cached_tokens == 32
        for one, other in zip(again.outputs, fresh.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert (one.speculation.drafted, one.speculation.accepted) == (
                other.speculation.drafted,
                other.speculation.accepted,
            )


def test_tenants_and_salts_do_not_meet(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()

    def found(salt: str, tenant: str) -> int:
        params = replace(PARAMS[0], cache_salt=salt, speculation=SpeculationParams(tenant=tenant))
        return llm.generate([PROMPTS[0]], params)[0].num_cached_tokens

    whose = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab")]
    assert [found(*one) for one in whose] == [0] * 6
    assert [found(*one) for one in whose] == [32] * 6


def test_off_means_off(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(prefix_caching=False)
    assert [output.num_cached_tokens for output in one_by_one(llm)] == [0] * 4
    assert llm.snapshot().pages_cached == llm.snapshot().prefix_queries == 0


def test_not_where_sums_depend_on_the_cut(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(dtype="bfloat16")
    assert [output.num_cached_tokens for output in one_by_one(llm)] == [0] * 4


def test_what_a_numeric_error_leaves_is_not_found(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter=None)
    forward = llm.engine.target.forward

    def broken(batch: PassBatch, cache: Any) -> Tensor:
        return forward(batch, cache) * float("nan")

    llm.engine.target.forward = broken  # type: ignore[method-assign]
    (failed,) = llm.generate([PROMPTS[0]], PARAMS[0])
    assert failed.outputs[0].finish_reason == "error"
    assert llm.snapshot().pages_cached == 0
    llm.engine.target.forward = forward  # type: ignore[method-assign]
    (again,) = llm.generate([PROMPTS[0]], PARAMS[0])
    assert (again.num_cached_tokens, again.outputs[0].error) == (0, None)


def test_what_a_failed_pass_leaves_is_not_found(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter=None)
    llm.generate([PROMPTS[0]], PARAMS[0])
    assert llm.snapshot().pages_cached == 2
    forward = llm.engine.target.forward

    def fails(batch: PassBatch, cache: Any) -> Tensor:
        raise RuntimeError("the device is gone")

    llm.engine.target.forward = fails  # type: ignore[method-assign]
    assert llm.generate([PROMPTS[1]], PARAMS[1])[0].outputs[0].finish_reason == "error"
    llm.engine.target.forward = forward  # type: ignore[method-assign]
    assert llm.snapshot().pages_cached == 0
    assert llm.generate([PROMPTS[0]], PARAMS[0])[0].num_cached_tokens == 0


def test_pages_are_given_up_before_anybody_waits(tiny_target: Path) -> None:
    bench = Stepper(tiny_target, None, pages=8, max_num_seqs=4)
    bench.engine.pool._most_kept = 8
    for start in range(6):
        job = bench._intake.job([start] * 50, replace(PARAMS[0], max_tokens=2), lambda output: None, streaming=False)
        bench.engine.add(job)
        while bench.engine.busy:
            bench.engine.step()
            bench.engine.scheduler.check_integrity()
        assert bench.engine.pool.kept_pages == min(8, 3 * (start + 1)) or bench.engine.pool.kept_pages >= 4
    assert bench.engine.scheduler.preemptions == 0


class Fragile:
    """Passes whose sums depend on how many rows they have, but for narrow ones: as on a GPU, only more so."""

    def __init__(self, engine: Engine) -> None:
        self._forward = engine.target.forward
        self.passes: list[tuple[int, int, bool]] = []
        engine.target.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: PassBatch, cache: Any) -> Tensor:
        logits = self._forward(batch, cache)
        self.passes.append((batch.prefix_lengths[0], batch.num_rows, bool(batch.wide)))
        if batch.wide:
            for planes in cache.planes:
                planes[:, batch.slots] *= 1 + batch.num_rows / 1000
        return logits


def bits(bench: Queue, prompt: Sequence[int]) -> tuple[list[Tensor], list[int], int]:
    """All that is in the cache of a prompt behind its last pass, what was said, and how much was found."""
    job, heard = bench.add(prompt, replace(PARAMS[1], max_tokens=6))
    kept: list[Tensor] = []
    answer = job.answers[0]
    while bench.engine.busy:
        bench.engine.step()
        if answer.table is not None and answer.cached >= len(prompt):
            slots = torch.tensor(list(answer.table.slots(0, len(prompt))))
            kept = [planes[:, slots].clone() for planes in bench.engine.cache.planes]
        bench.engine.scheduler.check_integrity()
    return kept, heard[-1].outputs[0].token_ids, heard[-1].num_cached_tokens


@pytest.mark.parametrize("page_size", [4, 8])
def test_a_prompt_comes_out_as_if_nothing_had_been_found(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    """Blocks of 24 tokens are computed alone: they are found whole or not at all. The rest is narrow, or fresh."""

    monkeypatch.setattr(QueuedBackend, "chunk_rule", lambda *_: OwnChunks(24, 8, 16))
    how: dict[str, Any] = {"page_size": page_size, "max_num_seqs": 4}
    warm = Queue(tiny_target, None, **how)
    seen = Fragile(warm.engine)
    text = [(11 * i) % 250 for i in range(100)]
    lengths = (100, 30, 57, 57, 100, 45, 9, 33, 8, 31)
    found = []
    for length in lengths:
        fresh = Queue(tiny_target, None, prefix_caching=False, **how)
        Fragile(fresh.engine)
        want, said, _ = bits(fresh, text[:length])
        got, says, cached = bits(warm, text[:length])
        assert says == said
        for one, other in zip(got, want, strict=True):
            # a row's sums differ by rounding where its pages are no neighbours; another cut would differ by percents
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        found.append(cached)
    # 30, 33 and 31 have a whole block and a narrow rest; 57 has two, and what was narrow is found the second time; 45
    # has one block and a wide rest, which nobody may have; 9 and 8 are narrow from their beginning on
    fine = page_size == 4
    assert found == [0, 24, 48, 56, 96, 24, 0, 28 if fine else 24, 4 if fine else 0, 28 if fine else 24]
    assert any(wide for _, _, wide in seen.passes)


def test_what_shares_wide_passes_goes_on_anywhere(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that come out the same in passes of any size: the rest is computed in such a pass, however short."""

    monkeypatch.setattr(QueuedBackend, "chunk_rule", lambda *_: OwnChunks(64, 8, 16, wide_together=64, grain=8))
    monkeypatch.setattr(queued, "WIDE_SIZES", ())
    bench = Queue(tiny_target, None, page_size=4, max_num_seqs=4)
    passes = Fragile(bench.engine).passes
    text = [(11 * i) % 250 for i in range(100)]
    assert bits(bench, text[:40])[2] == 0
    assert bits(bench, [*text[:30], 1, 2, 3, 4])[2] == 24  # of 28 that are there, a multiple of the grain
    assert bits(bench, text[:8])[2] == 0  # it is computed in narrow passes: nobody else's are the same
    assert passes == [(0, 39, True), (24, 9, True), (0, 8, False)]  # the last tokens are rounds of decoding


TOKENS = list(range(100, 120))


def store(pages: int = 8, most_kept: int | None = None) -> PrefixStore:
    return PrefixStore(PagePool(pages, 4, most_kept))


def test_a_name_is_of_all_before_it_and_of_the_token_behind() -> None:
    names = store()
    base = names.names(("t", "s"), TOKENS, [0, 0, 0])
    assert len(set(base)) == 3
    assert names.names(("t", "s"), TOKENS[:13], [0, 0, 0]) == base
    assert names.names(("t", "s"), [*TOKENS[:12], 7], [0, 0, 0])[:2] == base[:2]
    assert names.names(("t", "s"), [*TOKENS[:12], 7], [0, 0, 0])[2] != base[2]
    others = [
        names.names(("s", "t"), TOKENS, [0, 0, 0]),
        names.names(("ts", ""), TOKENS, [0, 0, 0]),
        names.names(("t", "s"), [1, *TOKENS[1:]], [0, 0, 0]),
        names.names(("t", "s"), TOKENS, [1, 0, 0]),
        store().names(("t", "s"), TOKENS, [0, 0, 0]),  # another key
    ]
    assert set(base).isdisjoint(name for other in others for name in other)


def test_pages_are_kept_found_and_given_away_from_their_end() -> None:
    prefixes = store(pages=5)
    pool, names = prefixes.pool, prefixes.names(("", ""), TOKENS, [0, 0, 0])
    table = PageTable(pool)
    table.reserve(20)
    first = table.pages
    for page, name in zip(first, names, strict=False):
        prefixes.keep(page, name)
    table.release()
    assert (pool.free_pages, pool.kept_pages) == (5, 3)
    assert prefixes.find(names) == list(first[:3])
    assert prefixes.find([names[0], b"unknown", names[2]]) == [first[0]]
    other = PageTable(pool)
    other.reserve(12)  # two were free, and the end of what is kept goes next
    assert prefixes.find(names) == list(first[:2])
    prefixes.check_integrity()
    again = PageTable(pool)
    again.adopt(prefixes.find(names))
    assert (again.length, pool.kept_pages, pool.free_pages) == (8, 0, 0)
    with pytest.raises(OutOfPages):
        other.reserve(16)
    pool.check_integrity([other.pages, again.pages])


def test_no_more_is_kept_than_is_allowed() -> None:
    prefixes = store(pages=8, most_kept=2)
    table = PageTable(prefixes.pool)
    table.reserve(16)
    names = prefixes.names(("", ""), TOKENS, [0, 0, 0, 0])
    for page, name in zip(table.pages, names, strict=True):
        prefixes.keep(page, name)
    table.release()
    assert len(prefixes.find(names)) == prefixes.pool.kept_pages == 2
    assert prefixes.pool.free_pages == 8
    prefixes.check_integrity()


def test_who_has_read_a_page() -> None:
    prefixes = store()
    pages = prefixes.pool.allocate(3)
    names = prefixes.names(("", ""), TOKENS, [0, 0, 0])
    for page, name in zip(pages[:2], names, strict=False):
        prefixes.keep(page, name)
    prefixes.mark(pages, "model")
    prefixes.mark(pages[:1], "eagle")
    assert [prefixes.read_by(pages, name) for name in ("model", "eagle", "nobody")] == [2, 1, 0]
    prefixes.forget(pages[:1])
    assert prefixes.read_by(pages, "model") == 0
    prefixes.check_integrity()
    prefixes.pool.release(pages)
    assert prefixes.pool.kept_pages == 1


def test_integrity_finds_a_page_that_lost_its_name() -> None:
    prefixes = store()
    (page,) = prefixes.pool.allocate(1)
    prefixes.keep(page, b"name")
    prefixes.check_integrity()
    prefixes.pool.forget(page)
    with pytest.raises(AssertionError, match="the pool keeps other pages"):
        prefixes.check_integrity()


@dataclass(eq=False)
class Prompt:
    """A prompt of a known text that is computed by the rule; `bits` says of each token how that was done."""

    prompt_length: int
    cached: int = 0
    bits: list[object] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return self.prompt_length - self.cached

    def compute(self, rule: OwnChunks) -> None:
        while self.pending:
            rows = rule.rows(self, 10**6)  # type: ignore[arg-type]
            chunk = Chunk(self, rows)  # type: ignore[arg-type]
            for row in range(rows):
                tile = self.cached + row // rule.grain * rule.grain
                if not rule.is_wide([chunk]):
                    how: object = "narrow"
                elif rule.shares([chunk]):
                    how = ("together", tile)  # the rows that attention takes together
                else:
                    how = ("alone", self.cached, rows)
                self.bits.append(how)
            self.cached += rows


@settings(max_examples=300)
@given(
    rule=st.builds(
        OwnChunks,
        max_rows=st.sampled_from([6, 16, 20, 24]),
        narrow=st.integers(1, 10),
        together=st.just(20),
        wide_together=st.sampled_from([0, 24]),
        grain=st.sampled_from([1, 2, 3, 8]),
    ),
    size=st.sampled_from([1, 3, 4, 8]),
    first=st.integers(1, 80),
    second=st.integers(1, 80),
)
def test_what_is_found_is_what_would_have_been_computed(rule: OwnChunks, size: int, first: int, second: int) -> None:
    """One text, of which two prompts have so many tokens: the second finds what the first computed."""

    def kinds(length: int) -> list[int | None]:
        return [rule.kind(length, end) for end in range(size, length, size)]

    one, fresh, other = Prompt(first), Prompt(second), Prompt(second)
    one.compute(rule)
    fresh.compute(rule)
    pages = 0
    for mine, theirs in zip(kinds(second), kinds(first), strict=False):
        if mine is None or mine != theirs:
            break
        pages += 1
    while pages and not rule.resumes(second, pages * size):
        pages -= 1
    other.cached = pages * size
    other.bits = one.bits[: pages * size]
    other.compute(rule)
    assert other.bits == fresh.bits
