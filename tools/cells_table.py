"""What the cells say of the planner, as tables in Markdown. Reads the JSON alone: an old file can be shown anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import Any

from curve_table import NOTHING, table

PLAIN, AUTO = "plain", "auto"
OVER_PLAIN = {"cuda": 0.98, "cpu": 0.97}
OVER_BEST, OF_THE_WAY = 0.93, 0.90
ADVERSE, FOLLOWS = 0.03, 20
"""The bars: by how much auto may be slower than plain decoding in any cell, and than the best fixed setting there; how
far it must be from the best single setting to the best of every cell; what ill-meaning drafters may cost; rounds."""

Rates = Mapping[str, float]
"""Tokens per second by setting."""


def rates_of(results: Mapping[str, Any], figure: str = "tok_s") -> dict[str, Rates]:
    """By cell, those in which both plain decoding and auto were measured."""
    found = {
        name: {setting: point[figure] for setting, point in settings.items() if point.get(figure)}
        for name, settings in results.get("cells", {}).items()
    }
    return {name: rates for name, rates in found.items() if {PLAIN, AUTO} <= rates.keys()}


def best_fixed(rates: Rates) -> str:
    """The fastest setting that somebody could have chosen; plain decoding is one of them."""
    return max((name for name in rates if name != AUTO), key=rates.__getitem__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """All cells together. Means are geometric, of tokens per second."""

    cells: int
    least_over_plain: float
    least_over_best: float
    single: str  # the best setting for all cells
    single_mean: float
    auto_mean: float
    oracle_mean: float

    @property
    def of_the_way(self) -> float | None:
        """How far auto is from the best single setting to the best setting of every cell; None: they are the same."""
        way = self.oracle_mean - self.single_mean
        return (self.auto_mean - self.single_mean) / way if way > 1e-9 * self.oracle_mean else None


def verdict(cells: Mapping[str, Rates]) -> Verdict | None:
    """None where nothing was measured. Only settings that every cell has can be the single one."""
    if not cells:
        return None
    every = set.intersection(*(set(rates) for rates in cells.values())) - {AUTO}
    means = {name: _mean(rates[name] for rates in cells.values()) for name in sorted(every)}
    single = max(means, key=means.__getitem__)
    return Verdict(
        len(cells),
        min(rates[AUTO] / rates[PLAIN] for rates in cells.values()),
        min(rates[AUTO] / rates[best_fixed(rates)] for rates in cells.values()),
        single,
        means[single],
        _mean(rates[AUTO] for rates in cells.values()),
        _mean(rates[best_fixed(rates)] for rates in cells.values()),
    )


def markdown(results: Mapping[str, Any], figure: str = "tok_s") -> str:
    """Everything that these results hold; what was not measured has no line. figure: by which settings are compared."""
    parts = [f"`{results['command']}`, {results['device']}, {results['date']}"] if "command" in results else []
    kind = "cuda" if results.get("on", "cuda").startswith("cuda") else "cpu"
    cells = rates_of(results, figure)
    found = verdict(cells)
    if found is not None:
        parts += [_cells(results, cells, OVER_PLAIN[kind]), _settings(cells), _said(found, OVER_PLAIN[kind])]
    parts += [_adversaries(results, figure), _switches(results), _peers(results, cells)]
    failed = dict(results.get("failed", {}))
    failed |= {f"vLLM {mode}": part["failed"] for mode, part in results.get("vllm", {}).items() if "failed" in part}
    parts += [f"{name} failed: {why.strip().splitlines()[-1]}" for name, why in failed.items()]
    return "\n\n".join(part for part in parts if part)


def _cells(results: Mapping[str, Any], cells: Mapping[str, Rates], bar: float) -> str:
    rows = [["cell", "plain, tok/s", "best fixed", "tok/s", "auto, tok/s", "its tau", "auto / plain", "auto / best"]]
    for name, rates in cells.items():
        best, auto = best_fixed(rates), rates[AUTO]
        rows.append(
            [
                name,
                f"{rates[PLAIN]:,.0f}",
                best,
                f"{rates[best]:,.0f}",
                f"{auto:,.0f}",
                f"{results['cells'][name][AUTO]['tau']:.2f}",
                _marked(auto / rates[PLAIN], bar),
                _marked(auto / rates[best], OVER_BEST),
            ]
        )
    return table(rows)


def _marked(ratio: float, bar: float) -> str:
    return f"{ratio:.3f}" if ratio >= bar else f"**{ratio:.3f}**"


def _settings(cells: Mapping[str, Rates]) -> str:
    """Each setting by plain decoding, in the geometric mean over the tasks, for each load."""
    loads = list(dict.fromkeys(name.partition(" ")[2] for name in cells))
    names = list(dict.fromkeys(setting for rates in cells.values() for setting in rates if setting != PLAIN))
    rows = [["times plain, mean over tasks", *loads]]
    for setting in names:
        row = [setting]
        for load in loads:
            ratios = [
                rates[setting] / rates[PLAIN]
                for name, rates in cells.items()
                if name.partition(" ")[2] == load and setting in rates
            ]
            row.append(f"{_mean(ratios):.2f}" if ratios else NOTHING)
        rows.append(row)
    return table(rows)


def _said(found: Verdict, bar: float) -> str:
    way = found.of_the_way
    return (
        f"{found.cells} cells. auto / plain is {found.least_over_plain:.3f} at the least (bar {bar}), auto / best "
        f"{found.least_over_best:.3f} (bar {OVER_BEST}). Geometric means, tok/s: best single setting ({found.single}) "
        f"{found.single_mean:,.1f}, auto {found.auto_mean:,.1f}, best of each cell {found.oracle_mean:,.1f}: auto is "
        f"{NOTHING if way is None else format(way, '.0%')} of the way (bar {OF_THE_WAY:.0%})."
    )


def _adversaries(results: Mapping[str, Any], figure: str) -> str:
    found = results.get("adversaries", {})
    rows = [["times plain, at once", *found]]
    for name in dict.fromkeys(name for part in found.values() for name in part if name != PLAIN):
        ratios = [part[name][figure] / part[PLAIN][figure] for part in found.values()]
        rows.append([f"drafter: {name}", *(_marked(ratio, 1 - ADVERSE) for ratio in ratios)])
    return table(rows) if found else ""


def _switches(results: Mapping[str, Any]) -> str:
    found = results.get("switches", {})
    rows = [["change", "nodes of a request, phase by phase", f"rounds until followed (bar {FOLLOWS})"]]
    for name, part in found.items():
        rounds = ["no change" if n is None else f"{n}" if n <= FOLLOWS else f"**{n}**" for n in part["rounds"]]
        rows.append([name, " → ".join(f"{level:g}" for level in part["levels"]), ", ".join(rounds)])
    return table(rows) if found else ""


def _peers(results: Mapping[str, Any], cells: Mapping[str, Rates]) -> str:
    """vLLM's settings in the cells that both were measured in."""
    modes = {mode: part.get("cells", {}) for mode, part in results.get("vllm", {}).items()}
    modes = {mode: part for mode, part in modes.items() if part}
    shared = [name for name in cells if any(name in part for part in modes.values())]
    if not shared:
        return ""
    rows: list[Sequence[str]] = [["tok/s", "auto", *(f"vLLM, {mode}" for mode in modes), "auto / best of vLLM"]]
    ratios = []
    for name in shared:
        theirs = {mode: part[name]["tok_s"] for mode, part in modes.items() if name in part}
        ratios.append(cells[name][AUTO] / max(theirs.values()))
        given = [f"{theirs[mode]:,.0f}" if mode in theirs else NOTHING for mode in modes]
        rows.append([name, f"{cells[name][AUTO]:,.0f}", *given, f"{ratios[-1]:.2f}"])
    return table(rows) + f"\n\nauto over the best of vLLM's settings in each cell: {_mean(ratios):.2f} in the mean."


def _mean(values: Iterable[float]) -> float:
    """Geometric."""
    logs = [log(value) for value in values]
    return exp(fsum(logs) / len(logs))
