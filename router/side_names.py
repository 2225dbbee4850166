"""What one source announced of a side group: a KV group beside the one that the index is made of.

A side group's block has the name of the block of the main group that ends with it, since an engine's
name stands for all the tokens up to there. So its tokens aren't looked at (of a window's blocks an event
leaves out some, and doesn't say which): it is what the main group's block of that name is. One that
isn't known there waits, as groups come in any order within a batch.

Source: vLLM 0.32 `v1/core/block_pool.py`, `cache_full_blocks`, and `v1/core/kv_cache_utils.py`,
`BlockHashListWithBlockSize`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from moongate.router.copies import take_one
from moongate.router.index import OwnershipIndex
from moongate.router.model import WHOLE_PREFIX, BlockHash, EngineHash, Holder, SideGroup, Tier
from moongate.router.names import Names

WAITING_MAX = 16_384
"""Names of a side group that may wait for the main group's blocks: more than an engine announces in one
step. Past it the oldest go: names that don't come are of blocks that end within one of the main group."""


@dataclass(slots=True)
class SideNames:
    """One side group of one holder."""

    number: int
    needed_tokens: int
    block_size_tokens: int
    names: Names | None = None  # None: until the main group has spoken
    _waiting: dict[EngineHash, Counter[Tier]] = field(default_factory=dict)  # copies

    def join(self, holder: Holder, index: OwnershipIndex, main_block_tokens: int) -> None:
        """Let the holder's overlaps depend on the group; its main blocks are of this size."""
        side = side_group(
            self.number, self.needed_tokens, self.block_size_tokens, main_block_tokens
        )
        if self.names is not None:
            if self.names.side == side:
                return
            self._leave_index()  # what is known is of blocks that were no whole ones
        index.join(holder, side)
        self.names = Names(holder, index, side)

    def leave(self) -> None:
        """Forget everything, and the group with it."""
        self._waiting.clear()
        self._leave_index()

    def _leave_index(self) -> None:
        if self.names is not None:
            for tier in Tier:
                self.names.clear(tier)
            self.names.index.leave(self.names.holder, side_of(self.names))
            self.names = None

    def move(self, holder: Holder) -> None:
        """Attribute the group to another holder, known to the index."""
        if self.names is not None:
            index, before, side = self.names.index, self.names.holder, side_of(self.names)
            index.join(holder, side)
            self.names.move(holder)
            index.leave(before, side)

    def store(self, tier: Tier, engine_hashes: Sequence[EngineHash], main: Names) -> int:
        """Note copies, those that `main` doesn't know as waiting. Return how many were refused."""
        known: list[EngineHash] = []
        blocks: list[BlockHash] = []
        for engine_hash in engine_hashes:
            block = main.find(engine_hash, tier)
            if block is None:
                self._waiting.setdefault(engine_hash, Counter())[tier] += 1
            else:
                known.append(engine_hash)
                blocks.append(block)
        while len(self._waiting) > WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]
        return self._note(tier, known, blocks)

    def name(self, engine_hashes: Sequence[EngineHash], blocks: Sequence[BlockHash]) -> int:
        """Note what waited for these blocks of the main group. Return how many were refused."""
        if self._waiting.keys().isdisjoint(engine_hashes):
            return 0
        refused = 0
        for engine_hash, block in zip(engine_hashes, blocks, strict=True):
            for tier, copies in self._waiting.pop(engine_hash, {}).items():
                for _ in range(copies):  # of one event's names, copies aren't told apart
                    refused += self._note(tier, (engine_hash,), (block,))
        return refused

    def remove(self, tier: Tier, engine_hashes: Sequence[EngineHash]) -> int:
        """Note that one copy of each is gone, and return how many were known."""
        for engine_hash in engine_hashes:
            waiting = self._waiting.get(engine_hash)
            if waiting is not None and take_one(waiting, tier) and not waiting:
                del self._waiting[engine_hash]
        return self.names.remove(tier, engine_hashes) if self.names is not None else 0

    def clear(self, tier: Tier) -> None:
        if self.names is not None:
            self.names.clear(tier)
        for engine_hash, copies in list(self._waiting.items()):
            del copies[tier]
            if not copies:
                del self._waiting[engine_hash]

    @property
    def is_empty(self) -> bool:
        return not self._waiting and (self.names is None or self.names.is_empty)

    def _note(
        self, tier: Tier, engine_hashes: Sequence[EngineHash], blocks: Sequence[BlockHash]
    ) -> int:
        if not blocks:
            return 0
        assert self.names is not None, "the main group's blocks are known, so it has spoken"
        return self.names.note(tier, engine_hashes, blocks)


def side_of(names: Names) -> SideGroup:
    assert names.side is not None
    return names.side


def side_group(
    number: int, needed_tokens: int, block_tokens: int, main_block_tokens: int
) -> SideGroup:
    """Return what reuse asks of a group, in the main group's blocks.

    Engines reuse a prefix only up to where blocks of all groups end. Where a block of this group is the
    smaller one, only those are asked for that end with one of the main group.
    """
    span_tokens = math.lcm(block_tokens, main_block_tokens)
    stride_blocks = span_tokens // main_block_tokens
    if needed_tokens == WHOLE_PREFIX:
        return SideGroup(number, None, stride_blocks)
    needed_blocks = -(-needed_tokens // block_tokens)
    return SideGroup(number, -(-needed_blocks * block_tokens // span_tokens), stride_blocks)
