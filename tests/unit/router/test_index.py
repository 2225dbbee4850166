"""The ownership index: who has which leading blocks, confirmed and predicted."""

from collections import UserList
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.router.index import NAMED_MIN, NEAR_BLOCKS, PREDICTIONS_MAX, Overlap, OwnershipIndex
from moongate.router.model import BlockHash, Holder, InstanceId, SideGroup, Tier

from .builders import A, B, C

HA, HB, HC = Holder(A), Holder(B), Holder(C)
H = [BlockHash(bytes([n])) for n in range(6)]


def make_index(*holders: Holder, blocks_max: int = 100) -> OwnershipIndex:
    index = OwnershipIndex(blocks_max)
    for holder in holders:
        index.add_holder(holder)
    return index


def store(
    index: OwnershipIndex, holder: Holder, *blocks: BlockHash, tier: Tier = Tier.DEVICE
) -> None:
    assert index.store(holder, tier, blocks) == len(blocks)


def overlaps(
    index: OwnershipIndex, chain: Sequence[BlockHash], usable: int, holders: Sequence[Holder]
) -> dict[Holder, Overlap]:
    return index.find_overlaps(chain, usable, index.mask(holders))


# --- overlap --------------------------------------------------------------------------------------


def test_an_overlap_ends_at_the_first_hole() -> None:
    index = make_index(HA)
    store(index, HA, H[0], H[1], H[3])
    assert overlaps(index, H[:4], 4, [HA]) == {HA: Overlap(2, 2)}


def test_each_holder_has_its_own_overlap_and_one_that_has_none_is_absent() -> None:
    index = make_index(HA, HB, HC)
    store(index, HA, H[0])
    store(index, HB, H[0], H[1], H[2])
    store(index, HC, H[1])
    assert overlaps(index, H[:3], 3, [HA, HB, HC]) == {HA: Overlap(1, 1), HB: Overlap(3, 3)}


def test_one_that_comes_in_anothers_place_is_told_by_its_own_name() -> None:
    many = [Holder(InstanceId(f"i{n}")) for n in range(NAMED_MIN + 1)]
    index = make_index(*many)
    for holder in many:
        store(index, holder, H[0])
    assert overlaps(index, H[:1], 1, many) == dict.fromkeys(many, Overlap(1, 1))
    index.remove(many[3], Tier.DEVICE, [H[0]])
    index.remove_holder(many[3])
    index.add_holder(HA)
    store(index, HA, H[0])
    now = [*(h for h in many if h != many[3]), HA]
    assert overlaps(index, H[:1], 1, now) == dict.fromkeys(now, Overlap(1, 1))


def test_a_block_tells_who_has_it_where_it_can_be_reused_and_who_is_to_get_it() -> None:
    index = make_index(HA, HB, HC)
    store(index, HA, H[0])
    store(index, HB, H[0], tier=Tier.HOST)
    store(index, HC, H[0], tier=Tier.POOL)
    index.predict(HC, H[:2], expires_at=9.0)
    assert index.find_holders(H[0]) == (frozenset({HA, HB}), frozenset({HC}))
    assert index.find_holders(H[1]) == (frozenset(), frozenset({HC}))
    assert index.find_holders(H[2]) == (frozenset(), frozenset())


def test_only_the_holders_asked_for_are_in_the_answer() -> None:
    index = make_index(HA, HB)
    store(index, HA, H[0])
    store(index, HB, H[0])
    assert overlaps(index, H[:1], 1, [HB, HC]) == {HB: Overlap(1, 1)}
    assert overlaps(index, H[:1], 1, []) == {}


def test_an_overlap_is_at_most_what_is_usable() -> None:
    index = make_index(HA)
    store(index, HA, H[0], H[1], H[2])
    assert overlaps(index, H[:3], 2, [HA]) == {HA: Overlap(2, 2)}


def test_host_and_disk_copies_fill_holes_and_pool_copies_do_not() -> None:
    index = make_index(HA)
    store(index, HA, H[0])
    store(index, HA, H[1], tier=Tier.HOST)
    store(index, HA, H[2], tier=Tier.DISK)
    store(index, HA, H[3], tier=Tier.POOL)
    assert overlaps(index, H[:4], 4, [HA]) == {HA: Overlap(3, 3)}


def test_predictions_lengthen_an_overlap_and_are_told_apart() -> None:
    index = make_index(HA)
    store(index, HA, H[0])
    index.predict(HA, H[:3], expires_at=60.0)
    assert overlaps(index, H[:4], 4, [HA]) == {HA: Overlap(1, 3)}


