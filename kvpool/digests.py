"""The engine's own names of blocks, computed here: pool keys are made from them.

A digest is the hash of (parent's digest, the block's tokens, its extra keys); that of a first block has
the hash of a seed for its parent. Which algorithm and seed an engine uses shows in what it announces
(`SchemeProbe`).

Source: vLLM 0.32 `v1/core/kv_cache_utils.py` `hash_block_tokens`, `init_none_hash`,
`generate_block_hash_extra_keys`; `utils/hashing.py`.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import cbor2
import xxhash

from moongate.kvpool.keys import BlockDigest
from moongate.router.blocks import TOKEN_BYTES, hash_prompt
from moongate.router.events import BlocksStored
from moongate.router.model import BlockHash, BlockSpace, EngineHash

Algorithm = Callable[[object], BlockDigest]
DigestKeys = tuple[tuple[str, ...], ...]
"""What isolates a block beside its tokens, in the engine's tagged form."""

DEFAULT_SEED = "vllm-none-hash"
"""The engine's own while PYTHONHASHSEED isn't set, for the SHA-256 algorithms."""

USUAL_SEEDS = (DEFAULT_SEED, "0")
"""The engine's own, and what `moongate engine` and most manuals set."""

ROOTS_MAX = 65_536
"""Digests of first blocks that are remembered of engines with a seed of chance."""

DIGESTS_MAX = 1_000_000
"""About 80 MB: 180 conversations of 90,000 tokens in blocks of 16."""


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


