"""A shared pool in virtual time: what it has of each branch, and on which nodes.

Responsible for capacity, eviction and placement. Not for how long a fetch takes (`network.py`). Pure.

Blocks lie in the memory of the node whose engine put them, one replica each. All nodes' memories are one
capacity, and what was used least recently goes first, a prefix from its end: a look-up that finds blocks, and a
put that finds them there, count as use. A Mooncake master evicts by the time of use as well, in batches and in
no order within one time.

Source: Mooncake's `master_service` (leases renewed by look-ups and reads), vLLM 0.32 `mooncake/store/worker.py`
(a prompt's blocks are all offered, those that are there are skipped).
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from moongate.simulator.content import Branch
from moongate.simulator.run_cache import RunCache


class _Part(NamedTuple):
    """Blocks of a branch that lie on a node."""

    first: int
    last: int
    node: int


class SharedStore:
    """A pool of so many blocks."""

    def __init__(self, blocks: int) -> None:
        self._cache = RunCache(blocks, self._removed)
        self._places: dict[Branch, list[_Part]] = {}
        self.evicted_blocks = 0

    @property
    def use(self) -> float:
        """Return the used part of the capacity."""
        return self._cache.used / self._cache.capacity

    def find(self, branch: Branch, limit: int) -> int:
        """Return how many of the first `limit` blocks are there, without counting it as use."""
        return self._cache.find(branch, limit)

    def take(self, branch: Branch, limit: int) -> int:
        """Return how many of the first `limit` blocks are there; they count as just used."""
        found = self._cache.find(branch, limit)
        self._cache.touch(branch, found)
        return found

    def put(self, branch: Branch, blocks: int, node: int) -> None:
        """Store the first `blocks` blocks, as far as they are not there."""
        known = self._cache.put(branch, blocks)
        for owner, first, last in branch.parts(known, self._cache.find(branch, blocks)):
            self._places.setdefault(owner, []).append(_Part(first, last, node))

    def nodes_of(self, branch: Branch, first: int, last: int) -> Counter[int]:
        """Return how many of these blocks lie on which node."""
        counts: Counter[int] = Counter()
        for owner, begin, end in branch.parts(first, last):
            for part in reversed(self._places.get(owner, ())):
                if part.last <= begin:
                    break
                shared = min(part.last, end) - max(part.first, begin)
                if shared > 0:
                    counts[part.node] += shared
        return counts

    def _removed(self, branch: Branch, first: int, last: int) -> None:
        self.evicted_blocks += last - first
        parts = self._places[branch]
        while parts and parts[-1].last > first:
            begin, _, node = parts.pop()
            if begin < first:
                parts.append(_Part(begin, first, node))
        if not parts:
            del self._places[branch]
