"""How many leading blocks of a prompt a pool has, all parts of each: asked of a `PoolStore`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from moongate.kvpool.directory import PoolPrefix
from moongate.kvpool.keys import BlockDigest, KeyLayout, Shard
from moongate.kvpool.search import EXHAUSTIVE_KEYS, FAR, NEAR, Questions, search_prefix
from moongate.kvpool.store import PoolStore, Replica


class PrefixLookup:
    """One look-up. `asked_keys` and `round_trips` say what it cost."""

    def __init__(self, store: PoolStore, layout: KeyLayout, digests: Sequence[BlockDigest]) -> None:
        self._store = store
        self._layout = layout
        self._digests = digests
        self._replicas: dict[tuple[int, Shard], Replica] = {}
        self.asked_keys = 0
        self.round_trips = 0

    async def run(self, likely: int | None = None) -> PoolPrefix:
        """Return the leading blocks that are there. `likely`: how many there probably are.

        One shard is searched, as all mostly agree; then the others are looked at where it ends and at
        growing distances before. A shard of which some are missing there is searched as well.
        Raises: PoolUnavailable.
        """
        count, shards = len(self._digests), self._layout.shards
        if count * len(shards) <= EXHAUSTIVE_KEYS:
            there = await self._ask(range(count), shards)
            return self._prefix(next((p for p in range(count) if p not in there), count))
        blocks = await self._search(count, likely, shards[:1])
        if blocks and len(shards) > 1:
            near = {blocks - distance for distance in (*NEAR, *FAR)}
            positions = sorted(p for p in near if p >= 0)
            there = await self._ask(positions, shards[1:])
            missing = [p for p in positions if p not in there]
            if missing:
                blocks = await self._search(missing[0], None, shards)
        return self._prefix(blocks)

    async def _search(self, count: int, likely: int | None, shards: Sequence[Shard]) -> int:
        questions: Questions = search_prefix(count, likely)
        try:
            positions = next(questions)
            while True:
                positions = questions.send(await self._ask(positions, shards))
        except StopIteration as end:
            blocks: int = end.value
            return blocks

    async def _ask(self, positions: Sequence[int], shards: Sequence[Shard]) -> Collection[int]:
        """Return the positions of which all these shards are there."""
        if not positions:
            return ()
        keys = {
            self._layout.key(shard, self._digests[position]): (position, shard)
            for position in positions
            for shard in shards
        }
        self.round_trips += 1
        self.asked_keys += len(keys)
        found = await self._store.look_up(list(keys))
        self._replicas |= {keys[key]: replica for key, replica in found.items() if key in keys}
        return {p for p in positions if all((p, shard) in self._replicas for shard in shards)}

    def _prefix(self, blocks: int) -> PoolPrefix:
        """Return the prefix, described by the last of its copies that was seen."""
        seen = [position for position, _ in self._replicas if position < blocks]
        if not seen:
            return PoolPrefix(blocks)
        parts = [r for (position, _), r in self._replicas.items() if position == max(seen)]
        return PoolPrefix(
            blocks,
            parts[0].size_bytes * len(self._layout.shards),
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
