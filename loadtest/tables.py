"""A run, or several side by side, as rows of text: for the terminal and for the HTML page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first column names the row, the others are figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        widths = [
            max(len(row[place]) for row in (self.columns, *self.rows))
            for place in range(len(self.columns))
        ]
        lines = [
            "  ".join(
                cell.ljust(width) if place == 0 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (self.columns, ["-" * width for width in widths], *self.rows)
        ]
        return "\n".join([self.title, *lines] if self.title else lines)


# --- figures --------------------------------------------------------------------------------------


def format_count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def format_ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def format_share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def format_rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a comparison."""

    name: str
    read: Callable[[Json], float | None]
    format: Callable[[float | None], str]


def _share_of(source: str) -> Callable[[Json], float | None]:
    def read(report: Json) -> float | None:
        by_source = report["tokens_by_source"]
        total = sum(by_source.values())
        return by_source[source] / total if total and source in by_source else None

    return read


def _at(*path: str) -> Callable[[Json], float | None]:
    def read(report: Json) -> float | None:
        value: Any = report
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value if isinstance(value, int | float) else None

    return read


FIGURES: tuple[Figure, ...] = (
    Figure("turns", _at("requests"), format_count),
    Figure("failed", _at("failures"), format_count),
    Figure("turns/s", _at("requests_per_s"), format_rate),
    Figure("TTFT p50 ms", _at("ttft_ms", "p50"), format_ms),
    Figure("TTFT p90 ms", _at("ttft_ms", "p90"), format_ms),
    Figure("TTFT p99 ms", _at("ttft_ms", "p99"), format_ms),
    Figure("TTFT from due p99 ms", _at("ttft_due_ms", "p99"), format_ms),
    Figure("ITL p50 ms", _at("itl_ms", "p50"), format_ms),
    Figure("ITL p99 ms", _at("itl_ms", "p99"), format_ms),
    Figure("turn p50 ms", _at("e2e_ms", "p50"), format_ms),
    Figure("prompt tokens", _at("prompt_tokens"), format_count),
    Figure("cached tokens", _at("cached_tokens"), format_count),
    Figure("cached share", _at("hit_rate"), format_share),
    Figure("  on device", _share_of("device"), format_share),
    Figure("  from pool", _share_of("pool"), format_share),
    Figure("load max/mean", _at("load_max_over_mean"), format_rate),
)

SHORT_FIGURES = (
    "turns", "failed", "turns/s", "TTFT p50 ms", "TTFT p99 ms", "turn p50 ms", "cached share",
    "  on device", "  from pool", "load max/mean",
)  # fmt: skip


def totals_table(report: Json) -> Table:
    rows = [[figure.name, figure.format(figure.read(report))] for figure in FIGURES]
    return Table("", ("", "run"), rows)


def instances_table(report: Json) -> Table:
    rows = [
        [
            name,
            format_count(own["requests"]),
            format_count(own["failures"]),
            format_ms(own["ttft_ms"]["p50"]),
            format_ms(own["ttft_ms"]["p99"]),
            format_count(own["prompt_tokens"]),
            format_share(own["cached_tokens"] / own["prompt_tokens"] if own["prompt_tokens"] else None),
        ]
        for name, own in report["per_instance"].items()
    ]  # fmt: skip
    columns = ("instance", "turns", "failed", "TTFT p50 ms", "p99 ms", "prompt tokens", "cached")
    return Table("", columns, rows)


def ttft_table(report: Json) -> Table:
    """Return first-token times by where a prompt came from, and by why it was sent where it was."""
    groups = (("mostly ", report["ttft_ms_by_source"]), ("routed by ", report["ttft_ms_by_reason"]))
    rows = [
        [f"{prefix}{name}", format_count(own["requests"]), *(format_ms(own[p]) for p in _PERCENTILES)]
        for prefix, by_name in groups
        for name, own in by_name.items()
    ]  # fmt: skip
    return Table("", ("prompt", "turns", "TTFT p50 ms", "p90 ms", "p99 ms"), rows)


