"""A process that serves: threads take turns quickly, old objects are left alone, and afterwards all is as before."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from serving import serving
from slipstream import LLM, SamplingParams
from slipstream.core.interpreter import rarely_searched, responsive, tidy
from slipstream.engine import loop
from slipstream.serve import server as http


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)


def test_threads_take_turns_quickly_and_what_is_there_is_left_alone() -> None:
    sys.setswitchinterval(0.005)
    frozen = gc.get_freeze_count()
    with responsive():
        assert sys.getswitchinterval() == pytest.approx(0.0001)
        assert gc.get_freeze_count() > frozen
    assert sys.getswitchinterval() == pytest.approx(0.005)
    assert gc.get_freeze_count() == 0


def test_who_shares_its_process_may_leave_the_turns_alone() -> None:
    sys.setswitchinterval(0.005)
    with rarely_searched():
        assert sys.getswitchinterval() == pytest.approx(0.005)
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_who_has_quicker_turns_keeps_them() -> None:
    sys.setswitchinterval(0.00001)
    with responsive():
        assert sys.getswitchinterval() == pytest.approx(0.00001)
    assert sys.getswitchinterval() == pytest.approx(0.00001)


def test_an_error_leaves_python_as_it_was() -> None:
    sys.setswitchinterval(0.005)
    with pytest.raises(OSError, match="nobody"), responsive():
        raise OSError("nobody is there")
    assert sys.getswitchinterval() == pytest.approx(0.005)
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold()[2] < 2000


class Ring:
    """Garbage that only a search finds."""

    def __init__(self) -> None:
        self.me = self


def test_what_is_old_is_searched_when_there_is_time() -> None:
    searches = gc.get_threshold()
    with responsive():
        assert gc.get_threshold() == (*searches[:2], 2000)
        ring = Ring()
        gc.collect(1)
        gc.collect(1)  # it is old now
        lost = weakref.ref(ring)
        del ring
        gc.collect(1)
        assert lost() is not None
        tidy()
        assert lost() is None
    assert gc.get_threshold() == searches


def test_nothing_is_tidied_where_nobody_put_it_off() -> None:
    gc.collect()
    gc.collect(1)  # which Python counts
    ring = Ring()
    lost = weakref.ref(ring)
    del ring
    tidy()
    assert lost() is not None


def test_an_engine_tidies_up_once_when_nobody_asks(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_PAUSE_S", 0.01)
    tidied = threading.Semaphore(0)
    monkeypatch.setattr(loop, "tidy", tidied.release)
    llm = open_llm()
    for _ in range(2):
        assert tidied.acquire(timeout=10)
        assert not tidied.acquire(timeout=0.1)
        llm.generate("again", SamplingParams(max_tokens=2))


def test_a_server_tidies_up_now_and_then_when_nobody_is_inside(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tidied = threading.Semaphore(0)
    monkeypatch.setattr(http, "tidy", tidied.release)
    with serving(llm):
        assert tidied.acquire(timeout=10)
        assert not tidied.acquire(timeout=0.8)
        monkeypatch.setattr(http, "_AGAIN", 6)
        assert all(tidied.acquire(timeout=10) for _ in range(2))
