"""What passes of a target, drafts of an EAGLE-3 head and the choice of a token take on one GPU, down to the kernels.

    python tools/kernel_table.py --target DIR --json FILE [--parts tree,heads] [--requests 16,64] [--add]
    python tools/kernel_table.py --show FILE

    tree       passes over 1 to 128 requests and over a tree of 64 rows, and the plain step over its bytes
    long       the plain step at 8,000 and 32,000 tokens of context
    heads      the draft of an EAGLE-3 head, in 16 and in 8 bits, and its bytes
    kernels    kernel by kernel: a plain step, trees and a head's draft; with --requests 16,64 those of that many
               requests, whose trees have 256 rows together
    sampling   the step with the choice of its token

The weights are random, in the target's shape. The JSON file is written after every part. Parts that fail are named in
it, and the others go on. The table is printed before the last line, which is the JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import kernel_passes as passes
from kernel_clock import Clock, KernelTime, Work, by_kernel, clock_of, copy_bandwidth
from kernel_passes import CONTEXT, DEPTH, NODES, OPENED_DEPTH, REPEATS, WIDTH, binary_tree, lay_out, random_cache
from results import Report, chosen, first_results, sizes
from slipstream.core.draft import Tree
from slipstream.core.errors import ConfigError
from slipstream.models.load import load_config
from slipstream.models.resolve import resolve
from slipstream.models.runner import Runner

PARTS = ("tree", "long", "heads", "kernels", "sampling")
TREES = (16, 32, 64)
"""Rows of the trees, roots included."""
CROWD_ROWS = 256
"""Rows of a pass of many requests, all trees together."""
_SHOWN = 12
"""Kernels of a work that are listed one by one."""


def measure(
    target: str,
    parts: Sequence[str],
    requests: Sequence[int],
    device: torch.device,
    report: Report,
    clock: Clock | None = None,
) -> None:
    """All parts. One that fails is written down, and the others go on."""
    clock = clock or clock_of(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    runner = passes.random_runner(load_config(resolve(target)), dtype, device)
    report.say(f"a model of random weights: {runner.swaps}")
    bandwidth = copy_bandwidth(device, clock)
    report.put(bandwidth, "copy_bytes_per_s")
    report.put(runner.weights_bytes, "weights_bytes")
    if "tree" in parts:
        with report.part("tree"):
            context = min(CONTEXT, runner.max_positions - passes.TREE_ROWS)
            report.put(asdict(passes.tree_part(runner, bandwidth, clock, context=context)), "tree")
    if "long" in parts:
        with report.part("long"):
            report.put([asdict(step) for step in passes.long_part(runner, bandwidth, clock)], "long")
    if "heads" in parts:
        with report.part("heads"):
            report.put(asdict(passes.head_part(runner, bandwidth, clock)), "heads")
            report.put(asdict(passes.head_part(runner, bandwidth, clock, kept="fp8")), "heads_fp8")
    if "kernels" in parts and device.type == "cuda":
        with report.part("kernels"):
            report.put(report.results.get("kernels", {}) | kernel_part(runner, requests=requests), "kernels")
    if "sampling" in parts:  # last: it changes the LM head
        with report.part("sampling"):
            report.put([asdict(step) for step in passes.sampling_part(runner, clock)], "sampling")


@torch.inference_mode()
def works(runner: Runner, context: int = CONTEXT, trees: Sequence[int] = TREES) -> dict[str, Work]:
    """The works of one request, by name."""
    cache = random_cache(runner, 1, context + max(trees))
    found = {"plain step": lay_out(runner, cache, [Tree()], context).run}
    for rows in trees:
        found[f"tree of {rows} rows"] = lay_out(runner, cache, [binary_tree(rows, runner.vocab_size)], context).run
    draft = passes.draft_work(runner, passes.random_head(runner, "fp8"), 1, context, DEPTH, WIDTH, NODES)
    return {**found, "EAGLE-3 draft in 8 bits": draft}


@torch.inference_mode()
def crowd_works(runner: Runner, requests: Sequence[int], context: int = CONTEXT) -> dict[str, Work]:
    """The works of many requests: a plain step, a pass over trees of 256 rows together, and the draft of these trees.

    The head is opened as usual, so it may draft deeper, after a round of such trees.
    """
    head = passes.random_head(runner, "fp8")
    found: dict[str, Work] = {}
    for n in requests:
        rows = max(2, CROWD_ROWS // n)
        cache = random_cache(runner, n, context + rows)
        tree = binary_tree(rows, runner.vocab_size)
        nodes = rows - 1
        found[f"{n} requests: plain step"] = lay_out(runner, cache, [Tree()] * n, context).run
        found[f"{n} requests: trees of {rows} rows"] = lay_out(runner, cache, [tree] * n, context).run
        depth = min(DEPTH, nodes)
        recent = 4 if depth < 4 else 8  # as rounds of many have it, `engine/draft_loops.py`
        size = (depth, WIDTH, max(nodes, 4))
        draft = passes.draft_work(runner, head, n, context, *size, deepest=OPENED_DEPTH, recent=recent)
        found[f"{n} requests: EAGLE-3 draft of {nodes} nodes in 8 bits"] = draft
    return found


@torch.inference_mode()
def kernel_part(
    runner: Runner,
    watch: Callable[[Work, int], Sequence[KernelTime]] = by_kernel,
    context: int = CONTEXT,
    requests: Sequence[int] = (1,),
) -> dict[str, list[dict[str, Any]]]:
    """The kernels of each work."""
    crowds = [n for n in requests if n > 1]
    wanted = works(runner, context) if 1 in requests else {}
    wanted |= crowd_works(runner, crowds, context) if crowds else {}
    return {name: [one._asdict() for one in fewer(watch(work, REPEATS))] for name, work in wanted.items()}


def fewer(times: Sequence[KernelTime]) -> list[KernelTime]:
    rest = times[_SHOWN:]
    others = [KernelTime("others", sum(one.launches for one in rest), sum(one.us for one in rest))] if rest else []
    return [*times[:_SHOWN], *others]


def markdown(results: Mapping[str, Any]) -> str:
    rows = [*_pass_rows(results), *_long_rows(results), *_head_rows(results), *_sampling_rows(results)]
    lines = ["| | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]
    lines += kernel_lines(results.get("kernels", {}))
    return "\n".join(
        [*lines, *(f"\n{name} failed: {why.splitlines()[-1]}" for name, why in results.get("failed", {}).items())]
    )


def kernel_lines(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """A table of kernels for each work."""
    told: list[str] = []
    for work, kernels in found.items():
        total = sum(one["us"] for one in kernels)
        told += ["", f"**{work}**: {total / 1e3:.3f} ms", "", "| kernel | launches | us | % |", "|---|---|---|---|"]
        told += [
            f"| `{one['name'][:60]}` | {one['launches']:g} | {one['us']:.1f} | {100 * one['us'] / total:.1f} |"
            for one in kernels
        ]
    return told


Row = tuple[str, str]
"""What was measured, and its value."""


def _pass_rows(results: Mapping[str, Any]) -> list[Row]:
    found = results.get("tree")
    if not found:
        return []
    where = f"at {found['context']} tokens"
    rows = [(f"pass over {n} rows, a request each, {where}, ms", f"{ms:.3f}") for n, ms in found["rows_ms"].items()]
    tree = f"{found['tree_ms']:.3f} ({found['tree_over_plain']:.3f} plain steps)"
    rows.append((f"pass over a tree of {found['tree_rows']} rows, {where}, ms", tree))
    return [*rows, ("plain step over its bytes at copy bandwidth", f"{found['step_over_bytes']:.3f}")]


def _long_rows(results: Mapping[str, Any]) -> list[Row]:
    return [
        (f"step at {step['context']:,} tokens, ms", f"{step['ms']:.3f} ({step['over_bytes']:.3f} times its bytes)")
        for step in results.get("long", ())
    ]


def _head_rows(results: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for key, how in (("heads", ""), ("heads_fp8", " in 8 bits")):
        if found := results.get(key):
            what = f"draft of an EAGLE-3 head{how}, depth {found['depth']}, {found['nodes']} nodes"
            rows += [(f"{what}, {n} at once, ms", f"{ms:.3f}") for n, ms in found["ms"].items()]
            rows.append((f"{what}, over its bytes at copy bandwidth", f"{found['over_bytes']:.3f}"))
    return rows


def _sampling_rows(results: Mapping[str, Any]) -> list[Row]:
    rows = []
    for step in results.get("sampling", ()):
        for name, ms in step["ms"].items():
            over = "" if name == "greedy" else f" ({step['over_greedy'][name]:.3f} greedy steps)"
            what = f"step with its choice, {name}, {step['vocab_size']:,} tokens to choose from, ms"
            rows.append((what, f"{ms:.3f}{over}"))
    return rows


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", help="the model whose shape is measured")
    made.add_argument("--parts", default=",".join(PARTS), help=f"by comma; all of them: {', '.join(PARTS)}")
    made.add_argument("--requests", default="1", help="of `kernels`, by comma")
    made.add_argument("--json", type=Path, help="where the results go")
    made.add_argument("--add", action="store_true", help="keep what the JSON file has of other parts, of this machine")
    made.add_argument("--show", type=Path, help="print the table of this JSON file, and measure nothing")
    made.add_argument("--device", default="cuda", help="cpu: only to try the command, with tiny models")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.show:
        print(markdown(json.loads(options.show.read_text())))
        return
    if not options.target:
        parser().error("--target is needed (or --show FILE)")
    try:
        parts, requests = chosen("--parts", options.parts, PARTS), sizes("--requests", options.requests)
    except ConfigError as error:
        parser().error(str(error))
    report = Report(first_results(options), options.json)
    measure(options.target, parts, requests, torch.device(options.device), report)
    print(markdown(report.results))
    print(json.dumps(report.results))


if __name__ == "__main__":
    main()
