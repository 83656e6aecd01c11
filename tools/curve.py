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
import math
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import curve_peers
from results import Report, chosen, first_results, sizes
from slipstream.core.errors import ConfigError
from work import SIZES, spread

PARTS = ("curve", "alone", "fixed", "interchange", "peers")
MODES = ("plain", "eagle3", "eagle3+suffix", "draft", "medusa", "ngram")


NOTHING = "-"
GREEDY = "T=0"
_LABELS = {
    "plain": "plain",
    "eagle3": "EAGLE-3",
    "eagle3+suffix": "EAGLE-3 with suffix",
    "draft": "distilled draft",
    "medusa": "Medusa",
    "ngram": "n-gram",
    "eagle3_drawn": "EAGLE-3, guesses drawn",
    "ngram_gpu": "n-gram on the GPU",
}
Points = Mapping[str, Mapping[str, Any]]
"""By mode and requests at once."""


def markdown(results: Mapping[str, Any]) -> str:
    """The tables of all results."""
    parts = [f"`{results['command']}`, {results['device']}, {results['date']}"] if "command" in results else []
    for temperature in results.get("curve", {}) or _temperatures(results):
        parts += [_rates(results, temperature), _rounds(results, temperature)]
    return "\n\n".join([part for part in parts if part] + list(_notes(results)))


def _temperatures(results: Mapping[str, Any]) -> list[str]:
    """The temperatures at which only vLLM was measured."""
    return sorted({key for found in results.get("vllm", {}).values() for key in found if key.startswith("T=")})


def lines(results: Mapping[str, Any], temperature: str) -> dict[str, Mapping[str, Any]]:
    """Ours and vLLM's curves at one temperature, by label."""
    ours: Points = results.get("curve", {}).get(temperature, {})
    named = {_LABELS.get(mode, mode): points for mode, points in ours.items()}
    for mode, found in results.get("vllm", {}).items():
        if temperature in found:
            named[f"vLLM, {_LABELS.get(mode, mode)}"] = found[temperature]
    return named


def plain_rate(results: Mapping[str, Any], temperature: str, size: str) -> float | None:
    """Our plain decoding with the drafters loaded or without, whichever is faster."""
    rates = [
        found["tok_s"]
        for key in ("curve", "alone")
        if (found := results.get(key, {}).get(temperature, {}).get("plain", {}).get(size))
    ]
    return max(rates, default=None)


def _rates(results: Mapping[str, Any], temperature: str) -> str:
    named = lines(results, temperature)
    sizes = sorted({size for points in named.values() for size in points}, key=int)
    rows = [[f"tok/s (times our plain), {temperature}", *(f"{size} at once" for size in sizes)]]
    for name, points in named.items():
        rows.append([name, *(_rate(points.get(size), plain_rate(results, temperature, size)) for size in sizes)])
    return table(rows)


def _rate(found: Mapping[str, Any] | None, plain: float | None) -> str:
    if not found:
        return NOTHING
    return f"{found['tok_s']:,.0f}" + (f" ({found['tok_s'] / plain:.2f})" if plain else "")


def _rounds(results: Mapping[str, Any], temperature: str) -> str:
    """The parts of a round of one request, and the result of a planner that always drafts."""
    fixed: Points = results.get("fixed", {}).get(temperature, {})
    head = [f"one request, {temperature}", "tau", "accepted", "draft, ms", "verify, ms", "host, ms"]
    rows = [head + (["always drafting, tok/s", "its tau"] if fixed else [])]
    for mode, points in results.get("curve", {}).get(temperature, {}).items():
        if (found := points.get("1")) is None:
            continue
        times, other = found["ms_per_round"], fixed.get(mode, {}).get("1")
        rows.append(
            [
                _LABELS.get(mode, mode),
                f"{found['tau']:.2f}",
                _share(found["alpha"]),
                *(f"{times[part]:.2f}" for part in ("draft", "verify", "host")),
                *((f"{other['tok_s']:,.0f}", f"{other['tau']:.2f}") if other else [NOTHING] * (len(rows[0]) - 6)),
            ]
        )
    for mode, found in results.get("vllm", {}).items():
        point = found.get(temperature, {}).get("1", {})
        if "tau" in point:
            name = f"vLLM, {_LABELS.get(mode, mode)}, chains of 5"
            rows.append([name, f"{point['tau']:.2f}", _share(point["alpha"]), *[NOTHING] * (len(rows[0]) - 3)])
    return table(rows) if len(rows) > 1 else ""


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others))


