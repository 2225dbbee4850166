"""Token ids (or text) to chained block hashes.

A block hash is the XXH3-128 of the parent's hash, the block's tokens as uint32, and its extra
keys: it names the block with its whole prefix. These are *our* names, computed the same way from a
request's prompt and from the token ids in an engine's events, so routing depends on no engine's
hash seed or algorithm. XXH3 isn't made against attackers; a forged collision could only mislead
the choice of an instance, since engines match by their own hashes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import xxhash

from moongate.router.model import TEXT_CHUNK_BYTES, BlockHash, BlockSpace, ExtraKeys

TOKEN_BYTES = 4


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Return token ids as native uint32 bytes, the form in which blocks are hashed.

    Raises: OverflowError for an id that doesn't fit, TypeError for what is no integer.
    """
    return array("I", token_ids).tobytes()


def root_hash(space: BlockSpace) -> BlockHash:
    """Return the parent of a chain's first block."""
    text = f"moongate\0{space.block_size_tokens}\0{space.lora_name or ''}"
    return BlockHash(xxhash.xxh3_128_digest(text.encode()))


def extend_chain(
    parent: BlockHash,
    tokens: bytes,
    block_size_tokens: int,
    extra_keys: Sequence[ExtraKeys | None] | None = None,
) -> list[BlockHash]:
    """Return the hashes of the full blocks in `tokens` (packed), chained from `parent`.

    `extra_keys` has an entry for each block, or is None when no block has any. A tail that fills
    no block is left out. Cost: one XXH3 of 16 + 4 x block size bytes a block.
    """
    blocks = _split(tokens, block_size_tokens * TOKEN_BYTES)
    if extra_keys is None:
        return _chain(parent, blocks)
    # The token part has a fixed length, so what follows can't be mistaken for tokens.
    contents = (
        (block if keys is None else block + repr(keys).encode(),)
        for (block,), keys in zip(blocks, extra_keys, strict=True)
    )
    return _chain(parent, contents)


def hash_prompt(space: BlockSpace, tokens: bytes, cache_salt: str | None = None) -> list[BlockHash]:
    """Return the chain of a text prompt. The salt isolates it from the first block on.

    Source: vLLM 0.32 `generate_block_hash_extra_keys` (the salt is a key of block 0 only).
    """
    root, size = root_hash(space), space.block_size_tokens
    first_end = size * TOKEN_BYTES
    if not cache_salt or len(tokens) < first_end:
        return extend_chain(root, tokens, size)
    first = extend_chain(root, tokens[:first_end], size, [(cache_salt,)])
    return first + extend_chain(first[0], tokens[first_end:], size)


def hash_text(text: bytes, isolation: tuple[str | None, ...] = ()) -> list[BlockHash]:
    """Return the chain of chunks of a prompt that could not be tokenised.

    `isolation` (model or adapter, salt) keeps apart what engines keep apart.
    """
    root = xxhash.xxh3_128_digest(b"moongate text" + repr(isolation).encode())
    return _chain(root, _split(text, TEXT_CHUNK_BYTES))


def _split(content: bytes, step: int) -> Iterator[tuple[bytes]]:
    """Return the full pieces of `step` bytes, each in a tuple of its own."""
    whole = len(content) // step * step
    return struct.iter_unpack(f"{step}s", memoryview(content)[:whole])


def _chain(parent: bytes, contents: Iterable[tuple[bytes]]) -> list[BlockHash]:
    digest = xxhash.xxh3_128_digest
    hashes = [parent := digest(parent + content) for (content,) in contents]
    # Calling BlockHash for each would take half as long again.
    return cast("list[BlockHash]", hashes)