def test_ranks_of_one_instance_are_holders_of_their_own() -> None:
    rank_0, rank_1 = Holder(A, 0), Holder(A, 1)
    index = make_index(rank_0, rank_1)
    store(index, rank_1, H[0])
    assert overlaps(index, H[:1], 1, [rank_0, rank_1]) == {rank_1: Overlap(1, 1)}


def test_an_empty_chain_overlaps_with_nothing() -> None:
    index = make_index(HA)
    store(index, HA, H[0])
    assert overlaps(index, [], 0, [HA]) == {}
    assert overlaps(index, H[:1], 0, [HA]) == {}


def test_a_prediction_without_the_block_before_lengthens_nothing() -> None:
    index = make_index(HA)
    store(index, HA, H[0])
    index.predict(HA, H[2:3], expires_at=60.0)
    assert overlaps(index, H[:4], 4, [HA]) == {HA: Overlap(1, 1)}


LONG = [BlockHash(n.to_bytes(4, "big")) for n in range(40)]


@pytest.mark.parametrize("hole", range(1, len(LONG)))
def test_a_hole_shortly_before_the_end_of_an_overlap_is_noticed(hole: int) -> None:
    for end in range(hole + 1, min(hole + NEAR_BLOCKS, len(LONG)) + 1):
        index = make_index(HA)
        store(index, HA, *LONG[:hole], *LONG[hole + 1 : end])
        assert overlaps(index, LONG, len(LONG), [HA]) == {HA: Overlap(hole, hole)}


def test_where_an_overlap_likely_ends_few_blocks_are_looked_up() -> None:
    index = make_index(HA)
    store(index, HA, *LONG[:30])

    class Counted(UserList[BlockHash]):
        looked_up = 0

        def __getitem__(self, position: Any) -> Any:
            self.looked_up += 1
            return self.data[position]

    chain = Counted(LONG)
    found = index.find_overlaps(chain, len(LONG), index.mask([HA]), likely_blocks=30)
    assert (found, chain.looked_up) == ({HA: Overlap(30, 30)}, 3 + NEAR_BLOCKS - 1)


def test_a_hole_far_inside_may_be_taken_for_held() -> None:
    index = make_index(HA)
    store(index, HA, *LONG[:3], *LONG[4:])
    assert overlaps(index, LONG, len(LONG), [HA]) == {HA: Overlap(40, 40)}
    store(index, HA, LONG[3])
    index.remove(HA, Tier.DEVICE, LONG[:1])
    assert overlaps(index, LONG, len(LONG), [HA]) == {}, "the first block is always looked up"


Held = list[tuple[int, int, int]]
"""For each holder how many leading blocks it has on the device, then on the host, then predicted."""

HOLDERS = [Holder(A, rank) for rank in range(70)]


def hold_prefixes(held: Held) -> OwnershipIndex:
    index = make_index(*HOLDERS, blocks_max=10_000)
    for holder, (device, host, predicted) in zip(HOLDERS, held, strict=False):
        store(index, holder, *LONG[:device])
        store(index, holder, *LONG[device : device + host], tier=Tier.HOST)
        index.predict(holder, LONG[device + host :][:predicted], expires_at=60.0)
    return index


def walk(index: OwnershipIndex, holder: Holder, chain: Sequence[BlockHash]) -> Overlap | None:
    """Return the overlap found by looking at one block after the other."""
    bit = index.mask([holder])
    tiers = [index._masks[tier] for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)]

    def leading(tables: Sequence[dict[BlockHash, int]]) -> int:
        has = (any(table.get(block, 0) & bit for table in tables) for block in chain)
        return next((n for n, has_it in enumerate(has) if not has_it), len(chain))

    found = Overlap(leading(tiers), leading([*tiers, index._predicted_masks]))
    return found if found.blocks else None


@settings(deadline=None)
@given(
    held=st.lists(st.tuples(*[st.integers(0, 45)] * 3), max_size=len(HOLDERS)),
    usable=st.integers(0, len(LONG)),
    likely=st.integers(0, 45),
)
def test_the_overlaps_of_prefixes_are_what_a_walk_over_all_blocks_finds(
    held: Held, usable: int, likely: int
) -> None:
    index = hold_prefixes(held)
    found = index.find_overlaps(LONG, usable, index.mask(HOLDERS), likely)
    walked = {holder: walk(index, holder, LONG[:usable]) for holder in HOLDERS}
    assert found == {holder: overlap for holder, overlap in walked.items() if overlap is not None}


