"""Gateways in virtual time: real routing cores, and what the edge around them does.

Responsible for giving a core its events and performing its commands: requests and their legs, retries, wake-ups,
replays, probes, and asking the pool. Not for what a core decides, nor for what engines do.

Each replica has a core of its own, that hears all events and sees its own requests only. As in the gateway a
policy that reads no prompts gets none, and opens no event sources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moongate.router import (
    BlockSpace,
    Command,
    Event,
    FailureKind,
    Forward,
    InstanceAdded,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstancePooled,
    InstanceProbed,
    InstanceSpec,
    KeySpace,
    ModelCard,
    Outcome,
    PoolPart,
    PrefillEnded,
    PrefillFailed,
    Probe,
    Prompt,
    ReplayEnded,
    Request,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    RequestReplay,
    RouterCore,
    SourceId,
    SourceLost,
    SourceOpened,
    SourceReconnected,
    WakeAt,
    WakeUp,
)
from moongate.router.events import BatchReceived, KvEvent
from moongate.router.model import Role
from moongate.simulator.batching import Job
from moongate.simulator.content import Branch
from moongate.simulator.shared_store import SharedStore
from moongate.simulator.virtual_instance import Agenda, Sender, VirtualInstance

MODEL = "sim"
KEY_SPACE = KeySpace(MODEL)
CONNECT_TIMEOUT_S = 5.0
REPLAY_S = 0.05
"""What a replay takes, for its way there and back."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request on its way through the fleet. Times are seconds of the agenda."""

    id: RequestId
    branch: Branch
    prompt_tokens: int
    answer_tokens: int
    session: str
    session_key: str
    arrived_at: float
    done: Callable[[Exchange], object]
    has_failed: bool = False
    first_token_at: float | None = None
    ended_at: float = 0.0
    cached_tokens: int = 0  # of the prompt, by the engine that computed it: device and pool
    pool_tokens: int = 0  # of these
    attempt: int = 0
    job: Job | None = None  # that is under way
    prefill: Sender | None = None  # the prefill whose blocks are kept for the answer
    at: VirtualInstance | None = None  # where the job is
    decode_at: VirtualInstance | None = None  # where it is answered