ALGORITHMS: Mapping[str, Algorithm] = {
    "sha256": lambda value: _sha256(_pickle(value)),
    "sha256_cbor": lambda value: _sha256(_cbor(value)),
    "xxhash": lambda value: xxhash.xxh3_128_digest(_pickle(value)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(_cbor(value)),
}


class HashScheme(NamedTuple):
    """How an engine names blocks. Seed None: of chance, so only announced roots can be gone on from."""

    algorithm: str
    seed: str | None

    @property
    def root(self) -> BlockDigest | None:
        """Return the digest that stands for the parent of a first block."""
        return None if self.seed is None else ALGORITHMS[self.algorithm](self.seed)


def digest_blocks(
    algorithm: str,
    parent: BlockDigest,
    tokens: bytes,
    block_size_tokens: int,
    first_keys: DigestKeys | None = None,
    every_keys: DigestKeys | None = None,
) -> list[BlockDigest]:
    """Return the digests of the full blocks in `tokens` (packed), chained from `parent`.

    `every_keys` isolate each block (an adapter); `first_keys` all that isolates the first one, if that
    is more (a salt).
    Cost: 2.5 us a block of 16 tokens (sha256).
    """
    hash_value, ids = ALGORITHMS[algorithm], array("I")
    ids.frombytes(tokens[: len(tokens) // TOKEN_BYTES * TOKEN_BYTES])
    values, digests = ids.tolist(), []
    keys = first_keys or every_keys
    for end in range(block_size_tokens, len(values) + 1, block_size_tokens):
        block = tuple(values[end - block_size_tokens : end])
        parent = hash_value((parent, block, keys))
        digests.append(parent)
        keys = every_keys
    return digests


def matches(announced: EngineHash, digest: BlockDigest) -> bool:
    """Tell whether an announced name is this digest's: itself, or its low 64 bits."""
    if isinstance(announced, bytes):
        return announced == digest
    return announced == int.from_bytes(digest[-8:], "big")


# --- which scheme ---------------------------------------------------------------------------------


class SchemeProbe:
    """Finds out how one engine names blocks, from what it announces of its device.

    `scheme` None: not known (yet). `mismatches` counts the announced first blocks that nothing fitted.
    """

    def __init__(self, seeds: Sequence[str] = USUAL_SEEDS) -> None:
        self._seeds = tuple(dict.fromkeys((*seeds, *USUAL_SEEDS)))
        self.scheme: HashScheme | None = None
        self.mismatches = 0
        self.roots: OrderedDict[BlockHash, BlockDigest] = OrderedDict()

    @property
    def is_done(self) -> bool:
        """Tell whether nothing is to be learned any more."""
        return self.scheme is not None and self.scheme.seed is not None

    def observe(self, event: BlocksStored) -> None:
        """Learn from blocks stored on the device. Blocks with extra keys prove nothing and are passed."""
        has_keys = event.extra_keys is not None or event.lora_name is not None
        if has_keys or not event.engine_hashes or event.block_size_tokens < 1 or self.is_done:
            return
        if event.parent is None:
            self._note_root(event)
            if self.scheme is None:
                self.scheme = self._find_usual(event) or _find_by_chance(event)
                self.mismatches += self.scheme is None
        elif self.scheme is None and self.roots:
            self.scheme = _find_by_chance(event)

    def _note_root(self, event: BlocksStored) -> None:
        name, size = event.engine_hashes[0], event.block_size_tokens
        chain = hash_prompt(BlockSpace(size), event.tokens[: size * TOKEN_BYTES])
        if isinstance(name, bytes) and chain:
            self.roots[chain[0]] = BlockDigest(name)
            if len(self.roots) > ROOTS_MAX:
                self.roots.popitem(last=False)

    def _find_usual(self, event: BlocksStored) -> HashScheme | None:
        """Return the algorithm and the seed that give the first block of a prompt its name."""
        for algorithm, hash_value in ALGORITHMS.items():
            for seed in self._seeds:
                if _follows(algorithm, hash_value(seed), event, 0):
                    return HashScheme(algorithm, seed)
        return None


def _find_by_chance(event: BlocksStored) -> HashScheme | None:
    """Return the algorithm that gives a block its name after the block before it, both told whole."""
    before, position = event.parent, 0
    if before is None and len(event.engine_hashes) > 1:
        before, position = event.engine_hashes[0], 1
    if not isinstance(before, bytes):
        return None
    follows = (a for a in ALGORITHMS if _follows(a, BlockDigest(before), event, position))
    return next((HashScheme(algorithm, None) for algorithm in follows), None)


def _follows(algorithm: str, parent: BlockDigest, event: BlocksStored, position: int) -> bool:
    """Tell whether the event's block at this position has the name that follows from its parent's."""
    size = event.block_size_tokens
    step = size * TOKEN_BYTES
    digests = digest_blocks(
        algorithm, parent, event.tokens[position * step : (position + 1) * step], size
    )
    return bool(digests) and matches(event.engine_hashes[position], digests[0])


# --- of whole prompts -----------------------------------------------------------------------------


class _Run:
    """The digests of one conversation, and the blocks under which they are found."""

    __slots__ = ("digests", "ends")

    def __init__(self, digests: list[BlockDigest]) -> None:
        self.digests = digests
        self.ends: set[BlockHash] = set()


class DigestMemory:
    """Digests of prompts, so that a turn digests only what it adds. Of one scheme and block space.

    Found by our own block hashes, which name a block with all that precedes it: a prompt goes on from
    the deepest block at which an earlier one ended. Bounded by `digests_max`; the conversation that was
    used least recently goes first.
    """

    def __init__(self, digests_max: int = DIGESTS_MAX) -> None:
        self._digests_max = digests_max
        self._runs: OrderedDict[_Run, None] = OrderedDict()
        self._ends: dict[BlockHash, tuple[_Run, int]] = {}  # and the length up to there
        self.count = 0

    def digest(
        self,
        algorithm: str,
        chain: Sequence[BlockHash],
        tokens: bytes,
        block_size_tokens: int,
        first: BlockDigest,
        every_keys: DigestKeys | None = None,
    ) -> Sequence[BlockDigest]:
        """Return the digests of a prompt's full blocks; `chain` has our own names of the same blocks.

        `first`: the digest of the first one. Cost: O(blocks since the turn that it goes on from).
        """
        run, length = self._find(chain)
        if run is None:
            run, length = self._extend(None, 0, [first]), 1
        rest = tokens[length * block_size_tokens * TOKEN_BYTES :]
        more = digest_blocks(
            algorithm, run.digests[length - 1], rest, block_size_tokens, every_keys=every_keys
        )
        run = self._extend(run, length, more[: len(chain) - length])
        for length in (len(chain) - 1, len(chain)):
            if length > 0:
                self._note_end(chain[length - 1], run, length)
        self._forget_oldest()
        return run.digests[: len(chain)]

    def _find(self, chain: Sequence[BlockHash]) -> tuple[_Run | None, int]:
        ends = self._ends
        for position in range(len(chain) - 1, -1, -1):
            found = ends.get(chain[position])
            if found is not None:
                return found[0], position + 1
        return None, 0

    def _extend(self, run: _Run | None, length: int, more: list[BlockDigest]) -> _Run:
        """Return a run of the first `length` digests of `run` and these."""
        if run is not None and not more:
            self._runs.move_to_end(run)
            return run
        if run is not None and length == len(run.digests):
            run.digests += more
            self._runs.move_to_end(run)
        else:
            run = _Run([*(run.digests[:length] if run is not None else ()), *more])
            self._runs[run] = None
            self.count += length
        self.count += len(more)
        return run

    def _note_end(self, end: BlockHash, run: _Run, length: int) -> None:
        if end in self._ends:
            return
        self._ends[end] = run, length
        run.ends.add(end)

    def _forget_oldest(self) -> None:
        while self.count > self._digests_max and len(self._runs) > 1:
            run, _ = self._runs.popitem(last=False)
            self.count -= len(run.digests)
            for end in run.ends:
                del self._ends[end]
