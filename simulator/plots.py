"""Plots of runs as SVG files: hit rate by source, TTFT, throughput against size, load over time.

Written by hand: four simple pictures don't need a plotting library. Pure but for writing the files.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from moongate.simulator.trial import Result, Row, quantile

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 860, 420, 70, 60, 40, 260
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

Series = tuple[str, Sequence[tuple[float, float]]]


def write_plots(directory: Path, preset: str, results: Sequence[Result]) -> list[Path]:
    """Write what can be drawn of these results, and return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [result.row for result in results]
    pictures = {
        "hits": _bars("Reused prompt tokens by source", rows),
        "ttft": _lines("Time to first token", "ms", "share of requests", _cdfs(results), log=True),
        "load": _lines("Busiest instance over the mean", "s", "", _imbalances(results)),
        "size": _lines("Throughput", "GPUs", "requests/s", _by_size(rows, "throughput")),
        "decision": _lines(
            "Decision, median", "instances", "ms", _by_size(rows, "decision_ms_p50"), log=True
        ),
    }
    files = []
    for name, picture in pictures.items():
        if picture:
            files.append(directory / f"{preset}-{name}.svg")
            files[-1].write_text(picture)
    return files


def _label(row: Row) -> str:
    return ", ".join(part for part in (row.name, row.workload, row.load, row.fault) if part)


def _cdfs(results: Sequence[Result]) -> list[Series]:
    shares = [n / 100 for n in range(1, 100)]
    return [
        (_label(r.row), [(max(quantile(r.ttft_ms, s), 1.0), s) for s in shares])
        for r in results
        if r.ttft_ms
    ]


def _imbalances(results: Sequence[Result]) -> list[Series]:
    found: list[Series] = []
    for result in results:
        points = [
            (at, max(busy) * len(busy) / sum(busy)) for at, busy in result.loads if sum(busy) > 0
        ]
        found.append((_label(result.row), points))
    return found


def _by_size(rows: Sequence[Row], name: str) -> list[Series]:
    """Return a line for each policy and workload that was run in several sizes."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if not row.fault:
            size = row.instances if name == "decision_ms_p50" else row.gpus
            lines.setdefault(f"{row.name}, {row.workload}", []).append((size, getattr(row, name)))
    return [(k, sorted(v)) for k, v in lines.items() if len({x for x, _ in v}) > 2]


# --- drawing --------------------------------------------------------------------------------------


def _lines(
    title: str, x_unit: str, y_unit: str, series: Sequence[Series], log: bool = False
) -> str:
    points = [point for _, line in series for point in line]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_scale = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, log)
    y_scale = _Scale(min(0.0, *ys), max(ys), HEIGHT - BOTTOM, TOP)
    body = [*_axes(x_scale, y_scale, x_unit, y_unit)]
    for number, (name, line) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_scale.at(x):.1f},{y_scale.at(y):.1f}" for x, y in line)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += _key(number, name, colour)
    return _picture(title, body)


def _bars(title: str, rows: Sequence[Row]) -> str:
    y_scale = _Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / max(len(rows), 1)
    body = [*_axes(None, y_scale, "", "share of prompt tokens")]
    body += _key(0, "device", COLOURS[0]) + _key(1, "pool", COLOURS[2])
    for number, row in enumerate(rows):
        left, below = LEFT + step * (number + 0.15), 0.0
        for share, colour in ((row.device_hit_rate, COLOURS[0]), (row.pool_hit_rate, COLOURS[2])):
            top, bottom = y_scale.at(below + share), y_scale.at(below)
            size = f'width="{step * 0.7:.1f}" height="{bottom - top:.1f}"'
            body.append(f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{colour}"/>')
            below += share
        body += _text(left + step * 0.35, HEIGHT - BOTTOM + 14, str(number + 1), "middle")
        body += _text(WIDTH - RIGHT + 12, TOP + 40 + 14 * number, f"{number + 1} {_label(row)}")
    return _picture(title, body)


class _Scale:
    """Where values lie in a picture."""

    def __init__(
        self, low: float, high: float, begin: float, end: float, log: bool = False
    ) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self.begin, self.end, self.log = begin, end, log and low > 0

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        if self.log:
            share = _log_share(value, self.low, self.high)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if self.log:
            return [10.0**n for n in range(-3, 10) if self.low <= 10.0**n <= self.high] or [
                self.low,
                self.high,
            ]
        return [self.low + (self.high - self.low) * n / 5 for n in range(6)]


def _log_share(value: float, low: float, high: float) -> float:
    return math.log(max(value, low) / low) / math.log(high / low)


def _axes(x_scale: _Scale | None, y_scale: _Scale, x_unit: str, y_unit: str) -> Iterable[str]:
    for value in y_scale.ticks():
        y = y_scale.at(value)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield from _text(LEFT - 6, y + 4, f"{value:,.4g}", "end")
    for value in x_scale.ticks() if x_scale is not None else ():
        yield from _text(x_scale.at(value), HEIGHT - BOTTOM + 16, f"{value:,.4g}", "middle")  # type: ignore[union-attr]
    yield from _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_unit, "middle")
    yield from _text(LEFT, TOP - 8, y_unit)


def _key(number: int, name: str, colour: str) -> list[str]:
    x, y = WIDTH - RIGHT + 12, TOP + 14 * number
    box = f'<rect x="{x}" y="{y - 8}" width="9" height="9" fill="{colour}"/>'
    return [box, *_text(x + 14, y, name)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> list[str]:
    return [f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>']


def _picture(title: str, body: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    )
    heading = f'<text x="{LEFT}" y="18" font-size="14">{html.escape(title)}</text>'
    return "\n".join([head, heading, *body, "</svg>"]) + "\n"
