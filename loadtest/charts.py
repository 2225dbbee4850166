"""Plots as inline SVG, without scripts and outside assets. Pure.

Colours are the page's CSS variables `--s0` to `--s7`, so that a plot is readable on dark and light
grounds; lines differ by their dashes as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 44
COLOURS = 8
DASHES = ("", "6 3", "2 3", "9 3 2 3")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to places. `is_log`: both bounds are more than 0."""

    label: str
    least: float
    most: float
    is_log: bool = False
    format: Callable[[float], str] = "{:g}".format

    def place(self, value: float, start: float, end: float) -> float:
        """Return where a value lies between two places; values outside lie at the ends."""
        low, high, at = self.least, self.most, min(max(value, self.least), self.most)
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high > low else 0.0
        return start + share * (end - start)

    def ticks(self) -> list[float]:
        return _log_ticks(self) if self.is_log else _ticks(self.least, self.most)


def _ticks(least: float, most: float) -> list[float]:
    if most <= least:
        return [least]
    step = 10.0 ** math.floor(math.log10((most - least) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (most - least) / (step * factor) <= 6)
    first = math.ceil(least / step - 1e-9)
    return [number * step for number in range(first, math.floor(most / step + 1e-9) + 1)]


def _log_ticks(axis: Axis) -> list[float]:
    low, high = math.floor(math.log10(axis.least)), math.ceil(math.log10(axis.most))
    factors = (1, 2, 5) if high - low <= 3 else (1,)
    values = (factor * 10.0**power for power in range(low, high + 1) for factor in factors)
    return [value for value in values if axis.least <= value <= axis.most]


def line_chart(title: str, series: Mapping[str, Sequence[Point]], x: Axis, y: Axis) -> str:
    """Return a plot of lines, one a name, with its legend; empty series are left out."""
    shown = {name: points for name, points in series.items() if points}
    lines = []
    for number, points in enumerate(shown.values()):
        dash = DASHES[number % len(DASHES)]
        lines.append(
            f'<polyline class="line" style="stroke:var(--s{number % COLOURS})" '
            f'stroke-dasharray="{dash}" points="{_points(points, x, y)}"/>'
        )
    return _figure(title, lines, list(shown), x, y)


def stacked_chart(title: str, layers: Mapping[str, Sequence[float]], xs: Sequence[float], x: Axis,
                  y: Axis) -> str:  # fmt: skip
    """Return a plot of layers upon each other; each has a value for each of `xs`."""
    floor = [0.0] * len(xs)
    areas = []
    for number, values in enumerate(layers.values()):
        ceiling = [low + value for low, value in zip(floor, values, strict=True)]
        outline = [*zip(xs, ceiling, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        areas.append(
            f'<polygon class="area" style="fill:var(--s{number % COLOURS})" '
            f'points="{_points(outline, x, y)}"/>'
        )
        floor = ceiling
    return _figure(title, areas, list(layers), x, y, has_areas=True)


def distribution(values: Iterable[float], points_max: int = 200) -> list[Point]:
    """Return the share of values up to each value: points of a cumulative distribution."""
    ordered = sorted(values)
    if not ordered:
        return []
    count = len(ordered)
    step = max(count / points_max, 1.0)
    numbers = {min(round(number * step), count - 1) for number in range(points_max)}
    points = [(ordered[place], (place + 1) / count) for place in sorted(numbers | {count - 1})]
    return [(ordered[0], 0.0), *points]


# --- drawing --------------------------------------------------------------------------------------


def _points(points: Iterable[Point], x: Axis, y: Axis) -> str:
    return " ".join(
        f"{x.place(at, LEFT, WIDTH - RIGHT):.1f},{y.place(value, HEIGHT - BOTTOM, TOP):.1f}"
        for at, value in points
    )


def _figure(
    title: str,
    marks: Sequence[str],
    names: Sequence[str],
    x: Axis,
    y: Axis,
    *,
    has_areas: bool = False,
) -> str:
    if not marks:
        return (
            f'<figure><figcaption>{escape(title)}</figcaption><p class="empty">no data</p></figure>'
        )
    described = f"{title}. Across: {x.label}. Up: {y.label}. Shown: {', '.join(names)}."
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(described)}">'
        f"{''.join(_grid(x, y))}{''.join(marks)}</svg>{_legend(names, has_areas)}</figure>"
    )


def _grid(x: Axis, y: Axis) -> Iterable[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in y.ticks():
        at = y.place(value, bottom, TOP)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield _text(LEFT - 8, at + 4, y.format(value), "end")
    for value in x.ticks():
        at = x.place(value, LEFT, right)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>'
        yield _text(at, bottom + 16, x.format(value), "middle")
    yield _text((LEFT + right) / 2, HEIGHT - 8, x.label, "middle")
    yield (
        f'<text transform="translate(14 {(TOP + bottom) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(y.label)}</text>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(names: Sequence[str], has_areas: bool) -> str:
    items = []
    for number, name in enumerate(names):
        colour = f"var(--s{number % COLOURS})"
        if has_areas:
            mark = f'<rect width="24" height="10" style="fill:{colour}"/>'
        else:
            dash = DASHES[number % len(DASHES)]
            mark = (
                f'<line class="line" x2="24" y1="5" y2="5" style="stroke:{colour}" '
                f'stroke-dasharray="{dash}"/>'
            )
        swatch = f'<svg viewBox="0 0 24 10" aria-hidden="true">{mark}</svg>'
        items.append(f"<li>{swatch}{escape(name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'
