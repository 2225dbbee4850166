"""What an engine calls the blocks of one KV group, and how many copies of each it has.

An engine may hold several physical copies of one block and announces each as stored and as removed
(vLLM does not de-duplicate), so copies are counted and a block is gone with its last copy. A name costs
an entry in one table; further copies, which are few, are counted beside it.

Invariant: the index holds, for this holder and group, exactly the blocks whose copies are counted here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moongate.router.copies import take_one
from moongate.router.index import OwnershipIndex
from moongate.router.model import BlockHash, EngineHash, Holder, SideGroup, Tier


@dataclass(slots=True)
class Names:
    """The blocks of a holder in one group (`side`; None: the one that the index is made of)."""

    holder: Holder
    index: OwnershipIndex
    side: SideGroup | None = None
    tiers: dict[Tier, dict[EngineHash, BlockHash]] = field(
        default_factory=lambda: {tier: {} for tier in Tier}
    )
    _copies: Counter[tuple[Tier, EngineHash]] = field(default_factory=Counter)  # beside the first

    def note(
        self, tier: Tier, engine_hashes: Sequence[EngineHash], blocks: Sequence[BlockHash]
    ) -> int:
        """Note copies of blocks. Return how many, the last ones, the full index refused."""
        names = self.tiers[tier]
        fresh: dict[EngineHash, BlockHash] = {}
        for engine_hash, block in zip(engine_hashes, blocks, strict=True):
            known = names.get(engine_hash)
            if known is None:
                fresh[engine_hash] = block
            elif known == block:
                self._copies[tier, engine_hash] += 1
            else:
                # One engine name, two contents: a hash collision of 64-bit names, or a lost removal.
                self._forget(tier, engine_hash)
                fresh[engine_hash] = block
        noted = self.index.store(self.holder, tier, list(fresh.values()), self.side)
        names.update(itertools.islice(fresh.items(), noted))
        return len(fresh) - noted

    def remove(self, tier: Tier, engine_hashes: Sequence[EngineHash]) -> int:
        """Note that one copy of each is gone, and return how many were known."""
        names, gone, copies = self.tiers[tier], [], 0
        for engine_hash in engine_hashes:
            if self._copies and take_one(self._copies, (tier, engine_hash)):
                copies += 1
                continue
            block = names.pop(engine_hash, None)
            if block is not None:
                gone.append(block)
        self.index.remove(self.holder, tier, gone, self.side)
        return len(gone) + copies

    def find(self, engine_hash: EngineHash, tier: Tier) -> BlockHash | None:
        """Return our name for a block, as told of this tier or else of another."""
        for names in (self.tiers[tier], *self.tiers.values()):
            block = names.get(engine_hash)
            if block is not None:
                return block
        return None

    def clear(self, tier: Tier) -> None:
        self.index.remove(self.holder, tier, list(self.tiers[tier].values()), self.side)
        self.tiers[tier].clear()
        for name in [name for name in self._copies if name[0] is tier]:
            del self._copies[name]

    def move(self, holder: Holder) -> None:
        """Attribute all to another holder, known to the index and a member of the group."""
        for tier, names in self.tiers.items():
            blocks = list(names.values())
            self.index.remove(self.holder, tier, blocks, self.side)
            self.index.store(holder, tier, blocks, self.side)
        self.holder = holder

    def held(self) -> Iterator[tuple[Tier, BlockHash]]:
        """Iterate over all that the holder has in the group, as the index knows it."""
        return ((tier, block) for tier, names in self.tiers.items() for block in names.values())

    @property
    def is_empty(self) -> bool:
        return not any(self.tiers.values())

    def _forget(self, tier: Tier, engine_hash: EngineHash) -> None:
        self.index.remove(self.holder, tier, (self.tiers[tier].pop(engine_hash),), self.side)
        self._copies.pop((tier, engine_hash), None)
