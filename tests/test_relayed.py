"""Which models' layers a relay runs, and that one which computes something else is found out before it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from relay_scenes import SMALL
from slipstream.kernels.layout import RowLayout
from slipstream.kernels.relay import RelayShape
from slipstream.models import relayed
from slipstream.models.device_pass import DevicePass
from slipstream.models.gpu import GpuLayer, Product
from slipstream.models.relayed import Relayed
from slipstream.models.traits import AttentionTraits

BF16 = torch.bfloat16


def layer(index: int = 0, shape: RelayShape = SMALL, dtype: torch.dtype = BF16) -> GpuLayer:
    def product(n: int, k: int) -> Product:
        return Product(torch.zeros(n, k, dtype=dtype), None, 1)

    query = shape.heads * shape.head_dim
    return GpuLayer(
        index=index,
        traits=AttentionTraits(scaling=0.125),
        heads=shape.heads,
        input_norm=torch.ones(shape.width, dtype=dtype),
        post_norm=torch.ones(shape.width, dtype=dtype),
        norm_eps=(1e-5, 1e-5),
        q_norm=None,
        k_norm=None,
        head_eps=0.0,
        qkv=product(shape.joined, shape.width),
        o=product(shape.width, query),
        gate_up=product(2 * shape.inner, shape.width),
        down=product(shape.width, shape.inner),
    )


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed, "on_gpu", lambda tensor: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)


def found(*layers: GpuLayer, dtype: torch.dtype = BF16) -> Relayed | None:
    cos = torch.ones(64, 64, dtype=dtype)
    return Relayed.of(layers, cos, torch.zeros_like(cos))


def test_none_without_a_gpu() -> None:
    assert found(layer()) is None


@pytest.mark.usefixtures("as_on_gpu")
def test_layers_that_are_alike() -> None:
    assert found(layer(0), layer(1)) is not None


def odd_place(tensor: Tensor) -> Tensor:
    """The same numbers, four bytes further on."""
    return torch.cat((tensor.new_zeros(2), tensor.flatten()))[2:].view(tensor.shape)


UNKNOWN: dict[str, Callable[[GpuLayer], GpuLayer]] = {
    "bias": lambda one: replace(one, o=replace(one.o, bias=torch.zeros(576, dtype=BF16))),
    "norms of heads": lambda one: replace(one, q_norm=torch.ones(64), k_norm=torch.ones(64)),
    "window": lambda one: replace(one, traits=replace(one.traits, window=16)),
    "soft cap": lambda one: replace(one, traits=replace(one.traits, softcap=30.0)),
    "sinks": lambda one: replace(one, traits=replace(one.traits, sinks=torch.zeros(9))),
    "another scale": lambda one: replace(one, traits=replace(one.traits, scaling=0.5)),
    "another eps": lambda one: replace(one, norm_eps=(1e-5, 1e-6)),
    "another width within": lambda one: layer(1, replace(SMALL, inner=1024)),
    "norms in fp32": lambda one: replace(one, post_norm=one.post_norm.float()),
    "a weight at an odd place": lambda one: replace(one, down=replace(one.down, weight=odd_place(one.down.weight))),
    "a weight that is turned": lambda one: replace(one, o=replace(one.o, weight=torch.zeros(576, 576, dtype=BF16).T)),
    "more keys than values": lambda one: replace(
        one, qkv=replace(one.qkv, weight=torch.zeros(960 + 64, 576, dtype=BF16))
    ),
}


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("name", UNKNOWN)
def test_layers_that_it_does_not_know(name: str) -> None:
    assert found(layer(0), UNKNOWN[name](layer(1))) is None


@pytest.mark.usefixtures("as_on_gpu")
def test_other_kinds_of_numbers() -> None:
    assert found(layer(dtype=torch.float32), dtype=torch.float32) is None
    assert found(layer(), dtype=torch.float32) is None  # rows come in fp32
    assert found(layer(dtype=torch.float16), dtype=torch.float16) is not None


def layout(rows: int) -> RowLayout:
    at = torch.arange(rows)
    starts = torch.tensor([0, rows], dtype=torch.int32)
    pages = torch.zeros(1, 1, dtype=torch.int32)
    return RowLayout(at, at, starts, torch.zeros(1, dtype=torch.int64), at[:1], pages, None, 16, 8)


def by_layers(x: Tensor, current: DevicePass, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Something that depends on the rows, and leaves something in the cache."""
    current.cache.keys(0)[positions] = x[:, :64, None].transpose(1, 2).expand(-1, 3, -1)
    return x + 1, x[None].float()


WRONG: dict[str, Any] = {
    "nothing": lambda x, current, positions: by_layers(x, current, positions),
    "the rows": lambda x, current, positions: (by_layers(x, current, positions)[0] + 0.5, x[None].float()),
    "what is to be added": lambda x, current, positions: (by_layers(x, current, positions)[0], x[None].float() + 1e-6),
    "the cache": lambda x, current, positions: (x + 1, x[None].float()),
}


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("name", WRONG)
def test_a_relay_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tries: list[int] = []

    def run(self: Relayed, x: Tensor, current: DevicePass, positions: Tensor) -> tuple[Tensor, Tensor]:
        tries.append(len(x))
        both: tuple[Tensor, Tensor] = WRONG[name](x, current, positions)
        return both

    monkeypatch.setattr(Relayed, "run", run)
    one = found(layer())
    assert one is not None
    for rows in (1, 2, 1, 2):
        assert one.takes(rows, layout(rows), by_layers) == (name == "nothing")
    assert tries == [1, 2]  # once for each size
    assert not one.takes(3, layout(3), by_layers)


@pytest.mark.usefixtures("as_on_gpu")
def test_one_that_cannot_be_launched_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Relayed, x: Tensor, current: DevicePass, positions: Tensor) -> tuple[Tensor, Tensor]:
        raise RuntimeError("too many blocks in cooperative launch")

    monkeypatch.setattr(Relayed, "run", run)
    one = found(layer())
    assert one is not None
    assert not one.takes(1, layout(1), by_layers)


@pytest.mark.usefixtures("as_on_gpu")
def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Relayed, "agrees", lambda *_: pytest.fail("tried"))
    one = found(layer())
    assert one is not None
    assert not one.takes(1, layout(1), by_layers)
