"""How many threads a pass gets, by what passes took."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from slipstream.kernels.crew import Crew


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def passes(crew: Crew, count: int, seconds: Callable[[int, int], float], rows: int = 1) -> list[int]:
    """The sizes of so many passes, each of which takes `seconds(threads, rows)`."""
    sizes = []
    for _ in range(count):
        sizes.append(crew.size())
        crew.observe(sizes[-1], rows, seconds(sizes[-1], rows))
    return sizes


def quiet(threads: int, rows: int) -> float:
    return (0.006 if threads == 2 else 0.011) * (1 + 0.2 * (rows - 1))


def crowded(threads: int, rows: int) -> float:
    return 0.7 if threads == 2 else quiet(1, rows)


def longer(times: float, threads: int, rows: int) -> float:
    return times * quiet(threads, rows)


def test_on_a_quiet_machine_all_of_them_work() -> None:
    sizes = passes(Crew(), 200, quiet)
    assert sizes.count(1) == 1  # once, to have something to compare with


def test_beside_a_busy_program_one_works_alone() -> None:
    crew = Crew()
    passes(crew, 10, quiet)
    sizes = passes(crew, 600, crowded)
    assert 1 <= sizes.count(2) <= 8  # tried now and then, ever more rarely
    assert passes(crew, 300, quiet).count(2) > 40
    assert set(passes(crew, 100, quiet)) == {2}  # and back when it is over


def test_a_machine_that_is_busy_from_the_start() -> None:
    assert passes(Crew(), 17, crowded).count(2) == 1


def test_a_growing_context_is_no_reason() -> None:
    crew = Crew()
    passes(crew, 5, quiet)
    sizes = []
    for n in range(1, 60):
        sizes += passes(crew, 5, partial(longer, 1 + n / 10))
    assert sizes.count(1) < len(sizes) / 10


def test_drafts_are_judged_by_their_rows() -> None:
    crew = Crew()
    passes(crew, 5, quiet)
    assert set(passes(crew, 50, quiet, rows=12)) == {2}
    assert passes(crew, 30, crowded, rows=12).count(2) <= 3


def test_one_thread_has_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert set(passes(Crew(), 10, crowded)) == {1}
