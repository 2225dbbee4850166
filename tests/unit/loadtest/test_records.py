"""Rows of `requests.csv`, and gaps between tokens in classes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from moongate.loadtest.records import COLUMNS, GapHistogram, TurnRecord, read_records

TURN = TurnRecord(
    "s-1", 2, 1.5, sent_s=1.75, status=200, instance="a", reason="load", prompt_tokens=100,
    routed_prompt_tokens=100, cached_tokens=60, device_tokens=50, pool_tokens=20, ttft_ms=12.25, e2e_ms=250.0,
)  # fmt: skip


def write_rows(file: Path, *records: TurnRecord) -> Path:
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([COLUMNS, *(record.row() for record in records)])
    return file


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    failed = TurnRecord("s,2", 1, 0.0, outcome="http_500", error='"no"\nline')
    assert read_records(write_rows(tmp_path / "r.csv", TURN, failed)) == [TURN, failed]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"not those of requests\.csv"):
        read_records(tmp_path / "r.csv")


def test_where_a_prompt_came_from() -> None:
    assert TURN.tokens_by_source() == {"device": 40, "pool": 20, "recompute": 40}
    assert TURN.main_source() == "recompute"
    assert TURN.end_s() == 2.0
    no_receipt = TurnRecord("s", 1, 0.0, prompt_tokens=100, cached_tokens=60, device_tokens=0)
    assert no_receipt.tokens_by_source() == {"cached": 60, "recompute": 40}
    assert no_receipt.main_source() == "cached"
    known = TurnRecord("s", 1, 0.0, prompt_tokens=100, routed_prompt_tokens=100, device_tokens=80)
    assert known.tokens_by_source() == {"device": 80, "pool": 0, "recompute": 20}
    assert TurnRecord("s", 1, 0.0).main_source() is None


def test_percentiles_of_gaps_are_right_within_a_hundredth() -> None:
    gaps = GapHistogram()
    for number in range(1, 1001):
        gaps.add(float(number))
    for share in (0.5, 0.9, 0.99):
        assert gaps.percentile(share) == pytest.approx(1000 * share, rel=0.011)
    again = GapHistogram.from_json({str(name): count for name, count in gaps.counts.items()})
    assert again.percentile(0.5) == gaps.percentile(0.5)
    assert GapHistogram().percentile(0.5) is None
    gaps.add(-1.0)  # a clock's whim
    assert gaps.percentile(0.0001) == pytest.approx(0.001)
