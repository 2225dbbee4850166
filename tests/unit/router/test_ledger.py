"""The ledger: an engine's names for its blocks, translated to ours and counted by copies."""

import pytest

from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.events import BlocksStored
from moongate.router.index import OwnershipIndex
from moongate.router.ledger import SIDE_GROUPS_MAX, Ledger
from moongate.router.model import (
    WHOLE_PREFIX,
    BlockHash,
    BlockSpace,
    Holder,
    SideGroup,
    Tier,
)

from .builders import SPACE, A, B, chain, removed, side_stored, stored

HA, HB = Holder(A), Holder(B)
WINDOW = 1
"""The number of a group whose window reaches two tokens back."""


def make_ledger(holder: Holder = HA, blocks_max: int = 100) -> Ledger:
    index = OwnershipIndex(blocks_max)
    index.add_holder(holder)
    return Ledger(holder, index)


def overlap(ledger: Ledger, hashes: list[BlockHash]) -> int:
    """Return the leading blocks of `hashes` that the ledger's holder has."""
    index = ledger.index
    found = index.find_overlaps(hashes, len(hashes), index.mask([ledger.holder]))
    return found[ledger.holder].confirmed_blocks if found else 0


# --- names ----------------------------------------------------------------------------------------


def test_stored_blocks_are_found_under_our_names() -> None:
    ledger = make_ledger()
    assert ledger.store(stored(71, 72, tokens=[1, 2, 3, 4]))
    assert overlap(ledger, chain(1, 2, 3, 4)) == 2
    assert ledger.engine_hashes(Tier.DEVICE) == {71, 72}
    assert list(ledger.held()) == [(Tier.DEVICE, block) for block in chain(1, 2, 3, 4)]


def test_blocks_are_chained_to_a_parent_announced_before() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2]))
    assert ledger.store(stored(72, parent=71, tokens=[3, 4]))
    assert overlap(ledger, chain(1, 2, 3, 4)) == 2


def test_a_parent_may_be_on_another_tier() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2], tier=Tier.HOST))
    assert ledger.store(stored(72, parent=71, tokens=[3, 4]))
    assert overlap(ledger, chain(1, 2, 3, 4)) == 2


def test_a_block_whose_parent_was_never_announced_is_an_orphan() -> None:
    ledger = make_ledger()
    assert not ledger.store(stored(72, 73, parent=71, tokens=[3, 4, 5, 6]))
    assert ledger.counts.orphan_blocks == 2
    assert ledger.index.total == 0


def test_c42_engines_with_other_hash_seeds_and_algorithms_share_our_names() -> None:
    one = make_ledger(HA)
    one.index.add_holder(HB)
    other = Ledger(HB, one.index)
    one.store(stored(71, 72, tokens=[1, 2, 3, 4]))
    other.store(stored(b"\x99" * 32, b"\x98" * 32, tokens=[1, 2, 3, 4]))
    assert overlap(one, chain(1, 2, 3, 4)) == overlap(other, chain(1, 2, 3, 4)) == 2


def test_c44_an_adapters_blocks_are_found_by_its_requests_only() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2], lora="ad-1"))
    assert overlap(ledger, chain(1, 2, space=BlockSpace(2, "ad-1"))) == 1
    assert overlap(ledger, chain(1, 2)) == 0


def test_c44_an_adapters_salted_blocks_are_found_by_its_salted_requests_only() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, 72, tokens=[1, 2, 3, 4], lora="ad-1", extra_keys=(("s",), None)))
    space, tokens = BlockSpace(2, "ad-1"), pack_tokens([1, 2, 3, 4])
    assert overlap(ledger, hash_prompt(space, tokens, cache_salt="s")) == 2
    assert overlap(ledger, hash_prompt(space, tokens)) == 0
    assert overlap(ledger, hash_prompt(SPACE, tokens, cache_salt="s")) == 0


def test_c46_the_block_size_is_what_the_events_say() -> None:
    ledger = make_ledger()
    ledger.store(stored(70, tokens=[9, 9], size=2))
    ledger.store(stored(71, tokens=[1, 2, 3, 4], size=4))
    assert ledger.block_size_tokens == 4
    assert overlap(ledger, chain(1, 2, 3, 4, space=BlockSpace(4))) == 1


