"""The ownership index: block hash -> who holds it, on which tier.

A *view* rebuilt from events and from our own forwards, never the truth. Confirmed (an engine said
so) and predicted (we forwarded a prompt that will fill it) are kept apart. Holders are small
integers and a block's holders a bit mask per tier, so that one look-up tells them all, and the
overlap of a prompt with the whole fleet is found by bisection. A block with one holder costs a table
entry and its name, since holders' own masks are shared.

Blocks are those of a model's full-attention group. A holder of a hybrid model has side groups as well,
whose copies are kept apart; they are asked only where such a holder has an overlap (`find_overlaps`).

Not here: what an engine calls its blocks (`ledger.py`), in which order events come (`feed.py`),
what an overlap is worth (`cost.py`).

Invariants: every set bit belongs to a known holder, in a side group to a member of it; a block is never
predicted for a holder that holds it confirmed on the device.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from moongate.router.copies import GroupCopies, take_one
from moongate.router.foreign_predictions import ForeignPredictions
from moongate.router.model import BlockHash, Holder, SideGroup, Tier

STALE_EXPIRIES_MAX = 100_000
"""Blocks that may be scheduled to expire beyond those predicted twice over, before the schedule is
made anew: a prefix that is predicted with each turn leaves an entry each time."""

PREDICTIONS_MAX = 65_536
"""Predicted blocks of a holder whose capacity isn't known: a million tokens at block size 16."""

WALK_BLOCKS_MAX = 2_048
"""How far a side group's next block is looked for: 32 K tokens at block size 16, many turns of a
conversation. What could be reused only up to before that is not credited."""

NEAR_BLOCKS = 4
"""Blocks before the end of an overlap that are looked up one by one."""


NAMED_MIN, NAMED_MAX = 8, 64
"""Masks of at least so many holders are kept with their names, so many of them."""


class Overlap(NamedTuple):
    """Leading blocks that a holder has without a hole. `blocks` counts predictions as well."""

    confirmed_blocks: int
    blocks: int


