"""One instance of a fleet in virtual time: drives its batcher over the agenda, and tells its KV events.

Responsible for when stretches end, which KV is on its way, what goes into the pool, and the order "events
first, then outputs". Not for which requests it gets (`virtual_gateway.py`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moongate.router.events import BlocksRemoved, BlocksStored, KvEvent
from moongate.router.model import InstanceId, Tier
from moongate.simulator.batching import Batcher, Change, Ended, Job, Stretch
from moongate.simulator.content import NUMBER_BITS
from moongate.simulator.network import Network
from moongate.simulator.profiles import InstanceShape
from moongate.simulator.shared_store import SharedStore

REPLAY_BATCHES_MAX = 10_000
"""Batches that a publisher can send again: vLLM's own `buffer_steps`."""


class Agenda:
    """What happens when. What is due at the same time happens in the order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, time: float, act: Callable[[], object]) -> None:
        assert time >= self.now, (time, self.now)
        heapq.heappush(self._due, (time, next(self._order), act))

    def run(self, until: float) -> None:
        """Let happen what is due until then."""
        while self._due and self._due[0][0] <= until:
            self.now, _, act = heapq.heappop(self._due)
            act()
        self.now = until


@dataclass(slots=True)
class Listener:
    """Who is told what comes of jobs."""

    begun: Callable[[Job], object]
    finished: Callable[[Job], object]
    lost: Callable[[Job], object]
    published: Callable[[VirtualInstance, int, tuple[KvEvent, ...]], object]


@dataclass(slots=True)
class Sender:
    """Where a job's KV comes from: an instance that keeps it."""

    instance: VirtualInstance
    job: Job