@settings(deadline=None)
@given(
    confirmed=st.lists(st.frozensets(st.integers(0, 39)), min_size=1, max_size=5),
    predicted=st.lists(st.frozensets(st.integers(0, 39)), min_size=1, max_size=5),
    likely=st.integers(0, 45),
)
def test_holes_make_an_overlap_too_long_at_most(
    confirmed: list[frozenset[int]], predicted: list[frozenset[int]], likely: int
) -> None:
    index = make_index(*HOLDERS, blocks_max=10_000)
    for holder, blocks in zip(HOLDERS, confirmed, strict=False):
        store(index, holder, *(LONG[n] for n in sorted(blocks)))
    for holder, blocks in zip(HOLDERS, predicted, strict=False):
        index.predict(holder, [LONG[n] for n in sorted(blocks)], expires_at=60.0)
    found = index.find_overlaps(LONG, len(LONG), index.mask(HOLDERS), likely)
    for holder in HOLDERS:
        walked = walk(index, holder, LONG) or Overlap(0, 0)
        overlap = found.get(holder, Overlap(0, 0))
        assert walked.confirmed_blocks <= overlap.confirmed_blocks <= overlap.blocks
        assert walked.blocks <= overlap.blocks


# --- confirmed ------------------------------------------------------------------------------------


def test_counts_follow_what_is_stored_and_removed() -> None:
    index = make_index(HA, HB)
    store(index, HA, H[0], H[1])
    store(index, HB, H[0], tier=Tier.HOST)
    assert (index.count(HA, Tier.DEVICE), index.count(HB, Tier.HOST), index.total) == (2, 1, 3)
    index.remove(HA, Tier.DEVICE, [H[0]])
    assert (index.count(HA, Tier.DEVICE), index.count(HB, Tier.HOST), index.total) == (1, 1, 2)


def test_removing_one_holders_copy_leaves_the_others() -> None:
    index = make_index(HA, HB)
    store(index, HA, H[0])
    store(index, HB, H[0])
    index.remove(HA, Tier.DEVICE, [H[0]])
    assert overlaps(index, H[:1], 1, [HA, HB]) == {HB: Overlap(1, 1)}


def test_removing_what_is_not_known_is_no_error() -> None:
    index = make_index(HA)
    index.remove(HA, Tier.DEVICE, [H[0]])
    assert index.total == 0


def test_a_block_announced_twice_is_counted_once_and_goes_with_the_second_removal() -> None:
    index = make_index(HA)
    store(index, HA, H[0], H[0], H[0])
    assert (index.count(HA, Tier.DEVICE), index.total) == (1, 3)
    index.remove(HA, Tier.DEVICE, [H[0]])
    index.remove(HA, Tier.DEVICE, [H[0]])
    assert overlaps(index, H[:1], 1, [HA]) == {HA: Overlap(1, 1)}
    index.remove(HA, Tier.DEVICE, [H[0]])
    assert overlaps(index, H[:1], 1, [HA]) == {}
    assert index.total == 0


def test_a_block_announced_twice_leaves_others_as_they_are() -> None:
    index = make_index(HA, HB)
    store(index, HA, H[0], H[0], H[1])
    store(index, HB, H[1])
    index.remove(HA, Tier.DEVICE, H[:2])
    assert (index.count(HA, Tier.DEVICE), index.count(HB, Tier.DEVICE), index.total) == (1, 1, 2)


def test_a_full_index_refuses_until_there_is_room_again() -> None:
    index = make_index(HA, HB, blocks_max=1)
    assert index.store(HA, Tier.DEVICE, H[:2]) == 1
    assert index.store(HB, Tier.DEVICE, H[:1]) == 0
    assert index.store(HA, Tier.DEVICE, H[:1]) == 0
    assert index.total == 1
    index.remove(HA, Tier.DEVICE, H[:2])
    assert index.store(HB, Tier.DEVICE, H[:1]) == 1


# --- predicted ------------------------------------------------------------------------------------


def test_a_prediction_ends_at_its_time() -> None:
    index = make_index(HA)
    index.predict(HA, H[:2], expires_at=60.0)
    assert index.next_expiry() == 60.0
    index.expire(59.9)
    assert index.predicted_count(HA) == 2
    index.expire(60.0)
    assert index.predicted_count(HA) == 0
    assert index.next_expiry() is None


