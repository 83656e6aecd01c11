"""Which products are tried with which tiles. A few dozen that make sense: each has to be compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.kernels.gpu.row_linear import Tile, splits_of

HEAD = "head "
"""What the names of a head's products begin with."""
_HEAD_VOCABULARY = 32_000
_FEW_ROWS = 128
"""With no more rows than these nobody sums all runs, and no tile is higher."""
_PROGRAMS = 66
"""As many as half of an H200's multiprocessors."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product by a weight [N, K], or [2 N, K] where gated. partial: the next kernel sums its runs."""

    name: str
    n: int
    k: int
    gated: bool = False
    partial: bool = True
    narrow: bool = False
    times: int = 1  # in a pass

    @property
    def height(self) -> int:
        """Rows of the weight."""
        return 2 * self.n if self.gated else self.n

    @property
    def splits(self) -> int:
        return splits_of(self.n, self.k) if self.partial else 1


def products_of(config: Any) -> tuple[Product, ...]:
    """Of a target's pass, and of a level of an EAGLE-3 head for it in 8 bits; first those that take most."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    read, joined = heads * size, (heads + 2 * kv_heads) * size
    layers = config.num_hidden_layers
    vocabulary = min(_HEAD_VOCABULARY, config.vocab_size - 1)
    return (
        Product("gate+up", inner, hidden, gated=True, partial=False, times=layers),
        Product("down", hidden, inner, times=layers),
        Product("qkv", joined, hidden, times=layers),
        Product("o", hidden, read, times=layers),
        Product("LM head", config.vocab_size, hidden, partial=False),
        Product(HEAD + "gate+up", inner, hidden, gated=True, partial=False, narrow=True),
        Product(HEAD + "down", hidden, inner, narrow=True),
        Product(HEAD + "qkv", joined, 2 * hidden, narrow=True),
        Product(HEAD + "o", hidden, read, narrow=True),
        Product(HEAD + "LM head", vocabulary, hidden, partial=False, narrow=True),
    )


def name_of(tile: Tile) -> str:
    """`128x256x64 s3 w8 tma flip`: rows, columns, step; stages; warps."""
    said = [name for name in ("tma", "flip", "whole", "beside") if getattr(tile, name)]
    return " ".join([f"{tile.block_m}x{tile.block_n}x{tile.block_k}", f"s{tile.stages}", f"w{tile.warps}", *said])


def candidates(product: Product, rows: int, today: Tile, shared: int, tma: bool = True) -> list[Tile]:
    """What is tried beside today's tile, which comes first; without those that do not fit.

    tma: can weights and rows come by descriptors here?
    """
    shapes = _narrow_shapes() if product.narrow else _plain_shapes()
    found = [today]
    for shape in shapes:
        tile = replace(shape, block_n=max(shape.block_n // 2, 32)) if product.gated else shape
        if tma or not tile.tma:
            found += _placed(tile, product, rows)
    return [tile for tile in dict.fromkeys(found) if tile == today or _can(tile, product, rows, shared)]


def _plain_shapes() -> Sequence[Tile]:
    """Columns of a gated product are half as many: there are two weights."""
    by_rows = {"tma": True, "flip": True}
    return (
        Tile(128, 256, 64, 3, 8, **by_rows),
        Tile(128, 128, 64, 3, 8, **by_rows),  # two programs a multiprocessor
        Tile(128, 128, 64, 3, 4, **by_rows),
        Tile(128, 128, 64, 5, 8, **by_rows),
        Tile(128, 128, 128, 3, 8, **by_rows),
        Tile(128, 128, 64, 3, 8, tma=True),  # the weight first
        Tile(128, 64, 64, 4, 4, **by_rows),
        Tile(64, 128, 64, 4, 4, tma=True),
        Tile(256, 128, 64, 4, 8, **by_rows),
        Tile(256, 64, 64, 4, 8, **by_rows),
    )


def _narrow_shapes() -> Sequence[Tile]:
    """The weight first: what is widened is in registers, and only the first operand may come from there."""
    return (
        Tile(128, 128, 64, 4, 8),
        Tile(128, 128, 64, 3, 4),
        Tile(128, 128, 128, 3, 8),
        Tile(128, 128, 64, 5, 8, tma=True),
        Tile(128, 256, 64, 4, 8, tma=True),
        Tile(64, 128, 64, 6, 4, tma=True),
        Tile(256, 128, 64, 4, 8, tma=True),
    )


def _placed(tile: Tile, product: Product, rows: int) -> Iterator[Tile]:
    """A shape with its programs' places: where there are enough of them that fetch far ahead, also to sum all runs.

    All stand beside each other, few rows' as well, whom it does not concern: so one compilation serves for both.
    """
    tile = replace(tile, beside=True)
    yield tile
    programs = -(-product.n // tile.block_n) * -(-rows // tile.block_m)
    if rows > _FEW_ROWS and product.splits > 1 and programs >= _PROGRAMS and tile.stages >= 4:
        yield replace(tile, whole=True)


def _can(tile: Tile, product: Product, rows: int, shared: int) -> bool:
    """Does it fit, and is it no higher than it needs to be? A run has two steps at least (`Tile.of`)."""
    run = product.k // product.splits
    fits = tile.fits(gated=product.gated, size=2, narrow=product.narrow, shared=shared)
    return (
        fits and (tile.block_m <= _FEW_ROWS or rows > _FEW_ROWS) and run % tile.block_k == 0 and run >= 2 * tile.block_k
    )
