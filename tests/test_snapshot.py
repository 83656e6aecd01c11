"""What the engine tells of itself: counts, reasons of its decisions, who guessed a token, what was declined."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from planning import Scripted
from queueing import OFF, Letters
from scripted import Answers, Bushy, RaisesForSome, Right, RightThenWrong
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import Tree
from slipstream.core.outputs import CompletionOutput, Origin, Snapshot
from slipstream.core.verdict import Authors, Verdict, author
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.drafters.guard import Proposals
from slipstream.engine.reasons import LATE, RESTING, SILENT, UNASKED
from slipstream.plan.planner import Planner
from slipstream.plan.types import Decision, Offer

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, seed=1)


PROMPTS = [[7, 3, i] for i in range(5)]


def told(llm: LLM) -> Answers:
    answers = Answers()
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, PARAMS), strict=True):
        answers.tell(prompt, PARAMS.seed, output.outputs[0].token_ids)
    return answers


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("kind", [Right, RightThenWrong])
def test_counts_are_those_of_the_requests(
    open_llm: Callable[..., LLM], kind: type[Right] | type[RightThenWrong], rounds: str
) -> None:
    drafter = kind(told(open_llm(drafter=None)))
    llm = open_llm(drafter=drafter, planner="fixed", rounds=rounds)
    assert llm.snapshot().rounds == 0
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    seen = llm.snapshot()
    stats = [output.speculation for output in outputs]
    assert seen.generated_tokens == sum(s.emitted for s in stats) == 5 * 16
    assert seen.turns == sum(s.rounds for s in stats)
    assert seen.prompt_tokens == 5 * 3
    assert seen.draft_tokens == sum(s.drafted for s in stats)
    assert seen.accepted_tokens == sum(s.accepted for s in stats) > 0
    assert seen.drafts == sum(s.by_drafter[kind.name].drafts for s in stats)
    assert seen.drafters[kind.name].accepted == seen.accepted_tokens
    assert seen.drafters["prediction"].drafts == 0
    assert seen.rejected_tokens == seen.draft_tokens - seen.accepted_tokens
    assert list(seen.accepted_by_position) == sorted(seen.accepted_by_position, reverse=True)
    assert len(seen.accepted_by_position) == (2 if kind is RightThenWrong else 6)
    assert seen.finished == {"length": 5}
    assert seen.decisions["drafted"] == seen.drafts
    assert seen.decisions["off"] == seen.decisions["failed"] == 0
    assert seen.verify_s > 0
    assert seen.verify_s == pytest.approx(sum(s.verify_s for s in stats))
    assert sum(seen.token_gaps) == seen.generated_tokens - len(outputs)
    assert seen.token_gaps[0] >= seen.accepted_tokens - len(outputs)  # those of one round come together
    waited = sum(output.timing.total_s - output.timing.first_token_s for output in outputs)
    assert 0 < seen.token_gaps_s <= waited
    assert seen.tenants == {}
    assert (seen.running, seen.waiting, seen.pages_used, seen.refused) == (0, 0, 0, 0)
    assert seen.pages_free == seen.pages == llm.engine.pool.num_pages


def test_the_memory_of_drafters(open_llm: Callable[..., LLM], tiny_target: Path) -> None:
    llm = open_llm(drafter=("ngram", "suffix", f"model:{tiny_target}"))
    before = llm.snapshot().drafter_bytes
    plan = llm.memory_plan
    assert before["ngram"] == 0
    assert before["model"] >= plan.draft_weights_bytes + plan.draft_cache_bytes > 0
    for name in ("ngram", "suffix"):
        params = replace(PARAMS, max_tokens=40, speculation=SpeculationParams(drafter=name, tenant="ann"))
        stream: Any = llm.stream(list(range(100)), params)
        next(stream)
        seen = llm.between_rounds(lambda engine: engine.snapshot())
        assert seen.drafter_bytes[name] > before[name]
        assert seen.tenants == {"ann": (1, 0)}
        stream.close()
        llm.between_rounds(lambda engine: None)
    assert llm.snapshot().drafter_bytes["ngram"] == 0
    assert llm.snapshot().drafter_bytes["suffix"] > before["suffix"], "the store remembers the answer"


def test_failures_are_counted(open_llm: Callable[..., LLM]) -> None:
    drafter = RaisesForSome(told(open_llm(drafter=None)))
    drafter.hates = frozenset({1})
    llm = open_llm(drafter=drafter, planner="fixed")
    llm.generate(PROMPTS[0], PARAMS)
    seen = llm.snapshot()
    assert seen.drafters[drafter.name].failures == 1
    assert seen.late[drafter.name] == 0
    assert (seen.dropped, seen.drops) == ({}, {drafter.name: {"raised": 1}})
    assert seen.decisions["failed"] > 0
    off = replace(PARAMS, speculation=SpeculationParams(enabled=False), max_tokens=4)
    llm.generate(PROMPTS[1], off)
    assert llm.snapshot().decisions["off"] == 3  # but not for the first token, which comes of the prompt


def test_another_thread_may_watch_while_the_engine_works(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    seen: list[Snapshot] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.append(llm.snapshot())

    watcher = threading.Thread(target=watch)
    watcher.start()
    llm.generate([[i, 2] for i in range(12)], SamplingParams(max_tokens=30, ignore_eos=True, n=2))
    over.set()
    watcher.join()
    for before, after in itertools.pairwise(seen):
        assert before.generated_tokens <= after.generated_tokens
        assert before.rounds <= after.rounds
    assert any(0 < one.running <= 8 for one in seen)
    assert all(0 <= one.pages_used <= one.pages for one in seen)


Open = Callable[..., LLM]


ODD, EVEN = [5, 6, 7], [5, 6, 7, 8]


class OddOnly(HostDrafter):
    """Guesses for prompts of an odd length."""

    name: ClassVar[str] = "odd"

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        parts = zip(requests, budget, strict=True)
        return [Tree.chain([7] * nodes) if request.prompt_length % 2 else Tree() for request, nodes in parts]


class Weighing(Planner):
    """Takes what there is, for the first of those who have something, and says how many decoded."""

    def __init__(self, *, asks: bool = True) -> None:
        self.off: str | None = None
        self._asks, self._decided = asks, None if asks else Decision(9, 5, 2.0)

    def asks(self, drafter: str, requests: int) -> bool:
        return self._asks

    def trim(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        requests: int,
        *,
        whole: bool = False,
    ) -> list[Tree]:
        first = next((i for i, tree in enumerate(trees) if tree), -1)
        if first >= 0:
            self._decided = Decision(requests, len(trees[first]), 2.0)
        return [tree if i == first else Tree() for i, tree in enumerate(trees)]

    def decision(self, drafter: str) -> Decision | None:
        return self._decided

    def words(self, drafter: str, decision: Decision, *, shared: bool = True) -> str:
        return f"{decision.requests if shared else 'own'} at once: {decision.text(drafter)}"

    def why_off(self, drafter: str) -> str | None:
        return self.off


def params(tokens: int = 12, **speculation: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, speculation=SpeculationParams(**speculation)
    )


def opened(open_llm: Open, planner: Planner | None = None, **options: Any) -> LLM:
    llm = open_llm(drafter=OddOnly(), planner="fixed", draft_tokens=3, **options)
    llm.engine.drafting.planner = planner or Weighing()
    return llm


def plans(llm: LLM, prompts: list[list[int]], asked: SamplingParams | list[SamplingParams]) -> list[dict[str, str]]:
    return [output.outputs[0].speculation.plan for output in llm.generate(prompts, asked)]


def test_what_was_decided_for_others_is_not_said(open_llm: Open) -> None:
    llm = opened(open_llm)
    assert "1 at once: odd" in plans(llm, [ODD], params())[0]["odd"]
    assert plans(llm, [EVEN], params()) == [{"odd": SILENT}]
    assert plans(llm, [ODD], params(1)) == [{}], "it had no round to plan"
    alone, other = plans(llm, [ODD, EVEN], [params(6), params()])
    assert alone["odd"].startswith("2 at once")
    assert other == {"odd": SILENT}


def test_a_tenant_hears_nothing_of_others(open_llm: Open) -> None:
    planner = Weighing()
    llm = opened(open_llm, planner)
    assert plans(llm, [ODD], params(tenant="ann"))[0]["odd"].startswith("own at once")
    planner.off = "off: its drafts made steps of 8 requests 0.90x as fast as none"
    assert plans(llm, [ODD], params())[0]["odd"] == planner.off
    assert plans(llm, [ODD], params(tenant="ann"))[0]["odd"] == RESTING
    full = Decision(7, 0, 0.5, row=1.0)  # arithmetic is used up
    assert "batch 7" in full.text("odd", "9 of 10 right")
    private = full.text("odd", shared=False)
    assert "the batch leaves no spare arithmetic" in private
    assert "7" not in private


def test_a_plan_of_others_only_is_said_to_be_theirs(open_llm: Open) -> None:
    first, second = plans(opened(open_llm), [ODD, ODD], [params(60), params(6)])
    assert "1 at once: odd" in first["odd"]
    assert second == {"odd": "2 at once: off: guesses for others were worth more (2.00x expected)"}


@pytest.mark.parametrize(
    ("asked", "options", "why"),
    [
        (params(draft_tokens=0), {}, "off: the request asked for 0 draft tokens"),
        (params(2), {}, "off: the answer ended before a guess could help"),
        (params(), {"max_draft_memory": 0}, "off: drafts may take no memory (max_draft_memory)"),
        (params(), {"max_num_seqs": 1, "max_draft_rows": 1}, "off: a pass has 1 rows for 1 requests and their guesses"),
        (params(64), {"max_model_len": 5}, "off: the context was full"),
    ],
)
def test_its_own_limit_is_the_reason(open_llm: Open, asked: SamplingParams, options: dict[str, Any], why: str) -> None:
    for planner in (Weighing(), Planner()):
        (plan,) = plans(opened(open_llm, planner, **options), [ODD], asked)
        assert plan["odd"].startswith(why)


def test_places_for_fewer_guesses_than_requests(open_llm: Open) -> None:
    llm = opened(open_llm)
    llm.engine.drafting._caps._places = 1
    assert set(map(str, plans(llm, [EVEN, EVEN], params()))) == {
        "{'odd': 'off: memory for 1 guesses is too little for 2 requests (max_draft_memory)'}"
    }


def test_who_was_not_asked_says_so_and_not_what_was_planned_before(open_llm: Open) -> None:
    llm = opened(open_llm, Weighing(asks=False))
    assert plans(llm, [ODD], params()) == [{"odd": UNASKED}]
    assert plans(llm, [ODD], params(draft_tokens=0)) == [{"odd": "off: the request asked for 0 draft tokens"}]


def test_a_limit_that_comes_at_the_end_is_not_the_reason(open_llm: Open) -> None:
    """The last token of an answer is never drafted; and where nothing is weighed, nothing is said."""
    assert plans(opened(open_llm, Planner()), [ODD], params()) == [{}]
    assert plans(opened(open_llm, Planner()), [EVEN], params()) == [{"odd": SILENT}]


def test_who_is_late_says_so(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = opened(open_llm)
    late = Proposals((Tree(),), (None,), {}, late=True)
    monkeypatch.setattr(llm.engine.drafting.guards["odd"], "propose", lambda *_: late)
    assert plans(llm, [ODD], params()) == [{"odd": LATE}]


PLAIN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, seed=1)


TOLD = replace(PLAIN, speculation=SpeculationParams(origins=True))


ORIGIN_PROMPTS = [[7, 3, i] for i in range(4)]


def guessed_by(llm: LLM) -> Answers:
    answers = Answers()
    for prompt, output in zip(ORIGIN_PROMPTS, llm.generate(ORIGIN_PROMPTS, PLAIN), strict=True):
        answers.tell(prompt, PLAIN.seed, output.outputs[0].token_ids)
    return answers


def rounds_of(origins: Sequence[Origin]) -> list[list[Origin]]:
    return [list(part) for _, part in itertools.groupby(origins, key=lambda origin: origin.round)]


def agrees(output: CompletionOutput) -> None:
    """The rounds come in order, each with its accepted guesses and then the target's own token."""
    assert output.origins is not None
    assert len(output.origins) == len(output.token_ids)
    parts = rounds_of(output.origins)
    assert [part[0].round for part in parts] == list(range(1, output.speculation.rounds + 1))
    for part in parts[:-1]:  # the last one may be cut
        assert [origin.depth for origin in part] == [*range(1, len(part)), 0]
    assert all(bool(origin.depth) == bool(origin.drafters) for origin in output.origins)
    credit = Counter(name for origin in output.origins for name in origin.drafters)
    assert credit == {name: s.accepted for name, s in output.speculation.by_drafter.items() if s.accepted}
    ends = [origin.text_end for origin in output.origins]
    assert ends == sorted(ends)
    assert ends[-1] <= len(output.text)


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("kinds", [(Right,), (RightThenWrong,), (Bushy,), (RightThenWrong, Bushy)])
def test_tokens_are_told_by_whom_they_were_guessed(
    open_llm: Callable[..., LLM], kinds: tuple[type[Right], ...], rounds: str
) -> None:
    answers = guessed_by(open_llm(drafter=None))
    llm = open_llm(drafter=[kind(answers) for kind in kinds], planner="fixed", rounds=rounds)
    names = "+".join(kind.name for kind in kinds)
    params = replace(TOLD, speculation=SpeculationParams(origins=True, drafter=names))
    for output in llm.generate(ORIGIN_PROMPTS, params):
        agrees(output.outputs[0])
        assert {name for o in output.outputs[0].origins or () for name in o.drafters} == {k.name for k in kinds}
    plain = llm.generate(ORIGIN_PROMPTS[0], replace(TOLD, speculation=SpeculationParams(enabled=False, origins=True)))
    assert all(origin.drafters == () for origin in plain[0].outputs[0].origins or ())
    assert [origin.round for origin in plain[0].outputs[0].origins or ()] == list(range(1, 25))


