"""One product with many tiles, as in a pass: by the weights of several layers in turn, with what sums its runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from gpu_clock import Clock
from tiles_list import Product, candidates, name_of
from torch import Tensor

from slipstream.kernels.gpu.jit import TensorDescriptor, recording, shared_bytes
from slipstream.kernels.gpu.norms import add_norm
from slipstream.kernels.gpu.row_linear import Tile, row_linear, silu_mul, tile_of
from slipstream.kernels.linear import narrowed, widened

REPEATS = 15
IN_TURN_BYTES = 300 << 20
"""Weights that are read in turn: several times what the L2 cache holds."""
_EPS = 1e-5
_CUBLAS = "cuBLAS"


@dataclass(frozen=True, slots=True)
class Found:
    """One product at one number of rows, in microseconds with what the next kernel adds for its runs."""

    today: str
    us: dict[str, float]  # by tile
    cublas_us: float
    other_bits: list[str]  # tiles that give other numbers than today's
    left_out: dict[str, str]  # tiles that could not be run, and why
    compile_s: float

    @property
    def best(self) -> str:
        return min((name for name in self.us if name not in self.other_bits), key=self.us.__getitem__)


@dataclass(frozen=True, slots=True)
class Operands:
    """Random rows and weights. `plain`: the weights as cuBLAS wants them."""

    product: Product
    x: Tensor  # [M, K]
    weights: Sequence[Tensor]  # each [N, K], or [2 N, K] where gated
    scales: Sequence[Tensor | None]
    plain: Sequence[Tensor]
    norm: Tensor  # [N]

    @staticmethod
    def of(
        product: Product, rows: int, dtype: torch.dtype, device: torch.device, in_turn: int = IN_TURN_BYTES
    ) -> Operands:
        dice = torch.Generator(device).manual_seed(rows)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=dice, device=device, dtype=dtype)

        size = product.height * product.k * (1 if product.narrow else dtype.itemsize)
        plain = [numbers(product.height, product.k) * product.k**-0.5 for _ in range(max(2, -(-in_turn // size)))]
        weights: Sequence[Tensor] = plain
        scales: Sequence[Tensor | None] = [None] * len(plain)
        if product.narrow:
            pairs = [narrowed(weight) for weight in plain]
            weights, scales = [codes for codes, _ in pairs], [scale for _, scale in pairs]
            plain = [widened(codes, scale, dtype) for codes, scale in pairs]
        return Operands(product, numbers(rows, product.k), weights, scales, plain, numbers(product.n))

    @property
    def today(self) -> Tile:
        """What is chosen where a round is captured."""
        one = self.product
        with recording():
            return tile_of(self.x, self.weights[0], splits=one.splits, gated=one.gated, narrow=one.narrow)

    def by(self, tile: Tile, at: int = 0) -> Tensor:
        """The product by one of the weights; where it has runs, they are still to be summed."""
        product = self.product
        return row_linear(
            self.x,
            self.weights[at],
            scale=self.scales[at],
            splits=product.splits,
            gated=product.gated,
            partial=product.partial,
            out_dtype=None if product.gated else torch.float32,
            overlap=self.x.is_cuda,
            tile=tile,
        )

    def run(self, tile: Tile, rows: Tensor) -> None:
        """All weights in turn. rows [M, N]: what a product with runs is added to, and normed."""
        for at in range(len(self.weights)):
            out = self.by(tile, at)
            if self.product.partial:
                add_norm(rows, out, self.norm, _EPS, overlap=self.x.is_cuda)

    def run_cublas(self, rows: Tensor) -> None:
        for weight in self.plain:
            out = F.linear(self.x, weight)
            if self.product.gated:
                silu_mul(out)
            elif self.product.partial:
                add_norm(rows, out[None], self.norm, _EPS)


def measure(
    product: Product,
    rows: int,
    clock: Clock,
    *,
    dtype: torch.dtype,
    device: torch.device,
    threads: int = 1,
    in_turn: int = IN_TURN_BYTES,
) -> Found:
    """Every candidate that runs here, beside cuBLAS. They are compiled by so many threads."""
    with torch.inference_mode():
        given = Operands.of(product, rows, dtype, device, in_turn)
        today = given.today
        by_descriptor = TensorDescriptor is not None and dtype.itemsize == 2 and product.k % 64 == 0
        tiles = candidates(product, rows, today, shared_bytes(device), by_descriptor)
        begun = time.perf_counter()
        left_out = compile_all(tiles, given, threads)
        compiled = time.perf_counter() - begun
        if name_of(today) in left_out:
            raise RuntimeError(f"today's tile {name_of(today)}: {left_out[name_of(today)]}")
        tiles = [tile for tile in tiles if name_of(tile) not in left_out]
        wanted = added_up(given.by(today))
        other_bits = [name_of(tile) for tile in tiles if not torch.equal(added_up(given.by(tile)), wanted)]
        rest = torch.zeros((rows, product.n), dtype=dtype, device=device)
        works: dict[str, Callable[[], object]] = {name_of(tile): partial(given.run, tile, rest) for tile in tiles}
        seconds = clock(works | {_CUBLAS: partial(given.run_cublas, rest)}, REPEATS)
    us = {name: round(1e6 * taken / len(given.weights), 2) for name, taken in seconds.items()}
    return Found(name_of(today), us, us.pop(_CUBLAS), other_bits, left_out, round(compiled, 2))


def compile_all(tiles: Sequence[Tile], given: Operands, threads: int) -> dict[str, str]:
    """Run each once: the first by itself, since what all of them need is made then. Those that cannot run, and why."""

    def tried(tile: Tile) -> str | None:
        try:
            with torch.inference_mode():
                given.by(tile)
        except Exception as error:  # a compiler's own, or too much of a multiprocessor's memory
            return f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return None

    first, *others = tiles
    wrong = [first] if tried(first) else []
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            wrong += [tile for tile, why in zip(others, pool.map(tried, others), strict=True) if why]
    else:
        wrong += others
    again = {name_of(tile): tried(tile) for tile in wrong}  # by itself: not for being beside others
    return {name: why for name, why in again.items() if why}


def added_up(out: Tensor) -> Tensor:
    """As the next kernel adds the runs of a product up, in their order; what is no run is left as it is."""
    if out.dim() == 2:
        return out
    total = out[0].clone()
    for run in out[1:]:
        total += run
    return total
