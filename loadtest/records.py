"""What is known of one turn, as a row of `requests.csv`; and how many gaps between tokens were how long.

Pure but for the file that rows are read from. Times are milliseconds, moments seconds since the run's
start. An empty cell says that the value isn't known.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

ROWS_FILE, GENERATOR_FILE, LOG_FILE = "requests.csv", "generator.json", "locust.log"
"""What the load generator leaves in a run's folder: turns, what it knows of itself, its messages."""

OK = "ok"
CUT_OFF = "cut_off"
"""Stopped by the run's end, after the grace period."""
NOT_SENT = "not_sent"
"""Due, but too many conversations were open already (open loop)."""

ERROR_TEXT_MAX = 300


@dataclass(slots=True)
class TurnRecord:
    """One turn, from when it was due to its end."""

    session: str
    turn: int  # from 1
    due_s: float
    """When it was to be sent."""
    sent_s: float = 0.0
    outcome: str = OK
    """`ok`, or the kind of failure."""
    status: int | None = None
    """HTTP status; None: there was no answer."""
    instance: str | None = None
    prefill_instance: str | None = None
    policy: str | None = None
    reason: str | None = None
    prompt_tokens: int | None = None
    """As the engine counted (`usage`), else as the receipt says."""
    routed_prompt_tokens: int | None = None
    """As routing counted; from the receipt. None: its policy doesn't look at prompts, or no receipt."""
    cached_tokens: int | None = None
    """Those that the engine says it didn't compute."""
    device_tokens: int | None = None
    """Those that routing expected on the instance; from the receipt."""
    pool_tokens: int | None = None
    """Those that routing expected from the pool; from the receipt."""
    output_tokens: int | None = None
    ttft_ms: float | None = None
    """From sending to the first text, reasoning or tool call."""
    ttft_due_ms: float | None = None
    """The same from when it was due: a generator or a pause that is late doesn't shorten it."""
    itl_ms_mean: float | None = None
    """Mean time between chunks with text."""
    itl_ms_max: float | None = None
    e2e_ms: float | None = None
    error: str | None = None
    """What was answered or raised instead, shortened."""

    @property
    def is_ok(self) -> bool:
        return self.outcome == OK

    def end_s(self) -> float:
        """Return when it ended, since the run's start."""
        return self.sent_s + (self.e2e_ms or 0.0) / 1000

    def tokens_by_source(self) -> dict[str, int]:
        """Return where the prompt came from: `device`, `pool` and `recompute`.

        Reused is what the engine reports; of that at most what the receipt expected from the pool is
        the pool's. Where routing didn't know the prompt, or there is no receipt, reused tokens are
        `cached`. Without usage, what was expected counts.
        """
        if self.prompt_tokens is None:
            return {}
        reused = self.cached_tokens
        if reused is None:
            reused = (self.device_tokens or 0) + (self.pool_tokens or 0)
        reused = min(reused, self.prompt_tokens)
        computed = {"recompute": self.prompt_tokens - reused}
        if self.routed_prompt_tokens is None:
            return {"cached": reused, **computed}
        pool = min(self.pool_tokens or 0, reused)
        return {"device": reused - pool, "pool": pool, **computed}

    def main_source(self) -> str | None:
        """Return where most of the prompt came from; `recompute` if that was half of it or more."""
        by_source = self.tokens_by_source()
        if not by_source:
            return None
        return max(by_source, key=lambda source: (by_source[source], source == "recompute"))

    def row(self) -> list[str]:
        return [_cell(getattr(self, name)) for name in COLUMNS]


COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(TurnRecord))
_TYPES: Mapping[str, type] = {
    field.name: next(t for t in (int, float, str) if str(field.type).startswith(t.__name__))
    for field in fields(TurnRecord)
}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def read_records(file: Path) -> list[TurnRecord]:
    """Return the turns of a `requests.csv`. Raises: ValueError if it isn't one; OSError."""
    with file.open(newline="") as lines:
        rows = csv.reader(lines)
        if tuple(next(rows, ())) != COLUMNS:
            raise ValueError(f"{file}: its columns are not those of {ROWS_FILE}")
        return [_from_row(row) for row in rows]


def _from_row(row: list[str]) -> TurnRecord:
    values = {
        name: _TYPES[name](cell) if cell else None for name, cell in zip(COLUMNS, row, strict=True)
    }
    return TurnRecord(**values)  # type: ignore[arg-type]


class GapHistogram:
    """Counts durations in classes that are each 2 % wide, so percentiles are right within 1 %.

    Gaps between tokens are too many to keep. Durations below a microsecond count as one.
    """

    WIDTH = math.log(1.02)
    LEAST_MS = 0.001

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})

    @classmethod
    def from_json(cls, value: Mapping[str, int]) -> Self:
        return cls({int(number): count for number, count in value.items()})

    def add(self, duration_ms: float) -> None:
        number = round(math.log(max(duration_ms, self.LEAST_MS) / self.LEAST_MS) / self.WIDTH)
        self.counts[number] = self.counts.get(number, 0) + 1

    def percentile(self, share: float) -> float | None:
        """Return the duration (ms) below which this share lies, None if nothing was counted."""
        total = sum(self.counts.values())
        seen = 0
        for number in sorted(self.counts):
            seen += self.counts[number]
            if seen >= share * total:
                return self.LEAST_MS * math.exp(number * self.WIDTH)
        return None
