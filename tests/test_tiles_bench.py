"""The search for tiles without a GPU: what is tried, that it is compared, and that it can be broken off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench_scripts import tiles, tiles_list, tiles_work
from gpu_bench import FakeClock, FakeTime, reports
from interpreted import DEVICE
from slipstream.kernels.gpu.row_linear import Tile, row_linear

LARGE = SimpleNamespace(
    hidden_size=4608, intermediate_size=12288, num_attention_heads=48, num_key_value_heads=16, head_dim=64,
    num_hidden_layers=32, vocab_size=49152,
)  # fmt: skip
SHARED = 227 * 1024
POINTS = [
    (product, rows)
    for product in tiles_list.products_of(LARGE)
    for rows in ((128, 256) if product.narrow else (72, 96, 128, 192, 256))
]


def today_of(product: Any, rows: int) -> Tile:
    return Tile.of(
        rows, product.n, product.k, splits=product.splits, gated=product.gated, size=2, tma=True, narrow=product.narrow,
    )  # fmt: skip


# --- the list ---------------------------------------------------------------------------------------------------------


def test_products_are_those_of_the_model_and_of_a_head() -> None:
    found = {product.name: (product.height, product.k) for product in tiles_list.products_of(LARGE)}
    assert found == {
        "gate+up": (2 * 12288, 4608),
        "down": (4608, 12288),
        "qkv": (80 * 64, 4608),
        "o": (4608, 48 * 64),
        "LM head": (49152, 4608),
        "head gate+up": (2 * 12288, 4608),
        "head down": (4608, 12288),
        "head qkv": (80 * 64, 2 * 4608),
        "head o": (4608, 48 * 64),
        "head LM head": (32000, 4608),
    }
    read = 2 * sum(product.height * product.k * product.times for product in tiles_list.products_of(LARGE)[:5])
    assert read == pytest.approx(13.74e9, rel=1e-3), "what a step of it reads"


@pytest.mark.parametrize(("product", "rows"), POINTS, ids=lambda value: getattr(value, "name", str(value)))
def test_candidates_fit_and_differ_from_today(product: Any, rows: int) -> None:
    today = today_of(product, rows)
    found = tiles_list.candidates(product, rows, today, SHARED)
    assert found[0] == today
    assert len({tiles_list.name_of(tile) for tile in found}) == len(found) >= 5
    run = product.k // product.splits
    for tile in found:
        assert tile.fits(gated=product.gated, size=2, narrow=product.narrow, shared=SHARED)
        assert run % tile.block_k == 0
        assert run > tile.block_k, "two steps at least, for the same bits"
        assert not (tile.whole and product.splits == 1)
        assert not (product.narrow and tile.flip), "what is widened can only be the first operand"
    assert {tile.whole for tile in found} == ({False, True} if rows > 128 and product.splits > 1 else {False})
    plain = tiles_list.candidates(product, rows, replace(today, tma=False), SHARED, tma=False)
    assert not any(tile.tma for tile in plain)


def test_there_are_no_more_than_a_minute_takes() -> None:
    """Whatever makes a kernel another one, at 0.4 s each where one thread compiles."""
    kernels = set()
    for product, rows in POINTS:
        for tile in tiles_list.candidates(product, rows, today_of(product, rows), SHARED):
            programs = -(-product.n // tile.block_n) * -(-rows // tile.block_m) * (1 if tile.whole else product.splits)
            form = (product.k, product.splits, product.gated, product.partial, product.narrow)
            kernels.add((*form, tile, programs <= 132))
    assert 100 < len(kernels) <= 160


def test_smaller_gpus_have_fewer() -> None:
    product, rows = POINTS[0]
    few = tiles_list.candidates(product, rows, today_of(product, rows), 99 * 1024)
    assert 1 < len(few) < len(tiles_list.candidates(product, rows, today_of(product, rows), SHARED))


# --- the work ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run, by the interpreter, on whole numbers: however they are added up, the same comes out."""

    def whole(shape: Sequence[int], *, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.randint(-3, 4, tuple(shape), generator=generator, device=device).to(dtype)

    monkeypatch.setattr(torch, "randn", whole)
    monkeypatch.setattr("slipstream.kernels.gpu.row_linear.on_gpu", lambda _: True)


PRODUCTS = {
    "runs": tiles_list.Product("runs", 70, 256),
    "gated": tiles_list.Product("gated", 40, 256, gated=True, partial=False),
    "narrow": tiles_list.Product("narrow", 70, 256, narrow=True),
}


def look(product: Any, rows: int, clock: FakeClock) -> Any:
    return tiles_work.measure(product, rows, clock, dtype=torch.float16, device=DEVICE, in_turn=0)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("name", "rows"), [("runs", 130), ("gated", 72), ("narrow", 72)])
def test_every_tile_is_run_and_compared(name: str, rows: int) -> None:
    product, clock = PRODUCTS[name], FakeClock({"cuBLAS": 4e-6, "128x64x64 s4 w4 tma flip beside": 2e-6})
    found = look(product, rows, clock)
    assert (found.left_out, found.other_bits) == ({}, [])
    assert found.today == tiles_list.name_of(tiles_work.Operands.of(product, rows, torch.float16, DEVICE, 0).today)
    assert next(iter(found.us)) == found.today
    assert set(clock.seen[0]) == {*found.us, "cuBLAS"}
    assert len(found.us) >= 5
    assert found.cublas_us == 2.0, "each work is two weights in turn"
    if name == "runs":
        assert product.splits == 2
        assert found.best == "128x64x64 s4 w4 tma flip beside"
        assert found.us[found.best] == 1.0


