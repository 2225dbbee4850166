"""What this process holds: memory, open files, tasks of its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

SETTLED_S = 15.0
"""For idle connections to be closed, on both sides."""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Held:
    """Open files by their kind (`socket`, `anon_inode:[eventfd]`, a path), and unfinished tasks by what
    they run."""

    files: Counter[str]
    tasks: Counter[str]

    @classmethod
    def now(cls) -> Self:
        files: Counter[str] = Counter()
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one that lists them
                files[re.sub(r":\[\d+\]$", "", str(link.readlink()))] += 1
        names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
        return cls(files, Counter(names))

    @classmethod
    async def settled(cls, before: Held) -> Self:
        """Return what is held once it is no more than before, or after a while."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLED_S
        while (now := cls.now()).exceeds(before) and loop.time() < deadline:
            await asyncio.sleep(0.1)
        return now

    def exceeds(self, before: Held) -> bool:
        return bool(self.files - before.files) or bool(self.tasks - before.tasks)


@dataclass(slots=True)
class Growth:
    """Resident memory over time."""

    samples: list[tuple[float, int]] = field(default_factory=list)  # s, bytes

    async def watch(self, every_s: float) -> None:
        while True:
            self.samples.append((asyncio.get_running_loop().time(), resident_bytes()))
            await asyncio.sleep(every_s)

    def slope_mb_per_minute(self, last: float = 0.5) -> float:
        """Return how fast memory grew in the last part of the time: the least squares' line."""
        samples = self.samples[int(len(self.samples) * (1 - last)) :]
        times, sizes = zip(*samples, strict=True)
        time_mean, size_mean = sum(times) / len(times), sum(sizes) / len(sizes)
        spread = sum((t - time_mean) ** 2 for t in times)
        shared = sum((t - time_mean) * (s - size_mean) for t, s in samples)
        return float(shared / spread * 60 / 1e6)

    def __str__(self) -> str:
        sizes = [size / 1e6 for _, size in self.samples]
        return (
            f"{sizes[0]:.0f} -> {sizes[-1]:.0f} MB, at most {max(sizes):.0f}, at the end "
            f"{self.slope_mb_per_minute():+.1f} MB a minute"
        )
