"""A process that serves: threads take turns quickly, old objects are left alone, and afterwards all is as before."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from slipstream.core.responsive import responsive


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