def test_nobody_asked(open_llm: Callable[..., LLM]) -> None:
    assert open_llm().generate(ORIGIN_PROMPTS[0], PLAIN)[0].outputs[0].origins is None


def test_a_stream_of_news_tells_each_once(open_llm: Callable[..., LLM]) -> None:
    answers = guessed_by(open_llm(drafter=None))
    llm = open_llm(drafter=Right(answers), planner="fixed")
    whole = llm.generate(ORIGIN_PROMPTS[1], TOLD)[0].outputs[0]
    parts = [output.outputs[0] for output in llm.stream(ORIGIN_PROMPTS[1], replace(TOLD, output_kind="delta"))]
    assert [origin for part in parts for origin in part.origins or ()] == whole.origins
    assert all(len(part.origins or ()) == len(part.token_ids) for part in parts)


def test_a_stop_inside_an_accepted_run_cuts_them_too(open_llm: Callable[..., LLM]) -> None:
    answers = guessed_by(open_llm(drafter=None))
    llm = open_llm(drafter=Right(answers), planner="fixed")
    tokens = llm.generate(ORIGIN_PROMPTS[0], PLAIN)[0].outputs[0].token_ids
    stopped = llm.generate(ORIGIN_PROMPTS[0], replace(TOLD, stop_token_ids=[tokens[10]]))[0].outputs[0]
    assert len(stopped.origins or ()) == len(stopped.token_ids) <= 11


