"""The load generator itself: writes what came of each turn, tells locust, and watches its own strain.

Runs in locust's process, under gevent. What it writes as JSON at the end is what only it can know: its
CPU share, how late it woke up, and all gaps between tokens.
"""

from __future__ import annotations

import csv
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import gevent
import orjson
from locust.env import Environment

from moongate.loadtest.records import (
    COLUMNS,
    GENERATOR_FILE,
    NOT_SENT,
    ROWS_FILE,
    GapHistogram,
    TurnRecord,
)
from moongate.loadtest.sending import Answered

NAP_S = 0.05
"""How often lateness is measured: a nap that lasts longer than it was to."""
SAMPLE_S = 1.0


class Recorder:
    """Takes each turn once. `folder`: where the files go; None: only locust's statistics are kept."""

    def __init__(self, environment: Environment, folder: Path | None) -> None:
        self._environment = environment
        self._file: TextIO | None = None
        self.gaps = GapHistogram()
        self.outcomes: Counter[str] = Counter()
        self.latest_ttft_ms: list[float] = []
        """Of turns since `latest_ttft_ms` was last cleared."""
        if folder is not None:
            self._file = (folder / ROWS_FILE).open("w", newline="")
            self._rows = csv.writer(self._file)
            self._rows.writerow(COLUMNS)

    def take(self, answered: Answered) -> None:
        record = answered.record
        self._write(record)
        for gap_ms in answered.gaps_ms:
            self.gaps.add(gap_ms)
        if record.ttft_ms is not None:
            self.latest_ttft_ms.append(record.ttft_ms)
        self._tell_locust(record)

    def take_unsent(self, record: TurnRecord) -> None:
        record.outcome = NOT_SENT
        self._write(record)
        self._fire("turn", "not sent", 0.0, RuntimeError("too many conversations are open"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, record: TurnRecord) -> None:
        self.outcomes[record.outcome] += 1
        if self._file is not None:
            self._rows.writerow(record.row())

    def _tell_locust(self, record: TurnRecord) -> None:
        """Fire locust's request event once for each thing measured; its web UI shows each as a row."""
        instance = record.instance or "unknown instance"
        trouble = None if record.is_ok else RuntimeError(f"{record.outcome}: {record.error or ''}")
        self._fire("turn", instance, record.e2e_ms or 0.0, trouble)
        if record.ttft_ms is not None:
            self._fire("TTFT", instance, record.ttft_ms)
            self._fire("TTFT by source", record.main_source() or "unknown", record.ttft_ms)
        if record.itl_ms_mean is not None:
            self._fire("ITL", instance, record.itl_ms_mean)
        if record.prompt_tokens and record.cached_tokens is not None:
            self._fire("cached %", instance, 100.0 * record.cached_tokens / record.prompt_tokens)
            self._fire("prompt tokens", instance, float(record.prompt_tokens))

    def _fire(self, kind: str, name: str, value: float, exception: Exception | None = None) -> None:
        self._environment.events.request.fire(
            request_type=kind, name=name, response_time=value, response_length=0,
            exception=exception, context={},
        )  # fmt: skip


class Watch:
    """Measures this process: CPU share of one core, and how late it wakes up from short naps."""

    def __init__(self) -> None:
        self.late_ms = GapHistogram()
        self.cpu_shares: list[float] = []
        self._began = (time.perf_counter(), time.process_time())
        self._greenlet = gevent.spawn(self._run)

    def stop(self) -> None:
        self._greenlet.kill()

    def as_json(self) -> dict[str, Any]:
        wall_s = time.perf_counter() - self._began[0]
        return {
            "cpu_share_mean": (time.process_time() - self._began[1]) / wall_s,
            "cpu_share_max": max(self.cpu_shares, default=None),
            "late_ms_p50": self.late_ms.percentile(0.5),
            "late_ms_p99": self.late_ms.percentile(0.99),
        }

    def _run(self) -> None:
        sampled_s, sampled_cpu_s = self._began
        while True:
            began_s = time.perf_counter()
            gevent.sleep(NAP_S)
            now_s = time.perf_counter()
            self.late_ms.add((now_s - began_s - NAP_S) * 1000)
            if now_s - sampled_s >= SAMPLE_S:
                cpu_s = time.process_time()
                self.cpu_shares.append((cpu_s - sampled_cpu_s) / (now_s - sampled_s))
                sampled_s, sampled_cpu_s = now_s, cpu_s


def write_summary(folder: Path, recorder: Recorder, watch: Watch, measured_s: float) -> None:
    """Write what the report needs beside the rows. `measured_s`: from the start to the last answer."""
    summary = {
        "measured_s": measured_s,
        "gaps": {str(number): count for number, count in recorder.gaps.counts.items()},
        **watch.as_json(),
    }
    (folder / GENERATOR_FILE).write_bytes(orjson.dumps(summary))
