"""A storm over a small fleet: agents work while one engine after the other is hurt, and what came of it.

Three simulated engines in processes of their own, each behind a proxy for its connections and one for its
KV events; the gateway and its clients in this process. Faults come one at a time, since a fleet without a
single engine that is well can only refuse. `run_storm` tells what was seen; tests say what is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from agent_clients import Outcome, Session, Shape, Turn, count, percentile
from event_proxy import EventProxy, Luck
from fault_proxy import FaultProxy, Weather
from live_gateway import LiveGateway, live_gateway, until
from processes import MOONGATE, Child, free_port
from resident import Growth, Held

from moongate.router import Holder, InstanceId, SourceId, Tier

ENGINES = 3
BLOCKS = 4000
"""Of an engine: fewer than all conversations have together, so that blocks are evicted."""

ENGINE_START_S = 15.0
UPSTREAM_TIMEOUT_S = 4.0
"""After which a silent engine is given up; more than a freeze lasts."""

HEALED_S = 20.0
"""For everything to be as the engines say, once all is well."""

GARBAGE = (
    b"\x00\xff\x16\x03\x01 this is no HTTP\r\n\r\n",
    b"HTTP/1.1 999 Nonsense\r\ncontent-length: 2\r\n\r\nno",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnot-a-size\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + b"x-pad: " + b"p" * 70_000,
    b"",
)
"""In place of an answer: none of it is one, so that it can be asked for elsewhere."""

ODD_EVENTS = (
    b": a comment \xff\xfe\n\n",
    b"event: unknown\ndata\nretry: x\n\n",
    b"data:\n\n",
    b"id: 7\r\n\r\n",
)
"""Between a stream's events: odd, but none of it is what ends one, nor what clients read."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how many, how often. `seed` decides everything that is left to chance here."""

    seed: int = 8
    sessions: int = 64
    clean_s: float = (
        48.0  # before the first fault; the first sixth, while caches fill, isn't measured
    )
    fault_every_s: float = 5.0
    faults: int = 36
    fault_s: float = 2.5  # how long one lasts, those that last
    gap_s: float = 1.0  # at least, from the end of one to the next
    calm_s: tuple[float, float] = (2.0, 32.0)  # after the last has ended: what is measured then
    pause_s: float = 1.5  # of an agent, between its turns
    jump_s: float = 600.0
    after_tokens: int = 1  # of the answers when all is over


@dataclass(slots=True)
class Report:
    """What was seen of a storm."""

    turns: list[Turn] = field(default_factory=list)
    after: list[Turn] = field(default_factory=list)
    """One more turn of each session, when all was over."""
    faults: Counter[str] = field(default_factory=Counter)
    broken_by_engines: int = 0
    """Answers of which a part had come when they were broken off, as the proxies saw it."""
    counted: dict[str, float] = field(default_factory=dict)
    """`moongate_requests_total` by status."""
    clean: list[Turn] = field(default_factory=list)
    calm: list[Turn] = field(default_factory=list)
    differences: dict[str, int] = field(default_factory=dict)
    """By instance: blocks that the index has and the engine has not, or the other way round."""
    blocks: dict[str, int] = field(default_factory=dict)
    held_before: Held | None = None
    held_after: Held | None = None
    growth: Growth = field(default_factory=Growth)
    events: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.outcome is not Outcome.ANSWERED]

    @property
    def malformed(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.outcome is Outcome.MALFORMED]

    @property
    def clean_p99_s(self) -> float:
        return percentile([turn.took_s for turn in self.clean], 0.99)

    @property
    def calm_p99_s(self) -> float:
        return percentile([turn.took_s for turn in self.calm], 0.99)

    def __str__(self) -> str:
        return (
            f"{len(self.turns)} turns: {dict(count(self.turns))}; faults {dict(self.faults)}; "
            f"{self.broken_by_engines} begun answers broken off; p99 clean {self.clean_p99_s:.3f} s of "
            f"{len(self.clean)}, calm {self.calm_p99_s:.3f} s of {len(self.calm)}; KV batches "
            f"{dict(self.events)}; blocks {self.blocks}, differences {self.differences}; "
            f"{self.held_before} -> {self.held_after}; RSS {self.growth}"
        )


