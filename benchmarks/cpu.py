"""CPU time of processes, from Linux' /proc: of a router with its children, and of the machine.

The scheduler's run time of each thread (`schedstat`, nanoseconds) is precise enough for a phase of
a second. It is lost when a thread ends, so where one has ended between two readings the process
times in clock ticks (10 ms) are used instead; those keep what ended threads and children spent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What we use of `/proc/PID/stat`."""

    parent: int
    ticks: int
    """Of its threads, ended ones among them, and of children that it has waited for."""
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class CpuReading:
    """What a process and its descendants have used up to one moment."""

    thread_ns: Mapping[tuple[int, int], int]
    """Run time by process and thread."""
    ticks: int
    resident_bytes: int
    processes: int

    def seconds_since(self, earlier: CpuReading) -> float:
        if earlier.thread_ns.keys() <= self.thread_ns.keys():
            gained_ns = sum(self.thread_ns.values()) - sum(earlier.thread_ns.values())
            return gained_ns / 1e9
        return (self.ticks - earlier.ticks) / TICKS_PER_S


def take_reading(root: int, proc: Path = PROC) -> CpuReading:
    """Return the CPU time of process `root` and all its descendants. Ended ones are left out."""
    stats = dict(_read_stats(proc))
    family = find_family({pid: stat.parent for pid, stat in stats.items()}, root)
    thread_ns = {
        (pid, thread): run_ns for pid in family for thread, run_ns in _read_threads(proc, pid)
    }
    return CpuReading(
        thread_ns=thread_ns,
        ticks=sum(stats[pid].ticks for pid in family),
        resident_bytes=sum(stats[pid].resident_bytes for pid in family),
        processes=len(family),
    )


def machine_busy_s(proc: Path = PROC) -> float:
    """Return the CPU seconds that all cores together have been anything but idle."""
    return parse_busy_ticks((proc / "stat").read_text()) / TICKS_PER_S


def find_family(parents: Mapping[int, int], root: int) -> list[int]:
    """Return `root` and its descendants, of those that `parents` (child -> parent) has."""
    family = [root] if root in parents else []
    for ancestor in family:  # grows while it is walked
        family += [child for child, parent in parents.items() if parent == ancestor]
    return family


def parse_process_stat(text: str) -> ProcessStat:
    """Return the facts of a `/proc/PID/stat` line.

    Source: proc(5). Fields are counted after the command's last parenthesis, because a command may
    itself have spaces and parentheses.
    """
    fields = text[text.rindex(")") + 1 :].split()
    return ProcessStat(
        parent=int(fields[1]),
        ticks=sum(int(field) for field in fields[11:15]),  # utime, stime, cutime, cstime
        resident_bytes=int(fields[21]) * PAGE_BYTES,
    )


def parse_busy_ticks(text: str) -> int:
    """Return the ticks of `/proc/stat`'s first line that are neither idle nor waiting for a disk.

    Source: proc(5): user, nice, system, idle, iowait, irq, softirq, steal; guest time is in user.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split()[1:9])
    return user + nice + system + irq + softirq + steal


def parse_run_ns(text: str) -> int:
    """Return the nanoseconds on a CPU that a `schedstat` line tells."""
    return int(text.split()[0])


def _read_stats(proc: Path) -> Iterator[tuple[int, ProcessStat]]:
    for folder in proc.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                yield int(folder.name), parse_process_stat((folder / "stat").read_text())


def _read_threads(proc: Path, pid: int) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(OSError):
        for folder in (proc / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                yield int(folder.name), parse_run_ns((folder / "schedstat").read_text())
