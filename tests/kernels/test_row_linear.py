"""Row-independent products: the kernel against its twin, the twin against torch, and the check on each chip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interpreted import DEVICE, FLOATS
from slipstream.kernels.gpu import row_linear as module
from slipstream.kernels.gpu.jit import is_recording, recording
from slipstream.kernels.gpu.row_linear import (
    Tile,
    _launch,
    row_linear,
    row_linear_twin,
    rows_agree,
    sizes_agree,
    splits_of,
    use_one_tile,
)
from slipstream.kernels.linear import narrowed

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale
    return values.to(dtype).to(DEVICE)


def product(
    m: int, n: int, k: int, dtype: torch.dtype, *, bias: bool, splits: int = 1, gated: bool = False,
    partial: bool = False, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """By the kernel, and by the twin in fp64, or as the twin rounds where roundings are part of it."""
    x, width = numbers(m, k, dtype=dtype), 2 * n if gated else n
    weight = numbers(width, k, dtype=dtype, seed=1, scale=k**-0.5)
    own = numbers(width, dtype=dtype, seed=2) if bias else None
    ours = _launch(x, weight, own, splits, gated, partial, out_dtype or dtype, False)
    twin = row_linear_twin(x, weight, own, splits=splits, gated=gated, partial=partial, out_dtype=out_dtype)
    return ours, twin


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (3, 70, 48), (17, 33, 40), (1, 1, 16), (40, 130, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_kernel_matches_the_twin(dtype: torch.dtype, m: int, n: int, k: int, bias: bool) -> None:
    ours, twin = product(m, n, k, dtype, bias=bias)
    assert (ours.dtype, ours.shape) == (dtype, (m, n))
    torch.testing.assert_close(ours, twin, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(2, 40, 64), (19, 65, 24), (70, 30, 32)])
@pytest.mark.parametrize("bias", [False, True])
def test_gated(dtype: torch.dtype, m: int, n: int, k: int, bias: bool) -> None:
    ours, twin = product(m, n, k, dtype, bias=bias, gated=True)
    assert (ours.dtype, ours.shape) == (dtype, (m, n))
    torch.testing.assert_close(ours, twin, rtol=CLOSE[dtype], atol=2 * CLOSE[dtype])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("m", "n", "splits"), [(20, 40, 1), (40, 70, 3), (70, 300, 3), (130, 300, 3), (200, 300, 1)])
def test_by_descriptors_where_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, splits: int, gated: bool, bias: bool
) -> None:
    """Other loads and other tiles, for 65 rows and more with the rows first: the same numbers."""
    monkeypatch.setattr("slipstream.kernels.gpu.row_linear._MULTIPROCESSORS", 0)  # as if the weight were large
    options: dict[str, Any] = {"gated": True} if gated else {"splits": splits, "partial": True}
    with recording():
        ours, twin = product(m, n, 192, torch.float16, bias=bias, **options)
    torch.testing.assert_close(ours, twin, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_runs_are_handed_on(splits: int, bias: bool) -> None:
    """Each run by itself in fp32, whatever the inputs are; the bias is in the first of them."""
    ours, twin = product(5, 40, 1536, torch.float16, bias=bias, splits=splits, partial=True)
    assert (ours.dtype, ours.shape) == (torch.float32, (splits, 5, 40))
    torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_are_summed_in_the_order_of_the_runs(bias: bool) -> None:
    """Above 256 rows one program sums all runs: to the last bit as the next kernel would."""
    x, weight = numbers(258, 192, dtype=torch.float32), numbers(40, 192, dtype=torch.float32, seed=1)
    own = numbers(40, dtype=torch.float32, seed=2, scale=30.0) if bias else None
    (whole,) = _launch(x, weight, own, 3, False, True, torch.float32, False)
    runs = _launch(x[:7].contiguous(), weight, own, 3, False, True, torch.float32, False)
    assert runs.shape[0] == 3
    assert torch.equal(whole[:7], runs[0] + runs[1] + runs[2])


def ragged(rows: int, k: int, *, splits: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of which each run's sum is exact in fp32, however it is added up, and the sum of the runs is not."""
    whole = torch.randint(-8, 9, (rows, k), generator=torch.Generator().manual_seed(seed)).float()
    sizes = torch.logspace(6, -6, splits, base=2).repeat_interleave(k // splits)  # the runs are 2^12 apart
    return (whole * sizes.round().clamp_min(2**-6)).to(dtype).to(DEVICE)


def added_up(runs: Tensor) -> Tensor:
    """As the next kernel does it."""
    total = runs[0].clone()
    for run in runs[1:]:
        total += run
    return total


CHOICES = [
    *(Tile(128, 64, 32, 2, 8, whole=whole, flip=flip) for whole in (False, True) for flip in (False, True)),
    *(Tile(64, 32, 16, 3, 4, whole=whole, beside=True) for whole in (False, True)),
    *(Tile(256, 32, 32, 2, 4, tma=True, flip=True, whole=whole) for whole in (False, True)),
    Tile(64, 128, 32, 2, 4, tma=True, flip=True, whole=True, beside=True),
    Tile(128, 32, 32, 2, 4, tma=True),
]


@pytest.mark.parametrize("rows", [72, 200, 272])
@pytest.mark.parametrize("kind", ["plain", "bias", "narrow", "narrow, bias"])
def test_every_choice_gives_the_same_bits(rows: int, kind: str) -> None:
    """The tile changes no bits: whole runs or not, any number of columns, any order of programs, one row or many."""
    n, k, splits = 70, 192, 3
    x = ragged(rows, k, splits=splits, dtype=torch.float16, seed=rows)
    weight, scale = numbers(n, k, dtype=torch.float16).round(), None
    if "narrow" in kind:
        weight, scale = narrowed(weight)
        scale = scale * 0.7
    own = numbers(n, dtype=torch.float16, seed=2, scale=30.0).round() if "bias" in kind else None

    def by(tile: Tile | None, some: Tensor = x) -> Tensor:
        found = _launch(some, weight, own, splits, False, True, torch.float16, False, scale, tile)
        assert found.shape == (1 if (tile.whole if tile else len(some) > 256) else splits, len(some), n)
        return added_up(found)

    wanted = by(None)
    exact = x.double() @ (weight.double() if scale is None else weight.double() * scale.double()[:, None]).T
    torch.testing.assert_close(wanted.double(), exact if own is None else exact + own.double(), rtol=1e-5, atol=1e-2)
    assert torch.equal(by(None, x[5:6].contiguous()), wanted[5:6])
    for tile in CHOICES:
        assert torch.equal(by(tile), wanted), tile


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [72, 200])
def test_so_it_does_where_nothing_is_split(rows: int, gated: bool) -> None:
    x = ragged(rows, 128, splits=1, dtype=torch.float16, seed=rows)
    weight = numbers(2 * 70 if gated else 70, 128, dtype=torch.float16).round() / 4096
    wanted = _launch(x, weight, None, 1, gated, False, torch.float16, False)
    for tile in CHOICES:
        assert torch.equal(_launch(x, weight, None, 1, gated, False, torch.float16, False, None, tile), wanted), tile


