"""How many leading blocks of a prompt a pool has, all parts of each: asked of a `PoolStore`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from moongate.kvpool.directory import PoolPrefix
from moongate.kvpool.keys import BlockDigest, KeyLayout, Shard
from moongate.kvpool.search import BELOW, FAR, search_prefix
from moongate.kvpool.store import PoolStore, Replica

EXHAUSTIVE_KEYS = 48
"""So few keys are all asked for at once: one round trip, and holes can't hide."""

THOROUGH_KEYS = 200
"""So many, one call, are asked for of a pool that evicts: what it evicts are any blocks of a prefix."""

CONFIRMATIONS_MAX = 3
"""A prefix in which a hole was found is confirmed again, but not for ever."""


class PrefixLookup:
    """One look-up. `asked_keys` and `round_trips` say what it cost.

    `has_holes`: blocks may be missing from within a prefix, as the pool has lately evicted some or has
    lost a segment.
    """

    def __init__(
        self,
        store: PoolStore,
        layout: KeyLayout,
        digests: Sequence[BlockDigest],
        *,
        has_holes: bool = False,
    ) -> None:
        self._store = store
        self._layout = layout
        self._digests = digests
        self._has_holes = has_holes
        self._replicas: dict[tuple[int, Shard], Replica] = {}
        self._missing = len(digests)  # the first block of which a part is known to be missing
        self.asked_keys = 0
        self.round_trips = 0

    async def run(self, likely: int | None = None) -> PoolPrefix:
        """Return the leading blocks that are there. `likely`: how many there probably are.

        One shard is searched, as all mostly agree; then the others are looked at where it ends and at
        growing distances before, and with holes all of them at many places. From where some are missing
        on all are searched.
        Raises: PoolUnavailable.
        """
        count, shards = len(self._digests), self._layout.shards
        if count * len(shards) <= (THOROUGH_KEYS if self._has_holes else EXHAUSTIVE_KEYS):
            await self._ask(range(count), shards)
            return self._prefix(self._missing)
        blocks = await self._search(count, likely, shards[:1])
        for _ in range(CONFIRMATIONS_MAX):
            await self._ask(self._confirming(blocks), shards)
            if self._missing >= blocks:
                break
            blocks = await self._search(self._missing, None, shards)
        return self._prefix(blocks)

    def seen_so_far(self) -> PoolPrefix:
        """Return the prefix that a look-up which was broken off had seen: at least so much is there."""
        whole = (p + 1 for p in {p for p, _ in self._replicas} if self._is_whole(p))
        return self._prefix(max((p for p in whole if p <= self._missing), default=0))

    def _confirming(self, blocks: int) -> list[int]:
        """Return the positions before the end of a prefix that all of its shards are looked at."""
        positions: set[int] = set()
        if self._has_holes:
            places = THOROUGH_KEYS // len(self._layout.shards)
            positions.update(range(0, blocks, max(-(-blocks // places), 1)) if places else ())
        if len(self._layout.shards) > 1:
            positions.update(blocks - distance for distance in (*BELOW, *FAR))
        return sorted(p for p in positions if p >= 0 and not self._is_whole(p))

    async def _search(self, count: int, likely: int | None, shards: Sequence[Shard]) -> int:
        questions = search_prefix(count, likely)
        try:
            positions = next(questions)
            while True:
                positions = questions.send(await self._ask(positions, shards))
        except StopIteration as end:
            blocks: int = end.value
            return blocks

    async def _ask(self, positions: Iterable[int], shards: Sequence[Shard]) -> Collection[int]:
        """Return the positions of which all these shards are there; ask for those not seen there."""
        parts = [(position, shard) for position in positions for shard in shards]
        keys = {
            self._layout.key(shard, self._digests[position]): (position, shard)
            for position, shard in parts
            if (position, shard) not in self._replicas
        }
        if keys:
            self.round_trips += 1
            self.asked_keys += len(keys)
            found = await self._store.look_up(list(keys))
            self._replicas |= {keys[key]: replica for key, replica in found.items() if key in keys}
        missing = {position for position, shard in parts if (position, shard) not in self._replicas}
        self._missing = min([self._missing, *missing])
        return {position for position, _ in parts} - missing

    def _is_whole(self, position: int) -> bool:
        return all((position, shard) in self._replicas for shard in self._layout.shards)

    def _prefix(self, blocks: int) -> PoolPrefix:
        """Return the prefix, described by the last of its copies that was seen."""
        last = max((p for p, _ in self._replicas if p < blocks), default=None)
        if last is None:
            return PoolPrefix(blocks)
        parts = [r for (position, _), r in self._replicas.items() if position == last]
        size_bytes = sum(part.size_bytes for part in parts)
        return PoolPrefix(
            blocks,
            size_bytes * len(self._layout.shards) // len(parts),
            parts[0].endpoint,
            any(part.on_disk for part in parts),
        )


EXTENTS = Shard(tp=16, pcp=4, dcp=8, pp=8, group=4)
"""The largest ranks that are looked for, plus one."""


async def learn_shards(
    store: PoolStore, layout: KeyLayout, digest: BlockDigest
) -> Sequence[Shard] | None:
    """Return in which parts a block is stored that an engine has just stored. None: in none.

    Each rank is looked for by itself, along its own axis; engines number them without gaps.
    Raises: PoolUnavailable.
    """
    axes = [
        [Shard(**{axis: rank}) for rank in range(extent)]
        for axis, extent in EXTENTS._asdict().items()
    ]
    keys = {layout.key(shard, digest): shard for axis in axes for shard in axis}
    found = {keys[key] for key in await store.look_up(list(keys))}
    if Shard() not in found:
        return None
    sizes = (
        next((rank for rank, shard in enumerate(axis) if shard not in found), len(axis))
        for axis in axes
    )
    return [Shard(*ranks) for ranks in itertools.product(*map(range, sizes))]
