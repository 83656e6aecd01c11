"""What compiling and recording take is counted: it happens once, and says nothing about rounds to come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.kernels.jit import recording
from slipstream.models import graphs


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> graphs.Recorded:
    found = graphs.Recorded()
    monkeypatch.setattr(graphs, "recorded", found)
    return found


def triton_with(listener: Any) -> SimpleNamespace:
    return SimpleNamespace(knobs=SimpleNamespace(compilation=SimpleNamespace(listener=listener)))


def test_kernels_compiled_outside_of_graphs_count(monkeypatch: pytest.MonkeyPatch, counted: graphs.Recorded) -> None:
    heard: list[str] = []
    fake = triton_with(lambda **told: heard.append(told["src"]))
    monkeypatch.setattr(graphs, "triton", fake)
    graphs.count_compiling()
    graphs.count_compiling()  # a second engine
    tell = fake.knobs.compilation.listener
    told: dict[str, Any] = {"metadata": {}, "metadata_group": {}}
    tell(src="one", times=SimpleNamespace(total=250_000), cache_hit=False, **told)
    tell(src="two", times=SimpleNamespace(total=1_000), cache_hit=True, **told)
    assert counted.seconds == pytest.approx(0.251)
    assert (counted.kernels, counted.graphs) == (1, 0)
    with recording():
        tell(src="three", times=SimpleNamespace(total=5_000_000), cache_hit=False, **told)
    assert counted.seconds == pytest.approx(0.251), "a recording is timed as a whole"
    assert heard == ["one", "two", "three"], "whoever listened before still hears"


@pytest.mark.parametrize("there", [None, SimpleNamespace()])
def test_without_triton_or_with_an_older_one_nothing_is_asked(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "triton", there)
    graphs.count_compiling()
