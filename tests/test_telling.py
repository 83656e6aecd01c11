"""Of many requests, those who end or begin by a round hear of it at once; the others when the next one is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from queueing import PARAMS, Echo, Queue
from slipstream import SamplingParams, SpeculationParams
from slipstream.core.verdict import Verdict
from slipstream.engine.listening import RoundTimes
from slipstream.engine.scheduler import Schedule
from slipstream.engine.state import Answer
from slipstream.engine.telling import FEW
from slipstream.engine.tickets import Ticket

MANY = FEW + 4


class Diary:
    """What an engine does, in order: rounds that it queues, and what it reports."""

    def __init__(self, queue: Queue, patch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self._queue, self._report = queue.queued._queue, queue.queued._report
        patch.setattr(queue.queued, "_queue", self._queued)
        patch.setattr(queue.queued, "_report", self._reported)

    def _queued(self, schedule: Schedule) -> Ticket:
        self.said.append("queue")
        return self._queue(schedule)

    def _reported(self, answers: Sequence[Answer]) -> None:
        self.said += [f"{'end' if answer.ended else 'on'} {answer.job.id}" for answer in answers]
        self._report(answers)


class Meter:
    """Listens, and notes how many requests each round had, and what they got."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []

    def offered(self, offer: Any) -> None: ...

    def drew(self, drafter: str, nodes: int, seconds: float) -> None: ...

    def round(
        self, answers: Sequence[Answer], verdicts: Sequence[Verdict], kept: Sequence[int], times: RoundTimes
    ) -> None:
        self.rounds.append((len(answers), sum(kept)))


def crowd(queue: Queue, requests: int = MANY, params: SamplingParams = PARAMS) -> list[Any]:
    """Of these the first says least."""
    asked = [replace(params, max_tokens=8 + 2 * i, seed=i) for i in range(requests)]
    return [queue.add([5 + i, 6, 7], one, request_id=f"r{i}") for i, one in enumerate(asked)]


def test_who_ends_hears_of_it_at_once_and_the_others_behind_the_next_round(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tiny_target, [Echo()], max_num_seqs=MANY)
    crowd(queue)
    diary = Diary(queue, monkeypatch)
    queue.drain()
    said = diary.said
    ends = [i for i, word in enumerate(said) if word.startswith("end ")]
    assert len(ends) == MANY
    first = ends[0]
    queued = [i for i, word in enumerate(said) if word == "queue"]
    behind = next(i for i in queued if i > first)
    assert all(word.startswith("end ") for word in said[first:behind])
    assert sum(word.startswith("on ") for word in said[behind : behind + MANY]) >= MANY - 2, "the others came too late"


def test_few_are_told_at_once(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(tiny_target, [Echo()], max_num_seqs=MANY)
    crowd(queue, FEW)
    diary = Diary(queue, monkeypatch)
    for _ in range(6):
        queue.engine.step()
        assert queue.queued._untold is None
    assert "on r7" in diary.said
    queue.drain()


def test_the_tokens_and_the_counts_are_those_of_who_is_told_at_once(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for few in (0, 100):
        monkeypatch.setattr("slipstream.engine.telling.FEW", few)
        queue, meter = Queue(tiny_target, [Echo()], max_num_seqs=MANY), Meter()
        queue.engine.listen(meter)
        stops = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=("e", "a"))
        jobs = [*crowd(queue), queue.add([5, 6, 7], stops), queue.add([8, 6, 7], stops)]
        queue.drain()
        outputs = [job.answers[0].output for job, _ in jobs]
        stats = [(output.speculation.rounds, output.speculation.drafted) for output in outputs]
        told = [(output.token_ids, output.text, output.finish_reason) for output in outputs]
        found.append((told, stats, meter.rounds, queue.engine.snapshot().rounds))
        assert sum(tokens for _, tokens in meter.rounds) == sum(len(output.token_ids) for output in outputs)
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_who_is_ended_in_between_has_all_that_was_heard_of_it(tiny_target: Path, how: str) -> None:
    queue = Queue(tiny_target, [Echo()], max_num_seqs=MANY)
    jobs = crowd(queue)
    while queue.queued._untold is None:
        queue.engine.step()
    job, heard = jobs[-1]
    (answer,) = job.answers
    assert answer.generated > len(answer.output.token_ids), "nothing was held back"
    if how == "abort":
        queue.engine.abort(job.id)
    else:
        queue.engine.fail_all(RuntimeError("broken"))
        assert not queue.engine.busy
        return
    assert answer.output.token_ids == answer.tokens[3:]
    assert heard[-1].outputs[0].token_ids == answer.output.token_ids
    assert queue.queued._untold is None
    queue.drain()
    assert all(len(other.answers[0].output.token_ids) == other.params.max_tokens for other, _ in jobs[:-1])


def test_first_tokens_do_not_wait(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(tiny_target, [Echo()], max_num_seqs=MANY + 1)
    crowd(queue)
    for _ in range(4):
        queue.engine.step()
    late, _ = queue.add([9, 9, 9], replace(PARAMS, speculation=SpeculationParams(enabled=False)), request_id="late")
    (answer,) = late.answers
    while not answer.generated:
        queue.engine.step()
    assert answer.output.token_ids
    assert queue.queued._untold is not None, "the others wait"
    queue.drain()