_PERCENTILES = ("p50", "p90", "p99")


def agreement_table(report: Json) -> Table | None:
    """Return the report's totals beside the gateway's own, None if there are none."""
    if report["gateway"] is None:
        return None
    rows = [
        [
            name.replace("_", " "),
            format_count(own["report"]),
            format_count(own["gateway"]),
            "-" if own["difference"] is None else f"{own['difference']:+.2%}",
        ]
        for name, own in report["gateway"]["agreement"].items()
    ]
    return Table("", ("total", "report", "gateway", "difference"), rows)


def comparison_table(reports: Mapping[str, Json], *, is_short: bool = False) -> Table:
    """Return several runs side by side, one column each; with two, how the second differs.

    `is_short`: one row a run instead, and only the figures that matter most.
    """
    if is_short:
        chosen = [figure for figure in FIGURES if figure.name in SHORT_FIGURES]
        rows = [
            [name, *(figure.format(figure.read(report)) for figure in chosen)]
            for name, report in reports.items()
        ]
        return Table("", ("", *(figure.name.strip() for figure in chosen)), rows)
    rows = []
    for figure in FIGURES:
        values = [figure.read(report) for report in reports.values()]
        row = [figure.name, *(figure.format(value) for value in values)]
        if len(values) == 2:
            row.append(_change(*values))
        rows.append(row)
    last = ("change",) if len(reports) == 2 else ()
    return Table("", ("", *reports, *last), rows)


def _change(first: float | None, second: float | None) -> str:
    if first is None or second is None or first == 0:
        return "-"
    return f"{(second - first) / first:+.1%}"


def facts(report: Json) -> str:
    """Return what a run was of, in a line."""
    users = f"{report['users']} users" if report["users"] else "open loop"
    rate = report["settings"]["rate_per_s"]
    load = f"{users}, {rate:g} conversations/s" if rate else users
    return (
        f"{report['preset']}; {report['url']}, model {report['model']}; {load}; "
        f"{report['measured_s']:.0f} s from {report['started_at']}; seed {report['seed']}"
    )


def difference_warning(reports: Mapping[str, Json]) -> str | None:
    """Return in which settings runs differ, so that it isn't only servers that do; None if in none."""
    told = {name: _settings(report) for name, report in reports.items()}
    found = []
    for setting in dict.fromkeys(key for settings in told.values() for key in settings):
        values = {name: settings.get(setting) for name, settings in told.items()}
        if len({repr(value) for value in values.values()}) > 1:
            each = ", ".join(f"{name} {_told(value)}" for name, value in values.items())
            found.append(f"{setting.replace('_', ' ')} ({each})")
    return f"The runs differ in what was sent: {'; '.join(found)}." if found else None


def _settings(report: Json) -> dict[str, Any]:
    """Return what was asked for. Costs of tokens were measured: they are the model's."""
    settings = {k: v for k, v in report["settings"].items() if k not in ("shape", "costs")}
    asked = {name: report[name] for name in ("preset", "users", "seed")}
    return {**asked, "duration": report["duration_s"], **settings, **report["settings"]["shape"]}


def _told(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_run(report: Json) -> str:
    """Return what a run's end prints."""
    parts = [str(totals_table(report))]
    if report["per_instance"]:
        parts.append(str(instances_table(report)))
    parts.append(str(ttft_table(report)))
    agreement = agreement_table(report)
    if agreement is not None:
        parts.append(str(agreement))
    generator = report["generator"]
    if generator.get("cpu_share_mean") is not None:
        late_ms = format_ms(generator["late_ms_p99"])
        parts.append(
            f"load generator: {generator['cpu_share_mean']:.0%} of a core, woke up late by "
            f"{late_ms} ms (P99)"
        )
    parts += [f"! {warning}" for warning in report["warnings"]]
    return "\n\n".join(parts)