def _notes(results: Mapping[str, Any]) -> Iterable[str]:
    """Results of one number or sentence."""
    for temperature, modes in results.get("curve", {}).items():
        there = {size for points in modes.values() for size in points}
        asked = {size for points in lines(results, temperature).values() for size in points}
        if missing := ", ".join(sorted(asked - there, key=int)):
            yield f"Not measured yet: ours at {temperature} with {missing} at once. What has a dash was not measured."
    every = [
        point
        for key in ("curve", "alone", "fixed")
        for modes in results.get(key, {}).values()
        for points in modes.values()
        for point in points.values()
    ]
    if every:
        count = sum(point["recorded_while_timed"] for point in every)
        yield f"Graphs recorded while it was timed: {count}."
    same = [point for point in every if "same_as_plain" in point]
    if same:
        alike, answers = sum(point["same_as_plain"] for point in same), sum(point["answers"] for point in same)
        yield f"Answers that are plain decoding's, token by token: {alike:,} of {answers:,}."
    sides = results.get("interchange", {})
    if found := sides.get("compared"):
        ours, theirs = sides["ours"], sides["vllm"]["acceptance"]
        verdict = "within" if found["within_5_percent"] else "not within"
        ratio = NOTHING if found["accepted_ratio"] is None else f"{found['accepted_ratio']:.3f}"
        yield (
            f"The same EAGLE-3 head on the small model, chains of 5, {ours['prompts']} prompts: tau {ours['tau']:.3f} "
            f"here, {theirs['tau']:.3f} in vLLM; guesses that stood there over here: {ratio}, {verdict} 5%."
        )
    if out := results.get("left_out"):
        yield f"Left out, because their drafters were not there: {', '.join(out)}."
    failed = dict(results.get("failed", {}))
    peers = {f"vLLM {mode}": found for mode, found in results.get("vllm", {}).items()}
    peers["vLLM in interchange"] = sides.get("vllm", {})
    failed |= {name: found["failed"] for name, found in peers.items() if "failed" in found}
    for name, why in failed.items():
        yield f"{name} failed: {why.strip().splitlines()[-1]}"


def filled(document: str, tables: str, name: str = "curve") -> str:
    """The document with the tables between its two marks. Raises `ValueError` if it has no such marks."""
    first, last = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begin, rest = document.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"no place for the tables: the file must have the lines {first} and {last}")
    return f"{before}{first}\n\n{tables}\n\n{last}{after}"


def picture(results: Mapping[str, Any]) -> str:
    """Tokens per second over our plain decoding by requests at once, as SVG. Modes with one size are left out."""
    from slipstream.train.plot import Panel, draw

    named = {name: points for name, points in lines(results, GREEDY).items() if len(points) > 1}
    sizes = sorted({int(size) for points in named.values() for size in points})
    ticks = {math.log2(size): str(size) for size in sizes}
    plain = {size: rate for size in sizes if (rate := plain_rate(results, GREEDY, str(size)))}
    times = {
        name: [(math.log2(size), points[str(size)]["tok_s"] / plain[size]) for size in plain if str(size) in points]
        for name, points in named.items()
    }
    panel = Panel("times our plain decoding, by requests at once", times, ticks, from_zero=True)
    return draw([panel], f"{results.get('device', '')}, {results.get('date', '')}, temperature 0".lstrip(", "))


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
    """Add the options about models, vLLM and results that benchmarks with a large target share."""
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
    """The lists among the options. Prompts that cannot be read are refused here, before anything is opened."""
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
    text = markdown(results)
    if options.plot:
        options.plot.write_text(picture(results))
    if options.into:
        options.into.write_text(filled(options.into.read_text(), text))
    print(text, flush=True)


class Begun(NamedTuple):
    """The options of a measurement."""

    options: argparse.Namespace
    lists: dict[str, Any]  # those among the options


def begin(
    made: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    peers: Any,  # the module that measures vLLM, where this is the process of its own
    show: Callable[[dict[str, Any], argparse.Namespace], None],
    checked: Callable[[argparse.Namespace], dict[str, Any]],
) -> Begun | None:
    """Parse the options. None: only tables were wanted, or this is a peer's process, and that is done."""
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
    import curve_ours  # brings torch and the engine, which a peer's process does not need

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers in their own groups end with us
    report = Report(first_results(options), options.json)
    curve_ours.run(options, curve_ours.Lists(**lists), report)
    show(report.results, options)
    print(json.dumps(report.results))


if __name__ == "__main__":
    main()