class Clock:
    """The monotonic clock, as of a machine that was asleep now and then."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class StormEngine:
    """One engine's process and what lies between it and the gateway."""

    def __init__(self, name: str, logs: Path, chance: random.Random) -> None:
        self.name = name
        self._http, self._events, self._replay = (free_port() for _ in range(3))
        self._log = logs / f"engine-{name}.log"
        self._seed = str(ord(name))
        self._child: Child | None = None
        self.proxy = FaultProxy(self._http)
        self.events = EventProxy(f"tcp://127.0.0.1:{self._events}", chance)

    @property
    def settings(self) -> dict[str, object]:
        return {
            "id": self.name,
            "url": self.proxy.url,
            "kv_events": self.events.endpoint,
            "kv_replay": f"tcp://127.0.0.1:{self._replay}",
        }

    async def start(self) -> None:
        argv = [
            *MOONGATE, "sim-engine", "--port", str(self._http), "--model", "m",
            "--kv-events-port", str(self._events), "--kv-replay-port", str(self._replay),
            "--blocks", str(BLOCKS), "--prefill-tokens-per-s", "20000",
            "--decode-tokens-per-s", "40",
        ]  # fmt: skip
        url = f"http://127.0.0.1:{self._http}"
        self._child = Child.start(argv, url, self._log, {"PYTHONHASHSEED": self._seed})
        await asyncio.to_thread(self._child.wait_until, "/health", ENGINE_START_S)

    async def begin(self) -> None:
        """Start for the first time."""
        await self.start()
        self.proxy.listen()
        await self.events.start()

    async def kill(self) -> None:
        assert self._child is not None
        self._child.kill()
        await self.proxy.leave()
        await self.events.stop()

    async def restart(self) -> None:
        await self.start()
        self.proxy.listen()
        await self.events.start()

    def signal(self, number: signal.Signals) -> None:
        assert self._child is not None
        os.kill(self._child.process.pid, number)

    async def end(self) -> None:
        if self._child is not None:
            self._child.kill()
        with contextlib.suppress(AssertionError):
            await self.proxy.leave()
            await self.events.__aexit__()

    async def cached(self, client: httpx.AsyncClient) -> set[int]:
        """Return the blocks of its cache by the names that its events tell."""
        answer = await client.get(f"http://127.0.0.1:{self._http}/sim/cache")
        return {int(digest[-16:], 16) for digest in answer.json()["0"]}


# --- faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """What a fault gets to do its harm with."""

    engine: StormEngine
    clock: Clock
    chance: random.Random
    plan: Plan

    async def lasts(self) -> None:
        await asyncio.sleep(self.plan.fault_s)

    async def weather(self, weather: Weather) -> None:
        """Let it last for a while."""
        self.engine.proxy.weather = weather
        await self.lasts()
        self.engine.proxy.weather = Weather()

    async def luck(self, luck: Luck) -> None:
        self.engine.events.luck = luck
        await self.lasts()
        self.engine.events.luck = Luck()


Fault = Callable[[Moment], Awaitable[None]]


async def killed(m: Moment) -> None:
    await m.engine.kill()
    await asyncio.sleep(m.plan.fault_s / 2)
    await m.engine.restart()


async def frozen(m: Moment) -> None:
    m.engine.signal(signal.SIGSTOP)
    await m.lasts()
    m.engine.signal(signal.SIGCONT)


async def slow(m: Moment) -> None:
    await m.weather(Weather(delay_s=0.1))


async def throttled(m: Moment) -> None:
    await m.weather(Weather(bytes_per_s=4000.0))


