"""A pool in this process: for `moongate up`, for simulated engines, and for tests.

Keys and sizes only; there are no values, since simulated engines compute nothing. What was used least
recently goes first, as in Mooncake, but one key at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from moongate.kvpool.store import PoolState, Replica


class MemoryPool:
    """Keys with their replica, bounded by `capacity_bytes`.

    Invariant: `allocated_bytes` is the sum of the sizes of all keys, at most the capacity.
    """

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes > 0, capacity_bytes
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0
        self.evicted_keys = 0
        self.stored_keys = 0  # since the start, evicted ones included
        self._epoch = 0
        self._replicas: OrderedDict[str, Replica] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, key: str) -> bool:
        return key in self._replicas

    def __iter__(self) -> Iterator[str]:
        """Yield the keys, the next one to be evicted first."""
        return iter(self._replicas)

    # --- engines ----------------------------------------------------------------------------------

    def put(self, key: str, size_bytes: int, endpoint: str = "") -> bool:
        """Store a key, evicting for it; False if it can't ever fit. One that exists stays as it is."""
        if key in self._replicas:
            self._replicas.move_to_end(key)
            return True
        if size_bytes > self.capacity_bytes:
            return False
        while self.allocated_bytes + size_bytes > self.capacity_bytes:
            self._evict_one()
        self._replicas[key] = Replica(endpoint, size_bytes)
        self.stored_keys += 1
        self.allocated_bytes += size_bytes
        return True

    def get(self, key: str) -> Replica | None:
        """Return a key's replica for reading its value; it then counts as just used."""
        replica = self._replicas.get(key)
        if replica is not None:
            self._replicas.move_to_end(key)
        return replica

    def remove_endpoint(self, endpoint: str) -> None:
        """Lose all that lay in one segment: its process has ended."""
        for key in [k for k, replica in self._replicas.items() if replica.endpoint == endpoint]:
            self.allocated_bytes -= self._replicas.pop(key).size_bytes

    def clear(self) -> None:
        """Lose everything, as a master that is restarted does."""
        self._replicas.clear()
        self.allocated_bytes = 0
        self._epoch += 1

    def _evict_one(self) -> None:
        _, replica = self._replicas.popitem(last=False)
        self.allocated_bytes -= replica.size_bytes
        self.evicted_keys += 1

    # --- the gateway ------------------------------------------------------------------------------

    async def look_up(self, keys: Sequence[str]) -> Mapping[str, Replica]:
        return {key: replica for key in keys if (replica := self._replicas.get(key)) is not None}

    async def check(self) -> PoolState:
        return PoolState(
            epoch=str(self._epoch),
            key_count=len(self._replicas),
            allocated_bytes=self.allocated_bytes,
            capacity_bytes=self.capacity_bytes,
            evicted_keys=self.evicted_keys,
        )

    async def close(self) -> None:
        pass
