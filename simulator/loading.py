"""Requests whose KV comes from elsewhere: they hold their blocks and wait, and are not computed.

Responsible for when what was asked for is here, over one link, one transfer after another. Not for
what is asked for (`engine.py`). Pure.

A request that is given up while its KV is on the way keeps its blocks until the transfer is over:
something may still be writing into them.

Source: `WAITING_FOR_REMOTE_KVS` in vLLM 0.32.0 `v1/core/sched/scheduler.py`.
"""

from dataclasses import dataclass


class Link:
    """What carries KV to one engine."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    def free_at(self, now: float) -> float:
        """Return when what was asked for before will be here."""
        return max(self._free_at, now)

    def carry(self, size_bytes: float, now: float) -> float:
        """Return when `size_bytes` that are asked for now will be here."""
        self._free_at = self.free_at(now) + size_bytes / self._bytes_per_s
        return self._free_at


@dataclass(slots=True)
class _Load:
    arrives_at: float | None  # None: whoever has it is not ready
    is_wanted: bool = True


class LoadingArea:
    """Which requests of one rank are parked, in the order in which they were."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}

    @property
    def wanted_requests(self) -> int:
        return sum(load.is_wanted for load in self._loads.values())

    def park(self, request_id: str, arrives_at: float | None) -> None:
        """`arrives_at` None: it will be set, or the load fails."""
        self._loads[request_id] = _Load(arrives_at)

    def set_arrival(self, request_id: str, arrives_at: float) -> None:
        self._loads[request_id].arrives_at = arrives_at

    def abandon(self, request_id: str) -> None:
        self._loads[request_id].is_wanted = False

    def remove(self, request_id: str) -> bool:
        """Return whether it was still wanted."""
        return self._loads.pop(request_id).is_wanted

    def arrived(self, now: float) -> list[str]:
        """Return those whose KV is here."""
        return [
            request_id
            for request_id, load in self._loads.items()
            if load.arrives_at is not None and load.arrives_at <= now
        ]

    def next_arrival_at(self) -> float | None:
        times = (load.arrives_at for load in self._loads.values())
        return min((time for time in times if time is not None), default=None)
