"""Which plots of runs there are, as SVG files: hit rate by source, TTFT, throughput against size, load
over time. How they are drawn is `loadtest/charts.py`'s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moongate.loadtest.charts import (
    SOURCE_COLOURS,
    Axis,
    Chart,
    Point,
    bar_chart,
    from_zero,
    line_chart,
    shares,
)
from moongate.simulator.trial import Result, Row, quantile

Lines = dict[str, list[Point]]


def write_plots(directory: Path, preset: str, results: Sequence[Result]) -> list[Path]:
    """Write what can be drawn of these results, and return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [result.row for result in results]
    charts = {
        "hits": _hits(rows),
        "ttft": _first_tokens(results),
        "load": _imbalances(results),
        "size": _by_size("Throughput by size", rows, "gpus", "throughput", "requests/s"),
        "decision": _by_size(
            "Time of a decision by size", rows, "instances", "decision_ms_p50", "ms, median"
        ),
    }
    files = []
    for name, chart in charts.items():
        if picture := chart.picture():
            files.append(directory / f"{preset}-{name}.svg")
            files[-1].write_text(picture, encoding="utf-8")
    return files


# --- names ----------------------------------------------------------------------------------------


def _labels(rows: Sequence[Row]) -> tuple[list[str], str]:
    """Return what tells each row from the others, and what they have in common, for the title."""
    told = [
        (row.name, row.workload, row.load, row.fault, f"{row.instances:,} instances")
        for row in rows
    ]
    columns = list(zip(*told, strict=True))
    differs = [n for n, column in enumerate(columns) if n == 0 or len(set(column)) > 1]
    labels = [", ".join(parts[n] for n in differs if parts[n]) for parts in told]
    shared = [column[0] for n, column in enumerate(columns) if n not in differs and column[0]]
    twice = {label for label in labels if labels.count(label) > 1}
    numbered = [f"{n}: {v}" if v in twice else v for n, v in enumerate(labels, 1)]
    return numbered, ", ".join(shared)


def _titled(title: str, shared: str) -> str:
    return f"{title}: {shared}" if shared else title


# --- plots ----------------------------------------------------------------------------------------


def _hits(rows: Sequence[Row]) -> Chart:
    labels, shared = _labels(rows)
    bars = {
        label: {"device": row.device_hit_rate, "pool": row.pool_hit_rate}
        for label, row in zip(labels, rows, strict=True)
    }
    title = _titled("Reused prompt tokens by source", shared)
    return bar_chart(title, bars, shares("share of prompt tokens"), colours=SOURCE_COLOURS)


def _first_tokens(results: Sequence[Result]) -> Chart:
    labels, shared = _labels([result.row for result in results])
    parts = [n / 100 for n in range(1, 100)]
    lines = {
        label: [(max(quantile(result.ttft_ms, part), 1.0), part) for part in parts]
        for label, result in zip(labels, results, strict=True)
        if result.ttft_ms
    }
    times = [at for line in lines.values() for at, _ in line]
    least = min(times, default=1.0)
    x = Axis("ms", least, max(*times, least * 1.01) if times else 2.0, is_log=True)
    return line_chart(_titled("Time to first token", shared), lines, x, shares("share of requests"))


def _imbalances(results: Sequence[Result]) -> Chart:
    labels, shared = _labels([result.row for result in results])
    lines = {
        label: [
            (at, max(busy) * len(busy) / sum(busy)) for at, busy in result.loads if sum(busy) > 0
        ]
        for label, result in zip(labels, results, strict=True)
    }
    ends = [at for line in lines.values() for at, _ in line]
    x = Axis("virtual seconds", 0.0, max(ends, default=1.0))
    title = _titled("Load over time", shared)
    return line_chart(title, lines, x, _from_zero("busiest instance over the mean", lines))


def _by_size(title: str, rows: Sequence[Row], size: str, name: str, unit: str) -> Chart:
    """Return a line for each policy and workload that was run in several sizes."""
    found: Lines = {}
    for row in rows:
        if not row.fault:
            label = f"{row.name}, {row.workload}"
            found.setdefault(label, []).append((getattr(row, size), getattr(row, name)))
    lines = {k: sorted(v) for k, v in found.items() if len({at for at, _ in v}) > 2}
    sizes = [at for line in lines.values() for at, _ in line]
    if size == "instances" and sizes:
        x = Axis(size, min(sizes), max(sizes), is_log=True)
    else:
        x = from_zero("GPUs" if size == "gpus" else size, max(sizes, default=1.0))
    return line_chart(title, lines, x, _from_zero(unit, lines))


def _from_zero(label: str, lines: Lines) -> Axis:
    return from_zero(label, max((value for line in lines.values() for _, value in line), default=1))