class OwnershipIndex:
    """Which holder has which block, on which tier.

    `blocks_max` bounds the entries (block, holder, tier) that events may make; past it `store`
    refuses them, and the source is no longer exact. A holder's predicted blocks are bounded by its
    capacity; past it the oldest go, which is also how an engine's own LRU would go about it.
    """

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._capacities: dict[Holder, int] = {}
        self._numbers: dict[Holder, int] = {}
        self._by_number: dict[int, Holder] = {}
        self._bits: dict[Holder, int] = {}  # 1 << number: one object for all blocks of its own
        self._free_numbers: list[int] = []
        self._named: dict[int, tuple[Holder, ...]] = {}  # masks of many that were asked for lately
        self._main = GroupCopies()
        self._masks, self._reusable = self._main.masks, self._main.reusable
        self._sides: dict[SideGroup, GroupCopies] = {}
        self._members: dict[SideGroup, int] = {}  # a mask
        self._memberships: Counter[tuple[Holder, SideGroup]] = Counter()
        self._hybrid = 0  # the mask of holders that have side groups
        self._total = 0
        self._predicted_masks: dict[BlockHash, int] = {}
        self._predicted: dict[Holder, dict[BlockHash, float]] = {}  # block -> expires_at
        self._predicted_total = 0
        self._expiries: list[tuple[float, int, Holder, Sequence[BlockHash]]] = []
        self._expiry_order = 0
        self._scheduled = 0  # blocks in all of `_expiries`
        self.foreign = ForeignPredictions()

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
        self._by_number[number] = holder
        self._bits[holder] = 1 << number
        self._main.counts[holder] = dict.fromkeys(Tier, 0)
        self._predicted[holder] = {}

    def remove_holder(self, holder: Holder) -> None:
        """Forget a holder that has nothing confirmed any more."""
        assert self._main.is_empty_of(holder), (holder, self._main.counts[holder])
        assert not self._bits[holder] & self._hybrid, holder
        self.forget_predictions(holder)
        del self._main.counts[holder], self._predicted[holder], self._capacities[holder]
        number = self._numbers.pop(holder)
        del self._by_number[number], self._bits[holder]
        self._free_numbers.append(number)
        self._named.clear()

    def mask(self, holders: Iterable[Holder]) -> int:
        """Return a set of holders as `find_overlaps` takes it; those not known are left out.

        It stands for them until one of them is removed.
        """
        return sum(self._bits[holder] for holder in set(holders) if holder in self._bits)

    def join(self, holder: Holder, side: SideGroup) -> None:
        """Let the holder's overlaps depend on this side group too, until it has left as often."""
        copies = self._sides.setdefault(side, GroupCopies())
        copies.counts.setdefault(holder, dict.fromkeys(Tier, 0))
        self._memberships[holder, side] += 1
        self._members[side] = self._members.get(side, 0) | self._bits[holder]
        self._hybrid |= self._bits[holder]

    def leave(self, holder: Holder, side: SideGroup) -> None:
        """End a membership; with the last one nothing must be left in the group."""
        if not take_one(self._memberships, (holder, side)) or self.is_member(holder, side):
            return
        copies = self._sides[side]
        assert copies.is_empty_of(holder), (holder, side, copies.counts[holder])
        del copies.counts[holder]
        self._members[side] ^= self._bits[holder]
        if not self._members[side]:
            del self._members[side], self._sides[side]
        if not self.sides_of(holder):
            self._hybrid ^= self._bits[holder]

    def is_member(self, holder: Holder, side: SideGroup) -> bool:
        return (holder, side) in self._memberships

    # --- confirmed --------------------------------------------------------------------------------

    def store(
        self,
        holder: Holder,
        tier: Tier,
        blocks: Sequence[BlockHash],
        side: SideGroup | None = None,
    ) -> int:
        """Note confirmed copies. Return how many, from the first on, were noted before it was full.

        A holder's block may be announced under two names or by two sources; it is then held until
        each has been removed.
        """
        room = self._blocks_max - self._total
        if len(blocks) > room:
            blocks = blocks[:room]
        self._total += len(blocks)
        if side is not None:
            self._sides[side].store(holder, self._bits[holder], tier, blocks)
            return len(blocks)
        self._main.store(holder, self._bits[holder], tier, blocks)
        if tier is Tier.DEVICE:
            self._confirm(holder, blocks)
        return len(blocks)

    def remove(
        self,
        holder: Holder,
        tier: Tier,
        blocks: Sequence[BlockHash],
        side: SideGroup | None = None,
    ) -> None:
        """Note that confirmed copies are gone. One that isn't known is no error."""
        copies = self._main if side is None else self._sides[side]
        self._total -= copies.remove(holder, self._bits[holder], tier, blocks)

    def count(self, holder: Holder, tier: Tier, side: SideGroup | None = None) -> int:
        """Return the blocks that the holder has confirmed on this tier."""
        copies = self._main if side is None else self._sides[side]
        return copies.counts[holder][tier]

    def sides_of(self, holder: Holder) -> list[SideGroup]:
        """Return the side groups on which the holder's overlaps depend."""
        return [side for side, copies in self._sides.items() if holder in copies.counts]

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
        held, bit = self._masks[Tier.DEVICE], self._bits[holder]
        fresh = [block for block in reversed(blocks) if not held.get(block, 0) & bit]
        if not fresh:
            return
        predicted, masks = self._predicted[holder], self._predicted_masks
        count_before = len(predicted)
        if not predicted.keys().isdisjoint(fresh):
            for block in fresh:
                predicted.pop(block, None)  # so that it moves to the young end
        predicted.update(dict.fromkeys(fresh, expires_at))
        for block in fresh:
            masks[block] = masks.get(block, 0) | bit
        self._predicted_total += len(predicted) - count_before
        while len(predicted) > self._capacities[holder]:
            self._drop_prediction(holder, next(iter(predicted)))
        self._schedule_expiry(expires_at, holder, fresh)

    def _confirm(self, holder: Holder, blocks: Sequence[BlockHash]) -> None:
        predicted = self._predicted[holder]
        if predicted:
            for block in blocks:
                if block in predicted:
                    self._drop_prediction(holder, block)

    def shorten_predictions(
        self, holder: Holder, blocks: Sequence[BlockHash], expires_at: float
    ) -> None:
        """Let these predictions end at `expires_at` where they would live longer."""
        predicted = self._predicted[holder]
        if not predicted:
            return
        affected = [block for block in blocks if predicted.get(block, 0.0) > expires_at]
        for block in affected:
            predicted[block] = expires_at
        if affected:
            self._schedule_expiry(expires_at, holder, affected)

    def take_predictions_back(self, holder: Holder, blocks: Sequence[BlockHash]) -> None:
        """Assume these no longer: what they were assumed for did not happen."""
        predicted = self._predicted[holder]
        for block in blocks:
            if block in predicted:
                self._drop_prediction(holder, block)

    def forget_predictions(self, holder: Holder) -> None:
        """Assume nothing of a holder any more, whoever predicted it."""
        self.foreign.forget(holder)
        for block in list(self._predicted[holder]):
            self._drop_prediction(holder, block)

    def expire(self, now: float) -> None:
        """Drop the predictions whose time is over."""
        self.foreign.expire(now)
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
        own = self._expiries[0][0] if self._expiries else None
        foreign = self.foreign.next_expiry()
        return own if foreign is None else min(foreign, own if own is not None else foreign)

    def predicted_count(self, holder: Holder) -> int:
        return len(self._predicted[holder])

    def _schedule_expiry(
        self, expires_at: float, holder: Holder, blocks: Sequence[BlockHash]
    ) -> None:
        self._expiry_order += 1  # makes entries of one instant comparable
        heapq.heappush(self._expiries, (expires_at, self._expiry_order, holder, blocks))
        self._scheduled += len(blocks)
        if self._scheduled > STALE_EXPIRIES_MAX + 2 * self._predicted_total:
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
        self._predicted_total -= 1
        mask = self._predicted_masks[block] ^ self._bits[holder]
        if mask:
            self._predicted_masks[block] = mask
        else:
            del self._predicted_masks[block]

    # --- query ------------------------------------------------------------------------------------

    def find_overlaps(
        self, chain: Sequence[BlockHash], usable_blocks: int, among: int, likely_blocks: int = 0
    ) -> dict[Holder, Overlap]:
        """Return how many leading blocks of `chain` each holder of the mask `among` has.

        At most `usable_blocks`; a holder that has none is absent, not zero. Host and disk copies
        count with device ones: the engine brings them back itself.
        A prefix is taken to be held without holes, since engines evict tails first (vLLM frees a
        request's blocks in reverse order): where a holder's overlap ends is found by bisection, and
        then confirmed on the blocks just before. A hole further inside (after events were lost, or
        with an engine that evicts in another order) makes an overlap too long, never too short: one
        cost is misjudged, and the engine computes what it lacks as always.
        Of a holder with side groups the confirmed blocks are those up to the last position at which
        each side group has what it needs; predicted ones will have it.
        Cost: O(different overlaps x log(usable_blocks)), however many holders share one; O(1) for one
        of `likely_blocks`, the length of a turn that is continued. A side group adds what it needs, and
        a step for each block over which it lacks that (at most `WALK_BLOCKS_MAX`).
        Source: vLLM 0.32 `v1/core/single_type_kv_cache_manager.py`, `find_longest_cache_hit` and
        `free`; docs/decisions/0006.
        """
        end = min(usable_blocks, len(chain))
        if not end:
            return {}
        tiers = [masks for masks in self._reusable if masks]
        have = _look_up(chain, tiers)
        confirmed = _leading_blocks(have, 0, end, among & have(0), likely_blocks)
        overlaps: dict[Holder, Overlap] = {}
        for mask, blocks in confirmed:
            overlaps |= dict.fromkeys(self._holders(mask), Overlap(blocks, blocks))
        if self._predicted_masks:
            self._add_predicted(overlaps, chain, end, among, confirmed)
        if self._hybrid & among:
            self._heed_sides(overlaps, chain, among, confirmed)
        return overlaps

    def find_holders(self, block: BlockHash) -> tuple[frozenset[Holder], frozenset[Holder]]:
        """Return who has this block where an engine can reuse it, and who is predicted to.

        Of the main group; a side group's copies are not asked. For looking at the index, not for routing.
        """
        confirmed = _look_up((block,), self._reusable)(0)
        predicted = self._predicted_masks.get(block, 0)
        return frozenset(self._holders(confirmed)), frozenset(self._holders(predicted))

    def _add_predicted(
        self,
        overlaps: dict[Holder, Overlap],
        chain: Sequence[BlockHash],
        end: int,
        among: int,
        confirmed: Sequence[tuple[int, int]],
    ) -> None:
        """Let predictions go on where confirmed prefixes end: at 0 for holders that have none."""
        predicted = self._predicted_masks
        having = sum(mask for mask, _ in confirmed)
        for mask, start in (*confirmed, (among & ~having, 0)):
            going_on = mask & predicted.get(chain[start], 0) if start < end else 0
            if going_on:
                have = _look_up(chain, [*self._reusable, predicted])
                for longer, blocks in _leading_blocks(have, start, end, going_on):
                    overlaps |= dict.fromkeys(self._holders(longer), Overlap(start, blocks))

    def _heed_sides(
        self,
        overlaps: dict[Holder, Overlap],
        chain: Sequence[BlockHash],
        among: int,
        confirmed: Sequence[tuple[int, int]],
    ) -> None:
        """Shorten confirmed overlaps to where the holders' side groups allow reuse."""
        sides = [
            (side, self._members[side], _look_up(_own_blocks(chain, side), copies.reusable))
            for side, copies in self._sides.items()
            if self._members[side] & among
        ]
        for mask, end in confirmed:
            for shorter, blocks in _reusable_ends(sides, mask & self._hybrid, end):
                for holder in self._holders(shorter):
                    # What was predicted to follow will be computed, with all that it needs.
                    going_on = overlaps[holder].blocks
                    if going_on == end:
                        going_on = blocks
                    overlaps[holder] = Overlap(blocks, going_on)
                    if not going_on:
                        del overlaps[holder]

    def _holders(self, mask: int) -> Sequence[Holder]:
        """Return who is meant by a mask.

        *Why* they are kept: a system prompt is held by the same many for hundreds of requests.
        """
        named = self._named.get(mask)
        if named is None:
            named = tuple(self._read(mask))
            if len(named) >= NAMED_MIN:
                if len(self._named) >= NAMED_MAX:
                    self._named.clear()
                self._named[mask] = named
        return named

    def _read(self, mask: int) -> Iterator[Holder]:
        while mask:
            lowest = mask & -mask
            yield self._by_number[lowest.bit_length() - 1]
            mask ^= lowest


