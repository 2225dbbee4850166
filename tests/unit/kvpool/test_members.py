"""The instances that use a pool: when their keys can be made, and when two have the same."""

from __future__ import annotations

import itertools

import pytest

from moongate.kvpool.digests import DEFAULT_SEED, HashScheme
from moongate.kvpool.keys import KeyLayout, Shard
from moongate.kvpool.members import KeyRules, Member
from moongate.router.blocks import pack_tokens
from moongate.router.model import BlockHash, InstanceId, KeySpace, SourceId, Tier

from .builders import SIZE, as_int, chain, digests, stored, tokens

A, B = InstanceId("a"), InstanceId("b")
USUAL = HashScheme("sha256", DEFAULT_SEED)


def member(name: InstanceId = A, rules: KeyRules | None = None) -> Member:
    return Member(name, rules or KeyRules(), model="m", block_size_tokens=SIZE)


def shown(seed: str = DEFAULT_SEED, algorithm: str = "sha256", name: InstanceId = A) -> Member:
    """Return a member that has announced a first block and the next one, whole."""
    one = member(name)
    one.observe(stored(digests(tokens(2), algorithm, seed), tokens(2)))
    return one


def test_a_key_space_is_what_keys_are_made_of() -> None:
    assert shown().key_space == KeySpace(f"m/sha256/{DEFAULT_SEED}/4")
    assert shown(name=B).key_space == shown().key_space
    assert shown(seed="0").key_space != shown().key_space


@pytest.mark.parametrize("missing", ["model", "block_size_tokens"])
def test_it_is_unknown_as_long_as_a_part_of_it_is(missing: str) -> None:
    one = shown()
    setattr(one, missing, None)
    assert one.key_space is None
    assert member().key_space is None


def test_who_uses_no_pool_has_none() -> None:
    one = shown()
    one.uses_pool = False
    assert one.key_space is None


def test_a_random_seed_is_the_process_s_own() -> None:
    one, other = shown("chance 1", "xxhash"), shown("chance 2", "xxhash", B)
    assert [m.key_space for m in (one, other)] == [
        KeySpace("m/xxhash/a#0/4"),
        KeySpace("m/xxhash/b#0/4"),
    ]
    one.restarted()
    one.block_size_tokens = SIZE
    assert [m.key_space for m in (one,)] == [None]
    one.observe(stored(digests(tokens(2), "xxhash", "chance 3"), tokens(2)))
    assert [m.key_space for m in (one,)] == [KeySpace("m/xxhash/a#1/4")]


def test_no_process_is_taken_for_another_not_even_of_one_that_came_back_under_its_id() -> None:
    epochs = itertools.count()
    first, again = (Member(A, KeyRules(), epochs=epochs) for _ in range(2))
    first.restarted()
    assert (first.epoch, again.epoch, next(epochs)) == (2, 1, 3)


def test_a_feed_that_begins_anew_shows_another_process() -> None:
    one, source = shown("chance 1", "xxhash"), SourceId(A)
    assert [one.note_feed(source, epoch) for epoch in (4, 4, 5, 5)] == [False, False, True, False]
    assert (one.epoch, len(one.probe.roots), one.block_size_tokens) == (1, 0, SIZE)
    assert not one.note_feed(SourceId(A, 1), 1), "that of another rank, seen for the first time"


def test_a_new_process_is_presumed_to_be_as_the_one_before_until_it_contradicts() -> None:
    one = shown()
    one.observe(stored([b"x"], tokens(1), tier=Tier.POOL))
    one.restarted()
    assert (one.scheme, one.uses_pool, one.block_size_tokens) == (USUAL, None, None)
    one.observe(stored([b"another name"], tokens(1)))
    assert one.scheme is None
    one.restarted()
    assert one.scheme == USUAL, "the process after that is a new one"


def test_what_it_shows_counts_more_than_what_was_presumed() -> None:
    one = member()
    one.presumed = HashScheme("sha256", "0")
    one.observe(stored([as_int(digests(tokens(1))[0])], tokens(1)))
    assert one.scheme == USUAL


def test_a_store_of_blocks_in_the_pool_shows_that_it_uses_one() -> None:
    one = member()
    one.observe(stored([b"x"], tokens(1), tier=Tier.POOL))
    assert one.uses_pool is True
    one.uses_pool = False
    one.observe(stored([b"x"], tokens(1), tier=Tier.POOL))
    assert one.uses_pool is False, "the operator said so"


def test_only_full_attention_on_the_device_tells_the_block_size() -> None:
    one = member()
    one.observe(stored([b"x"], tokens(1), is_full_attention=False, size=2))
    one.observe(stored([b"x"], tokens(1), tier=Tier.HOST, size=2))
    assert (one.block_size_tokens, one.probe.mismatches) == (SIZE, 0)
    one.observe(stored(digests(tokens(1)), tokens(1)))
    assert one.block_size_tokens == SIZE


def test_the_first_digest_follows_from_the_seed_or_was_announced() -> None:
    ids, packed = tokens(3), pack_tokens(tokens(3))
    one = shown()
    assert one.first_digest(chain(ids), packed) == digests(ids)[0]
    salted = one.first_digest(chain(ids, "s"), packed, (("cache_salt", "s"),))
    assert salted not in (None, digests(ids)[0])
    chance = shown("of chance", "xxhash")
    assert chance.first_digest(chain(ids), packed) == digests(ids, "xxhash", "of chance")[0]
    assert chance.first_digest(chain(ids, "s"), packed, (("cache_salt", "s"),)) is None
    assert chance.first_digest(chain(tokens(1, 99)), pack_tokens(tokens(1, 99))) is None


@pytest.mark.parametrize("blocks", [[], chain(tokens(1))])
def test_the_first_digest_of_nothing_or_without_a_scheme_can_t_be_told(
    blocks: list[BlockHash],
) -> None:
    one = shown() if not blocks else member()
    assert one.first_digest(blocks, pack_tokens(tokens(1))) is None


def test_the_layout_is_as_the_operator_says_else_as_it_is_learned() -> None:
    two = [Shard(), Shard(tp=1)]
    assert member().layout(two) == KeyLayout("m", two)
    rules = KeyRules(cache_prefix="p", namespace="@n", shards=[Shard(tp=1)])
    assert member(rules=rules).layout(two) == KeyLayout("m", [Shard(tp=1)], "p", "@n")


def test_seeds_of_the_operator_are_tried() -> None:
    one = member(rules=KeyRules(seeds=["mine"]))
    one.observe(stored([as_int(digests(tokens(1), seed="mine")[0])], tokens(1)))
    assert one.scheme == HashScheme("sha256", "mine")