@dataclass(slots=True, eq=False)
class VirtualGateway:
    """One replica."""

    core: RouterCore
    agenda: Agenda
    instances: Mapping[InstanceId, VirtualInstance]
    block_tokens: int
    store: SharedStore | None
    bytes_per_token: float
    sends_session_keys: bool
    lookup_s: float = 0.001  # what asking the pool takes
    has_replay: bool = True
    decisions_s: list[float] = field(default_factory=list)
    requests: dict[str, Exchange] = field(default_factory=dict)
    unreachable: set[InstanceId] = field(default_factory=set)
    replays: int = 0

    @property
    def hears_events(self) -> bool:
        """Tell whether the policy is one that goes by what engines announce."""
        return self.core.policy.name == "kv_cost"

    def join(self, specs: Sequence[InstanceSpec]) -> None:
        """Make the fleet known to the core."""
        for spec in specs:
            instance = self.instances[spec.id]
            facts = InstanceFacts(
                (ModelCard(MODEL),), self.block_tokens, instance.batcher.shape.blocks
            )
            self.handle(InstanceAdded(spec))
            self.handle(InstanceDescribed(spec.id, facts))
            self.handle(InstanceProbed(spec.id, is_healthy=True))
            if self.hears_events:
                self.handle(SourceOpened(SourceId(spec.id), self.has_replay))
            if self.store is not None:
                self.handle(InstancePooled(spec.id, KEY_SPACE))

    def handle(self, event: Event) -> list[Command]:
        """Give the core an event; perform what isn't about the request itself."""
        commands = self.core.handle(event, self.agenda.now)
        for command in commands:
            self._perform(command)
        return commands

    def _perform(self, command: Command) -> None:
        match command:
            case WakeAt(at):
                self.agenda.at(max(at, self._now), lambda: self.handle(WakeUp()))
            case RequestReplay():
                self._replay(command)
            case Probe(instance_id):
                self.agenda.at(self._now, lambda: self.probe(instance_id))
            case _:
                pass

    # --- events of engines ------------------------------------------------------------------------

    def hear(self, source: InstanceId, sequence: int, events: tuple[KvEvent, ...]) -> None:
        """Take in what an engine published."""
        if self.hears_events and source not in self.unreachable:
            self.handle(_batch(self.instances[source], sequence, events))

    def _replay(self, asked: RequestReplay) -> None:
        def answer() -> None:
            instance = self.instances[asked.source.instance_id]
            for sequence, events in list(instance.history) if self._reaches(instance) else ():
                if sequence >= asked.from_sequence:
                    self.handle(_batch(instance, sequence, events, asked.replay_id))
            self.handle(ReplayEnded(asked.source, asked.replay_id, self._reaches(instance)))

        self.replays += 1
        self.agenda.at(self.agenda.now + REPLAY_S, answer)

    def probe(self, instance_id: InstanceId) -> None:
        instance = self.instances[instance_id]
        is_gone = not instance.is_alive
        self.handle(InstanceProbed(instance_id, self._reaches(instance), is_gone=is_gone))

    def _reaches(self, instance: VirtualInstance) -> bool:
        return instance.is_alive and instance.id not in self.unreachable

    def lose_source(self, instance_id: InstanceId) -> None:
        if self.hears_events:
            self.handle(SourceLost(SourceId(instance_id)))

    def find_source(self, instance_id: InstanceId) -> None:
        if self.hears_events:
            self.handle(SourceReconnected(SourceId(instance_id)))

    # --- requests ---------------------------------------------------------------------------------

    def arrive(self, exchange: Exchange) -> None:
        """Route a request, after what it takes to find out what the pool has of it."""
        self.requests[exchange.id] = exchange
        request = self._request(exchange)
        if self.store is None or request.prompt is None or self.core.covers(request, self._now):
            self._route(exchange, request)
        else:
            self.agenda.at(
                self._now + self.lookup_s, lambda: self._route(exchange, self._pooled(exchange))
            )

    @property
    def _now(self) -> float:
        return self.agenda.now

    def _request(
        self, exchange: Exchange, pool: Mapping[KeySpace, PoolPart] | None = None
    ) -> Request:
        prompt = None
        if self.core.policy.reads_prompts:
            space = BlockSpace(self.block_tokens)
            chain = exchange.branch.chain(exchange.prompt_tokens // self.block_tokens, space)
            prompt = Prompt(exchange.prompt_tokens, {space: chain})
        return Request(
            exchange.id,
            MODEL,
            prompt,
            session_key=exchange.session_key if self.sends_session_keys else None,
            pool=pool or {},
            may_hand_over=True,
        )

    def _pooled(self, exchange: Exchange) -> Request:
        assert self.store is not None
        limit = (exchange.prompt_tokens - 1) // self.block_tokens
        tokens = self.store.find(exchange.branch, limit) * self.block_tokens
        part = {KEY_SPACE: PoolPart(tokens, self.bytes_per_token)} if tokens else None
        return self._request(exchange, part)

    def _route(self, exchange: Exchange, request: Request) -> None:
        began = time.perf_counter()
        commands = self.core.handle(RequestArrived(request), self._now)
        self.decisions_s.append(time.perf_counter() - began)
        self._follow(exchange, commands)

    def _follow(self, exchange: Exchange, commands: Sequence[Command]) -> None:
        """Send a request where the core says, or give it up."""
        for command in commands:
            self._perform(command)
        forward = next((c for c in commands if isinstance(c, Forward)), None)
        if forward is not None:
            self._send(exchange, forward)
        else:
            self._give_up(exchange)

    def _send(self, exchange: Exchange, forward: Forward) -> None:
        exchange.attempt += 1
        exchange.decode_at = self.instances[forward.holder.instance_id]
        if forward.is_redelivery:
            self._start(
                exchange, exchange.decode_at, exchange.answer_tokens, sender=exchange.prefill
            )
            return
        self._let_go(exchange)
        if forward.prefill is None:
            self._start(exchange, exchange.decode_at, exchange.answer_tokens)
        else:
            self._start(exchange, self.instances[forward.prefill.instance_id], 1, is_held=True)

    def _start(
        self,
        exchange: Exchange,
        instance: VirtualInstance,
        answer_tokens: int,
        *,
        is_held: bool = False,
        sender: Sender | None = None,
    ) -> None:
        exchange.at = instance
        job = exchange.job = Job(
            exchange.id,
            exchange.branch,
            exchange.prompt_tokens,
            answer_tokens,
            receives=sender is not None,
            is_held=is_held,
        )
        if self._reaches(instance):
            exchange.prefill = None
            instance.submit(job, sender)
        elif instance.is_alive:
            later = self._now + CONNECT_TIMEOUT_S
            self.agenda.at(later, lambda: self._fail(exchange, FailureKind.NO_CONNECTION))
        else:
            self.agenda.at(self._now, lambda: self._fail(exchange, FailureKind.UNREACHABLE))

    def _let_go(self, exchange: Exchange) -> None:
        """Free what a prefill keeps that nobody will fetch."""
        if exchange.prefill is not None:
            exchange.prefill.instance.release(exchange.prefill.job)
            exchange.prefill = None

    # --- what engines tell ------------------------------------------------------------------------

    def begun(self, job: Job) -> None:
        exchange = self.requests[job.id]
        if job.is_held:
            return
        if not job.receives:
            self._count(exchange, job)
        if exchange.first_token_at is None:
            exchange.first_token_at = self._now
            self.handle(RequestFirstByte(exchange.id, shows_prefill=True))

    def finished(self, job: Job) -> None:
        exchange = self.requests[job.id]
        if job.is_held:
            self._prefilled(exchange, job)
            return
        exchange.ended_at = self._now
        del self.requests[job.id]
        cached, length = None if job.receives else job.cached_tokens, exchange.answer_tokens
        self.handle(RequestFinished(exchange.id, Outcome.ANSWERED, length, cached, length))
        exchange.done(exchange)

    def _prefilled(self, exchange: Exchange, job: Job) -> None:
        self._count(exchange, job)
        assert exchange.at is not None
        assert exchange.decode_at is not None
        self.handle(PrefillEnded(exchange.id))
        sender = exchange.prefill = Sender(exchange.at, job)
        self._start(exchange, exchange.decode_at, exchange.answer_tokens, sender=sender)

    def _count(self, exchange: Exchange, job: Job) -> None:
        exchange.cached_tokens = job.cached_tokens
        exchange.pool_tokens = job.external_tokens

    def lost(self, job: Job) -> None:
        """The engine died under a job."""
        exchange = self.requests.get(job.id)
        if exchange is not None:
            self._fail(exchange, FailureKind.DISCONNECTED)

    def _fail(self, exchange: Exchange, kind: FailureKind) -> None:
        job = exchange.job
        assert job is not None
        if job.is_held:
            self._follow(exchange, self.core.handle(PrefillFailed(exchange.id, kind), self._now))
        elif exchange.first_token_at is None:
            self._follow(exchange, self.core.handle(RequestFailed(exchange.id, kind), self._now))
        else:
            self.handle(RequestFinished(exchange.id, Outcome.BROKEN_OFF))
            self._give_up(exchange)

    def _give_up(self, exchange: Exchange) -> None:
        self._let_go(exchange)
        exchange.has_failed = True
        exchange.ended_at = self._now
        del self.requests[exchange.id]
        exchange.done(exchange)


def _batch(
    source: VirtualInstance,
    sequence: int,
    events: tuple[KvEvent, ...],
    replay_id: int | None = None,
) -> BatchReceived:
    # Names the exact bytes: batches of one number from two lives of an engine differ.
    digest = b"%d/%d" % (source.life, sequence)
    return BatchReceived(SourceId(source.id), sequence, events, digest, replay_id=replay_id)


def spec_of(instance: VirtualInstance) -> InstanceSpec:
    """Return what an operator would say of an instance."""
    role = instance.shape.role
    return InstanceSpec(instance.id, role, receives=True if role is Role.DECODE else None)