# --- copies ---------------------------------------------------------------------------------------


def test_a_block_with_two_copies_is_gone_with_the_second_removal() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.remove(removed(71))
    assert overlap(ledger, chain(1, 2)) == 1
    ledger.remove(removed(71))
    assert overlap(ledger, chain(1, 2)) == 0
    assert (ledger.counts.stored_blocks, ledger.counts.removed_blocks) == (2, 2)


def test_of_three_copies_the_last_one_keeps_the_block() -> None:
    ledger = make_ledger()
    for _ in range(3):
        ledger.store(stored(71, tokens=[1, 2]))
    ledger.remove(removed(71, 71))
    assert overlap(ledger, chain(1, 2)) == 1
    ledger.remove(removed(71, 71))
    assert overlap(ledger, chain(1, 2)) == 0
    assert ledger.counts.removed_blocks == 3


def test_after_a_clear_a_block_has_one_copy_again() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.store(stored(72, tokens=[3, 4], tier=Tier.HOST))
    ledger.store(stored(72, tokens=[3, 4], tier=Tier.HOST))
    ledger.clear(Tier.DEVICE)
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.remove(removed(71))
    ledger.remove(removed(72, tier=Tier.HOST))
    assert list(ledger.held()) == [(Tier.HOST, chain(3, 4)[0])]


def test_a_block_with_two_names_is_gone_with_the_second_removal() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.store(stored(81, tokens=[1, 2]))
    ledger.remove(removed(71))
    assert overlap(ledger, chain(1, 2)) == 1
    ledger.remove(removed(81))
    assert overlap(ledger, chain(1, 2)) == 0


def test_a_block_announced_by_two_sources_of_one_holder_is_gone_with_the_second() -> None:
    one = make_ledger()
    other = Ledger(HA, one.index)
    one.store(stored(71, tokens=[1, 2]))
    other.store(stored(71, tokens=[1, 2]))
    one.clear()
    assert overlap(one, chain(1, 2)) == 1
    other.clear()
    assert overlap(one, chain(1, 2)) == 0


def test_a_removal_concerns_its_tier_only() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.store(stored(71, tokens=[1, 2], tier=Tier.HOST))
    ledger.remove(removed(71))
    assert ledger.engine_hashes(Tier.DEVICE) == set()
    assert ledger.engine_hashes(Tier.HOST) == {71}
    assert overlap(ledger, chain(1, 2)) == 1


def test_removing_a_name_that_is_not_known_is_no_error() -> None:
    ledger = make_ledger()
    ledger.remove(removed(71))
    assert ledger.counts.removed_blocks == 0


def test_one_name_with_two_contents_stands_for_the_later() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.store(stored(71, tokens=[8, 9]))
    assert overlap(ledger, chain(1, 2)) == 0
    assert overlap(ledger, chain(8, 9)) == 1
    assert ledger.index.total == 1


def test_a_name_that_stands_for_another_block_now_has_one_copy() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.store(stored(71, tokens=[8, 9]))
    ledger.remove(removed(71))
    assert ledger.is_empty
    assert ledger.index.total == 0


def test_a_name_twice_in_one_event_stands_for_the_later_block() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, 71, tokens=[1, 2, 3, 4]))
    assert list(ledger.held()) == [(Tier.DEVICE, chain(1, 2, 3, 4)[1])]
    assert ledger.index.total == 1


def test_a_clear_of_one_tier_leaves_the_others() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.store(stored(72, tokens=[3, 4], tier=Tier.HOST))
    ledger.clear(Tier.DEVICE)
    assert list(ledger.held()) == [(Tier.HOST, chain(3, 4)[0])]
    ledger.clear()
    assert list(ledger.held()) == []
    assert ledger.index.total == 0


# --- what does not count --------------------------------------------------------------------------