async def garbage(m: Moment) -> None:
    await m.weather(Weather(garbage=m.chance.choice(GARBAGE)))


async def odd_events(m: Moment) -> None:
    await m.weather(Weather(inserted=m.chance.choice(ODD_EVENTS)))


async def doubled(m: Moment) -> None:
    await m.weather(Weather(duplicates=True))


async def half_open(m: Moment) -> None:
    """Connections stand, and nothing that is sent into them is ever answered."""
    await m.weather(Weather(swallows=True))
    m.engine.proxy.end_connections(with_reset=True)


async def deaf(m: Moment) -> None:
    """Requests arrive, and their answers are lost."""
    await m.weather(Weather(drops_answers=True))
    m.engine.proxy.end_connections(with_reset=True)


async def reset(m: Moment) -> None:
    m.engine.proxy.end_connections(with_reset=True)


async def cut(m: Moment) -> None:
    m.engine.proxy.end_connections(with_reset=False)


async def events_lost(m: Moment) -> None:
    await m.luck(Luck(lost=0.3))


async def events_repeated(m: Moment) -> None:
    await m.luck(Luck(repeated=0.5))


async def events_swapped(m: Moment) -> None:
    await m.luck(Luck(swapped=0.5))


async def clock_jumped(m: Moment) -> None:
    m.clock.ahead_s += m.plan.jump_s


FAULTS: tuple[Fault, ...] = (
    killed, frozen, slow, throttled, garbage, odd_events, doubled, half_open, deaf, reset, cut,
    events_lost, events_repeated, events_swapped, clock_jumped,
)  # fmt: skip


# --- the storm ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def storm_fleet(logs: Path, chance: random.Random) -> AsyncIterator[list[StormEngine]]:
    engines = [StormEngine("abc"[n], logs, chance) for n in range(ENGINES)]
    try:
        await asyncio.gather(*(engine.begin() for engine in engines))
        yield engines
    finally:
        for engine in engines:
            await engine.end()


async def run_storm(plan: Plan, logs: Path) -> Report:
    """Let agents work through a storm and report what was seen."""
    chance, clock, report = random.Random(plan.seed), Clock(), Report()
    async with (
        storm_fleet(logs, chance) as engines,
        live_gateway(
            [],
            clock=clock,
            instances=[engine.settings for engine in engines],
            health={"interval_s": 0.5, "timeout_s": 1.5},
            limits={
                "upstream_timeout_s": UPSTREAM_TIMEOUT_S,
                "connect_timeout_s": 2.0,
                "prompt_memory_bytes_max": 8 << 20,
            },
        ) as gateway,
    ):
        await gateway.metric("moongate_requests_total")  # its connection stays
        report.held_before = Held.now()
        shape = Shape(str(plan.seed), pause_s=plan.pause_s)
        sessions = [
            Session(n, gateway.port, shape, report.turns.append) for n in range(plan.sessions)
        ]
        await _work(plan, chance, clock, engines, gateway, sessions, report)
        await until(lambda: gateway.inflight() == 0, HEALED_S)
        await until(lambda: _all_well(gateway, engines), HEALED_S)
        for session in sessions:
            if session.messages and session.messages[-1]["role"] == "assistant":
                session.messages.append({"role": "user", "content": "and now?"})
                session.shape = replace(shape, answer_tokens=plan.after_tokens)
                report.after.append(await session.take_turn(is_stream=True))
                await asyncio.sleep(0.02)
            await session.close()
        await _compare(gateway, engines, report)
        report.counted = await _counted(gateway)
        report.broken_by_engines = sum(engine.proxy.broken for engine in engines)
        for engine in engines:
            proxy = engine.events
            report.events += Counter(
                passed=proxy.passed, lost=proxy.lost, repeated=proxy.repeated,
                swapped=proxy.swapped,
            )  # fmt: skip
        assert await gateway.metric("moongate_inflight_requests") == 0
        report.held_after = await Held.settled(report.held_before)
    return report


