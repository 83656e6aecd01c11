"""Row-independence is tried out on each chip, and does without the tiles that break it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreted import DEVICE
from slipstream.kernels import row_linear as products
from slipstream.kernels import trust
from slipstream.kernels.jit import is_recording
from slipstream.kernels.row_linear import Tile, _launch, row_linear_twin, use_one_tile
from slipstream.kernels.trust import rows_agree, sizes_agree


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(products, "_one_tile", set())
    monkeypatch.setattr(trust, "_COLUMNS", 8)
    rows_agree.cache_clear()
    yield
    rows_agree.cache_clear()


@pytest.mark.parametrize(
    ("wrong", "agrees"),
    [
        (lambda rows: 0.0, True),
        (lambda rows: 1e-6 * (rows > 64), False),
        (lambda rows: 1e-6 * (rows == 17), False),
        (lambda rows: 1e-6 * is_recording(), False),
    ],
    ids=["all alike", "tall tiles", "one of them", "in graphs"],
)
def test_a_tile_that_adds_up_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch, wrong: Any, agrees: bool) -> None:
    def fake(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
        added: float = wrong(x.shape[0])
        return (x.double() @ weight.double().T).float() + added

    monkeypatch.setattr(trust, "row_linear", fake)
    assert rows_agree(DEVICE, torch.float32) == agrees


def test_then_one_tile_serves_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    of = Tile.of

    def note(rows: int, *args: Any, **options: Any) -> Tile:
        tile = of(rows, *args, **options)
        taken.append(tile.block_m)
        return tile

    monkeypatch.setattr(Tile, "of", staticmethod(note))
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)).half().to(DEVICE)
    use_one_tile(DEVICE, torch.float16)
    ours = _launch(x, weight, None, 1, False, False, torch.float16, False)
    torch.testing.assert_close(ours, row_linear_twin(x, weight), rtol=2e-3, atol=2e-2)
    _launch(x.float(), weight.float(), None, 1, False, False, torch.float32, False)
    assert taken == [16, 128]  # the other kind goes on as it was


@pytest.mark.parametrize(
    ("wrong", "agrees"),
    [
        (lambda rows, columns: 0.0, True),
        (lambda rows, columns: 1e-3 * (rows == 32), False),
        (lambda rows, columns: 1e-3 * (rows == 32 and columns == 5), False),
        (lambda rows, columns: 1e-3 * torch.arange(rows)[:, None], False),
    ],
    ids=["all alike", "one size", "of one weight", "by where a row stands"],
)
def test_a_product_of_another_size_that_adds_up_otherwise_is_noticed(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, agrees: bool
) -> None:
    def fake(x: Tensor, weight: Tensor) -> Tensor:
        added: Any = wrong(x.shape[0], weight.shape[0])
        product: Tensor = (x.double() @ weight.double().T).float() + added
        return product

    monkeypatch.setattr("slipstream.kernels.trust.F.linear", fake)
    weights = [torch.randn(n, 8) for n in (7, 5, 7)]
    assert sizes_agree(weights, (16, 32, 48)) == agrees
