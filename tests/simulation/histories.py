"""Histories of a small fleet, plausible and hostile, for the routing core.

A `History` is driven by chance alone. It holds the truth (instances, the caches of their ranks, what
each publisher sent, what the network still carries, which requests are open), lets one thing happen
at a time, hands the event to a `RouterCore`, and checks what comes back. As in swarm testing each
history enables only some kinds of things, so that rare combinations get long runs of their own.

The truth of a cache is the simplest there is: a list of physical copies, the least recently used
first, of all KV groups (some engines serve a hybrid model, and have groups beside the main one). Tokens are small numbers and block sizes 2, 3 and 4, so that prompts share prefixes often.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moongate.router import (
    BatchReceived,
    BlockSpace,
    Command,
    Event,
    FailureKind,
    Forward,
    Hold,
    Holder,
    InstanceAdded,
    InstanceChanged,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstancePooled,
    InstanceProbed,
    InstanceRemoved,
    InstanceSpec,
    KeySpace,
    ModelCard,
    Outcome,
    PoolPart,
    PrefillEnded,
    PrefillFailed,
    Prompt,
    Reconfigured,
    Reject,
    RelayFailure,
    ReplayEnded,
    Request,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    RequestReplay,
    Role,
    RouterCore,
    RouterLimits,
    SourceClosed,
    SourceId,
    SourceLost,
    SourceOpened,
    SourceReconnected,
    Tier,
    Trust,
    WakeAt,
    WakeUp,
    make_policy,
)
from moongate.router.admission import AdmissionLimits
from moongate.router.blocks import hash_prompt, hash_text, pack_tokens
from moongate.router.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    BlocksUnreadable,
    KvEvent,
)
from moongate.router.invariants import check
from moongate.router.model import TEXT_SPACE, WHOLE_PREFIX, BlockHash, Duty
from moongate.router.sources import SourceEvent

MODEL, ADAPTER = "m", "ad-1"
KEY_SPACES = (KeySpace("k"), KeySpace("l"))
POLICIES = ("kv_cost", "kv_cost", "prefix_affinity", "round_robin", "random", "power_of_two")
CACHE_COPIES_MAX = 12
PROMPT_TOKENS_MAX = 20
BUFFER_BATCHES = 1000
HEALED_S = 75.0
"""Time for the core to look twice at every silent source."""

FORGOTTEN_S = 700.0
"""Longer than every prediction of the core."""

MAIN_GROUP = 0

Tokens = tuple[int, ...]


@functools.cache
def chain(space: BlockSpace, tokens: Tokens) -> tuple[BlockHash, ...]:
    return tuple(hash_prompt(space, pack_tokens(tokens)))


# --- the truth ------------------------------------------------------------------------------------

Held = tuple[int, Tier, BlockHash]
"""A block that a holder has: of which group, and where."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One physical copy of a block: `prefix` ends with it."""

    tier: Tier
    prefix: Tokens
    lora: str | None
    name: int
    group: int = MAIN_GROUP


class Side(NamedTuple):
    """A group beside the main one: what of a prompt it keeps, and in blocks of which size."""

    number: int
    needed_tokens: int
    size: int


@dataclass(slots=True)
class Link:
    """A subscription to a publisher as the network sees it."""

    has_replay: bool
    is_connected: bool
    live: deque[BatchReceived] = field(default_factory=deque)
    delivered: list[BatchReceived] = field(default_factory=list)  # on this connection
    asked: deque[RequestReplay] = field(default_factory=deque)
    answers: deque[BatchReceived | ReplayEnded] = field(default_factory=deque)