def test_guessers_of_merged_drafts() -> None:
    verdict = Verdict("a", (5, 6, 7), 4, 2, (0, 3), authors=Authors(("x", "y"), ((0, 1), (0, 2, 3))))
    assert [verdict.guessers(place) for place in range(3)] == [("x", "y"), ("y",), ()]
    assert Verdict("a", (5, 6), 1, 1, (0,), authors=author("x")).guessers(0) == ("x",)


DECLINED = SamplingParams(temperature=0, max_tokens=12)


TEXT = [7, 8, 9] * 6


class Never(Scripted):
    """Nothing pays."""

    def nodes(self, offer: Offer) -> list[int]:
        return [0] * len(offer.caps)

    def trim(
        self, drafter: str, request_ids: Sequence[str], trees: Sequence[Tree], *_: object, **__: object
    ) -> list[Tree]:
        return [Tree()] * len(trees)


class Resting(Planner):
    """No guess of the host's is worth waiting for."""

    def asks(self, drafter: str, requests: int) -> bool:
        return False


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("name", ["model", "letters"])
def test_what_does_not_pay_is_counted(open_llm: Callable[..., LLM], tiny_draft: Path, rounds: str, name: str) -> None:
    llm = open_llm(drafter=[f"model:{tiny_draft}", Letters()], rounds=rounds)
    params = SamplingParams(temperature=0, max_tokens=12, speculation=SpeculationParams(drafter=name))
    llm.engine.drafting.planner = Never()
    stats = llm.generate([TEXT], params)[0].outputs[0].speculation
    assert stats.drafted == 0
    assert stats.by_drafter[name].drafts == 0
    assert 1 <= stats.by_drafter[name].declined <= stats.rounds
    plainly = SamplingParams(temperature=0, max_tokens=12, speculation=OFF)
    assert not llm.generate([TEXT], plainly)[0].outputs[0].speculation.by_drafter


def test_so_is_what_nobody_waits_for(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter=Letters(), rounds="queued")
    llm.engine.drafting.planner = Resting()
    stats = llm.generate([TEXT], DECLINED)[0].outputs[0].speculation
    assert stats.drafted == 0
    assert stats.by_drafter["letters"].declined >= 10


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_forced_drafts_are_not_declined(open_llm: Callable[..., LLM], tiny_draft: Path, rounds: str) -> None:
    llm = open_llm(drafter=f"model:{tiny_draft}", rounds=rounds, planner="fixed")
    stats = llm.generate([TEXT], DECLINED)[0].outputs[0].speculation
    assert stats.by_drafter["model"].drafts >= 2
    assert stats.by_drafter["model"].declined == 0
