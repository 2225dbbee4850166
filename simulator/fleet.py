"""A fleet in virtual time: the real routing core before the engines' pure models.

Responsible for the agenda (what happens when), for carrying requests, events and outputs between the two,
and for asking a shared pool what it holds, as the gateway does. Not for what arrives when: whoever drives
it puts that on the agenda. Nothing sleeps, and the same calls give the same history.

What an engine tells goes through the wire's bytes, so that what decides here is what decides in
production. The network takes no time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moongate.engine_plugins.vllm_wire import Frame, decode_batch
from moongate.kvpool.keys import KeyLayout
from moongate.kvpool.memory import MemoryPool
from moongate.router import (
    BlockSpace,
    Command,
    Event,
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
    Prompt,
    Reason,
    Request,
    RequestArrived,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    RouterCore,
    Seed,
    SeedingEnded,
    SourceId,
    SourceOpened,
    WakeAt,
    WakeUp,
)
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.simulator.blocks import DEFAULT_HASH_SEED, TokenSequence, make_root_digest
from moongate.simulator.engine import EngineModel, EngineProfile, EngineRequest, StepResult
from moongate.simulator.event_wire import BatchEncoder
from moongate.simulator.pooling import SharedPool

MODEL = "sim"
KEY_SPACE = KeySpace(MODEL)
LAYOUT = KeyLayout(MODEL)

STRANGER = "stranger/"
"""Begins the name of what another client sent to an engine."""

Tokens = Sequence[int]


@dataclass(slots=True)
class Sent:
    """One request as it went through the fleet. Times are seconds of the fleet."""

    request_id: RequestId
    tokens: Tokens
    arrived_at: float
    then: Callable[[Sent], None] | None
    instance_id: InstanceId | None = None
    reason: Reason | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    cached_tokens: int = 0  # as the engine reports: of its device, and from the pool
    output_ids: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        assert self.first_token_at is not None
        return self.first_token_at - self.arrived_at


@dataclass(slots=True)
class _Engine:
    """One instance's model, and what has to be known to step it and to tell what it did."""

    source: SourceId
    model: EngineModel
    encoder: BatchEncoder
    sequence: int = 0
    busy_until: float = 0.0
    steps_at: float | None = None  # the step that is on the agenda


