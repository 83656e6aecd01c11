"""Those who wait for their turn, the oldest first. Whoever leaves in the middle does so at once, however long it is."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from slipstream.engine.state import Answer


class WaitingLine:
    """Answers by age. To join or to be taken costs the logarithm of its length, to leave nothing but a note.

    Who left is still in the heap until its turn would have come, or until there are more such than others.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, Answer]] = []  # an arrival is nobody else's, so answers are never compared
        self._waiting: set[Answer] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, answer: Answer) -> bool:
        return answer in self._waiting

    def __iter__(self) -> Iterator[Answer]:
        """The oldest first: for those who look, not for rounds."""
        return iter(sorted(self._waiting, key=lambda answer: answer.arrival))

    def add(self, answer: Answer) -> None:
        """By its age: one that was preempted comes before those that never ran."""
        if answer not in self._waiting:
            self._waiting.add(answer)
            heapq.heappush(self._heap, (answer.arrival, answer))

    def take(self) -> Answer:
        """The oldest, which waits no more. There must be one."""
        while True:
            answer = heapq.heappop(self._heap)[1]
            if answer in self._waiting:
                self._waiting.remove(answer)
                return answer

    def remove(self, answer: Answer) -> None:
        """It waits no more. It must have."""
        self._waiting.remove(answer)
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [(one.arrival, one) for one in self._waiting]
            heapq.heapify(self._heap)