def test_what_is_chosen_on_an_h200() -> None:
    """For large weights: above 256 rows one program sums all runs, of those that have several."""

    def chosen(rows: int, splits: int = 4, **options: Any) -> Tile:
        return Tile.of(rows, 9216, 12288, splits=splits, size=2, **{"gated": False, "tma": True} | options)

    assert chosen(64) == Tile(64, 128, 64, 4, 4, tma=True)
    assert chosen(65) == chosen(128) == Tile(128, 128, 64, 3, 8, tma=True, flip=True, beside=True)
    assert chosen(129) == chosen(192) == Tile(64, 128, 64, 4, 4, tma=True, beside=True)
    assert chosen(193) == chosen(256) == Tile(128, 128, 64, 5, 8, tma=True, flip=True, beside=True)
    assert chosen(257) == Tile(128, 256, 64, 3, 8, tma=True, flip=True, whole=True)
    assert chosen(256, splits=1, gated=True) == Tile(128, 64, 64, 5, 8, tma=True, flip=True, beside=True)
    assert chosen(257, one=True) == replace(chosen(1), whole=True)


def test_what_is_chosen_for_weights_in_eight_bits() -> None:
    def chosen(rows: int, tma: bool = True) -> Tile:
        return Tile.of(rows, 9216, 12288, splits=4, size=2, gated=False, tma=tma, narrow=True)

    for rows in (1, 17, 64):
        assert chosen(rows) == chosen(rows, tma=False), "descriptors are for many rows"
    assert chosen(65) == chosen(256) == Tile(128, 128, 64, 5, 8, tma=True, beside=True)
    assert chosen(257) == replace(chosen(256), whole=True)
    assert chosen(65, tma=False) == Tile(128, 128, 128, 3, 8)


