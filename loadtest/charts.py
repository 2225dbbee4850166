"""Plots as SVG, without scripts and outside assets: in a page, or files that stand alone. Pure.

By hand, since what is needed is little (lines, layers, bars), must be readable in light and dark, at
any width and without a network, and a plotting library would be 60 MB beside a light gateway.

Colours are CSS variables: `--s0` to `--s7`, by which lines differ along with their dashes, and one for
each place that prompt tokens come from, the same as on the dashboard.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain, pairwise

WIDTH, HEIGHT = 560, 290
LEFT, RIGHT, TOP, BOTTOM = 76, 30, 32, 54
EDGE = 18  # where text and bars begin
COLOURS = 8
DASHES = ("", "6 3", "2 3", "9 3 2 3")
SOURCES = ("device", "pool", "cached", "recompute")
SOURCE_COLOURS = {source: f"var(--{source})" for source in SOURCES}
"""Of where prompt tokens come from, as in `gateway/admin/ui/dashboard.css`. `cached`: not known where."""

ROW = 24  # of a legend below a picture, and between a bar's label and the bar
BAR = 18
LINE_CHARACTERS = 50
"""So much text is as wide as a picture, in a phone's larger letters."""

VARIABLES = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2330; --soft: #5a6475; --line: #d9dee7;
  --device: #1a7f4b; --pool: #1f63c7; --cached: #8a3ea8; --recompute: #a85400;
  --s0: #0b65c2; --s1: #c2410c; --s2: #15803d; --s3: #9333ea; --s4: #b4235f; --s5: #0f766e;
  --s6: #a16207; --s7: #475569; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161d; --ink: #e8ecf3; --soft: #a3adbd;
  --line: #303947; --device: #4cc38a; --pool: #6ea8fe; --cached: #d08cf0; --recompute: #f0a04b;
  --s0: #6bb3ff; --s1: #ff9a62; --s2: #62d58b; --s3: #c99bff; --s4: #ff8fb6; --s5: #5fd6cb;
  --s6: #e6c15a; --s7: #b3bfd1; } }
"""
MARKS = """
svg text { fill: var(--soft); font-size: 13px; } svg .told { fill: var(--ink); }
svg .heading { fill: var(--ink); font-size: 16px; font-weight: 600; }
.grid { stroke: var(--line); } .line { fill: none; stroke-width: 2; }
@media (max-width: 32rem) { svg text { font-size: 17px; } svg .heading { font-size: 20px; }
  .minor { display: none; } }
"""
"""Styles of what is in a plot. On a phone the same picture is smaller, so its letters are larger."""

ALONE = """
svg { max-width: 100%; height: auto; background: var(--ground); font-family: system-ui, sans-serif; }
"""
"""Styles of a picture that is a file of its own."""

Point = tuple[float, float]


def format_number(value: float) -> str:
    return f"{value:,.10g}"


def format_share(value: float) -> str:
    return f"{value:.0%}"


# --- axes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to places. `is_log`: both bounds are more than 0. `is_whole`: values are counts."""

    label: str
    least: float
    most: float
    is_log: bool = False
    is_whole: bool = False
    is_share: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        """Return where a value lies between two places; values outside lie at the ends."""
        low, high, at = self.least, self.most, min(max(value, self.least), self.most)
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high > low else 0.0
        return start + share * (end - start)

    def ticks(self) -> list[float]:
        if self.is_log:
            ticks = _log_ticks(self)
            return ticks if len(ticks) > 1 else _ticks(self.least, self.most)
        return _ticks(self.least, self.most, 1.0 if self.is_whole else 0.0)

    def is_minor(self, tick: float) -> bool:
        """Tell whether a narrow plot can do without this tick: one between powers of ten."""
        powers = [value for value in _log_ticks(self) if _is_power(value)] if self.is_log else []
        return len(powers) > 1 and not _is_power(tick)

    def format(self, value: float) -> str:
        return format_share(value) if self.is_share else format_number(value)


def from_zero(label: str, most: float, *, is_whole: bool = False) -> Axis:
    """Return an axis from 0 to the first round tick that isn't below `most`."""
    step = _step(0.0, most, 1.0 if is_whole else 0.0) if most > 0 else 1.0
    return Axis(label, 0.0, math.ceil(most / step - 1e-9) * step or step, is_whole=is_whole)


