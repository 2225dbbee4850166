"""The block pool, one rule per test, and its invariants under arbitrary use."""

import hashlib
import pickle
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.simulator.blocks import (
    AllBlocksCleared,
    BlockDigest,
    BlockPool,
    BlockRemoved,
    BlockStored,
    CacheNamespace,
    KvEvent,
    TokenSequence,
    make_root_digest,
)

ROOT = make_root_digest()
SIZE = 2


def sequence(*token_ids: int, salt: str | None = None, lora: str | None = None) -> TokenSequence:
    return TokenSequence(
        token_ids,
        block_size_tokens=SIZE,
        root=ROOT,
        namespace=CacheNamespace(lora_name=lora, cache_salt=salt),
    )


def run(pool: BlockPool, tokens: TokenSequence) -> list[int]:
    """Admit `tokens` as an engine does: reuse, then allocate all; return the reused blocks."""
    reused = pool.find_cached_prefix(tokens)
    assert pool.allocate_slots(tokens, len(tokens), reused)
    return reused


# -- digests ------------------------------------------------------------------------------------


def test_a_digest_is_the_sha256_of_the_pickled_parent_tokens_and_extra_keys() -> None:
    root = hashlib.sha256(pickle.dumps("vllm-none-hash", pickle.HIGHEST_PROTOCOL)).digest()
    first = hashlib.sha256(pickle.dumps((root, (1, 2), None), pickle.HIGHEST_PROTOCOL)).digest()
    assert sequence(1, 2, 3).digests == [first]


def test_a_digest_names_the_whole_prefix() -> None:
    one, other = sequence(1, 2, 3, 4), sequence(9, 9, 3, 4)
    assert one.digests[1] != other.digests[1]


def test_only_full_blocks_have_a_digest() -> None:
    tokens = sequence(1, 2, 3)
    assert len(tokens.digests) == 1
    tokens.append(4)
    assert tokens.digests == sequence(1, 2, 3, 4).digests


def test_the_salt_enters_the_first_block_and_the_lora_name_every_one() -> None:
    namespace = CacheNamespace(lora_name="french", cache_salt="s")
    assert namespace.extra_keys(0) == (("lora", "french", ""), ("cache_salt", "s"))
    assert namespace.extra_keys(1) == (("lora", "french", ""),)
    assert CacheNamespace().extra_keys(0) is None


def test_another_salt_shares_nothing() -> None:
    assert not set(sequence(1, 2, 3, 4, salt="a").digests) & set(sequence(1, 2, 3, 4).digests)


# -- allocation ---------------------------------------------------------------------------------


def test_the_null_block_is_never_usable() -> None:
    pool = BlockPool(4, SIZE)
    assert pool.free_block_ids() == (1, 2, 3)
    assert not pool.allocate_slots(sequence(1, 2, 3, 4, 5, 6, 7), 7)
    assert pool.allocate_slots(sequence(1, 2, 3, 4, 5, 6), 6)
    assert pool.usage == 1.0


def test_a_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(4, SIZE)
    old = sequence(1, 2, 3)
    run(pool, old)
    pool.free(old)
    pool.take_events()
    before = pool.free_block_ids()
    big = sequence(1, 2, 3, 4, 5, 6, 7)
    assert not pool.allocate_slots(big, 7, pool.find_cached_prefix(big))
    assert (pool.free_block_ids(), pool.take_events(), big.block_ids) == (before, (), [])


def test_blocks_are_cached_when_their_tokens_are_scheduled() -> None:
    pool, tokens = BlockPool(4, SIZE), sequence(1, 2, 3, 4, 5)
    assert pool.allocate_slots(tokens, 3)
    assert pool.cached_copies() == {tokens.digests[0]: (1,)}
    assert pool.allocate_slots(tokens, 5)
    assert pool.cached_copies() == {tokens.digests[0]: (1,), tokens.digests[1]: (2,)}


