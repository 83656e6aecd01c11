"""Our drafters on a large target by requests at once, and vLLM with the same EAGLE-3 head beside them, in one run.

    python tools/curve.py --small SMALL --target BIG --work FOLDER --prompts spec_bench.jsonl --json curve.json
                          [--plot curve.svg] [--parts curve,alone,fixed,interchange,peers] [--peer-path DIR] [--add]
    python tools/curve.py --show curve.json [--into docs/performance.md]

SMALL is the model that the drafters were trained for, BIG what `widen.py` made of it, made here if it is not there. The
drafters (those that come with Slipstream, or the folders eagle3, medusa and draft of --heads) are made as wide into
FOLDER; what is there is used. The prompts are 14 first turns of a Spec-Bench file, answers have up to 256 tokens.

    curve        tokens per second with prompts included, tau, acceptance and the parts of a round, in each mode, with
                 1 to 32 requests at once at temperature 0 and one at temperature 1. The planner is the one users have
    alone        plain decoding in an engine without drafters, so that the ratio is to the faster one
    fixed        the same as `curve` for one request with a planner that always drafts
    interchange  the small model with its own EAGLE-3 head, all first turns of the file, chains of 5: acceptance here
                 and in vLLM
    peers        `curve` by vLLM, each mode in a process of its own; vLLM must be on the path, or in --peer-path

The JSON file is written after every point. Parts that fail are named in it, and the others go on. The tables are
printed before the last line, which is the JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import curve_peers
import curve_table
from results import Report, chosen, first_results, sizes
from slipstream.core.errors import ConfigError
from work import SIZES, spread

PARTS = ("curve", "alone", "fixed", "interchange", "peers")
MODES = ("plain", "eagle3", "eagle3+suffix", "draft", "medusa", "ngram")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(made)
    made.add_argument("--parts", default=",".join(PARTS), help=f"by comma; all of them: {', '.join(PARTS)}")
    made.add_argument("--modes", default=",".join(MODES), help=f"of ours: {', '.join(MODES)}")
    made.add_argument("--sizes", default=",".join(map(str, SIZES)), help="requests at once, at temperature 0")
    made.add_argument("--sampled-sizes", default="1", help="requests at once, at temperature 1")
    made.add_argument("--fixed-sizes", default="1", help="requests at once, of the part `fixed`")
    made.add_argument("--max-tokens", type=int, default=256)
    made.add_argument("--repeats", type=int, default=3, help="runs of each point, of which the median counts")
    made.add_argument("--limit", type=int, help="first turns of `interchange`; default: all")
    made.add_argument("--peers", default="plain,eagle3", help=f"modes of vLLM: {', '.join(curve_peers.MODES)}")
    made.add_argument("--peer-repeats", type=int, default=1)
    made.add_argument("--plot", type=Path, help="where the curves go, as SVG")
    return made


def add_models(made: argparse.ArgumentParser) -> None:
    """Options about models, vLLM and results, which benchmarks with a large target share."""
    made.add_argument("--small", default="default", help="the model that the drafters were trained for")
    made.add_argument("--target", type=Path, help="the large model; made from the small one where it is not there")
    made.add_argument("--work", type=Path, help="a folder for what is made of the drafters")
    made.add_argument(
        "--heads", type=Path, help="a folder with eagle3, medusa, draft or some of them; default: those shipped"
    )
    made.add_argument("--prompts", type=Path, help="a Spec-Bench file (JSON lines)")
    made.add_argument("--eagle", default="", help="options of the EAGLE-3 tree, such as 'depth=6&width=8'")
    made.add_argument("--layout", default="speculators", choices=("speculators", "original"), help="for vLLM")
    made.add_argument("--peer-draft", help="the model that vLLM's mode `draft` drafts with; default: the widened draft")
    made.add_argument("--peer-path", help="a folder with vLLM, where it is not installed")
    made.add_argument("--peer-timeout", type=float, default=240, help="seconds that a process of vLLM may take")
    made.add_argument("--json", type=Path, help="where the results go")
    made.add_argument("--add", action="store_true", help="keep what the JSON file has of other parts, of this machine")
    made.add_argument("--show", type=Path, help="print the tables of this JSON file, and measure nothing")
    made.add_argument("--into", type=Path, help="a Markdown file with a place for the tables, which are put there")
    made.add_argument("--device", default="cuda", help="cpu: only to try the command, with tiny models")
    made.add_argument("--as-peer", help=argparse.SUPPRESS)


def checked(options: argparse.Namespace) -> dict[str, Any]:
    """The lists among the options. Prompts that cannot be read are refused here too, before anything is opened."""
    if options.prompts:
        spread(options.prompts)
    return {
        "parts": chosen("--parts", options.parts, PARTS),
        "modes": chosen("--modes", options.modes, MODES),
        "peers": chosen("--peers", options.peers, curve_peers.MODES),
        "sizes": sizes("--sizes", options.sizes),
        "sampled": sizes("--sampled-sizes", options.sampled_sizes),
        "fixed": sizes("--fixed-sizes", options.fixed_sizes),
    }


def show(results: dict[str, Any], options: argparse.Namespace) -> None:
    text = curve_table.markdown(results)
    if options.plot:
        options.plot.write_text(curve_table.picture(results))
    if options.into:
        options.into.write_text(curve_table.filled(options.into.read_text(), text))
    print(text, flush=True)


class Begun(NamedTuple):
    """A command that is to measure something."""

    options: argparse.Namespace
    lists: dict[str, Any]  # those among the options


def begin(
    made: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    peers: Any,  # the module that measures vLLM, where this is the process of its own
    show: Callable[[dict[str, Any], argparse.Namespace], None],
    checked: Callable[[argparse.Namespace], dict[str, Any]],
) -> Begun | None:
    """How benchmarks with a large target begin. None: only tables were wanted, or only vLLM, and that is done."""
    options = made.parse_args(arguments)
    if options.as_peer:
        peers.measure(peers.Task.read(options.as_peer), lambda found: print(json.dumps(found), flush=True))
        return None
    if options.show:
        show(json.loads(options.show.read_text()), options)
        return None
    try:
        return Begun(options, checked(options))
    except ConfigError as error:
        made.error(str(error))


def main(arguments: Sequence[str] | None = None) -> None:
    begun = begin(parser(), arguments, curve_peers, show, checked)
    if begun is None:
        return
    options, lists = begun
    if not (options.target and options.work and options.prompts):
        parser().error("--target, --work and --prompts are needed (or --show FILE)")
    import curve_run  # brings torch and the engine, which a peer's process does not need

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers in their own groups end with us
    report = Report(first_results(options), options.json)
    curve_run.run(options, curve_run.Lists(**lists), report)
    show(report.results, options)
    print(json.dumps(report.results))


if __name__ == "__main__":
    main()