def test_a_prediction_made_again_lives_until_its_later_time() -> None:
    index = make_index(HA)
    index.predict(HA, H[:1], expires_at=60.0)
    index.predict(HA, H[:1], expires_at=70.0)
    index.expire(60.0)
    assert overlaps(index, H[:1], 1, [HA]) == {HA: Overlap(0, 1)}
    index.expire(70.0)
    assert overlaps(index, H[:1], 1, [HA]) == {}


def test_a_confirmation_takes_the_place_of_a_prediction() -> None:
    index = make_index(HA)
    index.predict(HA, H[:1], expires_at=60.0)
    store(index, HA, H[0])
    assert index.predicted_count(HA) == 0
    index.remove(HA, Tier.DEVICE, [H[0]])
    assert overlaps(index, H[:1], 1, [HA]) == {}


def test_a_host_copy_does_not_confirm_a_prediction() -> None:
    index = make_index(HA)
    index.predict(HA, H[:1], expires_at=60.0)
    store(index, HA, H[0], tier=Tier.HOST)
    assert index.predicted_count(HA) == 1


def test_what_is_confirmed_is_not_predicted() -> None:
    index = make_index(HA)
    store(index, HA, H[0])
    index.predict(HA, H[:1], expires_at=60.0)
    assert index.predicted_count(HA) == 0
    assert index.next_expiry() is None


def test_predictions_of_two_holders_are_apart() -> None:
    index = make_index(HA, HB)
    index.predict(HA, H[:1], expires_at=60.0)
    index.predict(HB, H[:1], expires_at=60.0)
    index.forget_predictions(HA)
    assert overlaps(index, H[:1], 1, [HA, HB]) == {HB: Overlap(0, 1)}


def test_predictions_are_shortened_and_never_lengthened() -> None:
    index = make_index(HA)
    index.predict(HA, H[:1], expires_at=10.0)
    index.predict(HA, H[1:2], expires_at=60.0)
    index.shorten_predictions(HA, H[:3], expires_at=20.0)
    index.shorten_predictions(HA, H[:3], expires_at=30.0)
    index.expire(10.0)
    assert index.predicted_count(HA) == 1
    index.expire(20.0)
    assert index.predicted_count(HA) == 0


def test_where_nothing_is_predicted_there_is_nothing_to_shorten() -> None:
    index = make_index(HA)
    index.shorten_predictions(HA, H[:3], expires_at=20.0)
    assert index.next_expiry() is None


def test_past_the_capacity_the_oldest_predictions_go_and_of_one_prompt_its_tail() -> None:
    index = OwnershipIndex(100)
    index.add_holder(HA, capacity_blocks=3)
    index.predict(HA, H[:2], expires_at=60.0)
    index.predict(HA, H[2:4], expires_at=60.0)
    assert index.predicted_count(HA) == 3
    assert overlaps(index, H[:2], 2, [HA]) == {HA: Overlap(0, 1)}
    index.predict(HA, H[:5], expires_at=60.0)
    assert overlaps(index, H[:5], 5, [HA]) == {HA: Overlap(0, 3)}


def test_a_capacity_told_later_counts_and_one_not_told_changes_nothing() -> None:
    index = make_index(HA)
    many = [BlockHash(n.to_bytes(4)) for n in range(PREDICTIONS_MAX + 1)]
    index.predict(HA, many, expires_at=60.0)
    assert index.predicted_count(HA) == PREDICTIONS_MAX
    index.add_holder(HA, capacity_blocks=2)
    index.add_holder(HA)
    index.predict(HA, many[:1], expires_at=60.0)
    assert index.predicted_count(HA) == 2


# --- holders --------------------------------------------------------------------------------------


def test_a_removed_holder_leaves_nothing_to_the_one_that_gets_its_number() -> None:
    index = make_index(HA, HB)
    index.predict(HA, H[:2], expires_at=60.0)
    index.remove_holder(HA)
    index.add_holder(HC)
    assert index.holders == (HB, HC)
    assert overlaps(index, H[:2], 2, [HA, HB, HC]) == {}
    index.expire(60.0)  # the entry of the holder that is gone
    assert index.next_expiry() is None


def test_a_holder_that_still_has_confirmed_blocks_is_not_removed() -> None:
    index = make_index(HA)
    store(index, HA, H[0])
    with pytest.raises(AssertionError):
        index.remove_holder(HA)


