"""What runs have brought, as a table and as JSON. Not plots (`plots.py`)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from moongate.simulator.trial import Result, Row

COLUMNS = (
    ("name", "policy", "{}"),
    ("workload", "workload", "{}"),
    ("load", "load", "{}"),
    ("fault", "fault", "{}"),
    ("instances", "inst", "{}"),
    ("hit_rate", "hits", "{:.1%}"),
    ("device_hit_rate", "device", "{:.1%}"),
    ("pool_hit_rate", "pool", "{:.1%}"),
    ("throughput", "req/s", "{:.2f}"),
    ("ttft_ms_p50", "TTFT p50", "{:,.0f}"),
    ("ttft_ms_p99", "p99 ms", "{:,.0f}"),
    ("e2e_ms_p50", "E2E p50", "{:,.0f}"),
    ("pool_bytes", "pool TB", "{:.1f}"),
    ("load_max_over_mean", "busiest", "{:.2f}"),
    ("decision_ms_p50", "decision ms", "{:.3f}"),
)
"""Field, heading, how it is shown."""

JSON_FIELDS = (
    "name", "workload", "load", "fault", "instances", "gpus", "hit_rate", "device_hit_rate",
    "pool_hit_rate", "throughput", "ttft_ms_p50", "ttft_ms_p99", "e2e_ms_p50", "pool_bytes",
    "load_max_over_mean", "decision_ms_p50",
)  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table; columns in which nothing is told are left out."""
    columns = [c for c in COLUMNS if any(getattr(row, c[0]) not in ("", 0) for row in rows)]
    cells = [[heading for _, heading, _ in columns]]
    cells += [[_shown(row, name, form) for name, _, form in columns] for row in rows]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def bound_line(result: Result) -> str:
    """Return how near a run came to what devices can hold (`bounds.py`)."""
    row, bounds = result.row, result.bounds
    share = row.device_hit_rate / row.hit_rate
    return (
        f"{row.name}, {row.workload}, {row.load}: {share:.1%} of the reused tokens come from devices; "
        f"at best {bounds.recency:.1%} (kept for {bounds.kept_s:.0f} s), {bounds.foresight:.1%} with "
        f"foresight"
    )


def _shown(row: Row, name: str, form: str) -> str:
    value = getattr(row, name)
    return form.format(value / 1e12 if name == "pool_bytes" else value)


def as_json(preset: str, seed: int, rows: Sequence[Row]) -> str:
    """Return the document that `--json` writes."""
    told = [{name: getattr(row, name) for name in JSON_FIELDS} for row in rows]
    document = {"preset": preset, "seed": seed, "commit": find_commit(), "rows": told}
    return json.dumps(document, indent=1) + "\n"


def find_commit() -> str | None:
    """Return the commit of the tree that this is run from; None if it is none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)  # noqa: S603 - fixed words
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()