def test_a_full_index_refuses_blocks_and_says_so() -> None:
    ledger = make_ledger(blocks_max=1)
    assert not ledger.store(stored(71, 72, tokens=[1, 2, 3, 4]))
    assert ledger.counts.refused_blocks == 1
    assert ledger.engine_hashes(Tier.DEVICE) == {71}
    ledger.remove(removed(72))
    ledger.remove(removed(71))
    assert ledger.index.total == 0


def test_pool_copies_are_nobodys_own() -> None:
    ledger = make_ledger()
    assert ledger.store(stored(71, tokens=[1, 2], tier=Tier.POOL))
    assert ledger.counts.ignored_blocks == 1
    assert ledger.index.total == 0


def test_groups_that_say_nothing_about_reuse_are_ignored() -> None:
    ledger = make_ledger()
    assert ledger.store(stored(70, tokens=[1, 2], group=0, is_full_attention=False))
    assert ledger.store(stored(71, tokens=[1, 2], group=1))
    assert ledger.store(stored(72, parent=71, tokens=[3, 4], group=2))  # of a kind that isn't told
    ledger.remove(removed(71, group=0))
    assert ledger.counts.ignored_blocks == 2
    assert ledger.engine_hashes(Tier.DEVICE) == {71}
    ledger.remove(removed(71, group=1))
    assert ledger.engine_hashes(Tier.DEVICE) == set()
    assert ledger.sides == []


def test_after_the_cache_was_lost_another_group_may_decide() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[1, 2], group=0))
    ledger.clear()
    ledger.store(stored(72, tokens=[1, 2], group=3))
    assert ledger.engine_hashes(Tier.DEVICE) == {72}


@pytest.mark.parametrize(
    "event",
    [
        stored(71, tokens=[1, 2, 3]),
        stored(71, tokens=[1]),
        stored(71, tokens=[], size=0),
        stored(71, tokens=[1, 2], extra_keys=(None, None)),
    ],
    ids=["too many tokens", "too few tokens", "no block size", "too many extra keys"],
)
def test_an_event_whose_parts_do_not_fit_is_malformed(event: BlocksStored) -> None:
    ledger = make_ledger()
    assert not ledger.store(event)
    assert ledger.counts.malformed_events == 1
    assert ledger.index.total == 0


def test_a_ledger_moves_to_another_holder_with_its_blocks() -> None:
    ledger = make_ledger(HA)
    ledger.index.add_holder(HB)
    ledger.store(stored(71, tokens=[1, 2]))
    ledger.move(HB)
    assert ledger.holder == HB
    both = ledger.index.mask([HA, HB])
    assert ledger.index.find_overlaps(chain(1, 2), 1, both).keys() == {HB}


# --- side groups ----------------------------------------------------------------------------------


def window(*engine_hashes: int, size: int = 2, tier: Tier = Tier.DEVICE) -> BlocksStored:
    return side_stored(*engine_hashes, group=WINDOW, needed_tokens=2, size=size, tier=tier)


def make_hybrid(*in_window: int) -> Ledger:
    """Return a ledger with blocks 71 to 74 in the main group, and these in the other one."""
    ledger = make_ledger()
    ledger.store(stored(71, 72, 73, 74, tokens=range(8)))
    assert ledger.store(window(*in_window))
    return ledger


PROMPT = chain(*range(8))


@pytest.mark.parametrize(
    ("in_window", "expected"),
    [((), 0), ((71,), 1), ((72,), 2), ((71, 73), 3), ((74,), 4), ((71, 72, 73, 74), 4)],
)
def test_a_prefix_is_held_up_to_where_its_window_is(
    in_window: tuple[int, ...], expected: int
) -> None:
    assert overlap(make_hybrid(*in_window), PROMPT) == expected


def test_a_windows_blocks_may_be_told_before_the_main_groups() -> None:
    ledger = make_ledger()
    assert ledger.store(window(72, 99))
    assert (ledger.sides, ledger.index.total) == ([], 0)
    ledger.store(stored(71, 72, tokens=[0, 1, 2, 3]))
    assert ledger.sides == [SideGroup(WINDOW, 1, 1)]
    assert overlap(ledger, PROMPT) == 2
    assert ledger.engine_hashes(Tier.DEVICE, WINDOW) == {72}, "what 99 is isn't known yet"
    ledger.store(stored(99, parent=72, tokens=[4, 5]))
    assert overlap(ledger, PROMPT) == 3