def test_predictions_made_again_and_again_leave_no_endless_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moongate.router.index.STALE_EXPIRIES_MAX", 10)
    index = make_index(HA, HB)
    index.predict(HB, H[4:5], expires_at=7.0)
    for turn in range(100):
        index.predict(HA, H[:3], expires_at=10.0 + turn)
        assert sum(len(blocks) for _, _, _, blocks in index._expiries) <= 10 + 2 * 4
    index.expire(7.0)
    assert (index.predicted_count(HA), index.predicted_count(HB)) == (3, 0)
    index.expire(108.9)
    assert index.predicted_count(HA) == 3
    index.expire(109.0)
    assert index.predicted_count(HA) == 0


# --- side groups ----------------------------------------------------------------------------------

NEAR, FAR, WHOLE = SideGroup(1, 2, 1), SideGroup(2, 5, 1), SideGroup(3, None, 1)
PAIRS = SideGroup(4, 1, 2)


def hold(index: OwnershipIndex, holder: Holder, side: SideGroup, *positions: int) -> None:
    """Let the holder be a member of the group and have the blocks of `LONG` at these positions."""
    if not index.is_member(holder, side):
        index.join(holder, side)
    blocks = [LONG[position] for position in positions]
    assert index.store(holder, Tier.DEVICE, blocks, side) == len(blocks)


def test_a_window_has_to_be_held_before_the_end_of_an_overlap_and_nowhere_else() -> None:
    index = make_index(HA)
    store(index, HA, *LONG[:20])
    hold(index, HA, NEAR, 8, 9)
    assert overlaps(index, LONG, 40, [HA]) == {HA: Overlap(10, 10)}
    assert overlaps(index, LONG[:9], 9, [HA]) == {}
    hold(index, HA, NEAR, 18, 19)
    assert overlaps(index, LONG, 40, [HA]) == {HA: Overlap(20, 20)}


def test_near_the_beginning_a_window_is_as_long_as_the_prefix() -> None:
    index = make_index(HA)
    store(index, HA, *LONG[:20])
    hold(index, HA, FAR, 0, 1, 2)
    assert overlaps(index, LONG, 40, [HA]) == {HA: Overlap(3, 3)}


def test_what_one_group_allows_another_may_not() -> None:
    index = make_index(HA)
    store(index, HA, *LONG[:20])
    hold(index, HA, NEAR, 0, 1, 10, 11, 15, 16, 17)
    hold(index, HA, FAR, 0, 1, 2, 3, 4, 12, 13, 14, 15, 16)
    # Full attention allows 20, the near window 18, the far one 17 of these, and the near one that.
    assert overlaps(index, LONG, 40, [HA]) == {HA: Overlap(17, 17)}
    index.remove(HA, Tier.DEVICE, [LONG[16]], NEAR)
    # Now the near one allows 12, the far one 5 of these, and the near one 2.
    assert overlaps(index, LONG, 40, [HA]) == {HA: Overlap(2, 2)}


def test_holders_with_and_without_windows_have_overlaps_of_their_own() -> None:
    index = make_index(HA, HB, HC)
    for holder in (HA, HB, HC):
        store(index, holder, *LONG[:20])
    hold(index, HA, NEAR, 3, 4)
    hold(index, HB, NEAR, 18, 19)
    assert overlaps(index, LONG, 40, [HA, HB, HC]) == {
        HA: Overlap(5, 5),
        HB: Overlap(20, 20),
        HC: Overlap(20, 20),
    }


def test_of_a_group_that_needs_all_the_leading_blocks_count() -> None:
    index = make_index(HA, HB)
    for holder in (HA, HB):
        store(index, holder, *LONG[:20])
    hold(index, HA, WHOLE, *range(7))
    hold(index, HB, WHOLE, *range(1, 7))
    assert overlaps(index, LONG, 40, [HA, HB]) == {HA: Overlap(7, 7)}


def test_reuse_ends_where_larger_blocks_of_a_side_group_end() -> None:
    index = make_index(HA)
    store(index, HA, *LONG[:20])
    hold(index, HA, PAIRS, 3, 9)
    assert overlaps(index, LONG, 19, [HA]) == {HA: Overlap(10, 10)}
    assert overlaps(index, LONG, 9, [HA]) == {HA: Overlap(4, 4)}


