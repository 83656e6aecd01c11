"""The results as a table in Markdown, and as a picture. Reads the JSON alone, so an old file can be shown anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = (1, 8, 32)
NOTHING = "-"
_PEER_MODES = {"plain": ("plain",), "ngram": ("ngram", "ngram_gpu"), "model": ("draft",), "deep": ("draft",)}
_LABELS = {"plain": "plain", "ngram": "n-gram", "model": "draft model", "deep": "draft model as deep as pays"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what was measured, by whom, and how many times better ours is."""

    what: str
    ours: str
    theirs: str = NOTHING
    ratio: str = NOTHING

    @staticmethod
    def of(
        what: str, ours: float | None, theirs: float | None, *, digits: int = 0, less_is_better: bool = False
    ) -> Row:
        if not ours or not theirs:
            return Row(what, _number(ours, digits), _number(theirs, digits))
        ratio = theirs / ours if less_is_better else ours / theirs
        return Row(what, _number(ours, digits), _number(theirs, digits), f"{ratio:.2f}")


def rows_of(results: Mapping[str, Any]) -> list[Row]:
    """Everything that these results hold; what was not measured has no line."""
    rows = [
        *_token_rows(results),
        *_pass_rows(results),
        *_long_rows(results),
        *_head_rows(results),
        *_sampling_rows(results),
        *_prompt_rows(results),
        *_start_rows(results),
        *_idle_rows(results),
    ]
    return [row for row in rows if (row.ours, row.theirs) != (NOTHING, NOTHING)]


def markdown(results: Mapping[str, Any]) -> str:
    head = [Row("", "ours", "vLLM", "times better"), Row("---", "---", "---", "---")]
    lines = [f"| {r.what} | {r.ours} | {r.theirs} | {r.ratio} |" for r in (*head, *rows_of(results))]
    failed = dict(results.get("failed", {}))
    failed |= {f"vLLM {name}": found["failed"] for name, found in results.get("vllm", {}).items() if "failed" in found}
    lines += kernel_lines(results.get("kernels", {}))
    return "\n".join([*lines, *(f"\n{name} failed: {why.splitlines()[-1]}" for name, why in failed.items())])