@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_that_fail_or_give_other_bits_are_told(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    def odd(x: Tensor, weight: Tensor, *, tile: Tile, **options: Any) -> Tensor:
        if tile.block_m == 64:
            raise ValueError("no room\nfor it")
        return row_linear(x, weight, **options) + (1.0 if tile.block_k == 128 else 0.0)

    monkeypatch.setattr(tiles_work, "row_linear", odd)
    product = tiles_list.Product("LM head", 70, 512, partial=False)
    seconds = {"128x128x128 s3 w8 tma flip beside": 1e-9, "128x128x64 s3 w4 tma flip beside": 1e-8}
    found = tiles_work.measure(
        product, 100, FakeClock(seconds), dtype=torch.float16, device=DEVICE, threads=threads, in_turn=0
    )
    assert found.left_out == {"64x128x64 s4 w4 tma beside": "ValueError: no room"}
    assert found.other_bits == ["128x128x128 s3 w8 tma flip beside"]
    assert found.best == "128x128x64 s3 w4 tma flip beside", "not the fastest, which computes something else"


def test_weights_in_turn_are_more_than_a_cache_holds() -> None:
    product = tiles_list.Product("o", 64, 64)
    few, many = (tiles_work.Operands.of(product, 3, torch.float16, DEVICE, size) for size in (0, 10 * 64 * 64 * 2))
    assert (len(few.weights), len(many.weights)) == (2, 10)
    assert not torch.equal(many.weights[0], many.weights[9])
    assert bool(many.x.any())
    narrow = tiles_work.Operands.of(replace(product, narrow=True), 3, torch.float16, DEVICE, 10 * 64 * 64)
    assert len(narrow.weights) == len(narrow.plain) == 10
    assert narrow.weights[0].element_size() == 1


# --- the command ------------------------------------------------------------------------------------------------------

FOUND = tiles_work.Found("a", {"a": 9.0, "b": 2.0, "c": 1.0}, 3.0, ["c"], {"d": "no room"}, 0.5)


def test_points_that_are_there_are_not_measured_again() -> None:
    products = [tiles_list.Product("down", 4, 4), tiles_list.Product("head down", 4, 4, narrow=True)]
    left = tiles.points(products, (72, 128, 256), (8, 704), {"down": {"128": {}}, "head down": {"8": {}}})
    assert [(product.name, rows) for product, rows in left] == [("down", 256), ("down", 72), ("head down", 704)]


def test_a_search_ends_in_time_and_outlives_a_failing_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock, path = FakeTime(), tmp_path / "tiles.json"
    report = reports.Report({}, path)

    def measured(product: Any, rows: int) -> Any:
        clock.now += 25
        if rows == 2:
            raise ValueError("no room")
        return FOUND

    product = tiles_list.Product("down", 4, 4)
    tiles.run([(product, rows) for rows in (1, 2, 3, 4, 5)], report, measured, 60, clock)
    kept = json.loads(path.read_text())
    assert list(kept["tiles"]["down"]) == ["1", "3"]
    assert kept["failed"] == {"down, 2 rows": "ValueError: no room"}
    assert "no time for 2 points; go on with --add" in capsys.readouterr().out


def test_the_table_has_todays_the_best_and_cublas() -> None:
    results = {
        "times": {"down": 32, "LM head": 1, "head down": 1, "head o": 1},
        "tiles": {
            "down": {"256": asdict(FOUND), "72": asdict(FOUND)},
            "LM head": {"256": asdict(FOUND)},
            "head down": {"704": asdict(FOUND)},
        },
        "failed": {"head o, 704 rows": "ValueError: x"},
    }
    assert tiles.table(results).splitlines()[2:] == [
        "| down | 72 | 9.0 | 2.0 | 3.0 | a | b |",
        "| down | 256 | 9.0 | 2.0 | 3.0 | a | b |",
        "| LM head | 256 | 9.0 | 2.0 | 3.0 | a | b |",
        "| head down | 704 | 9.0 | 2.0 | 3.0 | a | b |",
        "| **a pass of the target, ms** | 256 | 0.297 | 0.066 | 0.099 | | |",
        "",
        *(
            line
            for point in ("down, 72", "down, 256", "LM head, 256", "head down, 704")
            for line in (f"{point} rows: other bits by c", f"{point} rows: d left out: no room")
        ),
        "head o, 704 rows failed: ValueError: x",
    ]
    assert tiles.summary(results)["down@72"] == [9.0, 2.0, 3.0, "b"]


def test_the_command_goes_on_where_it_was(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiles.json"
    common = ["--target", str(tiny_target), "--device", "cpu", "--json", str(path)]
    tiles.main([*common, "--rows", "72", "--head-rows", ""])
    first = json.loads(path.read_text())
    assert sorted(first["tiles"]) == ["LM head", "down", "gate+up", "o", "qkv"]
    assert "failed" not in first
    said = capsys.readouterr().out.splitlines()
    assert set(json.loads(said[-1])) == {f"{name}@72" for name in first["tiles"]}
    tiles.main([*common, "--rows", "72", "--head-rows", "8", "--add"])
    second = json.loads(path.read_text())
    assert {name: second["tiles"][name] for name in first["tiles"]} == first["tiles"]
    assert sum(name.startswith("head ") for name in second["tiles"]) == 5
    capsys.readouterr()
    tiles.main(["--show", str(path)])
    assert "| **a level of the head, ms** | 8 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"), [(["--rows", "x", "--target", "t"], "--rows='x'"), ([], "--target is needed")]
)
def test_wrong_options_are_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tiles.main(given)
    assert said in capsys.readouterr().err
