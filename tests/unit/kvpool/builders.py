"""Prompts, digests and events for the pool's tests: blocks of four tokens."""

from __future__ import annotations

from collections.abc import Sequence

from moongate.kvpool.digests import ALGORITHMS, DEFAULT_SEED, digest_blocks
from moongate.kvpool.keys import BlockDigest, KeyLayout, Shard
from moongate.kvpool.memory import MemoryPool
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.events import BlocksStored
from moongate.router.model import BlockHash, BlockSpace, EngineHash, ExtraKeys, Tier

SIZE = 4
LAYOUT = KeyLayout("m")


def tokens(blocks: int, first: int = 1) -> list[int]:
    """Return the ids of so many full blocks."""
    return list(range(first, first + blocks * SIZE))


def chain(token_ids: Sequence[int], salt: str | None = None) -> list[BlockHash]:
    return hash_prompt(BlockSpace(SIZE), pack_tokens(token_ids), salt)


def digests(
    token_ids: Sequence[int], algorithm: str = "sha256", seed: str = DEFAULT_SEED
) -> list[BlockDigest]:
    """Return the digests that an engine makes of a prompt."""
    root = ALGORITHMS[algorithm](seed)
    return digest_blocks(algorithm, root, pack_tokens(token_ids), SIZE)


def as_int(digest: BlockDigest) -> int:
    """Return a digest's name in an engine's events, as they are by default."""
    return int.from_bytes(digest[-8:], "big")


def stored(
    names: Sequence[EngineHash],
    token_ids: Sequence[int],
    parent: EngineHash | None = None,
    *,
    tier: Tier = Tier.DEVICE,
    lora: str | None = None,
    extra_keys: tuple[ExtraKeys | None, ...] | None = None,
    size: int = SIZE,
    is_full_attention: bool = True,
) -> BlocksStored:
    return BlocksStored(
        tuple(names), parent, pack_tokens(token_ids), size, tier, lora, extra_keys,
        is_full_attention=is_full_attention,
    )  # fmt: skip


def fill(
    pool: MemoryPool,
    of: Sequence[BlockDigest],
    positions: Sequence[int] | range,
    layout: KeyLayout = LAYOUT,
    shards: Sequence[Shard] | None = None,
    size_bytes: int = 10,
) -> None:
    """Put the keys of the blocks at these positions into a pool."""
    for position in positions:
        for shard in shards if shards is not None else layout.shards:
            pool.put(layout.key(shard, of[position]), size_bytes, "host:1")