def kernel_lines(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """For each work a table of its kernels."""
    told: list[str] = []
    for work, kernels in found.items():
        total = sum(one["us"] for one in kernels)
        told += ["", f"**{work}**: {total / 1e3:.3f} ms", "", "| kernel | launches | us | % |", "|---|---|---|---|"]
        told += [
            f"| `{one['name'][:60]}` | {one['launches']:g} | {one['us']:.1f} | {100 * one['us'] / total:.1f} |"
            for one in kernels
        ]
    return told


def _token_rows(results: Mapping[str, Any]) -> list[Row]:
    ours, theirs = results.get("ours", {}), results.get("vllm", {})
    rows = []
    for mode, names in _PEER_MODES.items():
        for size in SIZES:
            rates = [rate for name in names if (rate := theirs.get(name, {}).get(f"tok_s@{size}"))]
            own = ours.get(mode, {}).get(f"tok_s@{size}")
            rows.append(Row.of(f"{_LABELS[mode]}, {size} at once, tok/s", own, max(rates, default=None)))
    own_small, their_small = results.get("small", {}).get("plain", {}), theirs.get("small", {})
    for size in SIZES:
        key = f"tok_s@{size}"
        rows.append(Row.of(f"small model, plain, {size} at once, tok/s", own_small.get(key), their_small.get(key)))
    return rows


def _pass_rows(results: Mapping[str, Any]) -> list[Row]:
    found = results.get("tree")
    if not found:
        return []
    where = f"at {found['context']} tokens"
    rows = [Row(f"pass over {n} rows, a request each, {where}, ms", f"{ms:.3f}") for n, ms in found["rows_ms"].items()]
    tree = f"{found['tree_ms']:.3f} ({found['tree_over_plain']:.3f} plain steps)"
    rows.append(Row(f"pass over a tree of {found['tree_rows']} rows, {where}, ms", tree))
    return [*rows, Row("plain step over its bytes at copy bandwidth", f"{found['step_over_bytes']:.3f}")]


def _long_rows(results: Mapping[str, Any]) -> list[Row]:
    return [
        Row(f"step at {step['context']:,} tokens, ms", f"{step['ms']:.3f} ({step['over_bytes']:.3f} times its bytes)")
        for step in results.get("long", ())
    ]


def _head_rows(results: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for key, how in (("heads", ""), ("heads_fp8", " in 8 bits")):
        if found := results.get(key):
            what = f"draft of an EAGLE-3 head{how}, depth {found['depth']}, {found['nodes']} nodes"
            rows += [Row(f"{what}, {n} at once, ms", f"{ms:.3f}") for n, ms in found["ms"].items()]
            rows.append(Row(f"{what}, over its bytes at copy bandwidth", f"{found['over_bytes']:.3f}"))
    return rows


def _sampling_rows(results: Mapping[str, Any]) -> list[Row]:
    rows = []
    for step in results.get("sampling", ()):
        for name, ms in step["ms"].items():
            over = "" if name == "greedy" else f" ({step['over_greedy'][name]:.3f} greedy steps)"
            rows.append(
                Row(
                    f"step with its choice, {name}, {step['vocab_size']:,} tokens to choose from, ms", f"{ms:.3f}{over}"
                )
            )
    return rows


def _prompt_rows(results: Mapping[str, Any]) -> list[Row]:
    ours, theirs = results.get("prefill", {}), results.get("vllm", {}).get("plain", {}).get("prefill", {})
    known = ours or theirs
    if not known:
        return []
    long, short = f"prompt of {known['tokens']:,} tokens, tok/s", f"first token after {known['first_tokens']:,}, ms"
    return [
        Row.of(long, ours.get("tok_s"), theirs.get("tok_s")),
        Row.of(short, ours.get("first_ms"), theirs.get("first_ms"), digits=1, less_is_better=True),
    ]


def _start_rows(results: Mapping[str, Any]) -> list[Row]:
    starts = [_seconds(start) for start in results.get("starts", ())]
    theirs = _seconds(results.get("vllm", {}).get("plain", {}).get("start"))
    names = ("start to first token, s", "the same, opened again, s")
    return [
        Row.of(name, ours, theirs, digits=1, less_is_better=True)
        for name, ours in zip(names, [*starts, None, None][:2], strict=True)
        if ours is not None
    ]


def _idle_rows(results: Mapping[str, Any]) -> list[Row]:
    return [
        Row(f"device idle, {_LABELS.get(mode, mode)}{beside}, %", f"{share:.1%}"[:-1])
        for name, beside in (("idle", ""), ("idle_in_a_crowd", ", 32 at once"))
        for mode, share in results.get(name, {}).items()
        if share is not None
    ]


def _seconds(start: Mapping[str, float] | None) -> float | None:
    return None if start is None else start["open_s"] + start["first_token_s"]


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def plot(results: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(SIZES), figsize=(12, 4))
    rows = {f"Slipstream {mode}": rates for mode, rates in results.get("ours", {}).items() if _has_rates(rates)}
    rows |= {f"vLLM {m}": r for m, r in results.get("vllm", {}).items() if m != "small" and _has_rates(r)}
    for axis, size in zip(axes, SIZES, strict=True):
        values: Sequence[float] = [rates.get(f"tok_s@{size}", 0) for rates in rows.values()]
        axis.barh(list(rows), values, color=["#2266aa" if name.startswith("Slip") else "#999999" for name in rows])
        axis.invert_yaxis()
        axis.set_title(f"{size} at once, tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _has_rates(found: Any) -> bool:
    return isinstance(found, Mapping) and "tok_s@1" in found
