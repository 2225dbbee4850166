"""Engine facts and block digests -> the keys under which a block lies in a Mooncake store.

Source: vLLM 0.32 `distributed/kv_transfer/kv_connector/v1/mooncake/store/data.py` `PoolKey`; the
missing colons after pcp and dcp are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

BlockDigest = bytes
"""The engine's full name of a block: 32 bytes of SHA-256, or 16 of XXH3."""


class Shard(NamedTuple):
    """One of the parts in which a block is stored: a worker's rank, and the KV group."""

    tp: int = 0
    pcp: int = 0
    dcp: int = 0
    pp: int = 0
    group: int = 0


ONE_SHARD = (Shard(),)

KEY_SEPARATOR = ","
"""Between keys that are asked for together, so no key that has one can be asked for."""

SHARDS_MAX = 4096
"""The ranks of a very large engine, or KV groups times those of a large one: each is a key to ask for."""


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """How the keys of one model's blocks are made.

    `model`: the last part of the path or name from which the engine loaded the model, whatever name it
    serves it under. `namespace`: for opt-in payload formats, such as `@store_tp:2@store_pp:1`.
    """

    model: str
    shards: Sequence[Shard] = ONE_SHARD
    cache_prefix: str = ""
    namespace: str = ""

    def key(self, shard: Shard, digest: BlockDigest) -> str:
        """Return the key of one part of a block."""
        prefix = f"{self.cache_prefix}@" if self.cache_prefix else ""
        return (
            f"{prefix}{self.model}{self.namespace}@tp_rank:{shard.tp}@pcp{shard.pcp}@dcp{shard.dcp}"
            f"@pp_rank:{shard.pp}@group:{shard.group}@{digest.hex()}"
        )

    def keys(self, digest: BlockDigest) -> list[str]:
        """Return the keys of all parts of a block."""
        return [self.key(shard, digest) for shard in self.shards]


def model_part(root: str) -> str:
    """Return what keys call a model that was loaded from this path or name."""
    return PurePosixPath(root.rstrip("/")).name