def _look_up(
    chain: Sequence[BlockHash], tiers: Sequence[dict[BlockHash, int]]
) -> Callable[[int], int]:
    """Return a function that tells who has the block at a position, on any of the tiers."""
    if len(tiers) == 1:  # as mostly
        get = tiers[0].get
        return lambda position: get(chain[position], 0)

    def have(position: int) -> int:
        block, mask = chain[position], 0
        for masks in tiers:
            mask |= masks.get(block, 0)
        return mask

    return have


def _own_blocks(chain: Sequence[BlockHash], side: SideGroup) -> Sequence[BlockHash]:
    """Return the hashes of a side group's blocks: each has that of the block it ends with."""
    step = side.stride_blocks
    return chain if step == 1 else chain[step - 1 :: step]


def _reusable_ends(
    sides: Sequence[tuple[SideGroup, int, Callable[[int], int]]], mask: int, end: int
) -> list[tuple[int, int]]:
    """Return up to where holders in `mask`, who have the blocks up to `end`, can reuse them.

    Each entry is a mask and the number of leading blocks. `sides`: each one's members, and who has the
    block of it at a position. What shortens one may let another fail, so all are asked again.
    Source: vLLM 0.32 `v1/core/kv_cache_coordinator.py`, `HybridKVCacheCoordinator`.
    """
    found: list[tuple[int, int]] = []
    spans = [(mask, end)] if mask else []
    while spans:
        mask, end = spans.pop()
        for side, members, have in sides:
            for shortened, blocks in _shortened(side, have, mask & members, end):
                mask ^= shortened
                spans.append((shortened, blocks))
        if mask:
            found.append((mask, end))
    return found


