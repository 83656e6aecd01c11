"""Curves as a picture, drawn as SVG: any browser shows it, and nothing has to be installed for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _EDGE = 380, 260, 50
_COLOURS = ("#1f6feb", "#d1572a", "#2a8f4f", "#8957c2", "#b58900", "#0f8b8d", "#c2417c", "#6a737d")
_TICKS = 4
_LARGE = 1000
"""From here on numbers are written out instead of in powers of ten."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: lines by name, each of (x, y) points. ticks: what stands under which x; None: numbers, evenly.

    from_zero: y begins at 0, so that what is twice as much stands twice as high.
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
        if panel.from_zero:  # nothing was below it, though all may have been it
            low_y = 0.0

        def place(x: float, y: float) -> tuple[float, float]:
            across = _EDGE + (x - low_x) / (high_x - low_x) * (_WIDTH - _EDGE - 20)
            down = _HEIGHT - 30 - (y - low_y) / (high_y - low_y) * (_HEIGHT - 60)
            return round(across, 1), round(down, 1)

        marks = panel.ticks or {x: f"{x:,.0f}" for x in _evenly(low_x, high_x)}
        for x, name in marks.items():
            at_x, bottom = place(x, low_y)
            out.append(f'<text x="{at_x}" y="{bottom + 14}" text-anchor="middle">{escape(name)}</text>')
        for y in _evenly(low_y, high_y):
            edge, at_y = place(low_x, y)
            label = f"{y:,.0f}" if high_y >= _LARGE else f"{y:.3g}"
            out.append(f'<text x="{edge - 5}" y="{at_y + 4}" text-anchor="end">{label}</text>')
            out.append(f'<line x1="{edge}" x2="{_WIDTH - 20}" y1="{at_y}" y2="{at_y}" stroke="#ddd"/>')
        for number, (name, line) in enumerate(panel.lines.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            path = " ".join("{},{}".format(*place(x, y)) for x, y in line)
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            if line:
                x, y = place(*line[-1])
                out.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>')
                out.append(f'<text x="{x - 4}" y="{y - 5}" text-anchor="end" fill="{colour}">{escape(name)}</text>')
    return "".join(out) + "</g>"


def _evenly(low: float, high: float) -> list[float]:
    return [low + (high - low) * tick / _TICKS for tick in range(_TICKS + 1)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
