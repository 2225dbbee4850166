"""`report.html` and comparisons: one file each, which needs nothing else and no network. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from moongate.loadtest.charts import (
    MARKS,
    SOURCE_COLOURS,
    SOURCES,
    VARIABLES,
    Axis,
    Chart,
    Point,
    distribution,
    from_zero,
    line_chart,
    shares,
    stacked_chart,
)
from moongate.loadtest.records import TurnRecord
from moongate.loadtest.summary import group, percentiles, tokens_by_source
from moongate.loadtest.tables import (
    Table,
    agreement_table,
    comparison_table,
    difference_warning,
    facts,
    instances_table,
    totals_table,
    ttft_table,
)

Json = Mapping[str, Any]

STEPS = 60
"""Plots over time have about so many steps."""

STYLE = (
    VARIABLES
    + MARKS
    + """
:root { --warn: #8a4b00; --warn-ground: #fff4e0; }
@media (prefers-color-scheme: dark) { :root { --warn: #ffcf8a; --warn-ground: #3a2a10; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 64rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.facts { color: var(--soft); margin: .25rem 0 1rem; }
.warning { color: var(--warn); background: var(--warn-ground); border-radius: 6px; padding: .5rem .75rem;
  margin: .5rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem .25rem 0; text-align: right; white-space: pre;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--soft); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.5rem; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; margin-bottom: .25rem; }
figure > svg { width: 100%; max-width: 42rem; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; list-style: none; margin: .25rem 0 0; padding: 0; }
.legend svg { width: 24px; height: 10px; margin-right: .4rem; } .empty { color: var(--soft); }
details { margin-top: 2rem; } pre { overflow-x: auto; background: var(--line); padding: .75rem; border-radius: 6px; }
"""
)


def run_page(report: Json, records: Sequence[TurnRecord]) -> str:
    """Return the page of one run. `records` belong to it."""
    parts = [
        f"<h1>Load test: {escape(report['preset'])}</h1>",
        f'<p class="facts">{escape(facts(report))}</p>',
        *(f'<p class="warning">{escape(text)}</p>' for text in report["warnings"]),
        f'<div class="plots">{"".join(_run_plots(report, records))}</div>',
        _section("Totals", totals_table(report)),
        _section("Instances", instances_table(report)),
        _section("Time to first token", ttft_table(report)),
    ]
    agreement = agreement_table(report)
    if agreement is not None:
        parts.append(_section("This report and the gateway's own metrics", agreement))
    told = {name: report[name] for name in ("settings", "generator", "gateway", "failures_by_kind")}
    parts.append(
        "<details><summary>Settings and details</summary>"
        f"<pre>{escape(json.dumps(told, indent=2))}</pre></details>"
    )
    return _page(f"moongate loadtest: {report['preset']}", parts)


def comparison_page(
    reports: Mapping[str, Json], records: Mapping[str, Sequence[TurnRecord]]
) -> str:
    """Return the page of several runs side by side. Both are by the runs' names."""
    texts = [f"{name}: {text}" for name, own in reports.items() for text in own["warnings"]]
    if difference := difference_warning(reports):
        texts.insert(0, difference)
    warnings = [f'<p class="warning">{escape(text)}</p>' for text in texts]
    told = "<br>".join(escape(f"{name}: {facts(report)}") for name, report in reports.items())
    turns = {name: [r for r in own if r.is_ok] for name, own in records.items()}
    plots = [
        ttft_plot("Time to first token", {n: _known(own, _ttft) for n, own in turns.items()}),
        over_time_plot(
            "Reused share of prompts, over time",
            turns,
            _reused_share,
            shares("share of prompt tokens"),
        ),
        ttft_plot("Whole turn", {n: _known(own, lambda r: r.e2e_ms) for n, own in turns.items()}),
    ]
    parts = [
        f"<h1>{escape(', '.join(reports))}</h1>",
        f'<p class="facts">{told}</p>',
        *warnings,
        f'<div class="plots">{"".join(plot.figure() for plot in plots)}</div>',
        _section("Side by side", comparison_table(reports)),
    ]
    return _page("moongate loadtest: comparison", parts)


def _page(title: str, parts: Iterable[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _section(title: str, table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    return (
        f'<h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


# --- plots ----------------------------------------------------------------------------------------


def _run_plots(report: Json, records: Sequence[TurnRecord]) -> Iterable[str]:
    good = [record for record in records if record.is_ok]
    by_source = group(good, TurnRecord.main_source)
    times = {"all": good} | {f"mostly {source}": own for source, own in by_source.items()}
    yield ttft_plot(
        "Time to first token",
        {name: _known(own, _ttft) for name, own in times.items()},
        {"all": "var(--ink)"} | {f"mostly {n}": colour for n, colour in SOURCE_COLOURS.items()},
    ).figure()
    yield reuse_plot(records).figure()
    yield load_plot(records).figure()
    title = "Time to first token, over time"
    yield over_time_plot(title, {"p50": good}, _ttft_p50, "ms, median").figure()


def ttft_plot(
    title: str,
    times_ms: Mapping[str, Sequence[float]],
    colours: Mapping[str, str] | None = None,
) -> Chart:
    """Return cumulative distributions of times, on a logarithmic axis."""
    known = [value for own in times_ms.values() for value in own if value > 0]
    least, most = min(known, default=1.0), max(known, default=1.0)
    x = Axis("ms", least, max(most, least * 1.01), is_log=True)
    lines = {name: distribution(own) for name, own in times_ms.items()} if known else {}
    return line_chart(title, lines, x, shares("share of turns"), colours=colours)


def reuse_plot(records: Sequence[TurnRecord]) -> Chart:
    """Return where prompt tokens came from, over time."""
    step_s, steps = _by_step(records)
    totals = [(number * step_s, tokens_by_source(own)) for number, own in enumerate(steps)]
    known = [(at_s, total) for at_s, total in totals if sum(total.values())]
    sources = [name for name in SOURCES if any(total.get(name) for _, total in known)]
    layers = {
        name: [total.get(name, 0) / sum(total.values()) for _, total in known] for name in sources
    }
    title = "Where prompt tokens came from, over time"
    xs = [at_s for at_s, _ in known]
    x, y = _seconds(xs[-1] if xs else 1.0), shares("share of prompt tokens")
    return stacked_chart(title, layers, xs, x, y, colours=SOURCE_COLOURS)


def load_plot(records: Sequence[TurnRecord]) -> Chart:
    """Return how many turns each instance had at a time, all until the last turn's end."""
    by_instance = group(records, lambda record: record.instance)
    end_s = max((_end_s(record) for own in by_instance.values() for record in own), default=1.0)
    series = {name: in_flight(own, end_s) for name, own in by_instance.items()}
    most = max((value for points in series.values() for _, value in points), default=1.0)
    y = from_zero("turns under way", most, is_whole=True)
    title = "Load by instance, over time"
    return line_chart(title, series, _seconds(end_s), y, is_stepped=True)


def in_flight(records: Iterable[TurnRecord], end_s: float) -> list[Point]:
    """Return the largest number of turns under way in each step of time until `end_s`, as points."""
    changes = sorted(change for r in records for change in ((r.sent_s, 1), (_end_s(r), -1)))
    if not changes:
        return []
    step_s = max(end_s / STEPS, 0.001)
    now, points, place = 0, [], 0
    for number in range(STEPS + 1):
        most = now
        while place < len(changes) and changes[place][0] <= (number + 1) * step_s:
            now += changes[place][1]
            most = max(most, now)
            place += 1
        points.append((number * step_s, float(most)))
    return points


def _end_s(record: TurnRecord) -> float:
    return max(record.end_s(), record.sent_s)


def over_time_plot(
    title: str,
    turns: Mapping[str, Sequence[TurnRecord]],
    value: Callable[[Sequence[TurnRecord]], float | None],
    up: Axis | str,
) -> Chart:
    """Return one line a name of what `value` makes of the turns of each step of time.

    `up`: the axis, or the label of one from 0 to what is found.
    """
    series: dict[str, list[Point]] = {}
    for name, own in turns.items():
        step_s, steps = _by_step(own)
        values = ((number * step_s, value(some)) for number, some in enumerate(steps))
        series[name] = [(at, found) for at, found in values if found is not None]
    points = [point for own in series.values() for point in own]
    x = _seconds(max((at for at, _ in points), default=1.0))
    if isinstance(up, str):
        up = from_zero(up, max((found for _, found in points), default=1.0))
    return line_chart(title, series, x, up)


def _by_step(records: Sequence[TurnRecord]) -> tuple[float, list[list[TurnRecord]]]:
    """Return a step's length (s) and the turns that were sent in each."""
    end_s = max((record.sent_s for record in records), default=0.0)
    step_s = max(end_s / STEPS, 1.0)
    steps: list[list[TurnRecord]] = [[] for _ in range(int(end_s / step_s) + 1)]
    for record in records:
        steps[int(record.sent_s / step_s)].append(record)
    return step_s, steps


def _reused_share(records: Sequence[TurnRecord]) -> float | None:
    total = tokens_by_source(records)
    return 1 - total.get("recompute", 0) / sum(total.values()) if sum(total.values()) else None


def _ttft_p50(records: Sequence[TurnRecord]) -> float | None:
    return percentiles(map(_ttft, records))["p50"]


def _ttft(record: TurnRecord) -> float | None:
    return record.ttft_ms


def _known(
    records: Iterable[TurnRecord], value: Callable[[TurnRecord], float | None]
) -> list[float]:
    return [found for record in records if (found := value(record)) is not None]


def _seconds(most: float) -> Axis:
    return Axis("seconds since the start", 0.0, max(most, 0.001))