def test_one_event_carries_all_blocks_that_became_full_at_once() -> None:
    pool, tokens = BlockPool(4, SIZE), sequence(1, 2, 3, 4, 5)
    run(pool, tokens)
    assert pool.take_events() == (
        BlockStored(
            digests=tuple(tokens.digests),
            parent=None,
            token_ids=(1, 2, 3, 4),
            extra_keys=(None, None),
            lora_name=None,
            session_id=None,
        ),
    )
    assert pool.take_events() == ()


def test_an_event_names_the_parent_of_its_first_block() -> None:
    pool, tokens = BlockPool(4, SIZE), sequence(1, 2, 3, 4)
    pool.allocate_slots(tokens, 2)
    pool.take_events()
    pool.allocate_slots(tokens, 4)
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert (event.parent, event.token_ids) == (tokens.digests[0], (3, 4))


def test_a_generated_token_fills_a_block_when_it_is_computed_not_when_sampled() -> None:
    pool, tokens = BlockPool(4, SIZE), sequence(1, 2, 3)
    run(pool, tokens)
    tokens.append(4)  # sampled, not computed
    assert tokens.digests[1] not in pool.cached_copies()
    pool.allocate_slots(tokens, 4)  # the next step computes it
    assert tokens.digests[1] in pool.cached_copies()


# -- reuse --------------------------------------------------------------------------------------


def test_reuse_is_the_longest_cached_prefix() -> None:
    pool = BlockPool(8, SIZE)
    run(pool, sequence(1, 2, 3, 4, 5))
    assert run(pool, sequence(1, 2, 3, 4, 6, 7)) == [1, 2]
    assert run(pool, sequence(9, 2, 3, 4, 6)) == []


def test_the_last_token_is_never_reused() -> None:
    pool = BlockPool(8, SIZE)
    run(pool, sequence(1, 2, 3, 4))
    assert pool.find_cached_prefix(sequence(1, 2, 3, 4)) == [1]
    assert pool.find_cached_prefix(sequence(1, 2, 3, 4, 5)) == [1, 2]


def test_a_reused_block_is_shared_and_not_stored_again() -> None:
    pool, first, second = BlockPool(8, SIZE), sequence(1, 2, 3), sequence(1, 2, 4)
    run(pool, first)
    pool.take_events()
    run(pool, second)
    assert pool.references(1) == 2
    assert pool.take_events() == ()


def test_equal_blocks_computed_side_by_side_are_stored_twice() -> None:
    pool, first, second = BlockPool(8, SIZE), sequence(1, 2), sequence(1, 2)
    run(pool, first)
    run(pool, second)  # its only block holds the last token, so it cannot reuse
    assert pool.cached_copies() == {first.digests[0]: (1, 2)}
    assert [type(event) for event in pool.take_events()] == [BlockStored, BlockStored]


def test_a_digest_stays_while_a_copy_is_left() -> None:
    pool, first, second = BlockPool(3, SIZE), sequence(1, 2), sequence(1, 2)
    run(pool, first)
    run(pool, second)
    pool.free(first)
    pool.take_events()
    run(pool, sequence(7, 8))
    assert BlockRemoved(first.digests[0]) in pool.take_events()
    assert pool.cached_copies()[first.digests[0]] == (2,)
    assert pool.find_cached_prefix(sequence(1, 2, 3)) == [2]


def test_touching_a_free_cached_block_takes_it_out_of_the_queue() -> None:
    pool, tokens = BlockPool(4, SIZE), sequence(1, 2, 3)
    run(pool, tokens)
    pool.free(tokens)
    assert 1 in pool.free_block_ids()
    run(pool, sequence(1, 2, 9))
    assert 1 not in pool.free_block_ids()


def test_touched_blocks_count_against_the_room() -> None:
    pool, old = BlockPool(4, SIZE), sequence(1, 2, 3, 4)
    run(pool, old)
    pool.free(old)
    new = sequence(1, 2, 3, 4, 5, 6, 7)  # 2 reused + 2 new, and 3 blocks are free in all
    assert not pool.has_room(new, 7, pool.find_cached_prefix(new))
    assert pool.has_room(new, 6, pool.find_cached_prefix(new))


# -- eviction -----------------------------------------------------------------------------------


