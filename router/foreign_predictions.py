"""What other gateways assume that a holder will have: the end of a prefix stands for all of it.

A block's name tells its whole prefix, so a gateway need not tell every block of a prompt that it has
forwarded, only some along the chain: every `stride_blocks`-th. Where a prompt comes by here that has one of
them, the holder will have it up to there. That is too little by less than a stride, never too much.

Kept apart from this gateway's own predictions (`index.py`), whose every block is known.

Invariants: a block is known as often as entries have it; entries are bounded by blocks, and by time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from moongate.router.model import BlockHash, Holder

STRIDE_TOKENS = 128
"""Between two blocks that are told: what is lost by it takes some 16 ms to compute (8 tokens a ms), and
a prompt of 80 K tokens is told in 10 KB."""

BLOCKS_MAX = 500_000
"""Told blocks in all, 64 million tokens; past it the oldest entries go. Some 200 bytes each."""


def stride_blocks(block_tokens: int) -> int:
    """Return how many blocks there are from one that is told to the next."""
    return max(1, STRIDE_TOKENS // block_tokens)


def told_blocks(chain: Sequence[BlockHash], part: range, block_tokens: int) -> list[BlockHash]:
    """Return of this part of a chain what is told to other gateways."""
    stride = stride_blocks(block_tokens)
    first = -(-(part.start + 1) // stride) * stride - 1
    return [*chain[first : part.stop : stride]]


class _Entry(NamedTuple):
    holder: Holder
    blocks: tuple[BlockHash, ...]
    expires_at: float


class ForeignPredictions:
    """Entries by a name that whoever made them gave."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._entries: dict[Hashable, _Entry] = {}
        self._holders: dict[BlockHash, Counter[Holder]] = {}
        self._expiries: list[tuple[float, int, Hashable]] = []
        self._order = 0
        self._total = 0

    def add(
        self, name: Hashable, holder: Holder, blocks: Sequence[BlockHash], expires_at: float
    ) -> None:
        """Assume that the holder will have these blocks, each with all before it, until then."""
        self.drop(name)
        if len(blocks) > self._blocks_max:
            return
        while self._total + len(blocks) > self._blocks_max:
            self.drop(next(iter(self._entries)))
        self._entries[name] = _Entry(holder, tuple(blocks), expires_at)
        self._total += len(blocks)
        for block in blocks:
            self._holders.setdefault(block, Counter())[holder] += 1
        self._schedule(name, expires_at)

    def shorten(self, name: Hashable, expires_at: float) -> None:
        """Let an entry end then, if it would live longer. One that isn't there is no error."""
        entry = self._entries.get(name)
        if entry is not None and entry.expires_at > expires_at:
            self._entries[name] = entry._replace(expires_at=expires_at)
            self._schedule(name, expires_at)

    def drop(self, name: Hashable) -> None:
        """Assume an entry no longer. One that isn't there is no error."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self._total -= len(entry.blocks)
        for block in entry.blocks:
            holders = self._holders[block]
            holders[entry.holder] -= 1
            if not holders[entry.holder]:
                del holders[entry.holder]
            if not holders:
                del self._holders[block]

    def forget(self, holder: Holder) -> None:
        """Assume nothing of a holder any more: its cache is gone. Cost: O(entries)."""
        for name in [name for name, entry in self._entries.items() if entry.holder == holder]:
            self.drop(name)

    def expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            _, _, name = heapq.heappop(self._expiries)
            entry = self._entries.get(name)
            if entry is not None and entry.expires_at <= now:
                self.drop(name)

    def next_expiry(self) -> float | None:
        return self._expiries[0][0] if self._expiries else None

    def find_overlaps(
        self, chain: Sequence[BlockHash], usable_blocks: int, block_tokens: int
    ) -> dict[Holder, int]:
        """Return how many leading blocks each holder is assumed to have, where it is any.

        Cost: O(blocks / stride), in one pass over the table where none is known.
        """
        if not self._holders:
            return {}
        told = told_blocks(chain, range(min(usable_blocks, len(chain))), block_tokens)
        if self._holders.keys().isdisjoint(told):
            return {}
        stride, overlaps = stride_blocks(block_tokens), dict[Holder, int]()
        for position in range(len(told) - 1, -1, -1):
            for holder in self._holders.get(told[position], ()):
                overlaps.setdefault(holder, (position + 1) * stride)
        return overlaps

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold. For `invariants.py`."""
        counts: dict[BlockHash, Counter[Holder]] = {}
        for entry in self._entries.values():
            for block in entry.blocks:
                counts.setdefault(block, Counter())[entry.holder] += 1
        assert counts == self._holders
        assert self._total == sum(len(e.blocks) for e in self._entries.values())
        assert self._total <= self._blocks_max

    def __len__(self) -> int:
        return len(self._entries)

    def _schedule(self, name: Hashable, expires_at: float) -> None:
        self._order += 1  # makes entries of one instant comparable
        heapq.heappush(self._expiries, (expires_at, self._order, name))