class VirtualFleet:
    """Instances of one model around a core, by name. Requests are given as token ids."""

    def __init__(
        self,
        core: RouterCore,
        instance_ids: Sequence[InstanceId],
        profile: EngineProfile | None = None,
        pool: MemoryPool | None = None,
    ) -> None:
        self.core = core
        self.profile = profile or EngineProfile()
        self.pool = pool
        self.now = 0.0
        self.sent: dict[RequestId, Sent] = {}
        self.seedings: dict[RequestId, Seed] = {}
        self.on_step: Callable[[], None] = lambda: None  # after each thing that happened
        self._agenda: list[tuple[float, int, Callable[[], object], bool]] = []
        self._due = 0  # of these, what isn't just the core's time-outs
        self._order = itertools.count()
        self._strangers = 0
        self._root = make_root_digest(DEFAULT_HASH_SEED)
        self._engines = {name: self._make_engine(name) for name in instance_ids}
        for name in instance_ids:
            self._join(name)

    # --- driving ----------------------------------------------------------------------------------

    def at(self, time: float, act: Callable[[], object]) -> None:
        """Let something happen at a time. What is due at the same time happens in order."""
        self._due += 1
        self._push(time, act, is_due=True)

    def _push(self, time: float, act: Callable[[], object], *, is_due: bool) -> None:
        assert time >= self.now, (time, self.now)
        heapq.heappush(self._agenda, (time, next(self._order), act, is_due))

    def run(self, until: float | None = None) -> None:
        """Let happen what is due until then, or until only time-outs of the core are left."""
        while self._due if until is None else self._agenda and self._agenda[0][0] <= until:
            self.now, _, act, is_due = heapq.heappop(self._agenda)
            self._due -= is_due
            act()
            self.on_step()
        if until is not None:
            self.now = until

    def arrive(
        self, tokens: Tokens, max_tokens: int, then: Callable[[Sent], None] | None = None
    ) -> Sent:
        """Let a request arrive now; `then` is called when it has been answered."""
        sent = Sent(RequestId(f"r{len(self.sent)}"), tokens, self.now, then)
        self.sent[sent.request_id] = sent
        for command in self.handle(RequestArrived(self._as_request(sent))):
            if isinstance(command, Forward):
                sent.instance_id = command.holder.instance_id
                sent.reason = command.decision.reason
                self.submit(sent.instance_id, sent.request_id, tokens, max_tokens)
        return sent

    def handle(self, event: Event) -> list[Command]:
        """Give the core an event, and perform what of its commands isn't the caller's."""
        commands = self.core.handle(event, self.now)
        for command in commands:
            match command:
                case WakeAt():
                    self._push(max(command.at, self.now), self._wake, is_due=False)
                case Seed():
                    self._seed(command)
                case _:
                    pass
        return commands

    def submit(
        self, instance_id: InstanceId, request_id: str, tokens: Tokens, max_tokens: int
    ) -> None:
        """Send a request to an engine."""
        engine = self._engines[instance_id]
        engine.model.submit(EngineRequest(request_id, tokens, max_tokens), self.now)
        self._step_at(engine, max(self.now, engine.busy_until))

    def warm(self, instance_id: InstanceId, tokens: Tokens) -> None:
        """Let an instance compute a prompt for another client, past the core; it tells its blocks."""
        self._strangers += 1
        self.submit(instance_id, f"{STRANGER}{self._strangers}", tokens, max_tokens=1)
        self.run()

    def _seed(self, seed: Seed) -> None:
        tokens = self.sent[seed.request_id].tokens[: seed.tokens]
        self.seedings[seed.seeding_id] = seed
        self.submit(seed.holder.instance_id, seed.seeding_id, tokens, max_tokens=1)

    def model(self, instance_id: InstanceId) -> EngineModel:
        return self._engines[instance_id].model

    # --- the fleet --------------------------------------------------------------------------------

    def _make_engine(self, name: InstanceId) -> _Engine:
        profile = self.profile
        shared = None
        if self.pool is not None:
            shared = SharedPool(self.pool, LAYOUT, block_bytes=profile.block_bytes)
        encoder = BatchEncoder(rank=0, block_size_tokens=profile.block_size_tokens)
        return _Engine(SourceId(name), EngineModel(profile, shared_pool=shared), encoder)

    def _join(self, name: InstanceId) -> None:
        profile = self.profile
        facts = InstanceFacts((ModelCard(MODEL),), profile.block_size_tokens, profile.blocks - 1)
        self.handle(InstanceAdded(InstanceSpec(name)))
        self.handle(InstanceDescribed(name, facts))
        self.handle(InstanceProbed(name, is_healthy=True))
        self.handle(SourceOpened(SourceId(name), has_replay=False))
        if self.pool is not None:
            self.handle(InstancePooled(name, KEY_SPACE))

    def _wake(self) -> None:
        self.handle(WakeUp())

    # --- requests ---------------------------------------------------------------------------------

    def _as_request(self, sent: Sent) -> Request:
        """Return the request as the gateway gives it to the core, what the pool holds included."""
        space = BlockSpace(self.profile.block_size_tokens)
        chain = hash_prompt(space, pack_tokens(sent.tokens))
        prompt = Prompt(len(sent.tokens), {space: chain})
        request = Request(sent.request_id, MODEL, prompt)
        if self.pool is None or self.core.covers(request, self.now):
            return request
        pooled_tokens = self._pooled_tokens(sent.tokens)
        if not pooled_tokens:
            return request
        part = PoolPart(pooled_tokens, self.profile.kv_bytes_per_token)
        return Request(sent.request_id, MODEL, prompt, pool={KEY_SPACE: part})

    def _pooled_tokens(self, tokens: Tokens) -> int:
        """Return how many leading tokens of a prompt the pool has."""
        size = self.profile.block_size_tokens
        digests = TokenSequence(tokens, block_size_tokens=size, root=self._root).digests
        usable = digests[: (len(tokens) - 1) // size]
        missing = (
            n
            for n, digest in enumerate(usable)
            if self.pool is None or not all(key in self.pool for key in LAYOUT.keys(digest))
        )
        return size * next(missing, len(usable))

    # --- engines ----------------------------------------------------------------------------------

    def _step_at(self, engine: _Engine, time: float) -> None:
        if engine.steps_at is not None and engine.steps_at <= time:
            return
        engine.steps_at = time
        self.at(time, lambda: self._step(engine, time))

    def _step(self, engine: _Engine, due: float) -> None:
        if engine.steps_at != due:
            return  # it was put forward
        engine.steps_at = None
        step = engine.model.step(self.now)
        if step is not None:
            engine.busy_until = step.ends_at
            self.at(step.ends_at, lambda: self._end_step(engine, step))
            return
        wakes_at = engine.model.wakes_at()
        if wakes_at is not None:
            self._step_at(engine, max(wakes_at, self.now))

    def _end_step(self, engine: _Engine, step: StepResult) -> None:
        """Tell what a step did, events first, and begin the next."""
        if step.events:
            frame = Frame(b"", engine.sequence, engine.encoder.encode(step.events, self.now))
            engine.sequence += 1
            self.handle(decode_batch(engine.source, frame))
        for output in step.outputs:
            if output.request_id.startswith(STRANGER):
                continue
            request_id = RequestId(output.request_id)
            if request_id in self.seedings:
                self.handle(SeedingEnded(request_id, is_done=True))
                continue
            sent = self.sent[request_id]
            sent.output_ids.append(output.token_id)
            if sent.first_token_at is None:
                sent.first_token_at, sent.cached_tokens = self.now, output.cached_tokens
                self.handle(RequestFirstByte(sent.request_id, shows_prefill=True))
            if output.finish_reason is not None:
                self._end(sent)
        self._step_at(engine, self.now)

    def _end(self, sent: Sent) -> None:
        sent.ended_at = self.now
        count = len(sent.output_ids)
        finished = RequestFinished(sent.request_id, Outcome.ANSWERED, count, generated_tokens=count)
        self.handle(finished)
        if sent.then is not None:
            sent.then(sent)