async def _work(
    plan: Plan,
    chance: random.Random,
    clock: Clock,
    engines: list[StormEngine],
    gateway: LiveGateway,
    sessions: list[Session],
    report: Report,
) -> None:
    """Run the agents: in peace, through the storm, and in the calm after it."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    running = [asyncio.create_task(session.run(stop)) for session in sessions]
    watching = asyncio.create_task(report.growth.watch(plan.fault_every_s / 2))
    began_at = loop.time()
    await asyncio.sleep(plan.clean_s)
    clean_until = loop.time()
    await _hurt(plan, chance, clock, engines, gateway, report)
    ended_at = loop.time()
    await asyncio.sleep(plan.calm_s[1])
    stop.set()
    watching.cancel()
    await asyncio.gather(*running)
    report.clean = [
        t for t in report.turns
        if t.began_at > began_at + plan.clean_s / 6 and t.ended_at < clean_until
    ]  # fmt: skip
    first, last = plan.calm_s
    report.calm = [t for t in report.turns if first <= t.began_at - ended_at <= last]


async def _hurt(
    plan: Plan,
    chance: random.Random,
    clock: Clock,
    engines: list[StormEngine],
    gateway: LiveGateway,
    report: Report,
) -> None:
    loop = asyncio.get_running_loop()
    order: list[Fault] = []
    while len(order) < plan.faults:
        order += chance.sample(FAULTS, len(FAULTS))
    due_at = loop.time()
    for number, fault in enumerate(order[: plan.faults], 1):
        engine = chance.choice(engines)
        print(f"{time.strftime('%X')} {engine.name}: {fault.__name__}", file=sys.stderr)
        await fault(Moment(engine, clock, chance, plan))
        report.faults[fault.__name__] += 1
        if number < plan.faults:
            await until(lambda: _all_well(gateway, engines), HEALED_S)
            # A request that was sent again for this fault must not meet the next.
            due_at = max(due_at + plan.fault_every_s, loop.time() + plan.gap_s)
            await asyncio.sleep(due_at - loop.time())


def _all_well(gateway: LiveGateway, engines: list[StormEngine]) -> bool:
    well = {i.spec.id for i in gateway.core.fleet if i.is_healthy and i.facts is not None}
    return well == {engine.name for engine in engines}


async def _counted(gateway: LiveGateway) -> dict[str, float]:
    name = "moongate_requests_total"
    statuses = {200, 499, *range(500, 505)}
    counts = {str(status): await gateway.metric(name, code=str(status)) for status in statuses}
    assert sum(counts.values()) == await gateway.metric(name), "a status that nobody expected"
    return {status: value for status, value in counts.items() if value}


async def _compare(gateway: LiveGateway, engines: list[StormEngine], report: Report) -> None:
    """Compare the index with the engines' caches, as soon as they are the same or never will be."""
    async with httpx.AsyncClient(trust_env=False) as client:

        async def differ() -> int:
            for engine in engines:
                indexed = indexed_names(gateway, engine.name)
                cached = await engine.cached(client)
                report.blocks[engine.name] = len(cached)
                report.differences[engine.name] = len(indexed ^ cached)
            return sum(report.differences.values())

        deadline = asyncio.get_running_loop().time() + HEALED_S
        while await differ() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.2)


def indexed_names(gateway: LiveGateway, name: str) -> set[int]:
    """Return what the index says that an instance has, by the engine's own names."""
    core, holder = gateway.core, Holder(InstanceId(name))
    state = core.sources.find(SourceId(InstanceId(name)))
    assert state is not None, name
    blocks = {block for tier, block in state.ledger.held() if tier is Tier.DEVICE}
    assert core.index.count(holder, Tier.DEVICE) == len(blocks)
    for block in blocks:
        assert holder in core.index.find_holders(block)[0]
    return {int(hash_) for hash_ in state.ledger.engine_hashes(Tier.DEVICE)}
