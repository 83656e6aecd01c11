"""Line diagrams as SVG, which any browser shows, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _EDGE, _NAMES = 460, 260, 50, 120
_COLOURS = ("#1f6feb", "#d1572a", "#2a8f4f", "#8957c2", "#b58900", "#0f8b8d", "#c2417c", "#6a737d")
_TICKS = 4
_LINE = 12.0  # pixels between names
_LARGE = 1000  # numbers from here on are written in full


@dataclass(frozen=True, slots=True)
class Panel:
    """A diagram: named lines of (x, y) points.

    ticks: labels by x; None: evenly spaced numbers. from_zero: the y axis begins at 0.
    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    ticks: Mapping[float, str] | None = None
    from_zero: bool = False


def draw(panels: Sequence[Panel], title: str) -> str:
    """The panels side by side, as the text of an SVG file."""
    width = len(panels) * _WIDTH
    body = "".join(_panel(panel, i * _WIDTH) for i, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT + 30}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="20" font-size="14">{escape(title)}</text>{body}</svg>\n'
    )


def _panel(panel: Panel, left: int) -> str:
    points = [point for line in panel.lines.values() for point in line]
    out = [f'<g transform="translate({left},30)"><text x="{_EDGE}" y="14">{escape(panel.title)}</text>']
    if points:
        low_x, high_x = _span([x for x, _ in points])
        low_y, high_y = _span([y for _, y in points] + [0.0] * panel.from_zero)
        if panel.from_zero:
            low_y = 0.0
        rungs = _round_steps(low_y, high_y)
        low_y, high_y = rungs[0], rungs[-1]

        def place(x: float, y: float) -> tuple[float, float]:
            across = _EDGE + (x - low_x) / (high_x - low_x) * (_WIDTH - _EDGE - _NAMES)
            down = _HEIGHT - 30 - (y - low_y) / (high_y - low_y) * (_HEIGHT - 60)
            return round(across, 1), round(down, 1)

        marks = panel.ticks or {x: f"{x:,.0f}" for x in _evenly(low_x, high_x)}
        for x, name in marks.items():
            at_x, bottom = place(x, low_y)
            out.append(f'<text x="{at_x}" y="{bottom + 14}" text-anchor="middle">{escape(name)}</text>')
        for y in rungs:
            edge, at_y = place(low_x, y)
            label = f"{y:,.0f}" if high_y >= _LARGE else f"{y:.3g}"
            out.append(f'<text x="{edge - 5}" y="{at_y + 4}" text-anchor="end">{label}</text>')
            out.append(f'<line x1="{edge}" x2="{_WIDTH - _NAMES}" y1="{at_y}" y2="{at_y}" stroke="#ddd"/>')
        colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(panel.lines)}
        ends = {name: place(*line[-1]) for name, line in panel.lines.items() if line}
        for name, (x, y) in ends.items():
            path = " ".join("{},{}".format(*place(*point)) for point in panel.lines[name])
            out.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>')
            out.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colours[name]}"/>')
        for name, y in _apart({name: y for name, (_, y) in ends.items()}).items():
            x = ends[name][0] + 7
            out.append(f'<text x="{x}" y="{round(y + 4, 1)}" fill="{colours[name]}">{escape(name)}</text>')
    return "".join(out) + "</g>"


def _apart(heights: Mapping[str, float]) -> dict[str, float]:
    """The heights of names, moved down where they would overlap."""
    placed: dict[str, float] = {}
    lowest = -_LINE
    for name, height in sorted(heights.items(), key=lambda one: one[1]):
        lowest = placed[name] = max(height, lowest + _LINE)
    return placed


def _round_steps(low: float, high: float) -> list[float]:
    """Round numbers at equal distances from below `low` to above `high`."""
    power = 10.0 ** math.floor(math.log10((high - low) / _TICKS))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * _TICKS >= high - low)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def _evenly(low: float, high: float) -> list[float]:
    return [low + (high - low) * tick / _TICKS for tick in range(_TICKS + 1)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
