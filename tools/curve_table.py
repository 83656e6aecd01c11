"""The curves as tables in Markdown, and as a picture. Reads the JSON alone, so an old file can be shown anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
    """Everything that these results hold; what was not measured has no line."""
    parts = [f"`{results['command']}`, {results['device']}, {results['date']}"] if "command" in results else []
    for temperature in results.get("curve", {}) or _temperatures(results):
        parts += [_rates(results, temperature), _rounds(results, temperature)]
    return "\n\n".join([part for part in parts if part] + list(_notes(results)))


def _temperatures(results: Mapping[str, Any]) -> list[str]:
    """Those that only vLLM was measured at."""
    return sorted({key for found in results.get("vllm", {}).values() for key in found if key.startswith("T=")})


def lines(results: Mapping[str, Any], temperature: str) -> dict[str, Mapping[str, Any]]:
    """Ours and vLLM's curves at one temperature, by what they are called."""
    ours: Points = results.get("curve", {}).get(temperature, {})
    named = {_LABELS.get(mode, mode): points for mode, points in ours.items()}
    for mode, found in results.get("vllm", {}).items():
        if temperature in found:
            named[f"vLLM, {_LABELS.get(mode, mode)}"] = found[temperature]
    return named


def plain_rate(results: Mapping[str, Any], temperature: str, size: str) -> float | None:
    """Our own plain decoding: with the drafters loaded or without, whichever is faster."""
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
    """What a round of one request is made of, and what a planner brings that always drafts."""
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
    """What is one number or one sentence."""
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
    """The document with these tables between its two marks. Raises `ValueError` where it has no such place."""
    first, last = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begin, rest = document.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"no place for the tables: the file must have the lines {first} and {last}")
    return f"{before}{first}\n\n{tables}\n\n{last}{after}"


def picture(results: Mapping[str, Any]) -> str:
    """Tokens per second over our plain decoding, by requests at once, as SVG. Modes with one size are left out."""
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
