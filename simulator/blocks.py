"""The KV block pool of one rank, by vLLM's rules: reuse, caching, eviction, and the events of each.

Responsible for which physical block holds which tokens, which cached prefix a request may reuse,
and what is evicted when room is needed. Not for scheduling (see `engine.py`), nor for how an event
looks on the wire (see `event_wire.py`). Pure: no I/O, no clock, no chance.

Theory of operation. A physical block is *free* (nobody refers to it) or *held* (its reference count
is positive), and, apart from that, *cached* (it carries a digest and can be found) or not. A free
cached block is still reusable: it stands in the free queue as a candidate for eviction until
somebody touches it (it leaves the queue) or its turn comes (its digest is removed, with an event).

Invariants: block 0 is the null block, never free and never held; a block is in the free queue
exactly when its reference count is 0; every digest in the map is the digest of the block it names;
stored minus removed events, counted per digest, equal the copies in the map.

Source: vLLM 0.32.0 `v1/core/block_pool.py`, `kv_cache_manager.py`, `kv_cache_utils.py`.
"""

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

BlockDigest = NewType("BlockDigest", bytes)
"""The engine's name for a full block together with everything before it: 32 bytes."""

ExtraKeys = tuple[tuple[str, ...], ...]
"""What separates caches beyond tokens: ("lora", name, path) and ("cache_salt", salt)."""

BlockHasher = Callable[[BlockDigest, Sequence[int], ExtraKeys | None], BlockDigest]
"""(digest of the parent, tokens of the block, extra keys) -> digest."""

DEFAULT_HASH_SEED = "vllm-none-hash"
"""What vLLM 0.32 derives the root digest from while PYTHONHASHSEED is unset."""

NULL_BLOCK_ID = 0


def _sha256_of_pickle(value: object) -> BlockDigest:
    return BlockDigest(hashlib.sha256(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).digest())


def make_root_digest(seed: str = DEFAULT_HASH_SEED) -> BlockDigest:
    """Return what stands for the parent of a first block."""
    return _sha256_of_pickle(seed)


def hash_block(
    parent: BlockDigest, token_ids: Sequence[int], extra_keys: ExtraKeys | None
) -> BlockDigest:
    """Return the engine's own default digest (`sha256`: SHA-256 over a pickle) of one full block.

    *Why* the same bytes as a real engine: pool keys and parity probes then work unchanged.
    Source: vLLM 0.32.0 `kv_cache_utils.hash_block_tokens`, `utils/hashing.py`.
    """
    return _sha256_of_pickle((parent, tuple(token_ids), extra_keys))


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """What a request's blocks are hashed with besides its tokens."""

    lora_name: str | None = None
    cache_salt: str | None = None

    def extra_keys(self, block_index: int) -> ExtraKeys | None:
        """Return the extra keys of the block at `block_index`, None when there are none.

        The salt enters the first block only: the chain carries it on. A simulated adapter has no
        files, so its path is the empty string.
        """
        keys: list[tuple[str, ...]] = []
        if self.lora_name is not None:
            keys.append(("lora", self.lora_name, ""))
        if self.cache_salt is not None and block_index == 0:
            keys.append(("cache_salt", self.cache_salt))
        return tuple(keys) or None


