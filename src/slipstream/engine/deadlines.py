"""Whose time is over: requests that said how long they may take, the next one to end first."""

from __future__ import annotations

import heapq
import itertools
import time

from slipstream.engine.state import Job


class Deadlines:
    """Jobs by when they must be over. A round that has none to end pays for one comparison.

    A job that ends in time is forgotten when its time comes, or when such jobs are more than half of all.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._order = itertools.count()  # jobs with the same end are not compared
        self._tidy_at = 64

    def add(self, job: Job) -> None:
        if job.params.timeout_s is None:
            return
        heapq.heappush(self._heap, (job.arrived + job.params.timeout_s, next(self._order), job))
        if len(self._heap) > self._tidy_at:
            self._heap = [entry for entry in self._heap if not all(answer.ended for answer in entry[2].answers)]
            heapq.heapify(self._heap)
            self._tidy_at = 2 * len(self._heap) + 64

    def over(self) -> list[Job]:
        """Those whose time is over by now. They are told once."""
        if not self._heap or self._heap[0][0] > time.perf_counter():
            return []
        now, jobs = time.perf_counter(), []
        while self._heap and self._heap[0][0] <= now:
            jobs.append(heapq.heappop(self._heap)[2])
        return jobs