@dataclass(slots=True)
class Engine:
    """One rank's cache and its publisher."""

    source: SourceId
    rank: int | None  # as its events tell it
    size: int
    buffer_batches: int
    sides: tuple[Side, ...] = ()
    is_main_last: bool = False  # in the order in which the groups speak
    process: int = 0
    copies: list[Copy] = field(default_factory=list)
    sequence: int = 0
    buffer: deque[BatchReceived] = field(default_factory=deque)
    link: Link | None = None
    is_odd: bool = False  # said something that leaves the router's view rightly incomplete
    has_lost: bool = False  # a replay was not answered, or something said could not be used

    def store(
        self, tokens: Tokens, lora: str | None, tier: Tier, as_copy: bool, alias: int
    ) -> None:
        """Cache a prompt's blocks, evicting others; `alias` tells apart two names of a block."""
        wanted = [
            Copy(tier, prefix, lora, self._name(prefix, lora, alias), group)
            for group, ends in self._kept_ends(len(tokens))
            for prefix in (tokens[:end] for end in ends)
        ]
        found = [] if as_copy else [copy for copy in wanted if copy in self.copies]
        for copy in found:
            self.copies.remove(copy)
            self.copies.append(copy)
        new = [copy for copy in wanted if copy not in found]
        events: list[KvEvent] = []
        copies_max = CACHE_COPIES_MAX * (1 + len(self.sides))
        while self.copies and len(self.copies) + len(new) > copies_max:
            evicted = self.copies.pop(0)
            events.append(BlocksRemoved((evicted.name,), evicted.tier, evicted.group))
        for group in dict.fromkeys(copy.group for copy in wanted):
            of_group = [copy for copy in wanted if copy.group == group]
            for run in _runs(of_group, new):
                self.copies += run
                is_main = group == MAIN_GROUP
                events.append(self._stored(of_group, run) if is_main else self._stored_side(run))
        if events:
            self.publish(*events)

    def _kept_ends(self, token_count: int) -> list[tuple[int, range]]:
        """Return for each group, in the order of speaking, where the blocks end that it keeps."""
        kept = [(MAIN_GROUP, range(self.size, token_count + 1, self.size))]
        for side in self.sides:
            ends = range(side.size, token_count + 1, side.size)
            needed_blocks = math.ceil(side.needed_tokens / side.size)
            kept.append((side.number, ends[-needed_blocks:]))
        return kept[::-1] if self.is_main_last else kept

    def evict(self, count: int) -> None:
        gone, self.copies = self.copies[:count], self.copies[count:]
        for tier, group in {(copy.tier, copy.group): None for copy in gone}:
            names = tuple(c.name for c in gone if (c.tier, c.group) == (tier, group))
            self.publish(BlocksRemoved(names, tier, group))

    def clear(self) -> None:
        self.copies = [copy for copy in self.copies if copy.tier is not Tier.DEVICE]
        self.publish(BlocksCleared())

    def restart(self) -> None:
        """End the process and start another: its cache, its place and its connections are lost."""
        self.process += 1
        self.copies.clear()
        self.sequence = 0
        self.buffer.clear()
        self.is_odd = False
        if self.link is not None:
            self.disconnect(self.link)

    def disconnect(self, link: Link) -> None:
        link.is_connected = False
        self.has_lost = self.has_lost or bool(link.asked or link.answers)
        link.live.clear()
        link.delivered.clear()
        link.asked.clear()
        unanswered = {e.replay_id for e in link.answers if isinstance(e, ReplayEnded)}
        link.answers.clear()
        link.answers += [ReplayEnded(self.source, i, is_complete=False) for i in sorted(unanswered)]

    def publish(self, *events: KvEvent, rank: int | None = None) -> None:
        batch = BatchReceived(
            self.source,
            self.sequence,
            events,
            f"{self.process}:{self.sequence}".encode(),
            self.rank if rank is None else rank,
        )
        self.sequence += 1
        self.buffer.append(batch)
        if len(self.buffer) > self.buffer_batches:
            self.buffer.popleft()
        if self.link is not None and self.link.is_connected:
            self.link.live.append(batch)

    def held(self) -> set[Held]:
        """Return all copies that can be known, by group: not those that end within a main block."""
        return {
            (copy.group, copy.tier, chain(BlockSpace(self.size, copy.lora), copy.prefix)[-1])
            for copy in self.copies
            if len(copy.prefix) % self.size == 0
        }

    def _name(self, prefix: Tokens, lora: str | None, alias: int) -> int:
        text = f"{self.source}/{self.process}/{prefix}/{lora}/{alias}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())

    def _stored(self, wanted: list[Copy], run: list[Copy]) -> BlocksStored:
        start = wanted.index(run[0])
        return BlocksStored(
            engine_hashes=tuple(copy.name for copy in run),
            parent=wanted[start - 1].name if start else None,
            tokens=pack_tokens(run[-1].prefix[start * self.size :]),
            block_size_tokens=self.size,
            tier=run[0].tier,
            lora_name=run[0].lora,
            group=MAIN_GROUP,
            needed_tokens=WHOLE_PREFIX if self.sides else None,
        )

    def _stored_side(self, run: list[Copy]) -> BlocksStored:
        """Return what is said of a side group: its names, and tokens that don't tell of which."""
        (side,) = (side for side in self.sides if side.number == run[0].group)
        return BlocksStored(
            engine_hashes=tuple(copy.name for copy in run),
            parent=None,
            tokens=pack_tokens(run[-1].prefix),
            block_size_tokens=side.size,
            tier=run[0].tier,
            lora_name=run[0].lora,
            group=side.number,
            is_full_attention=side.needed_tokens == WHOLE_PREFIX,
            needed_tokens=side.needed_tokens,
        )


def _runs(wanted: list[Copy], new: list[Copy]) -> list[list[Copy]]:
    """Return the new blocks in runs without a hole: each becomes one event."""
    runs: list[list[Copy]] = []
    previous = None
    for position, copy in enumerate(wanted):
        if copy not in new:
            continue
        if previous is None or position != previous + 1:
            runs.append([])
        runs[-1].append(copy)
        previous = position
    return runs


@dataclass(slots=True)
class Instance:
    """An instance of the fleet; `is_healthy` and `bad_probes` shadow what the core must know."""

    id: InstanceId
    engines: list[Engine]
    size: int
    ranks: tuple[int, ...]
    has_adapter: bool
    role: Role = Role.BOTH
    is_described: bool = False
    is_healthy: bool = False
    bad_probes: int = 0
    key_space: KeySpace | None = None

    def probed(self, is_healthy: bool, is_gone: bool) -> None:
        if is_healthy:
            self.is_healthy, self.bad_probes = True, 0
        elif self.is_healthy:
            self.bad_probes += 1
            if is_gone or self.bad_probes >= 2:
                self.is_healthy, self.bad_probes = False, 0


