"""Slipstream and its peers on one GPU, on the same prompts, in one run: everything that the performance page says.

    python bench/gpu.py --target DIR --draft DIR --small DIR --prompts spec_bench.jsonl --json results.json
                        [--plot results.png] [--peers plain,ngram,draft] [--peer-path DIR] [--parts tokens,tree]
    python bench/gpu.py --show results.json [--plot results.png]

    tokens     whole answers, greedy, up to 256 tokens, prefill included: one at a time, then 8 and 32 at once, in every
               mode. The prompts are a spread of a Spec-Bench file: four of its multi-turn group and two of each other
               one, first turns only
    tree       a verify pass over a tree of 64 rows, passes over 1 to 128 requests, the plain step over its bytes
    small      `tokens` of a small model by itself, plain
    long       the plain step at 8,000 and 32,000 tokens of context, of a random model of the target's shape
    heads      the draft of an EAGLE-3 head, and its bytes
    sampling   the step with the choice of its token, of that model
    kernels    where the time of a plain step, of trees and of a head's draft goes, kernel by kernel, of that model;
               with --requests 16,64 that of so many requests at once, whose trees have 256 rows together
    prefill    reading a prompt of 8,000 tokens; the first token after 1,024
    idle       how much of the time the device waits, in every mode
    peers      `tokens` and `prefill` by vLLM, each mode in a process of its own, after ours; vLLM must be on the path

The JSON file is written after every part. Parts that fail are named in it, and the others go on. The table is printed
before the last line, which is the JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_peers
import gpu_table
from gpu_report import Report
from gpu_tokens import spread
from kept import command_line

from slipstream.core.errors import ConfigError

PARTS = ("tokens", "tree", "small", "long", "heads", "sampling", "kernels", "prefill", "idle", "peers")


def chosen(key: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """A list by commas, in the order of those that are known."""
    names = [name for name in text.split(",") if name]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"{key}={text!r}: {wrong[0]!r} is unknown; choose from {', '.join(known)}")
    return tuple(name for name in known if name in names)


def sizes(key: str, text: str) -> tuple[int, ...]:
    """Numbers by commas."""
    try:
        found = tuple(sorted({int(part) for part in text.split(",") if part}))
    except ValueError:
        found = (0,)
    if any(size < 1 for size in found):
        raise ConfigError(f"{key}={text!r}: must be numbers from 1 on by commas, such as 1,8,32")
    return found


def run_ours(options: argparse.Namespace, parts: tuple[str, ...], report: Report) -> None:
    import gpu_ours  # brings torch and the engine, which a peer's process does not need
    import torch

    plan = gpu_ours.Plan(
        options.target,
        options.draft,
        options.small,
        options.prompts,
        options.max_tokens,
        torch.device(options.device),
        parts,
        sizes("--requests", options.requests),
    )
    gpu_ours.measure(plan, report)


def run_peers(options: argparse.Namespace, report: Report) -> None:
    modes = chosen("--peers", options.peers, gpu_peers.MODES)
    parts = chosen("--peer-parts", options.peer_parts, gpu_peers.PARTS)
    tasks = gpu_peers.tasks(
        modes, parts, options.target, options.small, options.draft, options.prompts, options.max_tokens
    )
    for name, task in tasks.items():
        with report.part(f"vllm {name}"):
            report.put(gpu_peers.run_apart(task, options.peer_path, options.peer_timeout), "vllm", name)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", help="the model that answers")
    made.add_argument("--draft", help="the draft model")
    made.add_argument("--small", help="a small model to run by itself as well")
    made.add_argument("--prompts", type=Path, help="a Spec-Bench file (JSON lines)")
    made.add_argument("--parts", default=",".join(PARTS), help=f"by comma; all of them: {', '.join(PARTS)}")
    made.add_argument("--max-tokens", type=int, default=256)
    made.add_argument("--requests", default="1", help="of `kernels`, by comma")
    made.add_argument("--peers", default="plain,ngram,draft", help=f"modes of vLLM: {', '.join(gpu_peers.MODES)}")
    made.add_argument("--peer-parts", default=",".join(gpu_peers.PARTS), help="what vLLM is asked for")
    made.add_argument("--peer-path", help="a folder with vLLM, where it is not installed")
    made.add_argument("--peer-timeout", type=float, default=300, help="seconds that a mode of vLLM may take")
    made.add_argument("--json", type=Path, help="where the results go")
    made.add_argument("--add", action="store_true", help="keep what the JSON file has of other parts, of this machine")
    made.add_argument("--plot", type=Path, help="where a picture of them goes; needs matplotlib")
    made.add_argument("--show", type=Path, help="print the table of this JSON file, and measure nothing")
    made.add_argument("--device", default="cuda", help="cpu: only to try the command, with tiny models")
    made.add_argument("--as-peer", help=argparse.SUPPRESS)
    return made


def first_results(options: argparse.Namespace) -> dict[str, Any]:
    """What the results begin with: of an older file too, where that is asked for."""
    import torch

    kept = json.loads(options.json.read_text()) if options.add and options.json and options.json.exists() else {}
    return kept | {
        "command": " && ".join(filter(None, [kept.get("command"), command_line(sys.argv)])),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {name: _version(name) for name in ("triton", "transformers")},
    }


def _version(name: str) -> str | None:
    """Of something that is installed, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def show(results: dict[str, Any], options: argparse.Namespace) -> None:
    print(gpu_table.markdown(results), flush=True)
    if options.plot:
        gpu_table.plot(results, options.plot)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.plot and find_spec("matplotlib") is None:
        parser().error("--plot: needs matplotlib, which Slipstream does not install; pip install matplotlib")
    if options.show:
        show(json.loads(options.show.read_text()), options)
        return
    if not (options.target and options.draft and options.prompts):
        parser().error("--target, --draft and --prompts are needed (or --show FILE)")
    if options.as_peer:
        parts = chosen("--peer-parts", options.peer_parts, gpu_peers.PARTS)
        task = gpu_peers.PeerTask(
            options.as_peer, options.target, options.draft, options.prompts, options.max_tokens, parts
        )
        gpu_peers.measure(task, lambda found: print(json.dumps(found), flush=True))
        return
    try:
        parts = chosen("--parts", options.parts, PARTS)
        for key, text, known in (
            ("--peers", options.peers, gpu_peers.MODES),
            ("--peer-parts", options.peer_parts, gpu_peers.PARTS),
        ):
            chosen(key, text, known)
        sizes("--requests", options.requests)
        spread(options.prompts)  # a file that cannot be read is refused before anything is opened
    except ConfigError as error:
        parser().error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers in their own groups end with us
    report = Report(first_results(options), options.json)
    if set(parts) - {"peers"}:
        run_ours(options, parts, report)
    if "peers" in parts:
        run_peers(options, report)
    show(report.results, options)
    print(json.dumps(report.results))


if __name__ == "__main__":
    main()
