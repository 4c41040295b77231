"""Curves: as SVG that takes its colours from the page, and as a line of characters."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape

from trackway.trace.printable import visible

WIDTH, HEIGHT = 420, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 24
_MOST_POINTS = 400
_BARS = "▁▂▃▄▅▆▇█"

Point = tuple[float, float]


def svg(values: Mapping[int, float], label: str) -> str:
    """Draw a curve.

    Args:
        values: step -> value, ascending; where one is not finite the curve has a gap.
        label: what it is, for those who do not see it.

    Returns:
        An ``svg`` element of the classes ``plot``, ``grid``, ``curve`` and ``tick``; it refers to nothing.
    """
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    head = (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(visible(label, newlines=False))}">'
    )
    if not finite:
        return f'{head}<text class="tick" x="{WIDTH / 2}" y="{HEIGHT / 2}">no finite value</text></svg>'
    low, high = _span(finite.values())
    first, last = _span(finite.keys())
    middle = low + (high - low) / 2

    def place(step: float, value: float) -> Point:
        across = (step - first) / (last - first)
        # Halves, since the difference of two large numbers may be none.
        up = (value / 2 - low / 2) / (high / 2 - low / 2)
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [head]
    for value in (low, middle, high):
        y = place(first, value)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{y + 4:.1f}">{value:.4g}</text>')
    for step in dict.fromkeys((min(finite), max(finite))):
        x = place(step, low)[0]
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 6}">{step:,}</text>')
    for piece in _pieces(values):
        points = [place(*point) for point in _thinned(piece)]
        if len(points) == 1:
            ((x, y),) = points
            parts.append(f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
        else:
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="curve" points="{drawn}"/>')
    return "".join([*parts, "</svg>"])


def sparkline(values: Mapping[int, float], width: int = 24) -> str:
    """Give a curve as a line of at most ``width`` bars; a value that is not finite is a space."""
    points = list(values.values())
    if len(points) > width:
        points = [points[round(place * (len(points) - 1) / (width - 1))] for place in range(width)]
    finite = [value for value in points if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    bars = []
    for value in points:
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5
        bars.append(_BARS[min(7, int(share * 8))] if math.isfinite(value) else " ")
    return "".join(bars)


def _span(values: Collection[float]) -> tuple[float, float]:
    """Give the lowest and highest, a little apart where they are the same."""
    low, high = min(values), max(values)
    if high / 2 - low / 2 > 0:
        return float(low), float(high)
    apart = abs(low) * 0.05 or 0.5
    return low - apart, high + apart


def _pieces(values: Mapping[int, float]) -> Iterator[list[Point]]:
    piece: list[Point] = []
    for step, value in values.items():
        if math.isfinite(value):
            piece.append((step, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Keep the lowest and the highest of each stretch: a spike must be seen."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(len(points) / (_MOST_POINTS // 2))
    found: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        found += sorted(ends)
    return found