def test_a_waiting_block_has_as_many_copies_as_were_told() -> None:
    ledger = make_ledger()
    ledger.store(window(71))
    ledger.store(window(71))
    ledger.store(window(71, tier=Tier.HOST))
    ledger.remove(removed(71, group=WINDOW, tier=Tier.HOST))
    ledger.store(stored(71, tokens=[0, 1]))
    ledger.remove(removed(71, group=WINDOW))
    assert overlap(ledger, PROMPT) == 1
    ledger.remove(removed(71, group=WINDOW))
    assert overlap(ledger, PROMPT) == 0


def test_a_block_removed_while_it_waits_is_gone() -> None:
    ledger = make_ledger()
    ledger.store(window(71))
    ledger.remove(removed(71, group=WINDOW))
    ledger.store(stored(71, tokens=[0, 1]))
    assert overlap(ledger, PROMPT) == 0


def test_only_so_many_names_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moongate.router.side_names.WAITING_MAX", 2)
    ledger = make_ledger()
    ledger.store(window(71, 72, 73))
    ledger.store(stored(71, 72, 73, tokens=range(6)))
    assert ledger.engine_hashes(Tier.DEVICE, WINDOW) == {72, 73}


def test_a_removal_concerns_its_group_only() -> None:
    ledger = make_hybrid(71, 72)
    ledger.remove(removed(72, group=WINDOW))
    assert overlap(ledger, PROMPT) == 1
    assert len(ledger.engine_hashes(Tier.DEVICE)) == 4
    ledger.remove(removed(71))
    assert ledger.engine_hashes(Tier.DEVICE, WINDOW) == {71}
    assert overlap(ledger, PROMPT) == 0


def test_a_block_of_the_main_group_that_comes_back_finds_its_window_again() -> None:
    ledger = make_hybrid(71)
    ledger.remove(removed(71))
    ledger.store(stored(71, tokens=[0, 1]))
    assert overlap(ledger, PROMPT) == 1


def test_a_window_on_the_host_counts_too() -> None:
    ledger = make_hybrid()
    ledger.store(window(73, tier=Tier.HOST))
    assert overlap(ledger, PROMPT) == 3


def test_a_clear_empties_all_groups_and_leaves_their_needs() -> None:
    ledger = make_hybrid(74)
    ledger.store(window(99))  # it waits
    ledger.clear(Tier.DEVICE)
    assert ledger.is_empty
    assert (ledger.index.total, ledger.sides) == (0, [SideGroup(WINDOW, 1, 1)])
    ledger.store(stored(99, tokens=[0, 1]))
    assert overlap(ledger, PROMPT) == 0
    ledger.store(window(99))
    assert overlap(ledger, PROMPT) == 1


def test_once_the_cache_was_lost_there_may_be_other_groups() -> None:
    ledger = make_hybrid(74)
    ledger.clear()
    assert (ledger.index.total, ledger.sides, ledger.index.sides_of(HA)) == (0, [], [])
    ledger.store(stored(71, tokens=[0, 1]))
    assert overlap(ledger, PROMPT) == 1


def test_a_hybrid_ledger_moves_with_its_groups() -> None:
    ledger = make_hybrid(72)
    ledger.index.add_holder(HB)
    ledger.move(HB)
    assert overlap(ledger, PROMPT) == 2
    assert ledger.index.sides_of(HA) == []
    ledger.index.remove_holder(HA)
    ledger.store(window(74))
    assert overlap(ledger, PROMPT) == 4


def test_two_sources_of_one_holder_share_its_groups() -> None:
    one = make_hybrid(72)
    other = Ledger(HA, one.index)
    other.store(stored(71, tokens=[0, 1]))
    other.store(window(71))
    other.clear()
    assert one.index.sides_of(HA) == [SideGroup(WINDOW, 1, 1)]
    assert overlap(one, PROMPT) == 2
    one.clear()
    one.index.remove_holder(HA)


