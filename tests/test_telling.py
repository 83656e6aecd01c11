"""Of many requests, those who end or begin by a round hear of it at once; the others when the next one is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import EOS
from exactness import FEW as FEW_TOKENS
from queueing import OFF, PARAMS, Echo, Queue
from slipstream import SamplingParams
from slipstream.core.verdict import Verdict
from slipstream.engine.drafts import Plan
from slipstream.engine.flight import Flight, StepTimes
from slipstream.engine.schedule import Schedule
from slipstream.engine.state import Answer
from slipstream.engine.step import FEW

MANY = FEW + 4


class Diary:
    """What an engine does, in order: rounds that it queues, and what it reports."""

    def __init__(self, queue: Queue, patch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self._launch, self._report = queue.queued.launch, queue.engine._report
        patch.setattr(queue.queued, "launch", self._launched)
        patch.setattr(queue.engine, "_report", self._reported)

    def _launched(self, batch: Schedule, plan: Plan, **how: Any) -> Flight:
        self.said.append("queue")
        return self._launch(batch, plan, **how)

    def _reported(self, answers: Sequence[Answer]) -> None:
        self.said += [f"{'end' if answer.ended else 'on'} {answer.job.id}" for answer in answers]
        self._report(answers)


class Meter:
    """Listens, and notes how many requests each round had, and what they got."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []

    def step(
        self, answers: Sequence[Answer], verdicts: Sequence[Verdict], kept: Sequence[int], times: StepTimes
    ) -> None:
        self.rounds.append((len(answers), sum(kept)))


def given(jobs: Sequence[Any]) -> int:
    return sum(len(job.answers[0].output.token_ids) for job, _ in jobs)


def watched(queue: Queue, jobs: Sequence[Any]) -> list[tuple[int, int]]:
    """Whenever one of these is told something: how many tokens were handed over, and how many are counted."""
    seen: list[tuple[int, int]] = []
    for job, _ in jobs:
        job.sink = lambda _: seen.append((given(jobs), queue.engine.snapshot().generated_tokens))
    return seen


def crowd(queue: Queue, requests: int = MANY, params: SamplingParams = PARAMS) -> list[Any]:
    """Of these the first says least."""
    asked = [replace(params, max_tokens=8 + 2 * i, seed=i) for i in range(requests)]
    return [queue.add([5 + i, 6, 7], one, request_id=f"r{i}") for i, one in enumerate(asked)]


STOPS = replace(PARAMS, max_tokens=30, stop=("?",), min_tokens=6, logit_bias=FEW_TOKENS)  # that is the token 30
ENDS = replace(PARAMS, max_tokens=30, ignore_eos=False, logit_bias={**FEW_TOKENS, EOS: 6.0})


@pytest.mark.parametrize(("last", "reason"), [(PARAMS, "length"), (STOPS, "stop"), (ENDS, "stop")])
def test_who_ends_hears_of_it_at_once_and_the_others_behind_the_next_round(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, last: SamplingParams, reason: str
) -> None:
    queue = Queue(tiny_target, [Echo()], max_num_seqs=MANY + 1)
    job, _ = queue.add([9, 6, 7], replace(last, max_tokens=min(last.max_tokens, 20)), request_id="last")
    for i in range(MANY):
        queue.add([5 + i, 6, 7], replace(PARAMS, max_tokens=60, seed=i), request_id=f"r{i}")
    diary = Diary(queue, monkeypatch)
    queue.drain()
    (answer,) = job.answers
    assert answer.output.finish_reason == reason
    said = diary.said
    at = said.index("end last")
    behind = said.index("queue", at)
    assert not [word for word in said[at:behind] if word.startswith("on ")], "somebody else was told before"
    assert sum(word.startswith("on ") for word in said[behind : behind + MANY + 1]) == MANY, "the others came too late"


