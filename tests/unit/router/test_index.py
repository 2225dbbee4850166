"""The ownership index: who has which leading blocks, confirmed and predicted."""

import pytest

from moongate.router.index import PREDICTIONS_MAX, Overlap, OwnershipIndex
from moongate.router.model import BlockHash, Holder, Tier

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
    for block in blocks:
        assert index.store(holder, tier, block)


# --- overlap --------------------------------------------------------------------------------------


def test_an_overlap_ends_at_the_first_hole() -> None:
    index = make_index(HA)
    store(index, HA, H[0], H[1], H[3])
    assert index.find_overlaps(H[:4], 4, [HA]) == {HA: Overlap(2, 2)}


def test_each_holder_has_its_own_overlap_and_one_that_has_none_is_absent() -> None:
    index = make_index(HA, HB, HC)
    store(index, HA, H[0])
    store(index, HB, H[0], H[1], H[2])
    store(index, HC, H[1])
    assert index.find_overlaps(H[:3], 3, [HA, HB, HC]) == {HA: Overlap(1, 1), HB: Overlap(3, 3)}


def test_only_the_holders_asked_for_are_in_the_answer() -> None:
    index = make_index(HA, HB)
    store(index, HA, H[0])
    store(index, HB, H[0])
    assert index.find_overlaps(H[:1], 1, [HB, HC]) == {HB: Overlap(1, 1)}
    assert index.find_overlaps(H[:1], 1, []) == {}


def test_an_overlap_is_at_most_what_is_usable() -> None:
    index = make_index(HA)
    store(index, HA, H[0], H[1], H[2])
    assert index.find_overlaps(H[:3], 2, [HA]) == {HA: Overlap(2, 2)}


def test_host_and_disk_copies_fill_holes_and_pool_copies_do_not() -> None:
    index = make_index(HA)
    store(index, HA, H[0])
    store(index, HA, H[1], tier=Tier.HOST)
    store(index, HA, H[2], tier=Tier.DISK)
    store(index, HA, H[3], tier=Tier.POOL)
    assert index.find_overlaps(H[:4], 4, [HA]) == {HA: Overlap(3, 3)}


def test_predictions_lengthen_an_overlap_and_are_told_apart() -> None:
    index = make_index(HA)
    store(index, HA, H[0])
    index.predict(HA, H[:3], expires_at=60.0)
    assert index.find_overlaps(H[:4], 4, [HA]) == {HA: Overlap(1, 3)}


def test_ranks_of_one_instance_are_holders_of_their_own() -> None:
    rank_0, rank_1 = Holder(A, 0), Holder(A, 1)
    index = make_index(rank_0, rank_1)
    store(index, rank_1, H[0])
    assert index.find_overlaps(H[:1], 1, [rank_0, rank_1]) == {rank_1: Overlap(1, 1)}


# --- confirmed ------------------------------------------------------------------------------------


def test_counts_follow_what_is_stored_and_removed() -> None:
    index = make_index(HA, HB)
    store(index, HA, H[0], H[1])
    store(index, HB, H[0], tier=Tier.HOST)
    assert (index.count(HA, Tier.DEVICE), index.count(HB, Tier.HOST), index.total) == (2, 1, 3)
    index.remove(HA, Tier.DEVICE, H[0])
    assert (index.count(HA, Tier.DEVICE), index.count(HB, Tier.HOST), index.total) == (1, 1, 2)


def test_removing_one_holders_copy_leaves_the_others() -> None:
    index = make_index(HA, HB)
    store(index, HA, H[0])
    store(index, HB, H[0])
    index.remove(HA, Tier.DEVICE, H[0])
    assert index.find_overlaps(H[:1], 1, [HA, HB]) == {HB: Overlap(1, 1)}


def test_removing_what_is_not_known_is_no_error() -> None:
    index = make_index(HA)
    index.remove(HA, Tier.DEVICE, H[0])
    assert index.total == 0


def test_a_block_announced_twice_is_counted_once_and_goes_with_the_second_removal() -> None:
    index = make_index(HA)
    store(index, HA, H[0], H[0], H[0])
    assert (index.count(HA, Tier.DEVICE), index.total) == (1, 3)
    index.remove(HA, Tier.DEVICE, H[0])
    index.remove(HA, Tier.DEVICE, H[0])
    assert index.find_overlaps(H[:1], 1, [HA]) == {HA: Overlap(1, 1)}
    index.remove(HA, Tier.DEVICE, H[0])
    assert index.find_overlaps(H[:1], 1, [HA]) == {}
    assert index.total == 0


def test_a_full_index_refuses_until_there_is_room_again() -> None:
    index = make_index(HA, HB, blocks_max=1)
    assert index.store(HA, Tier.DEVICE, H[0])
    assert not index.store(HA, Tier.DEVICE, H[1])
    assert not index.store(HB, Tier.DEVICE, H[0])
    assert not index.store(HA, Tier.DEVICE, H[0])
    assert index.total == 1
    index.remove(HA, Tier.DEVICE, H[0])
    assert index.store(HB, Tier.DEVICE, H[0])


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
    assert index.find_overlaps(H[:1], 1, [HA]) == {HA: Overlap(0, 1)}
    index.expire(70.0)
    assert index.find_overlaps(H[:1], 1, [HA]) == {}


def test_a_confirmation_takes_the_place_of_a_prediction() -> None:
    index = make_index(HA)
    index.predict(HA, H[:1], expires_at=60.0)
    store(index, HA, H[0])
    assert index.predicted_count(HA) == 0
    index.remove(HA, Tier.DEVICE, H[0])
    assert index.find_overlaps(H[:1], 1, [HA]) == {}


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
    assert index.find_overlaps(H[:1], 1, [HA, HB]) == {HB: Overlap(0, 1)}


def test_predictions_are_shortened_and_never_lengthened() -> None:
    index = make_index(HA)
    index.predict(HA, H[:1], expires_at=10.0)
    index.predict(HA, H[1:2], expires_at=60.0)
    index.shorten_predictions(HA, H[:3], expires_at=20.0)
    index.expire(10.0)
    assert index.predicted_count(HA) == 1
    index.expire(20.0)
    assert index.predicted_count(HA) == 0


def test_past_the_capacity_the_oldest_predictions_go_and_of_one_prompt_its_tail() -> None:
    index = OwnershipIndex(100)
    index.add_holder(HA, capacity_blocks=3)
    index.predict(HA, H[:2], expires_at=60.0)
    index.predict(HA, H[2:4], expires_at=60.0)
    assert index.predicted_count(HA) == 3
    assert index.find_overlaps(H[:2], 2, [HA]) == {HA: Overlap(0, 1)}
    index.predict(HA, H[:5], expires_at=60.0)
    assert index.find_overlaps(H[:5], 5, [HA]) == {HA: Overlap(0, 3)}


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
    assert index.find_overlaps(H[:2], 2, [HA, HB, HC]) == {}
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