@dataclass(slots=True)
class Open:
    """A request that the core has forwarded and that has not ended."""

    request: Request
    attempts: int = 0
    failed: set[InstanceId] = field(default_factory=set)  # or full
    prefill: Holder | None = None  # under way
    holder: Holder | None = None  # that answers, or will
    is_kept: bool = False  # by a prefill instance, for the decode leg
    had_prefill: bool = False  # that could not be done
    has_first_byte: bool = False


# --- the history ----------------------------------------------------------------------------------


class History:
    """A run of the core against a fleet that does as `chance` has it. See the module."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.policy = chance.choice(POLICIES)
        self.seed = chance.randrange(1000)
        # Of its own, so that bounded instances change nothing of a history that has none.
        self.bound_chance = random.Random(self.seed)
        self.limits = RouterLimits(
            index_blocks_max=chance.choice([8, 1000, 1000, 1000]),
            attempts_max=chance.choice([1, 2, 2, 3]),
            admission=self._choose_bounds(),
        )
        self.core = make_core(self.policy, self.seed, self.limits)
        self.instances: dict[InstanceId, Instance] = {}
        self.open: dict[RequestId, Open] = {}
        self.held: dict[RequestId, Request] = {}
        self.ended: Counter[RequestId] = Counter()
        self.asked: dict[RequestId, Request] = {}
        self.arrived = 0
        self.wake_at: float | None = None
        self.recording: list[tuple[float, Event]] = []
        self.commands: list[Command] = []
        # Some fleets prefill and decode apart, and much of what happens to them is about that.
        self.is_apart = chance.random() < 0.3
        self.kinds = self._choose_kinds()
        # Of its own, so that what a pool has changes nothing else of a history.
        self.pool_chance = random.Random(self.seed)
        self.has_pool = self.pool_chance.random() < 0.5
        self.operator_chance = random.Random(self.seed + 1)
        self.has_operator = self.operator_chance.random() < 0.3

    def run(self, steps: int) -> None:
        """Let a fleet join and `steps` things happen, then heal it and compare it with the truth."""
        for _ in range(self.chance.choice([3, 5] if self.is_apart else [1, 1, 2, 3])):
            self._join()
        for _ in range(steps):
            self.chance.choice(self.kinds)()
            if self.has_pool and self.pool_chance.random() < 0.1:
                self._name_keys()
            if self.has_operator and self.operator_chance.random() < 0.1:
                self._reconfigure()
        self.heal()
        self.check_converged()
        self.check_trusted()
        self.check_ended()

    def _choose_bounds(self) -> AdmissionLimits:
        chance = self.bound_chance
        if chance.random() < 0.7:
            return AdmissionLimits()
        return AdmissionLimits(
            chance.choice([None, 1, 2]),
            chance.choice([1, 10]),
            queue_requests_max=chance.choice([1, 3, 100]),
            wait_s_max=chance.choice([1.0, 30.0]),
        )

    def _choose_kinds(self) -> list[Callable[[], object]]:
        """Return what may happen: half of the kinds, some of them more often than others."""
        always: list[Callable[[], object]] = [
            self._join,
            *[self._arrive] * 2,
            *[self._deliver] * 3,
            *[self._store] * 3,
        ]
        sometimes: list[Callable[[], object]] = [
            *(self._add, self._describe, self._probe, self._remove, self._open_source),
            *(self._close_source, self._evict, self._clear, self._restart, self._disconnect),
            *(self._reconnect, self._drop, self._duplicate, self._answer, self._answer_badly),
            *(self._first_byte, self._fail, self._finish, self._pass_time, self._wake),
            *(self._speak_oddly, self._speak_of_others, self._deliver_all, self._answer_at_length),
        ]
        kinds: list[Callable[[], object]] = list(always)
        if self.is_apart:
            kinds += [*[self._arrive] * 2, *[self._end_prefill] * 3, self._fail, self._finish]
            kinds += [self._lose_decode_leg] * 2
        for kind in sometimes:
            kinds += [kind] * self.chance.choice([0, 0, 1, 2])
        return kinds

    # --- handing over -----------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Give the core an event, perform what it asks for, and check the state it is left in."""
        self.recording.append((self.now, event))
        if isinstance(event, RequestArrived):
            self.asked[event.request.id] = event.request
        elif isinstance(event, InstancePooled):
            self.instances[event.instance_id].key_space = event.key_space
        commands = self.core.handle(event, self.now)
        self.commands += commands
        check(self.core)
        self._check_predictions()
        self._check_attribution()
        arriving = event.request if isinstance(event, RequestArrived) else None
        for command in commands:
            match command:
                case Forward():
                    started = self.held.pop(command.request_id, None)
                    if started is None and arriving is not None:
                        started = arriving
                    if started is not None:
                        self.open[started.id] = Open(started)
                    self._forwarded(command)
                case Hold():
                    assert arriving is not None
                    self.held[command.request_id] = arriving
                case Reject() | RelayFailure():
                    self.open.pop(command.request_id, None)
                    self.held.pop(command.request_id, None)
                    self.ended[command.request_id] += 1
                case RequestReplay():
                    engine = self._engine(command.source)
                    assert engine.link is not None
                    assert engine.link.has_replay
                    engine.link.asked.append(command)
                case WakeAt():
                    assert command.at >= self.now
                    assert self.wake_at is None or command.at < self.wake_at
                    self.wake_at = command.at
                case _:
                    pass
        self._check_held(event)
        self._check_wake()

    def _check_held(self, event: Event) -> None:
        """Check that those that wait are those that the core holds, and that none of them could start."""
        admission = self.core.admission
        waiting = list(admission.queue) if admission is not None else []
        assert {each.request.id for each in waiting} == self.held.keys()
        if admission is not None and not isinstance(event, SourceEvent):
            can_start = admission.starter(admission.full_instances(), self.now)
            kinds = {each.kind for each in waiting}
            assert kinds == set(admission.queue.kinds)
            assert not any(map(can_start, kinds))
            assert all(admission.is_served(kind, self.now) for kind in kinds)
            assert all(each.deadline > self.now for each in waiting)

    def _forwarded(self, forward: Forward) -> None:
        holder, ranking = forward.holder, forward.decision.ranking
        opened = self.open[forward.request_id]
        self._check_chosen(opened, holder, {Role.DECODE, Role.BOTH})
        if opened.request.stays_whole:
            assert self.instances[holder.instance_id].role is Role.BOTH
        if forward.prefill is not None:
            assert opened.request.may_hand_over
            self._check_chosen(opened, forward.prefill, {Role.PREFILL})
        assert forward.is_redelivery == opened.is_kept
        assert ranking[0].holder == holder
        assert len({c.holder for c in ranking}) == len(ranking)
        usable = max((forward.decision.prompt_tokens or 0) - 1, 0)
        for candidate in ranking:
            found = candidate.candidate
            assert 0 <= found.confirmed_tokens <= found.overlap_tokens <= usable, candidate
            key_space = self.instances[found.holder.instance_id].key_space
            pool = self.asked[forward.request_id].pool
            assert found.pool == (pool.get(key_space) if key_space is not None else None)
            told = found.pool.tokens if found.pool is not None else 0
            assert found.overlap_tokens + found.pool_tokens == max(found.overlap_tokens, told)
        opened.attempts += not forward.is_redelivery
        opened.holder, opened.prefill = holder, forward.prefill
        assert opened.attempts == forward.attempt <= self.limits.attempts_max + opened.had_prefill

    def _check_chosen(self, opened: Open, holder: Holder, roles: set[Role]) -> None:
        instance = self.instances[holder.instance_id]
        assert instance.is_healthy, "forwarded to an instance that is down"
        assert instance.is_described
        assert instance.role in roles
        assert holder.instance_id not in opened.failed

    def _check_predictions(self) -> None:
        """Check that the index tells predicted from confirmed, and that its masks are its sets."""
        index = self.core.index
        masks: Counter[BlockHash] = Counter()
        for holder, blocks in index._predicted.items():
            bit = 1 << index._numbers[holder]
            for block, expires_at in blocks.items():
                assert not index._masks[Tier.DEVICE].get(block, 0) & bit
                assert expires_at > self.now
                masks[block] += bit
        assert masks == index._predicted_masks

    def _check_wake(self) -> None:
        """Check that the core has asked to be woken when a source has something to do, or before."""
        due = [state.feed.next_wake() for _, state in self.core.sources]
        for at in due:
            assert at is None or (self.wake_at is not None and self.wake_at <= max(at, self.now))

    def _check_attribution(self) -> None:
        """Check that each source speaks for the holder that its rank stands for now."""
        for source, state in self.core.sources:
            instance = self.core.fleet.find(source.instance_id)
            assert instance is not None
            assert state.ledger.holder == instance.holder_of(state.rank)

    # --- the fleet --------------------------------------------------------------------------------

    def _instance(self) -> Instance | None:
        return self.chance.choice(list(self.instances.values())) if self.instances else None

    def _engine(self, source: SourceId) -> Engine:
        return self.instances[source.instance_id].engines[source.publisher]

    def _some_engine(self) -> Engine | None:
        return self._pick([engine for i in self.instances.values() for engine in i.engines])

    def _pick(self, engines: list[Engine]) -> Engine | None:
        """Return one of them, mostly the first: things have to meet to go wrong."""
        if not engines:
            return None
        return engines[0] if self.chance.random() < 0.6 else self.chance.choice(engines)

    def _some_link(self) -> tuple[Engine, Link] | None:
        """Return an engine with an open source."""
        engines = [engine for i in self.instances.values() for engine in i.engines]
        engine = self._pick([engine for engine in engines if engine.link is not None])
        return (engine, engine.link) if engine is not None and engine.link is not None else None

    def _add(self) -> Instance | None:
        unused = [
            InstanceId(name)
            for name in ("abcde" if self.is_apart else "abc")
            if InstanceId(name) not in self.instances
        ]
        if not unused:
            return None
        chance, name = self.chance, self.chance.choice(unused)
        ranks = chance.choice([(), (), (), (0, 1), (4, 5)])
        size = chance.choice([2, 2, 2, 3, 4])
        buffer_batches = chance.choice([2, BUFFER_BATCHES, BUFFER_BATCHES])
        # Two publishers of an instance without ranks speak of the same holder.
        count = len(ranks) or chance.choice([1, 1, 1, 2])
        window = Side(3, chance.choice([1, 3, 5]), chance.choice([size, size, 2 * size, 2]))
        sides = chance.choice([(), (), (window,), (window, Side(4, WHOLE_PREFIX, size))])
        # Of two full-attention groups the first that speaks is the main one.
        is_main_last = len(sides) == 1 and chance.random() < 0.5
        engines = [
            Engine(
                SourceId(name, number),
                ranks[number] if ranks else chance.choice([None, 0]),
                size,
                buffer_batches,
                sides,
                is_main_last,
            )
            for number in range(count)
        ]
        self.instances[name] = instance = Instance(
            name, engines, size, ranks, has_adapter=chance.random() < 0.5
        )
        roles = [Role.BOTH, Role.BOTH, Role.BOTH, Role.DECODE]
        if self.is_apart:
            roles = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH]
        role = instance.role = chance.choice(roles)
        self.handle(InstanceAdded(InstanceSpec(name, role, chance.choice([1.0, 1.0, 2.0]))))
        return instance

    def _join(self) -> None:
        """Let an instance come up in the usual order, or in another."""
        instance = self._add()
        if instance is None:
            return
        steps: list[Callable[[], None]] = [
            lambda: self._describe(instance),
            lambda: self._probe(instance, is_healthy=True),
            *(functools.partial(self._open_source, engine) for engine in instance.engines),
        ]
        if self.chance.random() < 0.3:
            self.chance.shuffle(steps)
        for step in steps:
            step()

    def _describe(self, instance: Instance | None = None) -> None:
        instance = instance or self._instance()
        if instance is None:
            return
        cards = [ModelCard(MODEL)] + [ModelCard(ADAPTER, True)] * instance.has_adapter
        size = self.chance.choice([instance.size, instance.size, None, 2])
        capacity = self.chance.choice([None, 4, 50])
        instance.is_described = True
        facts = InstanceFacts(tuple(cards), size, capacity, instance.ranks)
        self.handle(InstanceDescribed(instance.id, facts))

    def _probe(self, instance: Instance | None = None, is_healthy: bool | None = None) -> None:
        instance = instance or self._instance()
        if instance is None:
            return
        healthy = self.chance.random() < 0.5 if is_healthy is None else is_healthy
        is_gone = not healthy and self.chance.random() < 0.5
        instance.probed(healthy, is_gone)
        self.handle(InstanceProbed(instance.id, healthy, is_gone))

    def _remove(self) -> None:
        instance = self._instance()
        if instance is None or (len(self.instances) == 1 and self.chance.random() < 0.9):
            return
        late = [batch for e in instance.engines if e.link for batch in list(e.link.live)[:1]]
        del self.instances[instance.id]
        self.handle(InstanceRemoved(instance.id))
        for batch in late:  # it was on its way
            self.handle(batch)

    def _name_keys(self) -> None:
        """Let it be known, or no more, how an instance names blocks in a pool."""
        chance = self.pool_chance
        if self.instances:
            instance = chance.choice(list(self.instances.values()))
            self.handle(InstancePooled(instance.id, chance.choice([None, *KEY_SPACES])))

    def _reconfigure(self) -> None:
        """Let the operator want another policy, or another role or weight of an instance."""
        chance = self.operator_chance
        if chance.random() < 0.5 or not self.instances:
            policy = make_policy(chance.choice(POLICIES))
            others = (make_policy("least_loaded"), make_policy("session_hash"))
            self.handle(Reconfigured(policy, others, self.limits, None))
            return
        instance = chance.choice(list(self.instances.values()))
        if self.is_apart:
            instance.role = chance.choice([Role.PREFILL, Role.DECODE, Role.BOTH])
        spec = InstanceSpec(instance.id, instance.role, chance.choice([0.5, 1.0, 2.0]))
        self.handle(InstanceChanged(spec))

    # --- sources ----------------------------------------------------------------------------------

    def _open_source(self, engine: Engine | None = None) -> None:
        engine = engine or self._some_engine()
        if engine is None or engine.link is not None:
            return
        instance = self.instances[engine.source.instance_id]
        has_replay = self.chance.random() < 0.7
        # A subscription takes effect some time after it was made, so the first batches pass it by.
        engine.link = Link(has_replay, is_connected=self.chance.random() < 0.7)
        told = self.chance.choice([engine.rank, None]) if not instance.ranks else engine.rank
        self.handle(SourceOpened(engine.source, has_replay, told))

    def _close_source(self) -> None:
        found = self._some_link()
        if found is None:
            return
        engine, link = found
        engine.link = None
        self.handle(SourceClosed(engine.source))
        if link.live:
            self.handle(link.live[0])  # it was on its way
        if link.answers:
            self.handle(link.answers[0])

    def _deliver(self) -> None:
        """Deliver the next live batch, or the next of a replay: they come on two connections."""
        found = self._some_link()
        if found is None:
            return
        _, link = found
        for _ in range(self.chance.choice([1, 1, 4])):
            self._deliver_next(link)

    def _deliver_next(self, link: Link) -> None:
        if link.answers and (not link.live or self.chance.random() < 0.6):
            self.handle(link.answers.popleft())
        elif link.live:
            link.delivered.append(link.live.popleft())
            self.handle(link.delivered[-1])

    def _deliver_all(self) -> None:
        for _ in range(3):
            self._deliver()

    def _drop(self) -> None:
        """Lose the youngest batches under way, or any one of them."""
        found = self._some_link()
        if found is None or not found[1].live:
            return
        live = found[1].live
        if self.chance.random() < 0.5:
            live.clear()
        else:
            del live[self.chance.randrange(len(live))]

    def _duplicate(self) -> None:
        found = self._some_link()
        if found is not None and found[1].delivered:
            self.handle(self.chance.choice(found[1].delivered))

    def _answer(self) -> None:
        """Let a publisher answer the oldest replay asked of it, with what its buffer still has."""
        found = self._some_link()
        if found is None:
            return
        engine, link = found
        if not link.asked or not link.is_connected:
            return
        asked = link.asked.popleft()
        link.answers += [
            replace(batch, replay_id=asked.replay_id)
            for batch in engine.buffer
            if batch.sequence >= asked.from_sequence
        ]
        link.answers.append(ReplayEnded(engine.source, asked.replay_id, is_complete=True))

    def _answer_at_length(self) -> None:
        self._answer()
        self._deliver_all()

    def _answer_badly(self) -> None:
        """Leave a replay unanswered, say that it failed, or end it in its middle."""
        found = self._some_link()
        if found is None or not found[1].asked:
            return
        engine, link = found
        asked = link.asked.popleft()
        engine.has_lost = True
        how = self.chance.randrange(3)
        if how == 2:
            first = [b for b in engine.buffer if b.sequence >= asked.from_sequence][:1]
            link.answers += [replace(batch, replay_id=asked.replay_id) for batch in first]
        if how:
            link.answers.append(ReplayEnded(engine.source, asked.replay_id, is_complete=False))

    def _disconnect(self) -> None:
        found = self._some_link()
        if found is not None:
            found[0].disconnect(found[1])
            self._report_loss(found[0])

    def _report_loss(self, engine: Engine) -> None:
        """Tell of the lost connection, or (rarely in truth) let it go unnoticed."""
        if self.chance.random() < 0.5:
            self.handle(SourceLost(engine.source))

    def _reconnect(self) -> None:
        found = self._some_link()
        if found is not None and not found[1].is_connected:
            found[1].is_connected = True
            self.handle(SourceReconnected(found[0].source))

    # --- engines ----------------------------------------------------------------------------------

    def _tokens(self) -> Tokens:
        """Return a prompt of one of three families, or of another that shares their beginning."""
        family, tail = self.chance.randrange(3), self.chance.randrange(2)
        length = self.chance.randrange(1, PROMPT_TOKENS_MAX)
        shared = min(length, self.chance.choice([4, 9]))
        return (family,) * shared + (10 + tail,) * (length - shared)

    def _store(self) -> None:
        engine = self._some_engine()
        if engine is None:
            return
        chance = self.chance
        engine.store(
            self._tokens(),
            lora=chance.choice([None, None, ADAPTER]),
            tier=chance.choice([Tier.DEVICE] * 4 + [Tier.HOST]),
            as_copy=chance.random() < 0.3,
            alias=chance.choice([0, 0, 0, 1]),
        )

    def _evict(self) -> None:
        engine = self._some_engine()
        if engine is not None:
            engine.evict(self.chance.randrange(1, 4))

    def _clear(self) -> None:
        engine = self._some_engine()
        if engine is not None:
            engine.clear()

    def _restart(self) -> None:
        """Restart an instance: all of its ranks."""
        instance = self._instance()
        if instance is not None:
            for engine in instance.engines:
                engine.restart()

    def _speak_oddly(self) -> None:
        """Publish what can't be used, or says nothing about reusable prefixes."""
        engine = self._some_engine()
        if engine is None:
            return
        odd: list[KvEvent] = [
            BlocksUnreadable("not_msgpack"),
            BlocksStored((1, 2), 12345, pack_tokens([1] * 4), 2, Tier.DEVICE),
            BlocksStored((1, 2), None, pack_tokens([1] * 3), 2, Tier.DEVICE),
            BlocksStored((1,), None, b"", 0, Tier.DEVICE),
            BlocksStored((1,), None, pack_tokens([1] * 2), 2, Tier.POOL),
            BlocksStored((1,), None, pack_tokens([1] * 2), 2, Tier.DEVICE, group=7),
            BlocksStored(
                (1,), None, pack_tokens([1] * 2), 2, Tier.DEVICE, group=1, is_full_attention=False
            ),
            BlocksRemoved((4, 5), Tier.DISK),
            BlocksRemoved((4, 5), Tier.DEVICE, group=9),
        ]
        event = self.chance.choice(odd)
        engine.has_lost = True
        # A publisher whose first full-attention group is another one is believed, wrongly here.
        engine.is_odd = engine.is_odd or (isinstance(event, BlocksStored) and event.group == 7)
        engine.publish(event)

    def _speak_of_others(self) -> None:
        """Publish a batch under another rank: what was said before is void."""
        engine = self._some_engine()
        if engine is not None:
            engine.is_odd = engine.has_lost = True
            engine.publish(rank=self.chance.randrange(7))

    # --- requests ---------------------------------------------------------------------------------

    def _arrive(self) -> None:
        chance = self.chance
        self.arrived += 1
        model = chance.choice([MODEL] * 6 + [ADAPTER, "unknown"])
        prompt = self._prompt(model)
        request = Request(
            RequestId(f"r{self.arrived}"),
            model,
            prompt,
            is_prompt_missing=chance.random() < 0.1,
            session_key=chance.choice([None, "s", "t"]),
            policy=chance.choice([None] * 5 + ["least_loaded", "session_hash", "unknown"]),
            pool=self._pool_parts(prompt),
            may_hand_over=(may_hand_over := chance.random() < 0.7),
            stays_whole=not may_hand_over and chance.random() < 0.3,
            tenant=self.bound_chance.choice(["", "", "t"]),
            priority=self.bound_chance.choice([0, 0, -1, 1]),
            answers=self.bound_chance.choice([0, 1, 1, 50]),
        )
        self.core.covers(request, self.now)  # changes nothing
        explained = self.core.explain(request, self.now)
        if explained is not None:
            duty = Duty.WHOLE if request.stays_whole else Duty.ALL
            candidates = self.core.candidates.group(model, self.now, duty=duty).seats
            assert 1 <= len(explained.ranking) <= len(candidates)
            is_choosy = self.core.fleet.has_prefill(model)  # of those that may compute a prompt
            assert is_choosy or len(explained.ranking) == len(candidates)
        self.handle(RequestArrived(request))
        is_held = request.id in self.held
        assert (request.id in self.open) + is_held + self.ended[request.id] == 1

    def _prompt(self, model: str) -> Prompt | None:
        kind, tokens = self.chance.randrange(9), self._tokens()
        if kind == 0:
            return None
        if kind == 1:
            text = bytes(tokens) * 70
            return Prompt(len(text) // 4, {TEXT_SPACE: hash_text(text)}, is_exact=False)
        spaces = sorted(self.core.spaces(model), key=lambda s: (s.block_size_tokens, s[1] or ""))
        known = [
            space for space in spaces if space.block_size_tokens and self.chance.random() < 0.9
        ]
        if kind == 2:
            beginning = tokens[: self.chance.randrange(len(tokens) + 1)]
            estimate = self.chance.randrange(PROMPT_TOKENS_MAX)
            chains = {space: chain(space, beginning) for space in known}
            return Prompt(estimate, chains, is_exact=False)
        return Prompt(len(tokens), {space: chain(space, tokens) for space in known})

    def _pool_parts(self, prompt: Prompt | None) -> dict[KeySpace, PoolPart]:
        """Return what a pool could have of a prompt; nothing while no instance uses one."""
        used = any(instance.key_space is not None for instance in self.instances.values())
        if not used or prompt is None or not prompt.is_exact or prompt.token_count < 2:
            return {}
        chance = self.pool_chance
        return {
            key_space: PoolPart(
                tokens=chance.randrange(1, prompt.token_count),
                bytes_per_token=chance.choice([0.0, 100.0, 1e6]),
                on_disk=chance.random() < 0.3,
                weight=chance.choice([1.0, 0.8]),
            )
            for key_space in KEY_SPACES
            if chance.random() < 0.7
        }

    def _some_request(self) -> tuple[RequestId, Open] | None:
        return self.chance.choice(list(self.open.items())) if self.open else None

    def _end_prefill(self) -> None:
        prefilling = [found for found in self.open.items() if found[1].prefill is not None]
        if not prefilling:
            return
        request_id, opened = self.chance.choice(prefilling)
        opened.prefill, opened.is_kept = None, self.chance.random() < 0.8
        self.handle(PrefillEnded(request_id, opened.is_kept))

    def _first_byte(self) -> None:
        found = self._some_request()
        if found is not None:
            found[1].has_first_byte = True
            # Of a prefill leg: its refusal.
            shows_prefill = found[1].prefill is None and self.chance.random() < 0.5
            self.handle(RequestFirstByte(found[0], shows_prefill))

    def _fail(self) -> None:
        found = self._some_request()
        if found is not None:
            self._fail_one(*found, self.chance.choice(list(FailureKind)))

    def _lose_decode_leg(self) -> None:
        """Let a decode leg not arrive whose blocks are kept."""
        kept = [found for found in self.open.items() if found[1].is_kept]
        unsent = [kind for kind in FailureKind if not kind.was_sent]
        if kept:
            self._fail_one(*self.chance.choice(kept), self.chance.choice(unsent))

    def _fail_one(self, request_id: RequestId, opened: Open, kind: FailureKind) -> None:
        if opened.has_first_byte:
            return
        holder = opened.prefill or opened.holder
        assert holder is not None
        opened.failed.add(holder.instance_id)
        instance = self.instances.get(holder.instance_id)
        if kind is FailureKind.UNREACHABLE and instance is not None:
            instance.probed(is_healthy=False, is_gone=True)
        opened.is_kept = opened.is_kept and not kind.was_sent
        opened.attempts -= kind.is_refusal and not opened.is_kept
        is_prefill = opened.prefill is not None
        opened.had_prefill = opened.had_prefill or is_prefill
        count = len(self.commands)
        self.handle((PrefillFailed if is_prefill else RequestFailed)(request_id, kind))
        told = [
            c for c in self.commands[count:]
            if isinstance(c, Forward | RelayFailure) and c.request_id == request_id
        ]  # fmt: skip
        assert len(told) == 1
        assert isinstance(told[0], Forward) != (self.ended[request_id] == 1)

    def _leave(self) -> None:
        """Let a client leave whose request waits."""
        request_id = self.bound_chance.choice(list(self.held))
        del self.held[request_id]
        self.ended[request_id] += 1
        self.handle(RequestFinished(request_id, Outcome.CLIENT_LEFT))

    def _finish(self) -> None:
        if self.held and self.bound_chance.random() < 0.2:
            self._leave()
        found = self._some_request()
        if found is None:
            return
        del self.open[found[0]]
        self.ended[found[0]] += 1
        outcome, cached_tokens = self.chance.choice(list(Outcome)), self.chance.choice([None, 0, 3])
        generated_tokens = self.bound_chance.choice([None, 0, 50, 100_000])
        self.handle(
            RequestFinished(
                found[0], outcome, cached_tokens=cached_tokens, generated_tokens=generated_tokens
            )
        )

    # --- time -------------------------------------------------------------------------------------

    def _pass_time(self) -> None:
        self.now += self.chance.choice([0.001, 0.6, 1.5, 12.0, 65.0])
        self._lose_replays()
        if self.wake_at is not None and self.wake_at <= self.now:
            self._wake()

    def _wake(self) -> None:
        if self.wake_at is not None and self.wake_at > self.now:
            self.now = self.wake_at
            self._lose_replays()
        self.wake_at = None
        self.handle(WakeUp())

    def _lose_replays(self) -> None:
        """Note that replays under way may have come to their time-out."""
        for instance in self.instances.values():
            for engine in instance.engines:
                if engine.link is not None and (engine.link.asked or engine.link.answers):
                    engine.has_lost = True

    # --- the end ----------------------------------------------------------------------------------

    def heal(self) -> None:
        """End all requests and all faults, and let everybody say what is left to say."""
        while self.open:
            self._finish()
        while self.held:
            self._leave()
        for engine in [e for i in self.instances.values() for e in i.engines]:
            if engine.link is None:
                continue
            if not engine.link.is_connected:
                engine.link.is_connected = True
                self.handle(SourceReconnected(engine.source))
            if not engine.link.has_replay:
                engine.publish()  # without replay only a next batch tells that one was lost
        until = self.now + HEALED_S
        self._settle()
        while self.wake_at is not None and self.wake_at < until:
            self._wake()
            self._settle()

    def _settle(self) -> None:
        """Deliver all that is under way and answer all replays, until nothing is left."""
        for _ in range(50):
            busy = False
            for instance in self.instances.values():
                for engine in instance.engines:
                    busy = self._settle_one(engine) or busy
            if not busy:
                return
        raise AssertionError("the core asks for replays without end")

    def _settle_one(self, engine: Engine) -> bool:
        link = engine.link
        if link is None or not (link.live or link.asked or link.answers):
            return False
        while link.live:
            self.handle(link.live.popleft())
        while link.answers:
            self.handle(link.answers.popleft())
        asks, link.asked = link.asked, deque()
        for asked in asks:
            for batch in list(engine.buffer):
                if batch.sequence >= asked.from_sequence:
                    self.handle(replace(batch, replay_id=asked.replay_id))
            self.handle(ReplayEnded(engine.source, asked.replay_id, is_complete=True))
        return True

    def check_ended(self) -> None:
        """Check that each request ended exactly once, and that nothing is left of any."""
        self.now += FORGOTTEN_S
        self._wake()
        ids = {RequestId(f"r{number + 1}") for number in range(self.arrived)}
        assert dict(self.ended) == dict.fromkeys(ids, 1)
        assert self.core.requests == {}
        assert self.core.loads.loads == {}
        assert self.core.index._predicted_masks == {}
        for instance in self.core.fleet:
            assert instance.breaker.trial is None

    def check_converged(self) -> None:
        """Check that the index of each holder that is EXACT is what its engines hold."""
        for holder in self.core.index.holders:
            engines = self._speaking_for(holder)
            if self.core.sources.trust(holder) is not Trust.EXACT or any(e.is_odd for e in engines):
                continue
            truth = set[Held]().union(*(engine.held() for engine in engines))
            known: set[Held] = set()
            for _, state in self.core.sources:
                if state.ledger.holder == holder:
                    known |= {(MAIN_GROUP, *held) for held in state.ledger.held()}
                    sides = state.ledger.held_by_sides()
                    known |= {(side.number, tier, block) for side, tier, block in sides}
            device = {held for held in truth if held[1] is Tier.DEVICE}
            assert {held for held in known if held[1] is Tier.DEVICE} == device, holder
            # A clear makes a source exact again though copies on the host may have been missed.
            assert known <= truth, holder
            self.converged = True

    def check_trusted(self) -> None:
        """Check that a source of which nothing was lost for good is EXACT."""
        for source, state in self.core.sources:
            engine = self._engine(source)
            is_sure = state.feed.has_replay and engine.buffer_batches == BUFFER_BATCHES
            if is_sure and not engine.has_lost and self.limits.index_blocks_max >= 1000:
                assert state.feed.trust is Trust.EXACT, source

    def _speaking_for(self, holder: Holder) -> list[Engine]:
        return [
            self._engine(source)
            for source, state in self.core.sources
            if state.ledger.holder == holder
        ]

    converged = False
    """Whether some holder was EXACT at the end, so that the comparison meant something."""


def make_core(policy: str, seed: int, limits: RouterLimits) -> RouterCore:
    others = [make_policy("least_loaded"), make_policy("session_hash")]
    return RouterCore(make_policy(policy), random.Random(seed).randrange, limits, others)
