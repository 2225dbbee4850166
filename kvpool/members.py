"""The instances that use a pool, and how each names its blocks there: pure.

Two instances are of one key space when they find what the other stored: same model, same digests, same
layout of keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moongate.kvpool.digests import (
    ALGORITHMS,
    DigestKeys,
    HashScheme,
    SchemeProbe,
    digest_blocks,
)
from moongate.kvpool.keys import KEY_SEPARATOR, ONE_SHARD, SHARDS_MAX, BlockDigest, KeyLayout, Shard
from moongate.router.blocks import TOKEN_BYTES
from moongate.router.events import BlocksStored
from moongate.router.model import BlockHash, InstanceId, KeySpace, SourceId, Tier


@dataclass(frozen=True, slots=True)
class KeyRules:
    """What the operator said of the pool and its keys. `shards` None: to be learned from the pool."""

    seeds: Sequence[str] = ()
    cache_prefix: str = ""
    namespace: str = ""
    shards: Sequence[Shard] | None = None
    master: str | None = None  # host:port, as engines are given it


@dataclass(slots=True)
class Member:
    """One instance. `uses_pool` None: not told, so it is taken to use it until it shows otherwise.

    `epochs` number processes: with one counter for all members none is taken for another, not even one
    that came back under its id.
    """

    instance_id: InstanceId
    rules: KeyRules
    uses_pool: bool | None = None
    model: str | None = None  # as keys call it
    block_size_tokens: int | None = None
    probe: SchemeProbe = field(default_factory=SchemeProbe)
    presumed: HashScheme | None = None  # that of its peers, or of the process before it
    foreign_because: str | None = None  # it uses a pool, but not ours
    shards: Sequence[Shard] | None = None  # by the sizes that it announced
    epochs: Iterator[int] = field(default_factory=itertools.count)
    epoch: int = field(init=False)  # of its process
    feed_epochs: dict[SourceId, int] = field(default_factory=dict)  # as last seen
    is_reported: bool = False  # that nothing names this process's blocks

    def __post_init__(self) -> None:
        self.probe = SchemeProbe(self.rules.seeds)
        self.epoch = next(self.epochs)

    def observe(self, event: BlocksStored) -> None:
        """Learn from an event of the instance."""
        if event.tier is Tier.DEVICE and event.is_full_attention:
            self.block_size_tokens = event.block_size_tokens
            self.probe.observe(event)
        elif event.tier is Tier.POOL and self.uses_pool is None:
            self.uses_pool = True

    def note_announced(self, announced: Mapping[str, Any]) -> None:
        """Take in what the instance said of itself; what isn't there says nothing."""
        algorithm, seed = announced.get("hash_algorithm"), announced.get("hash_seed")
        if self.presumed is None and str(algorithm) in ALGORITHMS and seed is not None:
            self.presumed = HashScheme(str(algorithm), str(seed))
        self.foreign_because = _foreign_because(self.rules, announced)
        if self.foreign_because is not None:
            self.uses_pool = False
        tp, pp = (announced.get(f"{axis}_parallel") or 1 for axis in ("tensor", "pipeline"))
        if 1 < tp * pp <= SHARDS_MAX:
            self.shards = [Shard(tp=t, pp=p) for t in range(tp) for p in range(pp)]

    def note_feed(self, source: SourceId, epoch: int) -> bool:
        """Tell whether the epoch of one of its feeds is another than before: so is the process then."""
        is_another = self.feed_epochs.get(source, epoch) != epoch
        self.feed_epochs[source] = epoch
        if is_another:
            self._begin_process()
        return is_another

    def restarted(self) -> None:
        """Presume of a new process what was known of the one before, until it shows otherwise.

        Its use of the pool and its block size are for it to say.
        """
        self._begin_process()
        self.uses_pool = self.block_size_tokens = None

    def _begin_process(self) -> None:
        self.epoch = next(self.epochs)
        before = self.probe.scheme
        self.presumed = before if before is not None and before.seed is not None else self.presumed
        self.probe = SchemeProbe(self.rules.seeds)
        self.is_reported = False

    @property
    def scheme(self) -> HashScheme | None:
        """Return how it names blocks: as it shows, or as far as nothing it announced speaks against."""
        if self.probe.scheme is not None or self.probe.mismatches:
            return self.probe.scheme
        return self.presumed

    @property
    def has_askable_keys(self) -> bool:
        """Tell whether the name of its model may be part of a question."""
        return self.model is None or KEY_SEPARATOR not in self.model

    @property
    def key_space(self) -> KeySpace | None:
        """Return the instance's key space, None as long as its keys can't be made."""
        scheme = self.scheme
        known = scheme is not None and self.model is not None and self.block_size_tokens is not None
        if not known or self.uses_pool is False or not self.has_askable_keys:
            return None
        assert scheme is not None
        seed = f"{self.instance_id}#{self.epoch}" if scheme.seed is None else scheme.seed
        return KeySpace(f"{self.model}/{scheme.algorithm}/{seed}/{self.block_size_tokens}")

    def layout(self, shards: Sequence[Shard] = ONE_SHARD) -> KeyLayout:
        assert self.model is not None
        return KeyLayout(
            self.model, self.rules.shards or shards, self.rules.cache_prefix, self.rules.namespace
        )

    def first_digest(
        self, chain: Sequence[BlockHash], tokens: bytes, keys: DigestKeys | None = None
    ) -> BlockDigest | None:
        """Return the digest of a prompt's first block; `keys` isolate it. None: it can't be told.

        Where the seed is of chance, it can be told only of a block that the engine announced.
        """
        scheme, size = self.scheme, self.block_size_tokens
        if scheme is None or size is None or not chain:
            return None
        if scheme.root is None:
            return self.probe.roots.get(chain[0])
        (digest,) = digest_blocks(
            scheme.algorithm, scheme.root, tokens[: size * TOKEN_BYTES], size, keys
        )
        return digest


def _foreign_because(rules: KeyRules, announced: Mapping[str, Any]) -> str | None:
    """Return why the pool that an instance announced is not ours, as far as both are given."""
    for what, setting, ours in (
        ("pool_master", "pool.master", rules.master),
        ("pool_prefix", "pool.cache_prefix", rules.cache_prefix),
    ):
        theirs = announced.get(what)
        if theirs and ours and theirs != ours:
            return f"its {what} is {theirs}, and {setting} is {ours}"
    return None