def _shortened(
    side: SideGroup, have: Callable[[int], int], mask: int, end: int
) -> list[tuple[int, int]]:
    """Return who of `mask` can't reuse the blocks up to `end`, and up to where they perhaps can."""
    step, count = side.stride_blocks, end // side.stride_blocks
    if not mask or not end:
        return []
    if count * step < end:
        return [(mask, count * step)]
    if side.needed_blocks is None:
        begun = mask & have(0)
        ends = [(m, n * step) for m, n in _leading_blocks(have, 0, count, begun) if n < count]
        return ends if begun == mask else [*ends, (mask ^ begun, 0)]
    ends = []
    for position in range(count - 1, max(count - side.needed_blocks, 0) - 1, -1):
        missing = mask & ~have(position)
        if missing:
            mask ^= missing
            lower, last = position, max(position - WALK_BLOCKS_MAX, 0)
            while lower > last and not missing & have(lower - 1):  # the least that they need
                lower -= 1
            ends.append((missing, lower * step if lower > last else 0))
            if not mask:
                break
    return ends


def _leading_blocks(
    have: Callable[[int], int], start: int, end: int, mask: int, likely: int = 0
) -> list[tuple[int, int]]:
    """Return where the prefixes end of the holders in `mask`, who have the block at `start`.

    Each entry is a mask of those that have the same number of leading blocks, and that number.
    """
    found: list[tuple[int, int]] = []
    # All of a span's mask have the block at `low`; none has that at `high`, or the chain ends there.
    spans = [(start, end, mask)] if mask else []
    while spans:
        low, high, mask = spans.pop()
        while high - low > 1:
            if low < likely < high:
                middle = likely
            elif high == likely:
                middle = high - 1
            else:
                middle = (low + high) // 2
            held = mask & have(middle)
            if held == mask:
                low = middle
                continue
            if held:
                spans.append((middle, high, held))
                mask ^= held
            high = middle
        # A hole just before the end is noticed; `low` was looked at.
        for position in range(max(high - NEAR_BLOCKS, start + 1), low):
            missing = mask & ~have(position)
            if missing:
                spans.append((start, position, missing))
                mask ^= missing
        if mask:
            found.append((mask, high))
    return found
