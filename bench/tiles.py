"""Which tiles are fastest for passes of 65 rows and more: today's, others and cuBLAS, product by product.

    python bench/tiles.py --target DIR --json FILE [--add] [--rows 256,128] [--head-rows 256,128] [--budget 60]
    python bench/tiles.py --show FILE

The products are those of a layer of the target and its LM head, and of an EAGLE-3 head for it in 8 bits; of the target
only the configuration is read. Each is timed in a CUDA graph with the weights of several layers in turn, together with
the kernel that sums its runs; all tiles must give the same bits. The file is written after every point, a product at a
number of rows. With --add points that it has are not measured again, so a call that was broken off goes on; with
--budget no point is begun after so many seconds. The table is printed before the last line, which is JSON.

A draft of an EAGLE head has 8 rows a request at each level, 4 where its tree has no more nodes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_clock import clock_of, free
from gpu_report import Report
from tiles_list import HEAD, Product, products_of
from tiles_work import Found, measure

from gpu import first_results, sizes
from slipstream.core.errors import ConfigError
from slipstream.models.load import load_config
from slipstream.models.resolve import resolve

ROWS = "72,96,128,192,256"
HEAD_ROWS = "128,256"


def points(
    products: Sequence[Product], rows: Sequence[int], head_rows: Sequence[int], done: Mapping[str, Any]
) -> list[tuple[Product, int]]:
    """What is still to be measured: the target's passes, then the head's; rows that fill their tiles first."""

    def ordered(rows: Sequence[int]) -> list[int]:
        return sorted(rows, key=lambda n: (n % 128 > 0, -n))

    wanted = [(product, n) for n in ordered(rows) for product in products if not product.narrow]
    wanted += [(product, n) for n in ordered(head_rows) for product in products if product.narrow]
    return [(product, n) for product, n in wanted if str(n) not in done.get(product.name, {})]


def run(
    left: Sequence[tuple[Product, int]],
    report: Report,
    look: Callable[[Product, int], Found],
    budget: float,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """All points that there is time for. One that fails is noted, and the others go on."""
    begun = now()
    for at, (product, rows) in enumerate(left):
        if now() - begun > budget:
            report.say(f"no time for {len(left) - at} points; go on with --add")
            break
        with report.part(f"{product.name}, {rows} rows"):
            report.put(asdict(look(product, rows)), "tiles", product.name, str(rows))


def table(results: Mapping[str, Any]) -> str:
    """By product and rows; and what the products of a whole pass take, or of a level of a head's draft."""
    lines = ["| product | rows | today, us | best, us | cuBLAS, us | today's tile | the best |", "|---" * 7 + "|"]
    times: Mapping[str, int] = results.get("times", {})
    notes: list[str] = []
    passes: dict[tuple[str, int], dict[str, list[float]]] = {}  # ms by whose and rows, then by product
    for name, by_rows in results.get("tiles", {}).items():
        for rows, told in sorted(by_rows.items(), key=lambda pair: int(pair[0])):
            found = Found(**told)
            taken = [found.us[found.today], found.us[found.best], found.cublas_us]
            shown = " | ".join(f"{us:.1f}" for us in taken)
            lines.append(f"| {name} | {rows} | {shown} | {found.today} | {found.best} |")
            notes += [f"{name}, {rows} rows: other bits by {tile}" for tile in found.other_bits]
            notes += [f"{name}, {rows} rows: {tile} left out: {why}" for tile, why in found.left_out.items()]
            passes.setdefault((_whose(name), int(rows)), {})[name] = [times.get(name, 1) * us / 1e3 for us in taken]
    for (whose, rows), parts in sorted(passes.items()):
        if len(parts) == sum(_whose(name) == whose for name in times):
            total = " | ".join(f"{sum(column):.3f}" for column in zip(*parts.values(), strict=True))
            lines.append(f"| **{whose}, ms** | {rows} | {total} | | |")
    failed = [f"{name} failed: {why}" for name, why in results.get("failed", {}).items()]
    return "\n".join([*lines, "", *notes, *failed])


def _whose(name: str) -> str:
    return "a level of the head" if name.startswith(HEAD) else "a pass of the target"


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """The table's numbers."""
    return {
        f"{name}@{rows}": [found.us[found.today], found.us[found.best], found.cublas_us, found.best]
        for name, by_rows in results.get("tiles", {}).items()
        for rows, told in by_rows.items()
        for found in [Found(**told)]
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", help="the model whose products are meant")
    made.add_argument("--rows", default=ROWS, help="of the target's passes, by comma")
    made.add_argument("--head-rows", default=HEAD_ROWS, help="of a head's, by comma; '' for none")
    made.add_argument("--threads", type=int, default=8, help="that compile at once")
    made.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no point is begun")
    made.add_argument("--json", type=Path, help="where the results go")
    made.add_argument("--add", action="store_true", help="keep the points that the JSON file has")
    made.add_argument("--show", type=Path, help="print the table of this JSON file, and measure nothing")
    made.add_argument("--device", default="cuda", help="cpu: only to try the command, with a tiny model")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return
    if not options.target:
        parser().error("--target is needed (or --show FILE)")
    try:
        wanted = sizes("--rows", options.rows), sizes("--head-rows", options.head_rows)
    except ConfigError as error:
        parser().error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    products = products_of(load_config(resolve(options.target)))
    report = Report(first_results(options), options.json)
    report.results["times"] = {product.name: product.times for product in products}
    device = torch.device(options.device)

    def look(product: Product, rows: int) -> Found:
        free(device)
        if device.type == "cpu":
            return measure(product, rows, clock_of(device), dtype=torch.float32, device=device, in_turn=0)
        return measure(product, rows, clock_of(device), dtype=torch.bfloat16, device=device, threads=options.threads)

    run(points(products, *wanted, report.results.setdefault("tiles", {})), report, look, options.budget)
    print(table(report.results), flush=True)
    print(json.dumps(summary(report.results)))


if __name__ == "__main__":
    main()