def test_freed_blocks_queue_up_tail_first() -> None:
    pool, tokens = BlockPool(6, SIZE), sequence(1, 2, 3, 4, 5, 6)
    run(pool, tokens)  # blocks 1, 2, 3; 4 and 5 stay free
    pool.free(tokens)
    assert pool.free_block_ids() == (4, 5, 3, 2, 1)


def test_a_block_without_digest_is_taken_first() -> None:
    pool, tokens = BlockPool(6, SIZE), sequence(1, 2, 3)
    run(pool, tokens)  # block 1 is full, block 2 is not
    pool.free(tokens)
    assert pool.free_block_ids() == (2, 3, 4, 5, 1)


def test_several_blocks_without_digest_are_taken_tail_first() -> None:
    pool, tokens = BlockPool(6, SIZE), sequence(1, 2, 3, 4, 5)
    tokens.digests.clear()  # as if caching had been skipped
    tokens.cached_blocks = 2
    pool.allocate_slots(tokens, 5)
    pool.free(tokens)
    assert pool.free_block_ids() == (3, 2, 1, 4, 5)


def test_taking_a_cached_block_evicts_it_with_an_event() -> None:
    pool, old = BlockPool(3, SIZE), sequence(1, 2, 3, 4)
    run(pool, old)
    pool.free(old)
    pool.take_events()
    new = sequence(7, 8)
    run(pool, new)
    removed, stored = pool.take_events()
    assert removed == BlockRemoved(old.digests[1])  # the tail went first
    assert isinstance(stored, BlockStored)
    assert pool.find_cached_prefix(sequence(1, 2, 9)) == [1]


def test_reset_is_refused_while_a_block_is_held() -> None:
    pool, tokens = BlockPool(4, SIZE), sequence(1, 2, 3)
    run(pool, tokens)
    pool.take_events()
    assert not pool.reset()
    assert pool.take_events() == ()
    pool.free(tokens)
    assert pool.reset()
    assert pool.take_events() == (AllBlocksCleared(),)
    assert pool.find_cached_prefix(sequence(1, 2, 3)) == []


# -- invariants ---------------------------------------------------------------------------------


class Ledger:
    """Counts copies per digest from events alone, as a subscriber would."""

    def __init__(self) -> None:
        self.copies: Counter[BlockDigest] = Counter()

    def apply(self, events: tuple[KvEvent, ...]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self.copies.update(event.digests)
                case BlockRemoved():
                    self.copies[event.digest] -= 1
                    assert self.copies[event.digest] >= 0
                case AllBlocksCleared():
                    self.copies.clear()


def check(pool: BlockPool, live: list[TokenSequence], ledger: Ledger) -> None:
    held = Counter(block_id for tokens in live for block_id in tokens.block_ids)
    assert {block: pool.references(block) for block in range(pool.blocks)} == {
        block: held[block] for block in range(pool.blocks)
    }
    assert set(pool.free_block_ids()) == {b for b in range(1, pool.blocks) if not held[b]}
    ledger.apply(pool.take_events())
    assert {digest: len(copies) for digest, copies in pool.cached_copies().items()} == dict(
        +ledger.copies
    )


# Few distinct tokens, so that prompts share prefixes; few blocks, so that they evict each other.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), PROMPTS),
        st.tuples(st.just("grow"), st.integers(0, 3)),
        st.tuples(st.just("free"), st.integers(0, 3)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_counts_queue_and_map_agree_with_the_requests_and_the_events(
    steps: list[tuple[str, int | list[int]]],
) -> None:
    pool, live, ledger = BlockPool(7, SIZE), list[TokenSequence](), Ledger()
    for step in steps:
        match step:
            case "start", list(prompt):
                tokens = sequence(*prompt)
                if pool.allocate_slots(tokens, len(tokens), pool.find_cached_prefix(tokens)):
                    live.append(tokens)
            case "grow", int(index) if live:
                tokens = live[index % len(live)]
                tokens.append(index % 2)
                if not pool.allocate_slots(tokens, len(tokens)):
                    live.remove(tokens)
                    pool.free(tokens)
            case "free", int(index) if live:
                pool.free(live.pop(index % len(live)))
            case "reset", _:
                assert pool.reset() == (not live)
        check(pool, live, ledger)
