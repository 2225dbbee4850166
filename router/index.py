"""The ownership index: block hash -> who holds it, on which tier.

A *view* rebuilt from events and from our own forwards, never the truth. Confirmed (an engine said
so) and predicted (we forwarded a prompt that will fill it) are kept apart. Holders are small
integers and a block's holders a bit mask per tier, so that the overlap of a prompt with the whole
fleet is one walk over its blocks.

Not here: what an engine calls its blocks (`ledger.py`), in which order events come (`feed.py`),
what an overlap is worth (`cost.py`).

Invariants: every set bit belongs to a known holder; `count` equals the bits set; a block is never
predicted for a holder that holds it confirmed on the device.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moongate.router.model import BlockHash, Holder, Tier

STALE_EXPIRIES_MAX = 100_000
"""Blocks that may be scheduled to expire beyond those predicted twice over, before the schedule is
made anew: a prefix that is predicted with each turn leaves an entry each time."""

PREDICTIONS_MAX = 65_536
"""Predicted blocks of a holder whose capacity isn't known: a million tokens at block size 16."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Leading blocks that a holder has without a hole. `blocks` counts predictions as well."""

    confirmed_blocks: int
    blocks: int


class OwnershipIndex:
    """Which holder has which block, on which tier.

    `blocks_max` bounds the entries (block, holder, tier) that events may make; past it `store`
    refuses, and the source is no longer exact. A holder's predicted blocks are bounded by its
    capacity; past it the oldest go, which is also how an engine's own LRU would go about it.
    """

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._capacities: dict[Holder, int] = {}
        self._numbers: dict[Holder, int] = {}
        self._free_numbers: list[int] = []
        self._masks: dict[Tier, dict[BlockHash, int]] = {tier: {} for tier in Tier}
        self._counts: dict[Holder, dict[Tier, int]] = {}
        self._total = 0
        self._repeats: Counter[tuple[Holder, Tier, BlockHash]] = Counter()
        self._predicted_masks: dict[BlockHash, int] = {}
        self._predicted: dict[Holder, dict[BlockHash, float]] = {}  # block -> expires_at
        self._expiries: list[tuple[float, int, Holder, tuple[BlockHash, ...]]] = []
        self._expiry_order = 0
        self._scheduled = 0  # blocks in all of `_expiries`

    # --- holders ----------------------------------------------------------------------------------

    @property
    def holders(self) -> tuple[Holder, ...]:
        return tuple(self._numbers)

    def has_holder(self, holder: Holder) -> bool:
        return holder in self._numbers

    def add_holder(self, holder: Holder, capacity_blocks: int | None = None) -> None:
        """Make a holder known, or tell a known one's capacity (None: not known)."""
        if capacity_blocks is not None or holder not in self._capacities:
            self._capacities[holder] = capacity_blocks or PREDICTIONS_MAX
        if holder in self._numbers:
            return
        number = self._free_numbers.pop() if self._free_numbers else len(self._numbers)
        self._numbers[holder] = number
        self._counts[holder] = dict.fromkeys(Tier, 0)
        self._predicted[holder] = {}

    def remove_holder(self, holder: Holder) -> None:
        """Forget a holder that has nothing confirmed any more."""
        assert not any(self._counts[holder].values()), (holder, self._counts[holder])
        self.forget_predictions(holder)
        del self._counts[holder], self._predicted[holder], self._capacities[holder]
        self._free_numbers.append(self._numbers.pop(holder))

    # --- confirmed --------------------------------------------------------------------------------

    def store(self, holder: Holder, tier: Tier, block: BlockHash) -> bool:
        """Note a confirmed copy. Return False when the index is full and it was not noted.

        A holder's block may be announced under two names or by two sources; it is then held until
        each has been removed.
        """
        masks = self._masks[tier]
        bit = 1 << self._numbers[holder]
        mask = masks.get(block, 0)
        if self._total >= self._blocks_max:
            return False
        self._total += 1
        if mask & bit:
            self._repeats[holder, tier, block] += 1
        else:
            masks[block] = mask | bit
            self._counts[holder][tier] += 1
        if tier is Tier.DEVICE and block in self._predicted[holder]:
            self._drop_prediction(holder, block)
        return True

    def remove(self, holder: Holder, tier: Tier, block: BlockHash) -> None:
        """Note that a confirmed copy is gone. One that isn't known is no error."""
        masks = self._masks[tier]
        bit = 1 << self._numbers[holder]
        mask = masks.get(block, 0)
        if not mask & bit:
            return
        self._total -= 1
        if self._repeats and (holder, tier, block) in self._repeats:
            self._repeats[holder, tier, block] -= 1
            if not self._repeats[holder, tier, block]:
                del self._repeats[holder, tier, block]
            return
        if mask == bit:
            del masks[block]
        else:
            masks[block] = mask & ~bit
        self._counts[holder][tier] -= 1

    def count(self, holder: Holder, tier: Tier) -> int:
        """Return the blocks that the holder has confirmed on this tier."""
        return self._counts[holder][tier]

    @property
    def total(self) -> int:
        """Return the entries in all: (block, holder, tier), as often as announced."""
        return self._total

    # --- predicted --------------------------------------------------------------------------------

    def predict(self, holder: Holder, blocks: Sequence[BlockHash], expires_at: float) -> None:
        """Assume that the holder will have these blocks, until confirmed or expired.

        The blocks come in chain order and are remembered tail first, so that what is dropped for
        want of room are tails: a prefix without its end is still of use, an end alone is not.
        """
        held = self._masks[Tier.DEVICE]
        bit = 1 << self._numbers[holder]
        predicted = self._predicted[holder]
        fresh = tuple(block for block in reversed(blocks) if not held.get(block, 0) & bit)
        for block in fresh:
            predicted.pop(block, None)  # moves it to the young end
            predicted[block] = expires_at
            self._predicted_masks[block] = self._predicted_masks.get(block, 0) | bit
        while len(predicted) > self._capacities[holder]:
            self._drop_prediction(holder, next(iter(predicted)))
        if fresh:
            self._schedule_expiry(expires_at, holder, fresh)

    def shorten_predictions(
        self, holder: Holder, blocks: Sequence[BlockHash], expires_at: float
    ) -> None:
        """Let these predictions end at `expires_at` where they would live longer."""
        predicted = self._predicted[holder]
        affected = tuple(block for block in blocks if predicted.get(block, 0.0) > expires_at)
        for block in affected:
            predicted[block] = expires_at
        if affected:
            self._schedule_expiry(expires_at, holder, affected)

    def forget_predictions(self, holder: Holder) -> None:
        for block in list(self._predicted[holder]):
            self._drop_prediction(holder, block)

    def expire(self, now: float) -> None:
        """Drop the predictions whose time is over."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, holder, blocks = heapq.heappop(self._expiries)
            self._scheduled -= len(blocks)
            predicted = self._predicted.get(holder)
            if predicted is None:
                continue
            for block in blocks:
                # A block predicted again meanwhile has a later entry of its own.
                if block in predicted and predicted[block] <= now:
                    self._drop_prediction(holder, block)

    def next_expiry(self) -> float | None:
        return self._expiries[0][0] if self._expiries else None

    def predicted_count(self, holder: Holder) -> int:
        return len(self._predicted[holder])

    def _schedule_expiry(
        self, expires_at: float, holder: Holder, blocks: tuple[BlockHash, ...]
    ) -> None:
        self._expiry_order += 1  # makes entries of one instant comparable
        heapq.heappush(self._expiries, (expires_at, self._expiry_order, holder, blocks))
        self._scheduled += len(blocks)
        if self._scheduled > STALE_EXPIRIES_MAX + 2 * sum(map(len, self._predicted.values())):
            self._reschedule_all()

    def _reschedule_all(self) -> None:
        """Leave out the entries of predictions that were made again or dropped meanwhile."""
        self._expiries, self._scheduled = [], 0
        for holder, predicted in self._predicted.items():
            by_time: dict[float, list[BlockHash]] = {}
            for block, expires_at in predicted.items():
                by_time.setdefault(expires_at, []).append(block)
            for expires_at, blocks in by_time.items():
                self._expiry_order += 1
                self._expiries.append((expires_at, self._expiry_order, holder, tuple(blocks)))
                self._scheduled += len(blocks)
        heapq.heapify(self._expiries)

    def _drop_prediction(self, holder: Holder, block: BlockHash) -> None:
        del self._predicted[holder][block]
        mask = self._predicted_masks[block] & ~(1 << self._numbers[holder])
        if mask:
            self._predicted_masks[block] = mask
        else:
            del self._predicted_masks[block]

    # --- query ------------------------------------------------------------------------------------

    def find_overlaps(
        self, chain: Sequence[BlockHash], usable_blocks: int, holders: Iterable[Holder]
    ) -> dict[Holder, Overlap]:
        """Return how many leading blocks of `chain` each of `holders` has without a hole.

        At most `usable_blocks`; a holder that has none is absent, not zero. Host and disk copies
        count with device ones: the engine brings them back itself.
        Cost: O(usable_blocks), and it stops at the first block that no holder has.
        Source: the longest-consecutive-prefix rule of vLLM's `find_longest_cache_hit`.
        """
        numbers = {self._numbers[h]: h for h in holders if h in self._numbers}
        everyone = sum(1 << number for number in numbers)
        walk = chain[:usable_blocks]
        tiers = [self._masks[t] for t in (Tier.DEVICE, Tier.HOST, Tier.DISK) if self._masks[t]]
        confirmed = _leading_blocks(walk, tiers, everyone)
        both = confirmed
        if self._predicted_masks:
            both = _leading_blocks(walk, [*tiers, self._predicted_masks], everyone)
        return {
            numbers[number]: Overlap(confirmed.get(number, 0), blocks)
            for number, blocks in both.items()
            if blocks
        }


def _leading_blocks(
    chain: Sequence[BlockHash], tiers: Sequence[dict[BlockHash, int]], everyone: int
) -> dict[int, int]:
    """Return, for each holder number in the mask `everyone`, its leading blocks of `chain`."""
    leading: dict[int, int] = {}
    alive = everyone
    for position, block in enumerate(chain):
        have = 0
        for masks in tiers:
            have |= masks.get(block, 0)
        out = alive & ~have
        if out:
            _note(leading, out, position)
            alive &= have
            if not alive:
                return leading
    _note(leading, alive, len(chain))
    return leading


def _note(leading: dict[int, int], mask: int, position: int) -> None:
    while mask:
        lowest = mask & -mask
        leading[lowest.bit_length() - 1] = position
        mask ^= lowest