NO_NAMESPACE = CacheNamespace()


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full blocks of one request became cached; one event for all that became so at once."""

    digests: tuple[BlockDigest, ...]
    parent: BlockDigest | None
    """Digest of the block before the first one; None when that one starts the prompt."""
    token_ids: tuple[int, ...]
    """The tokens of all the blocks, one after the other."""
    extra_keys: tuple[ExtraKeys | None, ...]
    """One entry per block."""
    lora_name: str | None
    session_id: str | None
    """The session whose request stored the blocks; others may share them."""


@dataclass(frozen=True, slots=True)
class PoolBlockStored:
    """One full block was put into the shared pool, where it had not been."""

    digest: BlockDigest
    parent: BlockDigest | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One physical copy of a cached block was evicted; other copies may remain."""

    digest: BlockDigest


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was reset."""


KvEvent = BlockStored | PoolBlockStored | BlockRemoved | AllBlocksCleared


class TokenSequence:
    """The tokens of one request, the digests of its full blocks, and the blocks that hold them."""

    __slots__ = (
        "_block_size_tokens",
        "_hasher",
        "_root",
        "block_ids",
        "cached_blocks",
        "digests",
        "namespace",
        "session_id",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: Iterable[int],
        *,
        block_size_tokens: int,
        root: BlockDigest,
        namespace: CacheNamespace = NO_NAMESPACE,
        session_id: str | None = None,
        hasher: BlockHasher = hash_block,
    ) -> None:
        self._block_size_tokens = block_size_tokens
        self._root = root
        self._hasher = hasher
        self.namespace = namespace
        self.session_id = session_id
        self.token_ids = list(token_ids)
        self.digests: list[BlockDigest] = []
        self.block_ids: list[int] = []  # physical blocks, in the order of the tokens
        self.cached_blocks = 0  # leading blocks that this sequence reused or entered in the cache
        self._extend_digests()

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: int) -> None:
        """Add a sampled token, and the digest of the block that it completes."""
        self.token_ids.append(token_id)
        self._extend_digests()

    def tokens_of_blocks(self, first: int, last: int) -> tuple[int, ...]:
        """Return the tokens of the blocks from `first` up to, but not including, `last`."""
        size = self._block_size_tokens
        return tuple(self.token_ids[first * size : last * size])

    def _extend_digests(self) -> None:
        full_blocks = len(self.token_ids) // self._block_size_tokens
        for index in range(len(self.digests), full_blocks):
            parent = self.digests[index - 1] if index else self._root
            tokens = self.tokens_of_blocks(index, index + 1)
            self.digests.append(self._hasher(parent, tokens, self.namespace.extra_keys(index)))


class _DigestMap:
    """Digest -> the physical copies that carry it, oldest first.

    *Why* two dictionaries: nearly every digest has one copy, and a list for each would double the
    memory of a fleet in virtual time.
    """

    __slots__ = ("_first", "_more")

    def __init__(self) -> None:
        self._first: dict[BlockDigest, int] = {}
        self._more: dict[BlockDigest, list[int]] = {}

    def __len__(self) -> int:
        return len(self._first)

    def find(self, digest: BlockDigest) -> int | None:
        return self._first.get(digest)

    def insert(self, digest: BlockDigest, block_id: int) -> None:
        if digest in self._first:
            self._more.setdefault(digest, []).append(block_id)
        else:
            self._first[digest] = block_id

    def remove(self, digest: BlockDigest, block_id: int) -> None:
        more = self._more.get(digest)
        if more is None:
            assert self._first[digest] == block_id, (digest, block_id)
            del self._first[digest]
            return
        if self._first[digest] == block_id:
            self._first[digest] = more.pop(0)
        else:
            more.remove(block_id)
        if not more:
            del self._more[digest]

    def copies(self) -> dict[BlockDigest, tuple[int, ...]]:
        return {
            digest: (first, *self._more.get(digest, ())) for digest, first in self._first.items()
        }

    def clear(self) -> None:
        self._first.clear()
        self._more.clear()


class BlockPool:
    """The physical blocks of one rank.

    `blocks` counts the null block, as the engine's own `num_gpu_blocks` does: N give N - 1 usable.
    """

    def __init__(self, blocks: int, block_size_tokens: int) -> None:
        assert blocks > 1, blocks
        assert block_size_tokens > 0, block_size_tokens
        self.blocks = blocks
        self.block_size_tokens = block_size_tokens
        self._references = [0] * blocks
        self._digests: list[BlockDigest | None] = [None] * blocks
        self._cached = _DigestMap()
        # An ordered dictionary is a queue that also gives up its middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._events: list[KvEvent] = []

    # -- what the pool holds ----------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """The held part of the usable blocks, 0.0 to 1.0. Free cached blocks count as free."""
        return 1.0 - len(self._free) / (self.blocks - 1)

    def free_block_ids(self) -> tuple[int, ...]:
        """Return the free blocks, the next one to be taken first."""
        return tuple(self._free)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def cached_copies(self) -> dict[BlockDigest, tuple[int, ...]]:
        """Return the physical copies of every cached digest. Cost: O(cached blocks)."""
        return self._cached.copies()

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return what happened since the last call, oldest first, and forget it."""
        events = tuple(self._events)
        self._events.clear()
        return events

    # -- what a request does ----------------------------------------------------------------

    def find_cached_prefix(self, sequence: TokenSequence) -> list[int]:
        """Return the blocks of the longest cached prefix that `sequence` may reuse.

        At most (tokens - 1) tokens: the last one must be computed to sample from it.
        Cost: O(blocks of the prefix).
        """
        blocks_max = (len(sequence) - 1) // self.block_size_tokens
        prefix: list[int] = []
        for digest in sequence.digests[:blocks_max]:
            block_id = self._cached.find(digest)
            if block_id is None:
                break
            prefix.append(block_id)
        return prefix

    def has_room(self, sequence: TokenSequence, tokens: int, reused: Sequence[int] = ()) -> bool:
        """Return whether the first `tokens` tokens fit, if `reused` blocks are touched for them."""
        return self._blocks_missing(sequence, tokens, reused) + self._parked(reused) <= len(
            self._free
        )

    def allocate_slots(
        self,
        sequence: TokenSequence,
        tokens: int,
        reused: Sequence[int] = (),
        *,
        is_cached: bool = True,
    ) -> bool:
        """Give `sequence` room for its first `tokens` tokens; change nothing and say False if full.

        `reused` is the prefix that `find_cached_prefix` just returned, for a sequence that holds
        nothing yet. Blocks that the `tokens` fill are cached here, when they are scheduled, not
        when they have been computed: a later request in the same step may already reuse them.
        Unless `is_cached` is False: what comes from elsewhere is cached when it has come.
        """
        assert not (reused and sequence.block_ids), "only a new sequence reuses a prefix"
        if not self.has_room(sequence, tokens, reused):
            return False
        missing = self._blocks_missing(sequence, tokens, reused)
        self._touch(reused)
        sequence.block_ids.extend(reused)
        sequence.cached_blocks = max(sequence.cached_blocks, len(reused))
        sequence.block_ids.extend(self._take_blocks(missing))
        if is_cached:
            self.cache_blocks(sequence, tokens)
        return True

    def cache_blocks(self, sequence: TokenSequence, tokens: int) -> None:
        """Enter the blocks that the first `tokens` tokens fill in the cache."""
        self._cache_full_blocks(sequence, tokens // self.block_size_tokens)

    def free(self, sequence: TokenSequence) -> None:
        """Let go of the blocks of `sequence`: the tail is evicted before what it builds on.

        Blocks without a digest can serve nobody and are the next to be taken; cached ones queue up
        at the back.
        """
        worthless: list[int] = []
        for block_id in reversed(sequence.block_ids):
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, block_id
            if self._references[block_id]:
                continue
            if self._digests[block_id] is None:
                worthless.append(block_id)
            else:
                self._free[block_id] = None
        for block_id in reversed(worthless):
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=False)
        sequence.block_ids.clear()
        sequence.cached_blocks = 0

    def reset(self) -> bool:
        """Forget every cached block; refused (False) while any block is held."""
        if len(self._free) != self.blocks - 1:
            return False
        self._cached.clear()
        self._digests = [None] * self.blocks
        self._events.append(AllBlocksCleared())
        return True

    # -- parts ------------------------------------------------------------------------------

    def _blocks_missing(self, sequence: TokenSequence, tokens: int, reused: Sequence[int]) -> int:
        blocks_needed = -(-tokens // self.block_size_tokens)
        return max(blocks_needed - len(sequence.block_ids) - len(reused), 0)

    def _parked(self, reused: Sequence[int]) -> int:
        """Count the blocks that leave the free queue by being touched."""
        return sum(1 for block_id in reused if not self._references[block_id])

    def _touch(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if not self._references[block_id]:
                del self._free[block_id]
            self._references[block_id] += 1

    def _take_blocks(self, count: int) -> list[int]:
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._evict(block_id)
            self._references[block_id] = 1
        return taken

    def _evict(self, block_id: int) -> None:
        digest = self._digests[block_id]
        if digest is None:
            return
        self._digests[block_id] = None
        self._cached.remove(digest, block_id)
        self._events.append(BlockRemoved(digest))

    def _cache_full_blocks(self, sequence: TokenSequence, full_blocks: int) -> None:
        first = sequence.cached_blocks
        if full_blocks <= first:
            return
        for index in range(first, full_blocks):
            block_id, digest = sequence.block_ids[index], sequence.digests[index]
            assert self._digests[block_id] is None, (block_id, "a full block is written once")
            self._digests[block_id] = digest
            self._cached.insert(digest, block_id)
        sequence.cached_blocks = full_blocks
        self._events.append(_stored(sequence, first, full_blocks))


def _stored(sequence: TokenSequence, first: int, last: int) -> BlockStored:
    return BlockStored(
        digests=tuple(sequence.digests[first:last]),
        parent=sequence.digests[first - 1] if first else None,
        token_ids=sequence.tokens_of_blocks(first, last),
        extra_keys=tuple(sequence.namespace.extra_keys(index) for index in range(first, last)),
        lora_name=sequence.namespace.lora_name,
        session_id=sequence.session_id,
    )
