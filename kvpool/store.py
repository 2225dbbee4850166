"""What a shared pool can be asked, whichever it is.

Implementations: `mooncake.py` (a Mooncake master's HTTP), `memory.py` (in process).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Replica(NamedTuple):
    """One copy of a key's value, the nearest where there are several."""

    endpoint: str  # host:port of the segment that has it; "" where the pool doesn't say
    size_bytes: int
    on_disk: bool = False  # has to be read from a disk first


class PoolState(NamedTuple):
    """What a pool says of itself. None: it doesn't say."""

    epoch: str  # another one: it was restarted or emptied, and what was known of it is void
    key_count: int | None = None
    allocated_bytes: int | None = None
    capacity_bytes: int | None = None
    evicted_keys: int | None = None

    @property
    def use(self) -> float | None:
        """Return how full it is, 0.0 to 1.0."""
        if self.allocated_bytes is None or not self.capacity_bytes:
            return None
        return self.allocated_bytes / self.capacity_bytes


class PoolUnavailable(Exception):
    """The pool did not answer, or not in a way that can be understood."""


class PoolStore(Protocol):
    """A pool. Looking up is no use of a key: it moves nothing and prolongs nothing."""

    async def look_up(self, keys: Sequence[str]) -> Mapping[str, Replica]:
        """Return those of the keys that exist. Raises: PoolUnavailable."""
        ...

    async def check(self) -> PoolState:
        """Return what the pool says of itself. Raises: PoolUnavailable."""
        ...

    async def close(self) -> None: ...