def test_a_second_full_attention_group_is_needed_from_the_first_block_on() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, 72, 73, 74, tokens=range(8)))
    ledger.store(side_stored(71, 72, 74, group=5, needed_tokens=WHOLE_PREFIX))
    assert overlap(ledger, PROMPT) == 2


@pytest.mark.parametrize(
    ("needed_tokens", "size", "expected"),
    [
        (1, 2, SideGroup(WINDOW, 1, 1)),
        (2, 2, SideGroup(WINDOW, 1, 1)),
        (3, 2, SideGroup(WINDOW, 2, 1)),
        (3, 4, SideGroup(WINDOW, 1, 2)),  # a block of its own for two of the main group
        (5, 4, SideGroup(WINDOW, 2, 2)),
        (3, 1, SideGroup(WINDOW, 2, 1)),  # two for one: those that end with it are looked at
        (2, 3, SideGroup(WINDOW, 1, 3)),
        (WHOLE_PREFIX, 4, SideGroup(WINDOW, None, 2)),
    ],
)
def test_what_a_group_needs_is_told_in_blocks_of_the_main_one(
    needed_tokens: int, size: int, expected: SideGroup
) -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[0, 1]))
    ledger.store(side_stored(9, group=WINDOW, needed_tokens=needed_tokens, size=size))
    assert ledger.sides == [expected]


def test_a_group_with_larger_blocks_allows_reuse_at_their_ends() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, 72, 73, 74, tokens=range(8)))
    ledger.store(side_stored(72, group=WINDOW, needed_tokens=3, size=4))
    assert overlap(ledger, PROMPT) == 2
    assert overlap(ledger, PROMPT[:3]) == 2
    ledger.store(side_stored(74, group=WINDOW, needed_tokens=3, size=4))
    assert [overlap(ledger, PROMPT[:n]) for n in range(1, 5)] == [0, 2, 2, 4]


def test_a_full_index_refuses_a_windows_blocks_and_says_so() -> None:
    ledger = make_ledger(blocks_max=3)
    ledger.store(stored(71, 72, tokens=range(4)))
    assert not ledger.store(window(71, 72))
    assert ledger.counts.refused_blocks == 1
    assert ledger.engine_hashes(Tier.DEVICE, WINDOW) == {71}


def test_a_full_index_refuses_what_waited_and_says_so() -> None:
    ledger = make_ledger(blocks_max=1)
    ledger.store(window(71))
    assert not ledger.store(stored(71, tokens=[0, 1]))
    assert ledger.counts.refused_blocks == 1


def test_past_so_many_groups_the_others_are_ignored() -> None:
    ledger = make_ledger()
    ledger.store(stored(71, tokens=[0, 1], group=1000))
    for number in range(SIDE_GROUPS_MAX + 1):
        ledger.store(side_stored(71, group=number, needed_tokens=2))
    assert len(ledger.sides) == SIDE_GROUPS_MAX
    assert ledger.counts.ignored_blocks == 1


def test_a_part_of_a_block_of_the_main_group_is_ignored() -> None:
    ledger = make_hybrid(72)
    assert ledger.store(stored(99, parent=74, tokens=[8], size=1))
    assert (ledger.block_size_tokens, ledger.counts.ignored_blocks) == (2, 1)
    assert overlap(ledger, PROMPT) == 2
    ledger.remove(removed(99))
    assert ledger.counts.removed_blocks == 0


def test_whole_blocks_after_a_part_of_one_tell_the_size_and_what_is_needed() -> None:
    ledger = make_ledger()
    ledger.store(window(99, 72, 74, size=2))
    ledger.store(stored(99, tokens=[0, 1], size=2))  # of a prompt that fills no block
    assert ledger.sides == [SideGroup(WINDOW, 1, 1)]
    ledger.store(stored(72, 74, tokens=range(8), size=4))
    assert ledger.block_size_tokens == 4
    assert ledger.index.sides_of(HA) == ledger.sides
    assert overlap(ledger, chain(*range(8), space=BlockSpace(4))) == 2
    ledger.remove(removed(74, group=WINDOW))
    assert overlap(ledger, chain(*range(8), space=BlockSpace(4))) == 1