def test_few_are_told_at_once(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(tiny_target, [Echo()], max_num_seqs=MANY)
    crowd(queue, FEW)
    diary = Diary(queue, monkeypatch)
    for _ in range(6):
        queue.engine.step()
        assert queue.engine._unfinished is None
    assert "on r7" in diary.said
    queue.drain()


def test_the_tokens_and_the_counts_are_those_of_who_is_told_at_once(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for few in (0, 100):
        monkeypatch.setattr("slipstream.engine.step.FEW", few)
        queue, meter = Queue(tiny_target, [Echo()], max_num_seqs=MANY), Meter()
        queue.engine.listen(meter)
        stops = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=("e", "a"))
        jobs = [*crowd(queue), queue.add([5, 6, 7], stops), queue.add([8, 6, 7], stops)]
        handed = watched(queue, jobs)
        queue.drain()
        assert handed
        assert all(counted >= tokens for tokens, counted in handed)
        outputs = [job.answers[0].output for job, _ in jobs]
        stats = [(output.speculation.rounds, output.speculation.drafted) for output in outputs]
        shares, snapshot = sum(output.speculation.verify_s for output in outputs), queue.engine.snapshot()
        assert shares == pytest.approx(snapshot.verify_s)
        told = [(output.token_ids, output.text, output.finish_reason) for output in outputs]
        found.append((told, stats, meter.rounds, snapshot.rounds))
        assert sum(tokens for _, tokens in meter.rounds) == sum(len(output.token_ids) for output in outputs)
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["abort", "fail", "refuse"])
def test_who_is_ended_in_between_has_all_that_was_heard_of_it(
    tiny_target: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tiny_target, [Echo()], max_num_seqs=MANY)
    jobs = crowd(queue)
    while queue.engine._unfinished is None:
        queue.engine.step()
    job, heard = jobs[-1]
    (answer,) = job.answers
    said = answer.tokens[3:]
    assert len(said) > len(answer.output.token_ids), "nothing was held back"
    if how == "abort":
        queue.engine.abort(job.id)
    elif how == "fail":
        queue.engine.fail_all(RuntimeError("broken"))
    else:  # it has to begin anew, and cannot

        def refuse(answer: Answer) -> None:
            raise RuntimeError("no")

        queue.engine.scheduler._preempt(answer)
        monkeypatch.setattr(queue.engine.scheduler, "_on_admit", refuse)
        queue.engine.step()
    assert answer.ended
    assert heard[-1].outputs[0].token_ids == answer.output.token_ids == said
    assert how != "fail" or queue.engine.snapshot().generated_tokens == given(jobs)
    monkeypatch.undo()
    queue.drain()
    if how != "fail":
        assert all(len(other.answers[0].output.token_ids) == other.params.max_tokens for other, _ in jobs[:-1])


def test_log_probabilities_are_read_before_the_next_round(tiny_target: Path) -> None:
    queue = Queue(tiny_target, [Echo()], max_num_seqs=MANY + 1)
    told = replace(PARAMS, logprobs=2, speculation=OFF)
    job, _ = queue.add([9, 6, 7], told)
    crowd(queue)
    while queue.engine.busy and not job.answers[0].ended:
        queue.engine.step()
        assert queue.engine._unfinished is None
    logprobs = job.answers[0].output.logprobs
    assert logprobs is not None
    assert all(token in likely for token, likely in zip(job.answers[0].output.token_ids, logprobs, strict=True))
    queue.drain()


def test_a_round_is_the_listeners_who_heard_it_begin(tiny_target: Path) -> None:
    queue, first, second = Queue(tiny_target, [Echo()], max_num_seqs=MANY), Meter(), Meter()
    jobs = crowd(queue)
    queue.engine.listen(first)
    while queue.engine._unfinished is None:
        queue.engine.step()
    queue.engine.listen(second)
    known = len(first.rounds)
    queue.drain()
    assert known == len(first.rounds)
    tokens = sum(tokens for _, tokens in (*first.rounds, *second.rounds))
    assert tokens == given(jobs)
    assert len(first.rounds) + len(second.rounds) == queue.engine.snapshot().rounds


def test_first_tokens_do_not_wait(tiny_target: Path) -> None:
    queue = Queue(tiny_target, [Echo()], max_num_seqs=MANY + 1)
    crowd(queue)
    for _ in range(4):
        queue.engine.step()
    late, _ = queue.add([9, 9, 9], replace(PARAMS, speculation=OFF), request_id="late")
    (answer,) = late.answers
    while not answer.generated:
        queue.engine.step()
    assert answer.output.token_ids
    assert queue.engine._unfinished is not None, "the others wait"
    queue.drain()
