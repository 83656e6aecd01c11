"""The requests of a cell, and its speed from a stream of rounds.

Imports no engine, since a peer's process imports this file. A cell is a task at one number of requests at once and one
temperature. Requests come in a closed loop: when one ends, the next takes its place, so the load is constant. Speed is
tokens over seconds from the first round in which all requests decode, later prompts included.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from statistics import fmean, median
from typing import Any

from slipstream.bench.prompts import load_prompts
from slipstream.core.errors import ConfigError
from work import MULTI_TURN, encode

AT_ONCE = (1, 4, 16, 64)
TEMPERATURES = (0.0, 1.0)
LONGEST = ((4, 1024), (16, 512), (64, 256))
"""Most tokens of a prompt by requests at once: reading 64 long articles would take longer than the measurement."""
WITHHELD_S = 0.025
"""Shortest gap in which neither the process nor the device computes that is ascribed to the machine, not the engine."""
FEW = 8
"""Fewest rounds of a window."""
WARM_S = 0.2
"""Untimed seconds of each setting at each load, ours and a peer's, for compiling, recording and learning."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A task, a number of requests at once, and a temperature."""

    task: str
    at_once: int
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.task} x{self.at_once} T={self.temperature:g}"

    @property
    def load(self) -> tuple[int, float]:
        """Cells of one load share what was recorded and compiled."""
        return self.at_once, self.temperature


def cells(tasks: Sequence[str], at_once: Sequence[int], temperatures: Sequence[float], text: str = "") -> list[Cell]:
    """All cells, grouped by load, since cells of one load share recorded graphs.

    text: cell names or parts of names by comma ("qa", "x64", "T=1", "rag x4"); keeps the cells that match one of them.
    """
    every = [Cell(task, n, warmth) for n in at_once for warmth in temperatures for task in tasks]
    wanted = [part.split() for part in text.split(",") if part.strip()]
    chosen = [cell for cell in every if not wanted or any(set(w) <= set(cell.name.split()) for w in wanted)]
    if not chosen:
        raise ConfigError(f"--cells {text!r}: none is called so; a name is such as {every[0].name!r}, or a part of it")
    return chosen


def by_task(path: Path | None) -> dict[str, list[str]]:
    """First turns by task; Spec-Bench's eight categories of conversations are one task. None: Slipstream's prompts."""
    found: dict[str, list[str]] = {}
    for prompt in load_prompts(path):
        task = "multi_turn" if path is not None and prompt.category in MULTI_TURN else prompt.category
        found.setdefault(task.replace(" ", "_"), []).append(prompt.text)
    return found


def longest_of(at_once: int, room: int) -> int:
    """Most tokens of a prompt in a cell. room: tokens that the context has for prompts."""
    return min(next((most for n, most in LONGEST if at_once <= n), LONGEST[-1][1]), room)


def shortened(tokenizer: Any, text: str, longest: int) -> list[int]:
    """A prompt of at most `longest` tokens. The middle of the text is left out, so that it stays a whole request."""
    ids = encode(tokenizer, text, 1 << 30)
    if len(ids) <= longest:
        return ids
    own = tokenizer.encode(text, add_special_tokens=False)
    kept = max(2, len(own) - (len(ids) - longest))
    tail = kept // 4
    return encode(tokenizer, tokenizer.decode(own[: kept - tail]) + tokenizer.decode(own[-tail:]), longest)


