"""CPU time as /proc tells it, read from a /proc of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cpu import (
    PAGE_BYTES,
    TICKS_PER_S,
    find_family,
    machine_busy_s,
    parse_process_stat,
    take_reading,
)


def add_process(
    proc: Path, pid: int, parent: int, ticks: tuple[int, int, int, int], threads: dict[int, int]
) -> None:
    """Write a process with utime, stime, cutime, cstime, and run time in ns by thread."""
    folder = proc / str(pid)
    head = [f"{pid} (a (very) odd name)", "S", str(parent), *["0"] * 9]
    tail = [*map(str, ticks), "20", "0", "1", "0", "100", "4096", "3", "0"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(" ".join(head + tail))
    for thread, run_ns in threads.items():
        (folder / "task" / str(thread)).mkdir(parents=True, exist_ok=True)
        (folder / "task" / str(thread) / "schedstat").write_text(f"{run_ns} 77 5\n")


def test_a_command_with_parentheses_does_not_shift_the_fields(tmp_path: Path) -> None:
    add_process(tmp_path, 10, 1, (3, 4, 5, 6), {})
    stat = parse_process_stat((tmp_path / "10" / "stat").read_text())
    assert (stat.parent, stat.ticks, stat.resident_bytes) == (1, 18, 3 * PAGE_BYTES)


def test_a_family_is_the_process_and_all_below_it() -> None:
    parents = {10: 1, 11: 10, 12: 11, 13: 10, 20: 1, 21: 20}
    assert sorted(find_family(parents, 10)) == [10, 11, 12, 13]
    assert find_family(parents, 99) == []


def test_run_time_of_all_threads_of_the_family_counts(tmp_path: Path) -> None:
    add_process(tmp_path, 10, 1, (0, 0, 0, 0), {10: 1_000_000, 101: 2_000_000})
    add_process(tmp_path, 11, 10, (0, 0, 0, 0), {11: 5_000_000})
    add_process(tmp_path, 20, 1, (0, 0, 0, 0), {20: 900_000_000})
    before = take_reading(10, tmp_path)
    add_process(tmp_path, 10, 1, (0, 0, 0, 0), {10: 4_000_000, 101: 2_000_000, 102: 1_000_000})
    add_process(tmp_path, 11, 10, (0, 0, 0, 0), {11: 6_000_000})
    after = take_reading(10, tmp_path)
    assert after.seconds_since(before) == pytest.approx(0.005)
    assert after.processes == 2
    assert after.resident_bytes == 6 * PAGE_BYTES


def test_ticks_count_where_a_thread_has_ended(tmp_path: Path) -> None:
    add_process(tmp_path, 10, 1, (100, 0, 0, 0), {10: 1_000_000_000, 101: 9_000_000})
    before = take_reading(10, tmp_path)
    (tmp_path / "10" / "task" / "101" / "schedstat").unlink()
    (tmp_path / "10" / "task" / "101").rmdir()
    add_process(tmp_path, 10, 1, (130, 10, 5, 5), {10: 1_100_000_000})
    assert take_reading(10, tmp_path).seconds_since(before) == pytest.approx(50 / TICKS_PER_S)


def test_a_process_that_is_gone_has_used_nothing(tmp_path: Path) -> None:
    reading = take_reading(10, tmp_path)
    assert (reading.thread_ns, reading.ticks, reading.processes) == ({}, 0, 0)


def test_the_machine_is_busy_unless_idle_or_waiting_for_a_disk(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 500 6 7 8 9 1\ncpu0 1 2 3\n")
    assert machine_busy_s(tmp_path) == pytest.approx(171 / TICKS_PER_S)
