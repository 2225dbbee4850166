"""The fleet's sources of KV events: each one's feed and ledger, and what they say together.

A feed says which batches come next, a ledger puts them into the index; here they are tied together
and each source's blocks are attributed to a holder.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from moongate.router.commands import Command, NotePooled, RequestReplay
from moongate.router.events import (
    BatchReceived,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    BlocksUnreadable,
    KvEvent,
    ReplayEnded,
    SourceClosed,
    SourceLost,
    SourceOpened,
    SourceReconnected,
)
from moongate.router.feed import Apply, Ask, Feed, FeedAction, Forget
from moongate.router.fleet import InstanceState
from moongate.router.index import OwnershipIndex
from moongate.router.ledger import Ledger
from moongate.router.model import BlockHash, Holder, InstanceId, SourceId, Tier, Trust
from moongate.router.settling import Settling

SourceEvent = (
    SourceOpened | BatchReceived | ReplayEnded | SourceLost | SourceReconnected | SourceClosed
)


Standing = tuple[Trust, Holder, int | None]
"""What candidates are made of: how far a source is trusted, for which holder, its block size."""


@dataclass(slots=True)
class SourceState:
    """One source: the order of its batches, and what it announced."""

    feed: Feed
    rank: int | None
    ledger: Ledger
    noted: Standing | None = None  # its standing when it was last looked at
    wakes_at: float | None = None  # when it is looked at again; it may turn out to be due later

    @property
    def standing(self) -> Standing:
        return self.feed.trust, self.ledger.holder, self.ledger.block_size_tokens


class Sources:
    """All open sources, by id. What they say goes into `index`, and past `settling`.

    `changes` rises whenever a source came, went or changed its standing.
    """

    def __init__(self, index: OwnershipIndex, settling: Settling) -> None:
        self._index = index
        self._settling = settling
        self._by_instance: dict[InstanceId, dict[SourceId, SourceState]] = {}
        # A heap. With each batch a source is due later: it is looked at when it was first, and then put back.
        self._wakes: list[tuple[float, SourceId]] = []
        self.changes = 0

    def __iter__(self) -> Iterator[tuple[SourceId, SourceState]]:
        for states in self._by_instance.values():
            yield from states.items()

    def find(self, source: SourceId) -> SourceState | None:
        return self._by_instance.get(source.instance_id, {}).get(source)

    def of(self, instance_id: InstanceId) -> list[SourceState]:
        return list(self._by_instance.get(instance_id, {}).values())

    # --- what they say together -------------------------------------------------------------------

    def trust(self, holder: Holder) -> Trust:
        """Return how far the blocks attributed to this holder can be believed."""
        trust: Trust | None = None
        for state in self._by_instance.get(holder.instance_id, {}).values():
            if state.ledger.holder == holder:
                trust = state.feed.trust if trust is None else min(trust, state.feed.trust)
        return Trust.APPROXIMATE if trust is None else trust

    def block_size_tokens(self, instance_id: InstanceId) -> int | None:
        """Return the block size that the instance's events name, None before the first."""
        sizes = (state.ledger.block_size_tokens for state in self.of(instance_id))
        return next((size for size in sizes if size is not None), None)

    def are_synced(self, instance_id: InstanceId) -> bool:
        """Tell whether all of the instance's sources follow their publishers' streams now."""
        return all(state.feed.is_live for state in self.of(instance_id))

    # --- what happened ----------------------------------------------------------------------------

    def handle(self, event: SourceEvent, instance: InstanceState, now: float) -> list[Command]:
        """Take in an event of one of the instance's sources. One that is not open says nothing."""
        if isinstance(event, SourceOpened):
            return self._open(event, instance, now)
        state = self.find(event.source)
        if state is None:
            return []
        match event:
            case BatchReceived():
                actions = state.feed.received(event, now)
                is_live = event.replay_id is None
                return self._perform(event.source, state, instance, actions, is_live=is_live)
            case ReplayEnded():
                actions = state.feed.replay_ended(event.replay_id, event.is_complete, now)
            case SourceLost():
                state.feed.connection_lost()
                return []
            case SourceReconnected():
                actions = state.feed.reconnected(now)
            case SourceClosed():
                self._close(event.source)
                return []
            case _:
                assert_never(event)
        return self._perform(event.source, state, instance, actions)

    def take_due(self, now: float) -> list[SourceId]:
        """Return the sources that may have something to do now: let each of them know that it `woke`."""
        due: list[SourceId] = []
        while (at := self.next_wake()) is not None and at <= now:
            _, source = heapq.heappop(self._wakes)
            state = self.find(source)
            assert state is not None, source
            state.wakes_at = None
            due.append(source)
        return due

    def next_wake(self) -> float | None:
        """Return when the first source may have something to do. Cost: O(1), rarely O(log sources)."""
        while self._wakes:
            at, source = self._wakes[0]
            state = self.find(source)
            if state is not None and state.wakes_at == at:
                return at
            heapq.heappop(self._wakes)
        return None

    def woke(self, source: SourceId, instance: InstanceState, now: float) -> list[Command]:
        """Let a source do what is due."""
        state = self.find(source)
        assert state is not None, source
        return self._perform(source, state, instance, state.feed.woke(now))

    def doubt(self, holder: Holder, instance: InstanceState, now: float) -> list[Command]:
        """Note that the engine has reported to lack what its events say this holder has."""
        commands: list[Command] = []
        for source, state in list(self._by_instance.get(holder.instance_id, {}).items()):
            if state.ledger.holder == holder:
                commands += self._perform(source, state, instance, state.feed.doubted(now))
        return commands

    def described(self, instance: InstanceState) -> None:
        """Follow discovery: a cache that had no rank may have one now, or the other way round."""
        for state in self.of(instance.spec.id):
            holder = instance.holder_of(state.rank)
            if holder != state.ledger.holder:
                state.ledger.move(self._known(holder))
                self.changes += 1

    def close_all(self, instance_id: InstanceId) -> None:
        for source in list(self._by_instance.get(instance_id, {})):
            self._close(source)

    def _open(self, event: SourceOpened, instance: InstanceState, now: float) -> list[Command]:
        assert self.find(event.source) is None, event.source
        holder = self._known(instance.holder_of(event.rank))
        state = SourceState(Feed(event.has_replay), event.rank, Ledger(holder, self._index))
        self._by_instance.setdefault(instance.spec.id, {})[event.source] = state
        return self._perform(event.source, state, instance, state.feed.opened(now))

    def _close(self, source: SourceId) -> None:
        states = self._by_instance[source.instance_id]
        states.pop(source).ledger.clear()
        self.changes += 1
        if not states:
            del self._by_instance[source.instance_id]

    # --- applying ---------------------------------------------------------------------------------

    def _perform(
        self,
        source: SourceId,
        state: SourceState,
        instance: InstanceState,
        actions: Sequence[FeedAction],
        *,
        is_live: bool = False,
    ) -> list[Command]:
        """Do what the feed says. `is_live`: what is applied was announced just now."""
        commands: list[Command] = []
        for action in actions:
            match action:
                case Apply():
                    self._attribute(state, instance, action.rank)
                    for event in action.events:
                        self._apply(state, event)
                    if is_live:
                        commands += _pooled(state.ledger, source.instance_id, action.events)
                case Forget():
                    state.ledger.clear()
                    self._index.forget_predictions(state.ledger.holder)
                case Ask():
                    commands.append(RequestReplay(source, action.from_sequence, action.replay_id))
                case _:
                    assert_never(action)
        standing = state.standing
        if standing != state.noted:
            state.noted = standing
            self.changes += 1
        at = state.feed.next_wake()
        if at is not None and (state.wakes_at is None or at < state.wakes_at):
            state.wakes_at = at
            heapq.heappush(self._wakes, (at, source))
        return commands

    def _apply(self, state: SourceState, event: KvEvent) -> None:
        match event:
            case BlocksStored():
                stored = state.ledger.store(event)
                if stored is None:
                    state.feed.distrust()
                elif stored.parent is not None:
                    self._settling.stored(state.ledger.holder, stored.parent, stored.blocks)
            case BlocksRemoved():
                state.ledger.remove(event)
            case BlocksCleared():
                state.ledger.clear(Tier.DEVICE)
                if state.ledger.is_empty:
                    state.feed.believe()
                self._index.forget_predictions(state.ledger.holder)
            case BlocksUnreadable():
                state.ledger.counts.malformed_events += 1
                state.feed.distrust()
            case _:
                assert_never(event)

    def _attribute(self, state: SourceState, instance: InstanceState, rank: int | None) -> None:
        """Let the batch's own rank decide whose blocks these are.

        Ranks are global in events and in the rank header, whatever the publisher's port suggests.
        A publisher speaks of one rank; should it change, what it said before is void.
        """
        if rank is None or rank == state.rank:
            return
        state.rank = rank
        holder = instance.holder_of(rank)
        if holder != state.ledger.holder:
            state.ledger.clear()
            state.ledger.move(self._known(holder))

    def _known(self, holder: Holder) -> Holder:
        self._index.add_holder(holder)
        return holder


def _pooled(
    ledger: Ledger, instance_id: InstanceId, events: Sequence[KvEvent]
) -> Iterator[NotePooled]:
    """Yield what the events say of the shared pool. Whether it lasts there nobody announces."""
    blocks: list[BlockHash] = []
    for event in events:
        if isinstance(event, BlocksStored) and event.tier is Tier.POOL:
            blocks += ledger.names_of(event)
    if blocks:
        yield NotePooled(instance_id, blocks)
