"""The other gateways before the same fleet: what they have given it, and what they assume of it.

Each says what its loads *are*, not how they changed, so what is lost on the way heals with what comes next.
What one says holds for a lease: of one that is silent for longer (killed, or cut off) nothing is left, and
this gateway goes by what it knows itself.

What others are told of this gateway is gathered here as well (`Outbox`).

Invariant: the loads elsewhere are the sums over all that the others have said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moongate.router.candidates import CandidateTable
from moongate.router.commands import Command, EndPrediction, ShareLoad, SharePrediction
from moongate.router.events import PeerLeft, PeerPredicted, PeerPredictionEnded, PeerReported
from moongate.router.foreign_predictions import told_blocks
from moongate.router.index import OwnershipIndex
from moongate.router.lineage import Lineages, RecentSessions
from moongate.router.load import Load, LoadTable, PeerLoad
from moongate.router.model import BlockHash, Holder, KnownPart, PeerId, RequestId

PEERS_MAX = 256
"""Gateways that are heard; what more of them say is ignored."""

PREDICTION_S_MAX = 600.0
"""However long another gateway wants something to be assumed."""

PeerEvent = PeerReported | PeerPredicted | PeerPredictionEnded | PeerLeft


@dataclass(slots=True)
class _Peer:
    expires_at: float
    loads: dict[Holder, PeerLoad]


class Peers:
    """All other gateways that are heard."""

    def __init__(
        self,
        loads: LoadTable,
        index: OwnershipIndex,
        lineages: Lineages,
        sessions: RecentSessions,
        candidates: CandidateTable,
        grace_s: float,
    ) -> None:
        """`grace_s`: how long events that confirm a prediction may still be under way after its end."""
        self._loads = loads
        self._index = index
        self._lineages = lineages
        self._sessions = sessions
        self._candidates = candidates
        self._grace_s = grace_s
        self._peers: dict[PeerId, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def handle(self, event: PeerEvent, now: float) -> None:
        match event:
            case PeerReported():
                self._reported(event, now)
            case PeerPredicted():
                if event.tail is not None:
                    self._lineages.note_elsewhere(event.tail)
                # Not of an instance that is not known here, or not yet.
                if event.blocks and self._index.has_holder(event.holder):
                    self._predicted(event, now)
            case PeerPredictionEnded():
                name = (event.peer, event.request_id)
                if event.is_void:
                    self._index.foreign.drop(name)
                else:
                    self._index.foreign.shorten(name, now + self._grace_s)
            case PeerLeft():
                self._forget(event.peer)

    def expire(self, now: float) -> None:
        """Forget what those said that have been silent for longer than their lease."""
        if self._peers:
            for name in [name for name, peer in self._peers.items() if peer.expires_at <= now]:
                self._forget(name)

    def next_expiry(self) -> float | None:
        if not self._peers:
            return None
        return min((peer.expires_at for peer in self._peers.values()), default=None)

    def total(self, holder: Holder) -> PeerLoad:
        """Return what all others together have said of a holder."""
        said = [peer.loads[holder] for peer in self._peers.values() if holder in peer.loads]
        load = sum((one.load for one in said), Load())
        return PeerLoad(load, sum(one.recent_sessions for one in said))

    @property
    def holders(self) -> set[Holder]:
        """Return all holders of which any of them has said something."""
        return {holder for peer in self._peers.values() for holder in peer.loads}

    def _reported(self, event: PeerReported, now: float) -> None:
        peer = self._peers.get(event.peer)
        if peer is None:
            if len(self._peers) == PEERS_MAX:
                return
            peer = self._peers[event.peer] = _Peer(now, {})
        peer.expires_at = now + event.lease_s
        said = dict(event.loads)
        changed = [holder for holder, load in said.items() if peer.loads.get(holder) != load]
        if event.is_whole:
            changed += peer.loads.keys() - said.keys()
            peer.loads = said
        else:
            peer.loads |= said
        self._sum_up(changed)

    def _predicted(self, event: PeerPredicted, now: float) -> None:
        expires_at = now + min(event.lifetime_s, PREDICTION_S_MAX)
        name = (event.peer, event.request_id)
        self._index.foreign.add(name, event.holder, event.blocks, expires_at)

    def _forget(self, name: PeerId) -> None:
        """What it predicted may come true all the same: its requests may go on."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._sum_up([*peer.loads])

    def _sum_up(self, holders: Sequence[Holder]) -> None:
        for holder in holders:
            total = self.total(holder)
            self._loads.set_elsewhere(holder, total.load)
            self._sessions.set_elsewhere(holder, total.recent_sessions)
            self._candidates.touch(holder)


class Outbox:
    """What other gateways are to be told of what this one does. Nothing is gathered unless `is_open`."""

    def __init__(self, loads: LoadTable, sessions: RecentSessions, *, is_open: bool) -> None:
        self._loads = loads
        self._sessions = sessions
        self._commands: list[Command] = []
        self.is_open = is_open

    def note_sent(
        self,
        request_id: RequestId,
        holder: Holder,
        known: KnownPart,
        part: range,
        lifetime_s: float,
    ) -> None:
        """A prompt was sent, of which the holder will have this part now."""
        if self.is_open:
            blocks = told_blocks(known.chain, part, known.block_tokens)
            tail: BlockHash | None = known.chain[-1] if known.chain else None
            if blocks or tail is not None:
                self._commands.append(
                    SharePrediction(request_id, holder, tuple(blocks), tail, lifetime_s)
                )

    def note_ended(self, request_id: RequestId, *, is_void: bool = False) -> None:
        """What was predicted for a request is confirmed by now, or soon; `is_void`: will never be."""
        if self.is_open:
            self._commands.append(EndPrediction(request_id, is_void=is_void))

    def take(self) -> list[Command]:
        """Return what is to be told since this was last asked."""
        changed = self._loads.changed
        if not self.is_open:
            changed.clear()
            return []
        commands, self._commands = self._commands, []
        commands += [ShareLoad(holder, self.load_of(holder)) for holder in changed]
        changed.clear()
        return commands

    def load_of(self, holder: Holder) -> PeerLoad:
        """Return what this gateway has given a holder, as others are told."""
        own = self._loads.get_own(holder)
        load = Load(own.active_requests, own.queued_prefill_tokens, own.active_blocks)
        return PeerLoad(load, self._sessions.count_own(holder))

    def whole(self) -> list[tuple[Holder, PeerLoad]]:
        """Return all that this gateway has given: what others are told from time to time."""
        holders = {**dict.fromkeys(self._loads.loads), **dict.fromkeys(self._sessions.holders)}
        return [(holder, self.load_of(holder)) for holder in holders]