def shares(label: str) -> Axis:
    """Return an axis from 0 to 100 %."""
    return Axis(label, 0.0, 1.0, is_share=True)


def _step(least: float, most: float, step_least: float) -> float:
    step = 10.0 ** math.floor(math.log10((most - least) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (most - least) / (step * factor) <= 6)
    return max(step, step_least)


def _ticks(least: float, most: float, step_least: float = 0.0) -> list[float]:
    if most <= least:
        return [least]
    step = _step(least, most, step_least)
    first = math.ceil(least / step - 1e-9)
    return [number * step for number in range(first, math.floor(most / step + 1e-9) + 1)]


def _log_ticks(axis: Axis) -> list[float]:
    low, high = math.floor(math.log10(axis.least)), math.ceil(math.log10(axis.most))
    factors = (1, 2, 5) if high - low <= 3 else (1,)
    values = (factor * 10.0**power for power in range(low, high + 1) for factor in factors)
    return [value for value in values if axis.least <= value <= axis.most]


def _is_power(value: float) -> bool:
    power = math.log10(value)
    return abs(power - round(power)) < 1e-9


# --- charts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """What a legend says of one line, or one layer."""

    name: str
    colour: str
    dash: str | None  # None: a layer

    def mark(self, x: float, y: float) -> str:
        """Return a swatch, 24 wide and 10 high."""
        if self.dash is None:
            return f'<rect x="{x:g}" y="{y:g}" width="24" height="10" style="fill:{self.colour}"/>'
        place = f'x1="{x:g}" x2="{x + 24:g}" y1="{y + 5:g}" y2="{y + 5:g}"'
        stroke = f'style="stroke:{self.colour}" stroke-dasharray="{self.dash}"'
        return f'<line class="line" {place} {stroke}/>'


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot that is drawn but for its surroundings. Empty if there are no marks."""

    title: str
    across: str
    up: str
    marks: Sequence[str]
    keys: Sequence[Key]
    height: int = HEIGHT
    grid: Sequence[str] = field(default_factory=list)

    def figure(self) -> str:
        """Return it as an HTML figure, for a page that has `VARIABLES` and `MARKS` in its styles."""
        caption = f"<figcaption>{escape(self.title)}</figcaption>"
        if not self.marks:
            return f'<figure>{caption}<p class="empty">no data</p></figure>'
        swatch = '<svg viewBox="0 0 24 10" aria-hidden="true">'
        items = "".join(
            f"<li>{swatch}{key.mark(0, 0)}</svg>{escape(key.name)}</li>" for key in self.keys
        )
        return (
            f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {self.height}" {self._told()}>'
            f'{"".join((*self.grid, *self.marks))}</svg><ul class="legend">{items}</ul></figure>'
        )

    def picture(self) -> str:
        """Return it as an SVG file that stands alone; empty if there is nothing in it."""
        if not self.marks:
            return ""
        heading = textwrap.wrap(self.title, LINE_CHARACTERS - 6)
        body = [
            f'<text class="heading" x="{EDGE}" y="{ROW * n + 26}">{escape(line)}</text>'
            for n, line in enumerate(heading)
        ]
        top = ROW * len(heading) + 16
        body += [f'<g transform="translate(0 {top})">', *self.grid, *self.marks, "</g>"]
        height = top + self.height
        for key in self.keys:
            body.append(key.mark(EDGE, height + 3))
            for line in textwrap.wrap(key.name, LINE_CHARACTERS):
                body.append(_text(EDGE + 34, height + 13, line, "start", "told"))
                height += ROW
        height += 8
        sized = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {sized} {self._told()}>'
            f"<style>{VARIABLES}{MARKS}{ALONE}</style>"
            f'<rect width="100%" height="100%" style="fill:var(--ground)"/>\n'
            + "\n".join(body)
            + "\n</svg>\n"
        )

    def _told(self) -> str:
        shown = ", ".join(key.name for key in self.keys)
        described = f"{self.title}. Across: {self.across}. Up: {self.up}. Shown: {shown}."
        return f'role="img" aria-label="{escape(described)}"'


def line_chart(
    title: str,
    series: Mapping[str, Sequence[Point]],
    x: Axis,
    y: Axis,
    *,
    colours: Mapping[str, str] | None = None,
    is_stepped: bool = False,
) -> Chart:
    """Return a plot of lines, one a name; empty series are left out.

    `colours`: of lines that have a certain one. `is_stepped`: a value holds until the next point.
    """
    shown = {name: points for name, points in series.items() if points}
    keys = [
        Key(
            name,
            (colours or {}).get(name, f"var(--s{number % COLOURS})"),
            DASHES[(number + number // COLOURS) % len(DASHES)],
        )
        for number, name in enumerate(shown)
    ]
    marks = [
        f'<polyline class="line" style="stroke:{key.colour}" stroke-dasharray="{key.dash}" '
        f'points="{_points(_stepped(points) if is_stepped else points, x, y)}"/>'
        for key, points in zip(keys, shown.values(), strict=True)
    ]
    return Chart(title, x.label, y.label, marks, keys, grid=_grid(x, y))


def stacked_chart(
    title: str,
    layers: Mapping[str, Sequence[float]],
    xs: Sequence[float],
    x: Axis,
    y: Axis,
    *,
    colours: Mapping[str, str],
) -> Chart:
    """Return a plot of layers upon each other; each has a value for each of `xs`."""
    floor = [0.0] * len(xs)
    marks = []
    for name, values in layers.items():
        ceiling = [low + value for low, value in zip(floor, values, strict=True)]
        outline = [*zip(xs, ceiling, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        marks.append(f'<polygon style="fill:{colours[name]}" points="{_points(outline, x, y)}"/>')
        floor = ceiling
    keys = [Key(name, colours[name], None) for name in layers]
    return Chart(title, x.label, y.label, marks, keys, grid=_grid(x, y))


def bar_chart(
    title: str, bars: Mapping[str, Mapping[str, float]], x: Axis, *, colours: Mapping[str, str]
) -> Chart:
    """Return a plot of bars below each other, each under its label, from parts that have a name."""
    marks = []
    top = 4
    for label, parts in bars.items():
        for line in textwrap.wrap(label, LINE_CHARACTERS):
            marks.append(_text(EDGE, top + 14, line, "start", "told"))
            top += ROW - 4
        before = 0.0
        for name, value in parts.items():
            left, right = (x.place(at, EDGE, WIDTH - RIGHT) for at in (before, before + value))
            size = f'width="{right - left:.1f}" height="{BAR}"'
            marks.append(f'<rect x="{left:.1f}" y="{top}" {size} style="fill:{colours[name]}"/>')
            before += value
        top += BAR + 8
    names = dict.fromkeys(name for parts in bars.values() for name in parts)
    keys = [Key(name, colours[name], None) for name in names]
    grid = _grid_across(x, EDGE, 0, top)
    return Chart(title, x.label, "one bar each", marks, keys, height=top + BOTTOM, grid=grid)


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


def _stepped(points: Sequence[Point]) -> list[Point]:
    corners = [((at, before), (at, value)) for (_, before), (at, value) in pairwise(points)]
    return [points[0], *chain.from_iterable(corners)]


def _grid(x: Axis, y: Axis) -> list[str]:
    drawn = []
    for value in y.ticks():
        at = y.place(value, HEIGHT - BOTTOM, TOP)
        drawn += [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>',
            _text(LEFT - 8, at + 5, y.format(value), "end"),
        ]
    # Above its axis, where it needs no turning and has the plot's whole width.
    drawn.append(_text(EDGE, 16, y.label, "start"))
    return drawn + _grid_across(x, LEFT, TOP, HEIGHT - BOTTOM)


def _grid_across(x: Axis, left: float, top: float, bottom: float) -> list[str]:
    drawn = []
    right = WIDTH - RIGHT
    for value in x.ticks():
        at = x.place(value, left, right)
        minor = "minor" if x.is_minor(value) else ""
        drawn += [
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top:g}" y2="{bottom:g}"/>',
            _text(at, bottom + 20, x.format(value), "middle", minor),
        ]
    drawn.append(_text((left + right) / 2, bottom + 43, x.label, "middle"))
    return drawn


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