def prompts_of(tokenizer: Any, texts: Sequence[str], at_once: int, room: int, fewest: int) -> list[list[int]]:
    """The prompts of a cell, spread over the task's: the same for every setting, engine and temperature.

    fewest: the fewest prompts, if the task has enough.
    """
    count = min(len(texts), max(fewest, at_once))
    spread = [texts[i * len(texts) // count] for i in range(count)]
    return [shortened(tokenizer, text, longest_of(at_once, room)) for text in spread]


def tokens_of(number: int, at_once: int, max_tokens: int) -> int:
    """Most tokens of the n-th answer. The first answers have different lengths, from a quarter on, so that requests
    that begin together do not end together and have their successors' prompts read in one pass."""
    if number >= at_once:
        return max_tokens
    return max(1, max_tokens * (at_once + 3 * (number + 1)) // (4 * at_once))


# --- rounds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beat:
    """A finished round."""

    at: float  # seconds, by any clock
    requests: int  # that received tokens
    tokens: int
    drafted: int = 0  # nodes
    read_rows: int = 0  # of prompts
    recorded: int = 0  # graphs recorded and kernels compiled so far
    recording_s: float = 0.0  # the time of that
    parts_s: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of the host, the draft and the pass, if known
    cpu_s: float | None = None  # CPU time of all threads of the process, if known
    hoped: float = 1.0  # planned speed relative to plain decoding
    guessers: tuple[str, ...] = ()  # the drafters with guesses in it

    @property
    def device_s(self) -> float:
        return self.parts_s[1] + self.parts_s[2]


@dataclass(frozen=True, slots=True)
class Span:
    """The time of one round, without recording of graphs and without gaps due to the machine."""

    seconds: float
    beat: Beat
    withheld_s: float = 0.0  # the gap due to the machine

    @property
    def kind(self) -> tuple[int, int]:
        """Rounds of a kind take about the same time: the same number of requests, and about the same number of
        nodes."""
        return self.beat.requests, round(2 * log2(1 + self.beat.drafted))


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive rounds, and the number of graphs recorded in them."""

    spans: tuple[Span, ...]
    recorded: int = 0

    @property
    def tokens(self) -> int:
        return sum(span.beat.tokens for span in self.spans)

    @property
    def seconds(self) -> float:
        return sum(span.seconds for span in self.spans)

    @property
    def withheld(self) -> list[float]:
        """Seconds of each gap due to the machine."""
        return [span.withheld_s for span in self.spans if span.withheld_s]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def window(beats: Sequence[Beat], at_once: int) -> Window:
    """The rounds from the first one in which all requests decode. Raises `ValueError` if there are too few."""
    full = next((i for i, beat in enumerate(beats) if beat.requests >= at_once), len(beats))
    rounds = list(zip(beats[full:], beats[full + 1 :], strict=False))
    if len(rounds) < FEW:
        raise ValueError(f"{len(rounds)} rounds with {at_once} requests: give it more --seconds")
    spans = tuple(_span(beats[i : i + 4]) for i in range(full, len(beats) - 1))
    return Window(spans, rounds[-1][1].recorded - beats[full].recorded)


def _span(beats: Sequence[Beat]) -> Span:
    """The time between the first two beats; the later ones show device work that the host hears of late.

    Time in which neither the process computed nor the device had work is the machine's: another program held it. A wait
    of the process for its own work is no longer than that work, and counts.
    """
    last, now = beats[:2]
    seconds = now.at - last.at - (now.recording_s - last.recording_s)
    if last.cpu_s is None or now.cpu_s is None or now.recorded > last.recorded:
        return Span(seconds, now)
    withheld_s = seconds - max(now.cpu_s - last.cpu_s, *[beat.device_s for beat in beats])
    return Span(seconds - withheld_s, now, withheld_s) if withheld_s > WITHHELD_S else Span(seconds, now)


def keep_rounds(file: Path, cell: str, setting: str, seen: Window) -> None:
    """Append these rounds to a file, to find out afterwards why a setting was slow."""
    rounds = []
    for one in seen.spans:
        beat = one.beat
        counts = beat.requests, beat.drafted, beat.tokens, beat.read_rows
        times = map(_us, (*beat.parts_s, one.withheld_s))
        hoped, guessers = round(100 * beat.hoped), "+".join(beat.guessers)
        rounds.append([_us(one.seconds), *counts, *times, hoped, guessers])
    columns = ["us", "requests", "drafted", "tokens", "read_rows"]
    columns += ["host_us", "draft_us", "verify_us", "withheld_us", "hoped_percent", "guessers"]
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"cell": cell, "setting": setting, "columns": columns, "rounds": rounds}) + "\n")


def _us(seconds: float) -> int:
    return round(1e6 * seconds)


def point(windows: Sequence[Window]) -> dict[str, Any]:
    """The results of a setting in a cell, over all its windows."""
    spans = [span for window in windows for span in window.spans]
    turns = sum(span.beat.requests for span in spans)
    bare = [span for span in spans if not span.beat.read_rows]
    return {
        "tok_s": sum(span.beat.tokens for span in spans) / sum(span.seconds for span in spans),
        "runs": [round(w.rate, 1) for w in windows],
        "decode_tok_s": sum(s.beat.tokens for s in bare) / sum(s.seconds for s in bare) if bare else None,
        "steady_tok_s": sum(s.beat.tokens for s in bare) / _steady_s(bare) if bare else None,
        "rounds": len(spans),
        "tau": sum(span.beat.tokens for span in spans) / turns,
        "drafted_per_turn": sum(span.beat.drafted for span in spans) / turns,
        "recorded": sum(w.recorded for w in windows),
        "withheld_ms": [round(1e3 * seconds, 1) for window in windows for seconds in window.withheld],
    } | _parts(spans)


def _parts(spans: Sequence[Span]) -> dict[str, list[float]]:
    """The mean parts of a round (host, draft, pass), if known."""
    means = [round(1e3 * fmean(part), 3) for part in zip(*(span.beat.parts_s for span in spans), strict=True)]
    return {"parts_ms": means} if any(means) else {}


def _steady_s(spans: Sequence[Span]) -> float:
    """Seconds of these rounds if each had taken the median of its kind: a stall of the machine does not count."""
    kinds: dict[tuple[int, int], list[float]] = {}
    for span in spans:
        kinds.setdefault(span.kind, []).append(span.seconds)
    return sum(len(seconds) * median(seconds) for seconds in kinds.values())


Measure = Callable[[str], Window]
"""From the name of a setting to one window of it."""
RECORDED_MOST = 2
"""Most graphs recorded in a window that counts: recording also disturbs the rounds around it."""


def side_by_side(names: Sequence[str], measure: Measure, repeats: int, patience: int = 2) -> dict[str, dict[str, Any]]:
    """Measure all settings in turn, `repeats` times, each time in another order, against a drifting machine.

    A window with too much recording is measured again, at most `patience` times for each setting.
    """
    found: dict[str, list[Window]] = {name: [] for name in names}
    left = dict.fromkeys(names, patience)
    for turn in range(repeats):
        shift = turn * max(1, len(names) // repeats) % len(names)
        for name in [*names[shift:], *names[:shift]]:
            seen = measure(name)
            while seen.recorded > RECORDED_MOST and left[name]:
                left[name] -= 1
                seen = measure(name)
            found[name].append(seen)
    return {name: point(windows) for name, windows in found.items()}
