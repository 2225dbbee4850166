"""Who has a copy of which block of one KV group, on which tier: a bit mask of holders per block.

Nearly all models have one group. Of a hybrid one each group has its blocks evicted for itself, so each
has copies of its own. Which of them matter for reuse is decided in `index.py`.

Invariant: `count` equals the bits set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from moongate.router.model import BlockHash, Holder, Tier

K = TypeVar("K")


def take_one(counts: Counter[K], key: K) -> bool:
    """Count one less of a key, and return True; False if there is none."""
    if key not in counts:
        return False
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
    return True


@dataclass(slots=True)
class GroupCopies:
    """The copies of one group's blocks. `bit` is the holder's own in the masks."""

    masks: dict[Tier, dict[BlockHash, int]] = field(
        default_factory=lambda: {tier: {} for tier in Tier}
    )
    counts: dict[Holder, dict[Tier, int]] = field(default_factory=dict)
    reusable: list[dict[BlockHash, int]] = field(init=False)
    """Of `masks`, what counts for an overlap: engines bring copies on host and disk back themselves."""
    _repeats: Counter[tuple[Holder, Tier, BlockHash]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.reusable = [self.masks[tier] for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)]

    def store(self, holder: Holder, bit: int, tier: Tier, blocks: Sequence[BlockHash]) -> None:
        """Note copies. One noted twice is held until it was removed as often."""
        masks = self.masks[tier]
        repeats = 0
        for block in blocks:
            mask = masks.get(block)
            if mask is None:
                masks[block] = bit
            elif mask & bit:
                self._repeats[holder, tier, block] += 1
                repeats += 1
            else:
                masks[block] = mask | bit
        self.counts[holder][tier] += len(blocks) - repeats

    def remove(self, holder: Holder, bit: int, tier: Tier, blocks: Sequence[BlockHash]) -> int:
        """Note that copies are gone, and return how many were known."""
        masks = self.masks[tier]
        gone = repeats = 0
        for block in blocks:
            mask = masks.get(block, 0)
            if not mask & bit:
                continue
            if self._repeats and take_one(self._repeats, (holder, tier, block)):
                repeats += 1
                continue
            gone += 1
            if mask == bit:
                del masks[block]
            else:
                masks[block] = mask ^ bit
        self.counts[holder][tier] -= gone
        return gone + repeats

    def is_empty_of(self, holder: Holder) -> bool:
        return not any(self.counts[holder].values())