@dataclass(slots=True, eq=False)
class VirtualInstance:
    """One engine, on a node of its own."""

    id: InstanceId
    shape: InstanceShape
    node: int
    block_tokens: int
    agenda: Agenda
    network: Network
    listener: Listener
    store: SharedStore | None = None
    store_bytes_per_token: float = 0.0
    partner: int | None = None  # the node through which loads come in as well
    announces: bool = True  # whether anybody listens to its KV events
    saves_answers: bool = True  # whether an answer's blocks are put into the pool when it ends
    is_alive: bool = True
    pool_bytes: float = 0.0  # that it got from the pool
    life: int = 0  # rises with each crash: what was on its way to an earlier one is void
    sequence: int = 0
    history: deque[tuple[int, tuple[KvEvent, ...]]] = field(
        default_factory=lambda: deque(maxlen=REPLAY_BATCHES_MAX)
    )
    batcher: Batcher = field(init=False)
    _stretch: Stretch | None = None
    _senders: dict[str, Sender] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batcher = Batcher(self.shape.engine(self.block_tokens), self._find_external)

    # --- what can happen --------------------------------------------------------------------------

    def submit(self, job: Job, sender: Sender | None = None) -> None:
        """Queue a job. `sender`: where its prompt's KV comes from."""
        if sender is not None:
            self._senders[job.id] = sender
        self.batcher.submit(job)
        self._interrupt()

    def release(self, job: Job) -> None:
        """Free what a finished prefill keeps."""
        self.batcher.free(job)
        if self.batcher.waiting:
            self._interrupt()

    def crash(self) -> None:
        """Lose the cache and all jobs."""
        self.is_alive = False
        self.life += 1
        self._stretch = None
        for job in self.batcher.crash():
            sender = self._senders.pop(job.id, None)
            if sender is not None:
                sender.instance.release(sender.job)
            self.listener.lost(job)

    def restart(self) -> None:
        """Begin anew with an empty cache, as another process that publishes from 0."""
        self.is_alive = True
        self.sequence = 0
        self.history.clear()

    def slow_down(self, slowness: float) -> None:
        """Take so many times longer for what is begun from now on."""
        self.batcher.slowness = slowness

    @property
    def busy_s(self) -> float:
        """Return for how long it has computed until now."""
        under_way_s = self.agenda.now - self._stretch.began_at if self._stretch is not None else 0.0
        return self.batcher.busy_s + under_way_s

    # --- stretches --------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        if self._stretch is None:
            self._begin()
        elif self.batcher.cut(self._stretch, self.agenda.now):
            self._schedule(self._stretch)

    def _begin(self) -> None:
        if not self.is_alive:
            return
        self._stretch = stretch = self.batcher.begin(self.agenda.now)
        if self.batcher.parking:
            parking, self.batcher.parking = self.batcher.parking, []
            for job in parking:
                self._fetch(job)
        if stretch is not None:
            self._schedule(stretch)

    def _schedule(self, stretch: Stretch) -> None:
        ends_at = stretch.ends_at
        self.agenda.at(ends_at, lambda: self._end(stretch, ends_at))

    def _end(self, stretch: Stretch, ends_at: float) -> None:
        if self._stretch is not stretch or stretch.ends_at != ends_at:
            return  # it was cut, or its engine has crashed
        self._stretch = None
        ended = self.batcher.end(stretch)
        self._tell_events(ended)
        self._put(ended)
        for job in ended.begun:
            self.listener.begun(job)
        for job in ended.finished:
            self.listener.finished(job)
        if self._stretch is None:
            self._begin()

    # --- KV from elsewhere ------------------------------------------------------------------------

    def _find_external(self, job: Job, first: int, last: int) -> int:
        if self.store is None or job.receives:
            return first
        return max(self.store.take(job.branch, last), first)

    def _fetch(self, job: Job) -> None:
        """Ask for what a parked job lacks."""
        now, tokens = self.agenda.now, job.external_tokens
        sender = self._senders.get(job.id)
        if sender is not None:
            size = tokens * self.shape.load_bytes_per_token
            arrives_at = self.network.hand_over(sender.instance.node, self.node, size, now)
        else:
            arrives_at = self._load(job, now)
        life = self.life
        self.agenda.at(arrives_at, lambda: self._arrived(job, life))

    def _load(self, job: Job, now: float) -> float:
        assert self.store is not None
        last = job.computed // self.block_tokens
        counts = self.store.nodes_of(
            job.branch, last - job.external_tokens // self.block_tokens, last
        )
        block_bytes = self.shape.load_bytes_per_token * self.block_tokens
        parts = {node: blocks * block_bytes for node, blocks in counts.items()}
        self.pool_bytes += sum(parts.values())
        return self.network.load(self.node, parts, now, self.partner)

    def _arrived(self, job: Job, life: int) -> None:
        if life != self.life:
            return
        sender = self._senders.pop(job.id, None)
        if sender is not None:
            sender.instance.release(sender.job)
        if job.id in self.batcher.parked:
            self.batcher.arrived(job.id)
            self._interrupt()

    def _put(self, ended: Ended) -> None:
        """Give the pool what was computed; it takes what it lacks."""
        if self.store is None:
            return
        for job, blocks in ended.computed:
            self.store.put(job.branch, blocks, self.node)
        if self.saves_answers:
            for job in ended.finished:
                if not job.is_held:
                    blocks = (job.tokens - 1) // self.block_tokens
                    self.store.put(job.branch, blocks, self.node)

    # --- events -----------------------------------------------------------------------------------

    def _tell_events(self, ended: Ended) -> None:
        if not self.announces or not ended.changes:
            return
        size = self.block_tokens
        batch = tuple(_stored(c, size) if c.is_stored else _removed(c) for c in ended.changes)
        self.history.append((self.sequence, batch))
        self.listener.published(self, self.sequence, batch)
        self.sequence += 1


def _stored(change: Change, block_tokens: int) -> BlocksStored:
    _, branch, first, last = change
    base = branch.number << NUMBER_BITS
    return BlocksStored(
        engine_hashes=tuple(range(base + first, base + last)),
        parent=branch.name(first - 1) if first else None,
        tokens=branch.tokens(first, last, block_tokens),
        block_size_tokens=block_tokens,
        tier=Tier.DEVICE,
    )


def _removed(change: Change) -> BlocksRemoved:
    _, branch, first, last = change
    base = branch.number << NUMBER_BITS
    return BlocksRemoved(tuple(range(base + last - 1, base + first - 1, -1)), Tier.DEVICE)


def busy_over_mean(busy_s: Sequence[float]) -> float:
    """Return the busiest one's time over the mean; 1 if nobody worked."""
    mean = sum(busy_s) / len(busy_s) if busy_s else 0.0
    return max(busy_s) / mean if mean else 1.0
