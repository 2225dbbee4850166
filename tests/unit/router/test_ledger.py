"""The ledger: an engine's names for its blocks, translated to ours and counted by copies."""

import pytest

from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.events import BlocksStored
from moongate.router.index import OwnershipIndex
from moongate.router.ledger import Ledger
from moongate.router.model import BlockHash, BlockSpace, Holder, Tier

from .builders import SPACE, A, B, chain, removed, stored

HA, HB = Holder(A), Holder(B)


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


def test_the_first_full_attention_group_decides_and_the_others_are_ignored() -> None:
    ledger = make_ledger()
    assert ledger.store(stored(70, tokens=[1, 2], group=0, is_full_attention=False))
    assert ledger.store(stored(71, tokens=[1, 2], group=1))
    assert ledger.store(stored(72, parent=71, tokens=[3, 4], group=2))
    ledger.remove(removed(71, group=0))
    assert ledger.counts.ignored_blocks == 2
    assert ledger.engine_hashes(Tier.DEVICE) == {71}
    ledger.remove(removed(71, group=1))
    assert ledger.engine_hashes(Tier.DEVICE) == set()


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
