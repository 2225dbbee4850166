"""What one source announced, translated: the engine's names for blocks to ours.

Our hash of a block follows from its parent's, its tokens and its extra keys; a block whose parent was
never announced can't be named and is an orphan.

With several KV groups (hybrid attention) the first full-attention group that speaks is the main one: it
needs every block of a prefix, so its blocks name those of the others (`side_names.py`).

Invariant: the index holds, for this holder, exactly the blocks whose copies are counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moongate.router.blocks import TOKEN_BYTES, extend_chain, root_hash
from moongate.router.events import BlocksRemoved, BlocksStored
from moongate.router.index import OwnershipIndex
from moongate.router.model import BlockHash, BlockSpace, EngineHash, Holder, SideGroup, Tier
from moongate.router.names import Names
from moongate.router.side_names import SideNames, side_of

SIDE_GROUPS_MAX = 64
"""KV groups beside the main one; models have one to ten. Those past it are ignored."""


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


NOTHING_STORED = Stored(None, ())


class Ledger:
    """The blocks of one holder by the engine's names."""

    def __init__(self, holder: Holder, index: OwnershipIndex) -> None:
        self.index = index
        self.counts = LedgerCounts()
        self.block_size_tokens: int | None = None  # as the events say
        self._main = Names(holder, index)
        self._group: int | None = None  # the main one
        self._sides: dict[int, SideNames] = {}

    @property
    def holder(self) -> Holder:
        return self._main.holder

    def store(self, event: BlocksStored) -> Stored | None:
        """Note stored blocks and return them. None: something in the event could not be used."""
        if event.tier is Tier.POOL:  # no holder's own: the pool's directory has them
            return self._ignore(event)
        if self._group is None and event.is_full_attention:
            self._group = event.group
        if event.group != self._group:
            return self._store_side(event)
        if self._is_part_of_block(event):
            return self._ignore(event)
        if not _is_well_formed(event):
            self.counts.malformed_events += 1
            return None
        count = len(event.engine_hashes)
        parent = self._parent_hash(event)
        if parent is None:
            self.counts.orphan_blocks += count
            return None
        self.block_size_tokens = event.block_size_tokens
        blocks = extend_chain(parent, event.tokens, event.block_size_tokens, event.extra_keys)
        self.counts.stored_blocks += count
        refused = self._main.note(event.tier, event.engine_hashes, blocks)
        if self._sides:
            refused += self._name_sides(event, blocks)
        self.counts.refused_blocks += refused
        return None if refused else Stored(parent, blocks)

    def remove(self, event: BlocksRemoved) -> None:
        """Note that one copy of each block is gone. Names that aren't known are no error."""
        names: Names | SideNames | None = self._main
        if event.group != self._group:
            names = self._sides.get(event.group)
        if names is not None:
            self.counts.removed_blocks += names.remove(event.tier, event.engine_hashes)

    def clear(self, tier: Tier | None = None) -> None:
        """Forget what this source announced, on one tier or (None) altogether."""
        for cleared in Tier if tier is None else (tier,):
            self._main.clear(cleared)
            for side in self._sides.values():
                side.clear(cleared)
        if tier is None:
            # Whatever comes next may be another engine.
            self._group = self.block_size_tokens = None
            for side in self._sides.values():
                side.leave()
            self._sides.clear()

    def move(self, holder: Holder) -> None:
        """Attribute all that was announced to another holder, known to the index."""
        self._main.move(holder)
        for side in self._sides.values():
            side.move(holder)

    @property
    def is_empty(self) -> bool:
        return self._main.is_empty and all(side.is_empty for side in self._sides.values())

    def held(self) -> Iterator[tuple[Tier, BlockHash]]:
        """Iterate over all that the holder has in its main group, as the index knows it."""
        return self._main.held()

    def held_by_sides(self) -> Iterator[tuple[SideGroup, Tier, BlockHash]]:
        """Iterate over all that the holder has in its side groups, as the index knows it."""
        for names in self._side_names():
            for tier, block in names.held():
                yield side_of(names), tier, block

    def names_of(self, event: BlocksStored) -> Sequence[BlockHash]:
        """Return our names of blocks that were stored elsewhere, as far as they can be told."""
        device = self._main.tiers[Tier.DEVICE]
        known = [block for name in event.engine_hashes if (block := device.get(name)) is not None]
        if known or not event.tokens or not _is_well_formed(event):
            return known
        # Forgotten by the device already; without its extra keys a first block can't be told.
        parent = device.get(event.parent) if event.parent is not None else None
        if parent is None:
            return ()
        return extend_chain(parent, event.tokens, event.block_size_tokens, event.extra_keys)

    @property
    def sides(self) -> list[SideGroup]:
        """Return the side groups that the holder's overlaps depend on by what this source said."""
        return [side_of(names) for names in self._side_names()]

    def engine_hashes(self, tier: Tier, group: int | None = None) -> set[EngineHash]:
        """Return the engine's names of all blocks on this tier (for comparison with the engine).

        Of the main group, or of that side group.
        """
        if group is None or group == self._group:
            return set(self._main.tiers[tier])
        names = self._sides[group].names if group in self._sides else None
        return set() if names is None else set(names.tiers[tier])

    def _side_names(self) -> Iterator[Names]:
        return (side.names for side in self._sides.values() if side.names is not None)

    def _is_part_of_block(self, event: BlocksStored) -> bool:
        """Tell whether the event is of a prefix that ends within a block.

        Engines that keep several groups may announce where in a block work could go on, as a smaller
        block of the main group. Prompts aren't hashed that finely, so it is of no use here.
        Source: vLLM 0.32 `v1/core/block_pool.py`, `cache_partial_block`.
        """
        size = self.block_size_tokens
        return size is not None and bool(self._sides) and event.block_size_tokens < size

    def _ignore(self, event: BlocksStored) -> Stored:
        self.counts.ignored_blocks += len(event.engine_hashes)
        return NOTHING_STORED

    def _store_side(self, event: BlocksStored) -> Stored | None:
        side = self._sides.get(event.group)
        if side is None:
            needed_tokens, size = event.needed_tokens, event.block_size_tokens
            if needed_tokens is None or not size or len(self._sides) == SIDE_GROUPS_MAX:
                return self._ignore(event)
            side = self._sides[event.group] = SideNames(event.group, needed_tokens, size)
            if self.block_size_tokens is not None:
                side.join(self.holder, self.index, self.block_size_tokens)
        self.counts.stored_blocks += len(event.engine_hashes)
        refused = side.store(event.tier, event.engine_hashes, self._main)
        self.counts.refused_blocks += refused
        return None if refused else NOTHING_STORED

    def _name_sides(self, event: BlocksStored, blocks: Sequence[BlockHash]) -> int:
        refused = 0
        for side in self._sides.values():
            side.join(self.holder, self.index, event.block_size_tokens)
            refused += side.name(event.engine_hashes, blocks)
        return refused

    def _parent_hash(self, event: BlocksStored) -> BlockHash | None:
        if event.parent is None:
            return root_hash(BlockSpace(event.block_size_tokens, event.lora_name))
        return self._main.find(event.parent, event.tier)


def _is_well_formed(event: BlocksStored) -> bool:
    count = len(event.engine_hashes)
    return (
        event.block_size_tokens > 0
        and len(event.tokens) == count * event.block_size_tokens * TOKEN_BYTES
        and (event.extra_keys is None or len(event.extra_keys) == count)
    )
