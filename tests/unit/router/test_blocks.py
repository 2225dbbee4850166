"""Chained block hashes: what names a block, and what keeps two apart."""

import pytest
import xxhash

from moongate.router.blocks import extend_chain, hash_prompt, hash_text, pack_tokens, root_hash
from moongate.router.model import TEXT_CHUNK_BYTES, BlockSpace

SPACE = BlockSpace(2)


def test_a_block_is_the_xxh3_of_its_parent_and_its_tokens_as_uint32() -> None:
    root = root_hash(SPACE)
    tokens = pack_tokens([1, 2])
    assert tokens in (b"\1\0\0\0\2\0\0\0", b"\0\0\0\1\0\0\0\2")
    assert extend_chain(root, tokens, 2) == [xxhash.xxh3_128_digest(root + tokens)]


def test_a_tail_that_fills_no_block_is_left_out() -> None:
    assert len(hash_prompt(SPACE, pack_tokens([1]))) == 0
    assert len(hash_prompt(SPACE, pack_tokens([1, 2, 3]))) == 1
    assert len(hash_prompt(SPACE, pack_tokens([1, 2, 3, 4]))) == 2


def test_a_block_is_named_with_its_whole_prefix() -> None:
    one = hash_prompt(SPACE, pack_tokens([1, 2, 3, 4]))
    other = hash_prompt(SPACE, pack_tokens([9, 9, 3, 4]))
    assert one[1] != other[1]


def test_a_chain_extended_from_its_middle_equals_the_whole() -> None:
    whole = hash_prompt(SPACE, pack_tokens([1, 2, 3, 4, 5, 6]))
    assert [whole[0], *extend_chain(whole[0], pack_tokens([3, 4, 5, 6]), 2)] == whole


def test_c44_an_adapter_has_blocks_of_its_own() -> None:
    tokens = pack_tokens([1, 2])
    assert hash_prompt(BlockSpace(2, "ad-1"), tokens) != hash_prompt(SPACE, tokens)
    assert hash_prompt(BlockSpace(2, "ad-1"), tokens) != hash_prompt(BlockSpace(2, "ad-2"), tokens)


def test_c46_block_sizes_have_blocks_of_their_own() -> None:
    assert root_hash(BlockSpace(16)) != root_hash(BlockSpace(64))


def test_extra_keys_isolate_a_block_and_all_after_it() -> None:
    tokens = pack_tokens([1, 2, 3, 4, 5, 6])
    plain = extend_chain(root_hash(SPACE), tokens, 2)
    with_image = extend_chain(root_hash(SPACE), tokens, 2, [None, ("image",), None])
    assert with_image[0] == plain[0]
    assert with_image[1] != plain[1]
    assert with_image[2] != plain[2]


def test_a_salt_is_an_extra_key_of_the_first_block_only() -> None:
    tokens = pack_tokens([1, 2, 3, 4])
    salted = extend_chain(root_hash(SPACE), tokens, 2, [("s",), None])
    assert hash_prompt(SPACE, tokens, cache_salt="s") == salted


def test_an_empty_salt_is_none() -> None:
    tokens = pack_tokens([1, 2])
    assert hash_prompt(SPACE, tokens, cache_salt="") == hash_prompt(SPACE, tokens)


def test_a_salted_prompt_shorter_than_a_block_has_no_blocks() -> None:
    assert hash_prompt(SPACE, pack_tokens([1]), cache_salt="s") == []


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_that_is_no_uint32_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token_id])


def test_text_is_hashed_in_full_chunks_that_name_their_prefix() -> None:
    chunk = b"x" * TEXT_CHUNK_BYTES
    assert len(hash_text(chunk[:-1])) == 0
    assert len(hash_text(chunk + b"y")) == 1
    two = hash_text(chunk + chunk)
    assert len(set(two)) == 2
    assert hash_text(chunk) == two[:1]


def test_text_is_kept_apart_by_what_isolates_it() -> None:
    chunk = b"x" * TEXT_CHUNK_BYTES
    assert hash_text(chunk, ("ad-1", None)) != hash_text(chunk, (None, "ad-1"))
