"""One engine's side of a pool that several share: what it finds there, and what it puts there.

Responsible for keys and for when a block counts as stored. Not for what a fetch takes (`loading.py`)
or for when a request may look (`engine.py`). Pure: the pool is an object in this process.

A block is there when the keys of all its parts are. What a step computes is put when the step is
over, although the model decides at the step's start: another engine must not find it before.

Source: vLLM 0.32.0 `distributed/kv_transfer/kv_connector/v1/mooncake/store/` `scheduler.py`,
`worker.py` (`load_async`, no `save_decode_cache`).
"""

from collections import deque
from dataclasses import dataclass

from moongate.kvpool.keys import KeyLayout
from moongate.kvpool.memory import MemoryPool
from moongate.simulator.blocks import BlockDigest, PoolBlockStored, TokenSequence


@dataclass(frozen=True, slots=True)
class _Put:
    """Blocks that one step computes for one request."""

    ready_at: float
    digests: tuple[BlockDigest, ...]
    parent: BlockDigest | None
    token_ids: tuple[int, ...]


class SharedPool:
    """A pool as one rank of an engine uses it."""

    def __init__(
        self,
        pool: MemoryPool,
        layout: KeyLayout,
        *,
        block_bytes: int,
        endpoint: str = "",
        stores: bool = True,
        publishes: bool = True,
    ) -> None:
        """`block_bytes`: of all parts of a block together. `endpoint`: the segment it is put into.

        `stores`: False for an engine that only decodes. `publishes`: whether what is stored is told.
        """
        self._pool = pool
        self._layout = layout
        self._part_bytes = max(block_bytes // len(layout.shards), 1)
        self._endpoint = endpoint
        self._stores = stores
        self._publishes = publishes
        self._puts: deque[_Put] = deque()

    def take_prefix(self, tokens: TokenSequence, first: int, last: int) -> int:
        """Return how many blocks from `first`, before `last`, the prefix that is there has.

        A prefix begins with the prompt's first block, whatever the device has of it: where the pool has
        lost that one, the rest is of no use. All that is there then counts as just used.
        Source: `get_num_new_matched_tokens` in `scheduler.py`, `lookup` in `worker.py`.
        """
        keys = [self._layout.keys(digest) for digest in tokens.digests[:last]]
        has_all = [None not in [self._pool.get(key) for key in parts] for parts in keys]
        found = has_all.index(False) if False in has_all else len(has_all)
        return max(found - first, 0)

    def put_later(self, tokens: TokenSequence, first: int, last: int, ready_at: float) -> None:
        """Put the blocks from `first`, before `last`, when they have been computed."""
        if not self._stores or first >= last:
            return
        parent = tokens.digests[first - 1] if first else None
        digests = tuple(tokens.digests[first:last])
        self._puts.append(_Put(ready_at, digests, parent, tokens.tokens_of_blocks(first, last)))

    def settle(self, now: float) -> list[PoolBlockStored]:
        """Put what has been computed by now; return what of it is new there and to be told."""
        stored: list[PoolBlockStored] = []
        while self._puts and self._puts[0].ready_at <= now:
            stored += self._put(self._puts.popleft())
        return stored if self._publishes else []

    def _put(self, put: _Put) -> list[PoolBlockStored]:
        stored: list[PoolBlockStored] = []
        parent, size = put.parent, len(put.token_ids) // len(put.digests)
        for index, digest in enumerate(put.digests):
            keys = self._layout.keys(digest)
            is_new = any(key not in self._pool for key in keys)
            has_all = all(self._pool.put(key, self._part_bytes, self._endpoint) for key in keys)
            if is_new and has_all:
                tokens = put.token_ids[index * size : (index + 1) * size]
                stored.append(PoolBlockStored(digest, parent, tokens))
            parent = digest
        return stored