def test_predicted_blocks_will_have_their_windows() -> None:
    index = make_index(HA, HB)
    for holder in (HA, HB):
        store(index, holder, *LONG[:20])
        hold(index, holder, NEAR, 3, 4)
    index.predict(HA, LONG[:25], expires_at=60.0)
    assert overlaps(index, LONG, 40, [HA, HB]) == {HA: Overlap(5, 25), HB: Overlap(5, 5)}
    index.remove(HA, Tier.DEVICE, [LONG[3]], NEAR)
    assert overlaps(index, LONG, 40, [HA]) == {HA: Overlap(0, 25)}


def test_a_windows_next_block_is_looked_for_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    index = make_index(HA)
    store(index, HA, *LONG[:20])
    hold(index, HA, NEAR, 8, 9)
    for reach, expected in ((10, {HA: Overlap(10, 10)}), (9, {})):
        monkeypatch.setattr("moongate.router.index.WALK_BLOCKS_MAX", reach)
        assert overlaps(index, LONG, 40, [HA]) == expected


def test_a_group_counts_until_it_was_left_as_often_as_joined() -> None:
    index = make_index(HA)
    store(index, HA, *LONG[:20])
    index.join(HA, NEAR)
    index.join(HA, NEAR)
    index.leave(HA, NEAR)
    assert overlaps(index, LONG, 40, [HA]) == {}
    index.leave(HA, NEAR)
    index.leave(HA, NEAR)
    assert overlaps(index, LONG, 40, [HA]) == {HA: Overlap(20, 20)}
    assert index.sides_of(HA) == []


def test_a_group_is_left_empty_and_before_its_holder_goes() -> None:
    index = make_index(HA)
    hold(index, HA, NEAR, 0)
    with pytest.raises(AssertionError):
        index.leave(HA, NEAR)
    index.join(HA, FAR)
    with pytest.raises(AssertionError):
        index.remove_holder(HA)


def test_side_groups_copies_are_counted_and_bounded_with_the_others() -> None:
    index = make_index(HA, blocks_max=3)
    store(index, HA, H[0])
    index.join(HA, NEAR)
    assert index.store(HA, Tier.DEVICE, H[:3], NEAR) == 2
    assert (index.total, index.count(HA, Tier.DEVICE), index.count(HA, Tier.DEVICE, NEAR)) == (
        3,
        1,
        2,
    )
    index.remove(HA, Tier.DEVICE, H[:3], NEAR)
    assert (index.total, index.count(HA, Tier.DEVICE), index.count(HA, Tier.DEVICE, NEAR)) == (
        1,
        1,
        0,
    )


def is_reusable(held: Sequence[frozenset[int]], sides: Sequence[SideGroup], blocks: int) -> bool:
    """Tell by the rule itself whether a prefix of so many blocks is held in all these groups."""
    for side, positions in zip(sides, held, strict=True):
        ends = [end - 1 for end in range(side.stride_blocks, blocks + 1, side.stride_blocks)]
        needed = ends if side.needed_blocks is None else ends[-side.needed_blocks :]
        if blocks % side.stride_blocks or not positions.issuperset(needed):
            return False
    return True


SIDES = [NEAR, FAR, PAIRS, SideGroup(5, 2, 3), WHOLE]


@settings(deadline=None)
@given(
    held=st.lists(
        st.tuples(*[st.frozensets(st.integers(0, 39))] * (len(SIDES) - 1), st.integers(0, 40)),
        min_size=1,
        max_size=4,
    ),
    count=st.integers(1, len(SIDES)),
    main_blocks=st.integers(0, 40),
    usable=st.integers(0, 40),
)
def test_a_hybrid_overlap_is_the_longest_prefix_that_all_groups_allow(
    held: list[tuple[Any, ...]], count: int, main_blocks: int, usable: int
) -> None:
    index = make_index(*HOLDERS, blocks_max=10_000)
    sides = SIDES[-count:]
    expected: dict[Holder, Overlap] = {}
    for holder, (*windows, whole) in zip(HOLDERS, held, strict=False):
        store(index, holder, *LONG[:main_blocks])
        positions = [*windows, frozenset(range(whole))][-count:]
        for side, of_side in zip(sides, positions, strict=True):
            hold(index, holder, side, *sorted(of_side))
        longest = max(
            n for n in range(min(main_blocks, usable) + 1) if is_reusable(positions, sides, n)
        )
        if longest:
            expected[holder] = Overlap(longest, longest)
    assert overlaps(index, LONG, usable, HOLDERS) == expected
