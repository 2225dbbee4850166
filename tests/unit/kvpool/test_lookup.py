"""How many leading blocks a pool has, all parts of each, and what it costs to know."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.kvpool.directory import PoolPrefix
from moongate.kvpool.keys import BlockDigest, KeyLayout, Shard
from moongate.kvpool.lookup import THOROUGH_KEYS, PrefixLookup, learn_shards
from moongate.kvpool.memory import MemoryPool
from moongate.kvpool.store import PoolUnavailable, Replica

from .builders import LAYOUT, fill

BIG = 1 << 30
TP4 = KeyLayout("m", [Shard(tp=rank) for rank in range(4)])


def names(count: int) -> list[BlockDigest]:
    return [number.to_bytes(4, "big") for number in range(count)]


def look_up(
    pool: MemoryPool,
    of: Sequence[BlockDigest],
    layout: KeyLayout = LAYOUT,
    likely: int | None = None,
    *,
    has_holes: bool = False,
) -> tuple[int, PrefixLookup]:
    lookup = PrefixLookup(pool, layout, of, has_holes=has_holes)
    return asyncio.run(lookup.run(likely)).blocks, lookup


def test_c78_a_block_without_the_part_of_one_rank_ends_the_prefix() -> None:
    pool, of = MemoryPool(BIG), names(10)
    fill(pool, of, range(10), TP4)
    lost = TP4.key(Shard(tp=2), of[5])
    assert lost == f"m@tp_rank:2@pcp0@dcp0@pp_rank:0@group:0@{of[5].hex()}"
    del pool._replicas[lost]
    blocks, lookup = look_up(pool, of, TP4)
    assert (blocks, lookup.asked_keys, lookup.round_trips) == (5, 40, 1)


def test_a_short_chain_costs_one_question_and_hides_no_hole() -> None:
    pool, of = MemoryPool(BIG), names(40)
    fill(pool, of, [*range(20), *range(21, 40)])
    blocks, lookup = look_up(pool, of, likely=40)
    assert (blocks, lookup.asked_keys, lookup.round_trips) == (20, 40, 1)


@pytest.mark.parametrize("likely", [None, 5_400])
def test_all_of_a_long_chain_but_a_tail_costs_at_most_24_keys_in_4_round_trips(
    likely: int | None,
) -> None:
    pool, of = MemoryPool(BIG), names(5_600)
    fill(pool, of, range(5_563))
    blocks, lookup = look_up(pool, of, likely=likely)
    assert blocks == 5_563
    assert lookup.asked_keys <= 24
    assert lookup.round_trips <= 4


@pytest.mark.parametrize("hole", [0, 1, 300, 4_900, 4_998, 4_999])
def test_a_hole_in_one_rank_ends_a_long_prefix_where_it_is_noticed(hole: int) -> None:
    pool, of = MemoryPool(BIG), names(5_600)
    fill(pool, of, range(5_000), TP4)
    fill_less = [TP4.key(Shard(tp=3), of[position]) for position in range(hole, 5_000)]
    for key in fill_less:
        del pool._replicas[key]
    blocks, lookup = look_up(pool, of, TP4, likely=5_000)
    assert blocks == hole
    assert lookup.round_trips <= 9


def test_what_evicts_is_asked_thoroughly() -> None:
    pool, of = MemoryPool(BIG), names(1_000)
    fill(pool, of, [*range(400), *range(450, 1_000)])
    assert look_up(pool, of, likely=1_000)[0] == 1_000, "nobody told that there may be holes"
    blocks, lookup = look_up(pool, of, likely=1_000, has_holes=True)
    assert blocks == 400
    assert lookup.asked_keys < 2 * THOROUGH_KEYS
    short, lookup = look_up(pool, of[:THOROUGH_KEYS], has_holes=True)
    assert (short, lookup.round_trips) == (THOROUGH_KEYS, 1)


def test_many_parts_leave_room_for_few_places() -> None:
    wide = KeyLayout("m", [Shard(tp=t, pp=p) for t in range(16) for p in range(16)])
    pool, of = MemoryPool(BIG), names(4)
    fill(pool, of, range(3), wide)
    assert look_up(pool, of, wide, likely=4, has_holes=True)[0] == 3


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 400),
    st.sets(st.tuples(st.integers(0, 399), st.integers(0, 3)), max_size=12),
    st.none() | st.integers(0, 400),
    st.booleans(),
)
def test_the_last_block_was_seen_whole_and_the_next_one_was_not(
    count: int, lost: set[tuple[int, int]], likely: int | None, has_holes: bool
) -> None:
    pool, of = MemoryPool(BIG), names(count)
    fill(pool, of, range(count), TP4)
    for position, rank in lost:
        if position < count:
            del pool._replicas[TP4.key(Shard(tp=rank), of[position])]
    blocks, lookup = look_up(pool, of, TP4, likely, has_holes=has_holes)
    gone = {position for position, _ in lost}
    assert blocks == count or blocks in gone
    assert blocks == 0 or blocks - 1 not in gone
    assert lookup.seen_so_far().blocks == blocks
    if count * 4 <= 48:
        assert blocks == min([count, *(position for position in gone if position < count)])


def test_a_prefix_is_described_by_its_last_block() -> None:
    pool, of = MemoryPool(BIG), names(3)
    pair = KeyLayout("m", [Shard(), Shard(tp=1)])
    fill(pool, of, range(2), pair)
    pool._replicas[pair.key(Shard(), of[1])] = Replica("near:1", 100)
    pool._replicas[pair.key(Shard(tp=1), of[1])] = Replica("far:1", 60, on_disk=True)
    prefix = asyncio.run(PrefixLookup(pool, pair, of).run())
    assert prefix == PoolPrefix(2, 160, "near:1", on_disk=True)


def test_nothing_there_and_nothing_to_ask_for() -> None:
    pool = MemoryPool(BIG)
    assert look_up(pool, names(5))[0] == 0
    assert look_up(pool, [])[1].round_trips == 0


# --- broken off -----------------------------------------------------------------------------------


class Failing(MemoryPool):
    """Answers so many questions."""

    answers = 1

    async def look_up(self, keys: Sequence[str]) -> Mapping[str, Replica]:
        if self.answers == 0:
            raise PoolUnavailable("gone")
        self.answers -= 1
        return await super().look_up(keys)


def test_what_was_seen_before_it_was_broken_off_counts() -> None:
    pool, of = Failing(BIG), names(5_600)
    fill(pool, of, range(5_563))
    lookup = PrefixLookup(pool, LAYOUT, of)
    with pytest.raises(PoolUnavailable):
        asyncio.run(lookup.run())
    assert lookup.seen_so_far().blocks == 5_536  # 65 before the chain's end, and so on


def test_of_several_parts_only_whole_blocks_count() -> None:
    pool, of = Failing(BIG), names(5_600)
    fill(pool, of, range(5_563), TP4)
    lookup = PrefixLookup(pool, TP4, of)
    with pytest.raises(PoolUnavailable):
        asyncio.run(lookup.run())
    assert lookup.seen_so_far() == PoolPrefix(0)


# --- which parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shards",
    [
        [Shard()],
        [Shard(tp=rank) for rank in range(4)],
        [Shard(tp=t, pp=p) for t in range(2) for p in range(3)],
        [Shard(pcp=c, dcp=d, group=g) for c in range(2) for d in range(2) for g in range(2)],
        [Shard(tp=rank) for rank in range(16)],
    ],
)
def test_the_parts_of_a_block_are_learned_from_the_pool(shards: list[Shard]) -> None:
    pool, of = MemoryPool(BIG), names(1)
    fill(pool, of, [0], KeyLayout("m", shards))
    assert asyncio.run(learn_shards(pool, LAYOUT, of[0])) == sorted(shards)


def test_a_block_that_is_not_there_has_no_parts() -> None:
    pool, of = MemoryPool(BIG), names(1)
    fill(pool, of, [0], LAYOUT, [Shard(tp=1)])
    assert asyncio.run(learn_shards(pool, LAYOUT, of[0])) is None