def test_stages_must_fit() -> None:
    tile = Tile(128, 256, 64, 4, 8)
    assert tile.stage_bytes(gated=False, size=2, narrow=False) == (256 + 128) * 64 * 2
    assert tile.stage_bytes(gated=True, size=2, narrow=True) == (2 * 256 + 2 * 128) * 64
    assert tile.fits(gated=False, size=2, narrow=False, shared=227 * 1024)
    assert not replace(tile, stages=5).fits(gated=False, size=2, narrow=False, shared=227 * 1024)
    assert not tile.fits(gated=True, size=2, narrow=False, shared=227 * 1024)


def test_logits_come_out_in_fp32() -> None:
    ours, twin = product(2, 70, 64, torch.float16, bias=False, out_dtype=torch.float32)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-5)
    assert not torch.equal(ours, ours.half().float())  # never rounded on the way


def test_nothing_is_written_beside_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def framed(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        whole = torch.full((torch.Size(shape).numel() + 256,), 7.0, dtype=dtype, device=device)
        made.append(whole)
        return whole[128:-128].view(shape)

    monkeypatch.setattr("slipstream.kernels.gpu.row_linear.torch.empty", framed)
    product(3, 70, 40, torch.float32, bias=True)
    product(5, 33, 192, torch.float32, bias=True, splits=3, partial=True)
    for whole in made:
        assert torch.equal(whole[:128], torch.full_like(whole[:128], 7.0))
        assert torch.equal(whole[-128:], torch.full_like(whole[:128], 7.0))
    assert len(made) == 2


def test_the_twin_is_the_plain_product() -> None:
    x, weight = torch.randn(6, 96), torch.randn(50, 96)
    bias = torch.randn(50)
    want = F.linear(x, weight, bias)
    torch.testing.assert_close(row_linear(x, weight, bias), want)
    torch.testing.assert_close(row_linear(x, weight, bias, splits=3, partial=True).sum(0), want)
    gate, up = want.chunk(2, dim=-1)
    torch.testing.assert_close(row_linear(x, weight, bias, gated=True), F.silu(gate) * up)
    with pytest.raises(AssertionError, match="summed by the next kernel"):
        row_linear(x, weight, splits=2)


def test_runs_are_whole_steps() -> None:
    """Whatever the weight's shape: each run is a whole number of steps, whichever tile a row count gets."""
    for n in (64, 576, 1536, 4096, 12288, 49152):
        for k in (16, 24, 40, 48, 576, 896, 1536, 3584, 4096, 11008, 18944):
            splits = splits_of(n, k)
            assert 1 <= splits <= 4
            assert k % splits == 0
            for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 2048):
                for size in (2, 4):
                    step = Tile.of(rows, n, k, splits=splits, gated=False, size=size).block_k
                    assert splits == 1 or (k // splits) % step == 0
    assert splits_of(64, 4096) == 4  # a narrow weight needs its runs to keep a GPU busy
    assert splits_of(152_000, 4096) == 1  # a wide one does not


@pytest.mark.parametrize("shared", [99 * 1024, 227 * 1024])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_a_tile_fits_into_shared_memory(shared: int, size: int, gated: bool) -> None:
    """Of data centres' GPUs, and of those that have less than half of it."""
    for rows in (1, 16, 17, 33, 65, 129, 512):
        for n, k in ((64, 64), (576, 1536), (12288, 4608), (4608, 12288), (151936, 896)):
            for tma in (False, size == 2):
                splits = 1 if gated else splits_of(n, k)
                tile = Tile.of(rows, n, k, splits=splits, gated=gated, size=size, tma=tma, shared=shared)
                held = ((2 if gated else 1) * tile.block_n + tile.block_m) * tile.block_k * size
                assert tile.stages >= 2
                assert tile.stages * held < shared


@pytest.mark.parametrize("rows", [8, 24, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_narrow_tiles_fetch_as_far_ahead_and_leave_room_for_another(rows: int, gated: bool) -> None:
    plain = Tile.of(rows, 22016, 4096, splits=1, gated=gated, size=2)
    narrow = Tile.of(rows, 22016, 4096, splits=1, gated=gated, size=2, narrow=True)
    assert narrow.block_n * narrow.block_k == plain.block_n * plain.block_k
    assert narrow.stages >= 1.5 * plain.stages
    weight, row = (2 if gated else 1) * narrow.block_n, 2 * narrow.block_m  # bytes of each step of K
    held = ((narrow.stages - 1) * weight + narrow.stages * row) * narrow.block_k  # what is in registers needs no place
    assert 2 * held < 227 * 1024


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (8, 70, 48), (17, 33, 40), (130, 40, 96), (258, 40, 96)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["whole", "gated", "runs"])
def test_weights_in_eight_bits(dtype: torch.dtype, m: int, n: int, k: int, bias: bool, form: str) -> None:
    """The codes are exact numbers in all dtypes: what is left is how sums are added up."""
    gated, splits = form == "gated", 3 if form == "runs" and k % 48 == 0 else 1
    width = 2 * n if gated else n
    x = numbers(m, k, dtype=dtype)
    codes, scale = narrowed(numbers(width, k, dtype=dtype, seed=1, scale=k**-0.5))
    own = numbers(width, dtype=dtype, seed=2) if bias else None
    partial = form == "runs"
    ours = _launch(x, codes, own, splits, gated, partial, dtype, False, scale)
    twin = row_linear_twin(x, codes, own, scale=scale, splits=splits, gated=gated, partial=partial)
    if partial and m > 256:
        twin = twin.sum(0, keepdim=True)
    torch.testing.assert_close(ours, twin, rtol=CLOSE[dtype], atol=2 * CLOSE[dtype])


def test_a_row_of_eight_bits_does_not_depend_on_its_company() -> None:
    x, (codes, scale) = numbers(20, 96, dtype=torch.float32), narrowed(numbers(70, 96, dtype=torch.float32, seed=1))
    alone = _launch(x[:1].contiguous(), codes, None, 1, False, False, torch.float32, False, scale)
    torch.testing.assert_close(_launch(x, codes, None, 1, False, False, torch.float32, False, scale)[:1], alone)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_one_tile", set())
    monkeypatch.setattr(module, "_CHECKED_COLUMNS", 8)
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

    monkeypatch.setattr(module, "row_linear", fake)
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

    monkeypatch.setattr("slipstream.kernels.gpu.row_linear.F.linear", fake)
    weights = [torch.randn(n, 8) for n in (7, 5, 7)]
    assert sizes_agree(weights, (16, 32, 48)) == agrees
