"""What one source announced, translated: the engine's names for blocks to ours.

An engine may hold several physical copies of one block and announces each as stored and as removed
(vLLM does not de-duplicate), so copies are counted and a block is gone with its last copy. Our hash
of a block follows from its parent's, its tokens and its extra keys; a block whose parent was never
announced can't be named and is an orphan.

A name costs an entry in one table; further copies, which are few, are counted beside it.

Invariant: the index holds, for this holder, exactly the blocks whose copies are counted here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moongate.router.blocks import TOKEN_BYTES, extend_chain, root_hash
from moongate.router.events import BlocksRemoved, BlocksStored
from moongate.router.index import OwnershipIndex, take_one
from moongate.router.model import BlockHash, BlockSpace, EngineHash, Holder, Tier


@dataclass(slots=True)
class LedgerCounts:
    """Counted since the source was opened; for metrics and `/admin/index`."""

    stored_blocks: int = 0
    removed_blocks: int = 0
    orphan_blocks: int = 0  # parent unknown: can't be named
    ignored_blocks: int = 0  # a group or tier that says nothing about reusable prefixes here
    malformed_events: int = 0
    refused_blocks: int = 0  # the index was full


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks noted from one event, by our names, and the block before them (None: ignored)."""

    parent: BlockHash | None
    blocks: Sequence[BlockHash]


@dataclass(slots=True)
class Ledger:
    """The blocks of one holder by the engine's names."""

    holder: Holder
    index: OwnershipIndex
    counts: LedgerCounts = field(default_factory=LedgerCounts)
    block_size_tokens: int | None = None  # as the events say
    _names: dict[Tier, dict[EngineHash, BlockHash]] = field(
        default_factory=lambda: {tier: {} for tier in Tier}
    )
    _copies: Counter[tuple[Tier, EngineHash]] = field(default_factory=Counter)  # beside the first
    _group: int | None = None  # the KV group whose blocks decide reuse

    def store(self, event: BlocksStored) -> Stored | None:
        """Note stored blocks and return them. None: something in the event could not be used."""
        count = len(event.engine_hashes)
        if not self._decides_reuse(event):
            self.counts.ignored_blocks += count
            return Stored(None, ())
        if not _is_well_formed(event):
            self.counts.malformed_events += 1
            return None
        parent = self._parent_hash(event)
        if parent is None:
            self.counts.orphan_blocks += count
            return None
        self.block_size_tokens = event.block_size_tokens
        blocks = extend_chain(parent, event.tokens, event.block_size_tokens, event.extra_keys)
        self.counts.stored_blocks += count
        is_whole = self._note(event.tier, event.engine_hashes, blocks)
        return Stored(parent, blocks) if is_whole else None

    def remove(self, event: BlocksRemoved) -> None:
        """Note that one copy of each block is gone. Names that aren't known are no error."""
        if self._group is not None and event.group != self._group:
            return
        names, gone = self._names[event.tier], []
        for engine_hash in event.engine_hashes:
            if self._copies and take_one(self._copies, (event.tier, engine_hash)):
                self.counts.removed_blocks += 1
                continue
            block = names.pop(engine_hash, None)
            if block is not None:
                gone.append(block)
        self.counts.removed_blocks += len(gone)
        self.index.remove(self.holder, event.tier, gone)

    def clear(self, tier: Tier | None = None) -> None:
        """Forget what this source announced, on one tier or (None) altogether."""
        for cleared in Tier if tier is None else (tier,):
            self.index.remove(self.holder, cleared, list(self._names[cleared].values()))
            self._names[cleared].clear()
            for name in [name for name in self._copies if name[0] is cleared]:
                del self._copies[name]
        if tier is None:
            # Whatever comes next may be another engine.
            self._group = self.block_size_tokens = None

    def move(self, holder: Holder) -> None:
        """Attribute all that was announced to another holder, known to the index."""
        for tier, names in self._names.items():
            blocks = list(names.values())
            self.index.remove(self.holder, tier, blocks)
            self.index.store(holder, tier, blocks)
        self.holder = holder

    @property
    def is_empty(self) -> bool:
        return not any(self._names.values())

    def held(self) -> Iterator[tuple[Tier, BlockHash]]:
        """Iterate over all that the holder has, as the index knows it."""
        return ((tier, block) for tier, names in self._names.items() for block in names.values())

    def engine_hashes(self, tier: Tier) -> set[EngineHash]:
        """Return the engine's names of all blocks on this tier (for comparison with the engine)."""
        return set(self._names[tier])

    def names_of(self, event: BlocksStored) -> Sequence[BlockHash]:
        """Return our names of blocks that were stored elsewhere, as far as they can be told."""
        device = self._names[Tier.DEVICE]
        known = [block for name in event.engine_hashes if (block := device.get(name)) is not None]
        if known or not event.tokens or not _is_well_formed(event):
            return known
        # Forgotten by the device already; without its extra keys a first block can't be told.
        parent = device.get(event.parent) if event.parent is not None else None
        if parent is None:
            return ()
        return extend_chain(parent, event.tokens, event.block_size_tokens, event.extra_keys)

    def _decides_reuse(self, event: BlocksStored) -> bool:
        """Tell whether the event is of the group that decides how long a prefix can be reused.

        With several groups (hybrid attention) full attention needs every block of a prefix, so
        its blocks bound the reuse; the first full-attention group that speaks is taken.
        Pool copies are no holder's own: the pool's directory has them.
        """
        if event.tier is Tier.POOL or not event.is_full_attention:
            return False
        if self._group is None:
            self._group = event.group
        return event.group == self._group

    def _parent_hash(self, event: BlocksStored) -> BlockHash | None:
        if event.parent is None:
            return root_hash(BlockSpace(event.block_size_tokens, event.lora_name))
        for tier in (event.tier, *Tier):
            block = self._names[tier].get(event.parent)
            if block is not None:
                return block
        return None

    def _note(
        self, tier: Tier, engine_hashes: Sequence[EngineHash], blocks: Sequence[BlockHash]
    ) -> bool:
        """Note copies of blocks by the engine's names. False: the index was full before the end."""
        names = self._names[tier]
        fresh: dict[EngineHash, BlockHash] = {}
        for engine_hash, block in zip(engine_hashes, blocks, strict=True):
            known = names.get(engine_hash)
            if known is None:
                fresh[engine_hash] = block
            elif known == block:
                self._copies[tier, engine_hash] += 1
            else:
                # One engine name, two contents: a hash collision of 64-bit names, or a lost removal.
                self._forget(tier, engine_hash)
                fresh[engine_hash] = block
        noted = self.index.store(self.holder, tier, list(fresh.values()))
        self.counts.refused_blocks += len(fresh) - noted
        names.update(itertools.islice(fresh.items(), noted))
        return noted == len(fresh)

    def _forget(self, tier: Tier, engine_hash: EngineHash) -> None:
        self.index.remove(self.holder, tier, (self._names[tier].pop(engine_hash),))
        self._copies.pop((tier, engine_hash), None)


def _is_well_formed(event: BlocksStored) -> bool:
    count = len(event.engine_hashes)
    return (
        event.block_size_tokens > 0
        and len(event.tokens) == count * event.block_size_tokens * TOKEN_BYTES
        and (event.extra_keys is None or len(event.extra_keys) == count)
    )
