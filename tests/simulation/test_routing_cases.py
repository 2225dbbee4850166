"""Routing cases on the core alone: a tiny fleet in virtual time, its numbers as the cases state them.

An instance here serves `SLOTS` requests at a time, each for `SERVICE_S`; what waits, waits in order.
A request is prefilled at the beginning of its service, which fills the instance's cache and sends
the events for it.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from moongate.router import (
    BatchReceived,
    BlockSpace,
    Command,
    Event,
    FailureKind,
    Forward,
    Holder,
    InstanceAdded,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstanceProbed,
    InstanceSpec,
    ModelCard,
    Outcome,
    Prompt,
    Request,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    RouterCore,
    SourceId,
    SourceOpened,
    Tier,
    WakeAt,
    WakeUp,
    make_policy,
)
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.events import BlocksStored
from moongate.router.invariants import check
from moongate.router.model import BlockHash

SIZE = 16
SPACE = BlockSpace(SIZE)
SLOTS, SERVICE_S, PREFILL_TOKENS_PER_S = 8, 1.0, 80_000
MODEL = "m"
A, B, C, D = (InstanceId(name) for name in "abcd")
SYSTEM_PROMPT = tuple(range(8000))

Tokens = tuple[int, ...]


def unrelated(number: int, count: int = 800) -> Tokens:
    """Return a prompt that shares nothing with one of another number."""
    return tuple(range(100_000 * number, 100_000 * number + count))


@dataclass
class Instance:
    """What an engine has to do, and what it holds: all that it ever computed."""

    id: InstanceId
    fails: FailureKind | None = None
    waiting: list[RequestId] = field(default_factory=list)
    running: set[RequestId] = field(default_factory=set)
    cached: set[BlockHash] = field(default_factory=set)
    sequence: int = 0


@dataclass
class Sent:
    """One request as it went through the fleet."""

    tokens: Tokens
    chain: list[BlockHash]
    instance_id: InstanceId | None = None
    cached_tokens: int = 0
    attempts: int = 1


class Fleet:
    """Instances around a core, in virtual time."""

    def __init__(self, *instance_ids: InstanceId, policy: str = "kv_cost") -> None:
        self.now = 0.0
        self.core = RouterCore(make_policy(policy), lambda n: n - 1)
        self.instances = {name: Instance(name) for name in instance_ids}
        self.sent: dict[RequestId, Sent] = {}
        self.probes: list[tuple[float, InstanceId]] = []  # attempts at an instance that fails
        self.in_flight: list[dict[InstanceId, int]] = []  # after each arrival
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        facts = InstanceFacts((ModelCard(MODEL),), SIZE)
        for name in instance_ids:
            self.handle(InstanceAdded(InstanceSpec(name)))
            self.handle(InstanceDescribed(name, facts))
            self.handle(InstanceProbed(name, is_healthy=True))
            self.handle(SourceOpened(SourceId(name), has_replay=False))

    # --- driving ----------------------------------------------------------------------------------

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), act))

    def run(self) -> None:
        """Let everything happen that is due; idle time-outs don't count."""
        while self._agenda:
            self.now, _, act = heapq.heappop(self._agenda)
            act()

    def run_until(self, time: float) -> None:
        while self._agenda and self._agenda[0][0] <= time:
            self.now, _, act = heapq.heappop(self._agenda)
            act()
        self.now = time

    def arrive(self, tokens: Tokens) -> RequestId:
        request_id = RequestId(f"r{len(self.sent)}")
        chain = hash_prompt(SPACE, pack_tokens(tokens))
        prompt = Prompt(len(tokens), {SPACE: chain})
        self.sent[request_id] = Sent(tokens, chain)
        self.handle(RequestArrived(Request(request_id, MODEL, prompt)))
        self.in_flight.append({i.id: _in_flight(i) for i in self.instances.values()})
        return request_id

    def arrive_in_turn(self, prompts: Sequence[Tokens], pause_s: float = 0.0) -> None:
        """Send one prompt after the other, each when the one before has ended."""
        for tokens in prompts:
            self.arrive(tokens)
            self.run()
            self.now += pause_s

    def arrive_in_parallel(self, prompts: Sequence[Tokens], concurrency: int) -> None:
        """Send all prompts, keeping `concurrency` of them open."""
        left = iter(prompts)
        self._next = lambda: self.arrive(tokens) if (tokens := next(left, None)) else None
        for _ in range(concurrency):
            self._next()
        self.run()

    _next: Callable[[], object] = staticmethod(lambda: None)

    def warm(self, instance_id: InstanceId, tokens: Tokens) -> None:
        """Let an instance hold a prompt without having served a request."""
        self._cache(self.instances[instance_id], tokens, hash_prompt(SPACE, pack_tokens(tokens)))

    def handle(self, event: Event) -> None:
        for command in self.core.handle(event, self.now):
            self._perform(command)
        check(self.core)

    def _perform(self, command: Command) -> None:
        if isinstance(command, Forward):
            self._take(self.instances[command.holder.instance_id], command)
        elif isinstance(command, WakeAt) and command.at < self.now + 30:
            self.at(command.at, lambda: self.handle(WakeUp()))

    # --- an instance's work -----------------------------------------------------------------------

    def _take(self, instance: Instance, forward: Forward) -> None:
        sent = self.sent[forward.request_id]
        sent.instance_id, sent.attempts = instance.id, forward.attempt
        if instance.fails is not None:
            self.probes.append((self.now, instance.id))
            failed = RequestFailed(forward.request_id, instance.fails, 500)
            self.at(self.now + 0.001, lambda: self.handle(failed))
            return
        instance.waiting.append(forward.request_id)
        self._start(instance)

    def _start(self, instance: Instance) -> None:
        while instance.waiting and len(instance.running) < SLOTS:
            request_id = instance.waiting.pop(0)
            instance.running.add(request_id)
            sent = self.sent[request_id]
            usable = sent.chain[: (len(sent.tokens) - 1) // SIZE]
            sent.cached_tokens = SIZE * _leading(usable, instance.cached)
            prefill_s = (len(sent.tokens) - sent.cached_tokens) / PREFILL_TOKENS_PER_S
            self.at(self.now + prefill_s, lambda r=request_id: self._prefilled(instance, r))  # type: ignore[misc]
            self.at(self.now + SERVICE_S, lambda r=request_id: self._served(instance, r))  # type: ignore[misc]

    def _prefilled(self, instance: Instance, request_id: RequestId) -> None:
        self._cache(instance, self.sent[request_id].tokens, self.sent[request_id].chain)
        self.handle(RequestFirstByte(request_id))

    def _served(self, instance: Instance, request_id: RequestId) -> None:
        instance.running.remove(request_id)
        self.handle(RequestFinished(request_id, Outcome.ANSWERED))
        self._start(instance)
        self._next()

    def _cache(self, instance: Instance, tokens: Tokens, chain: list[BlockHash]) -> None:
        known = _leading(chain, instance.cached)
        new = tuple(chain[known:])
        if not new:
            return
        instance.cached.update(new)
        parent = chain[known - 1] if known else None
        content = pack_tokens(tokens[known * SIZE : len(chain) * SIZE])
        event = BlocksStored(new, parent, content, SIZE, Tier.DEVICE)
        digest = f"{instance.id}{instance.sequence}".encode()
        batch = BatchReceived(SourceId(instance.id), instance.sequence, (event,), digest)
        instance.sequence += 1
        self.handle(batch)

    # --- what came out ----------------------------------------------------------------------------

    def shares(self) -> Counter[InstanceId | None]:
        return Counter(sent.instance_id for sent in self.sent.values())

    def hit_rate(self, first: int | None = None) -> float:
        """Return the cached tokens of the (first) requests over all their tokens."""
        sent = list(self.sent.values())[:first]
        return sum(s.cached_tokens for s in sent) / sum(len(s.tokens) for s in sent)


def _leading(chain: list[BlockHash], cached: set[BlockHash]) -> int:
    return next((n for n, block in enumerate(chain) if block not in cached), len(chain))


def _in_flight(instance: Instance) -> int:
    return len(instance.waiting) + len(instance.running)


# --- C32 ------------------------------------------------------------------------------------------


def run_c32(policy: str) -> Fleet:
    """200 requests, one system prompt of 8,000 tokens, own tails; only A has seen the prompt."""
    fleet = Fleet(A, B, C, D, policy=policy)
    fleet.warm(A, SYSTEM_PROMPT)
    prompts = [SYSTEM_PROMPT + unrelated(n, 100) for n in range(1, 201)]
    fleet.arrive_in_parallel(prompts, concurrency=32)
    return fleet


@pytest.fixture(scope="module")
def c32() -> Fleet:
    return run_c32("kv_cost")


def test_c32_every_instance_gets_its_share_of_a_popular_system_prompt(c32: Fleet) -> None:
    assert all(c32.shares()[name] >= 0.15 * 200 for name in (A, B, C, D)), c32.shares()


def test_c32_after_two_rounds_the_instances_have_equally_much_in_flight(c32: Fleet) -> None:
    spreads = [max(f.values()) - min(f.values()) for f in c32.in_flight[64:]]
    assert max(spreads) <= 2, spreads


def test_c32_the_makespan_is_within_1_3_of_least_loaded(c32: Fleet) -> None:
    assert run_c32("least_loaded").now == pytest.approx(7.0)
    assert c32.now <= 1.3 * 7.0


def test_c32_more_is_reused_than_by_round_robin_in_its_first_pass(c32: Fleet) -> None:
    first_pass = run_c32("round_robin").hit_rate(first=32)
    assert first_pass == pytest.approx(0.25, abs=0.01)  # one of four is warm
    assert c32.hit_rate() > first_pass


# --- C33 ------------------------------------------------------------------------------------------


def test_c33_unrelated_prompts_one_after_the_other_use_all_instances() -> None:
    fleet = Fleet(A, B, C, D)
    fleet.arrive_in_turn([unrelated(n) for n in range(40)])
    assert all(5 <= fleet.shares()[name] <= 15 for name in (A, B, C, D)), fleet.shares()
    chosen = [sent.instance_id for sent in fleet.sent.values()]
    assert max(len(list(run)) for _, run in itertools.groupby(chosen)) <= 4


# --- C37 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_tokens", "pause_s"), [(100, 0.0), (800, 0.05)])
def test_c37_unseen_prompts_go_to_the_idle_instance_whatever_it_has_cached(
    prompt_tokens: int, pause_s: float
) -> None:
    fleet = Fleet(A, B)
    fleet.handle(InstanceProbed(B, is_healthy=False, is_gone=True))
    for number in range(30):
        fleet.arrive(unrelated(number, prompt_tokens))
    fleet.run_until(0.4)
    fleet.handle(InstanceProbed(B, is_healthy=True))
    fleet.warm(B, unrelated(500, 5000 * SIZE))
    assert fleet.core.index.count(Holder(B), Tier.DEVICE) == 5000
    assert fleet.core.loads.get(Holder(A)).active_requests == 30
    unseen: list[RequestId] = []
    for number in range(20):
        unseen.append(fleet.arrive(unrelated(1000 + number, prompt_tokens)))
        fleet.run_until(fleet.now + pause_s)
    assert sum(fleet.sent[request].instance_id == B for request in unseen) >= 18


# --- C49 ------------------------------------------------------------------------------------------

PREFIX = tuple(range(4000))


def test_c49_a_stopped_instance_costs_one_failover() -> None:
    fleet = Fleet(A, B)
    fleet.warm(A, PREFIX)
    fleet.instances[A].fails = FailureKind.UNREACHABLE
    for _ in range(50):
        fleet.arrive(PREFIX)
        fleet.run_until(fleet.now + 0.02)
    fleet.run()
    assert fleet.shares() == {B: 50}
    assert sum(sent.attempts == 2 for sent in fleet.sent.values()) == 1
    explained = fleet.core.explain(Request(RequestId("x"), MODEL), fleet.now)
    assert explained is not None
    assert [c.holder.instance_id for c in explained.ranking] == [B]


def test_c49_an_instance_that_answers_500_gets_one_probe_per_back_off_step() -> None:
    fleet = Fleet(A, B)
    fleet.warm(A, PREFIX)
    fleet.instances[A].fails = FailureKind.STATUS
    # One after the other: each takes 1 s, so that the back-off passes several times.
    fleet.arrive_in_turn([PREFIX] * 50)
    assert fleet.shares() == {B: 50}
    times = [round(time) for time, _ in fleet.probes]
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert steps == sorted(steps)
    assert all(step >= 2**n for n, step in enumerate(steps)), steps


@pytest.mark.parametrize("kind", [FailureKind.STATUS, FailureKind.UNREACHABLE])
def test_c49_within_the_first_back_off_one_request_pays_a_failover(kind: FailureKind) -> None:
    fleet = Fleet(A, B)
    fleet.warm(A, PREFIX)
    fleet.instances[A].fails = kind
    fleet.arrive_in_turn([PREFIX])
    for _ in range(49):
        fleet.arrive(PREFIX)
    fleet.run()
    assert fleet.shares() == {B: 50}
    assert len(fleet.probes) == 1
