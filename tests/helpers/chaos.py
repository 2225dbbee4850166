"""A storm over a small fleet: agents work while one engine after the other is hurt, and what came of it.

Three simulated engines in processes of their own, each behind a proxy for its connections and one for its
KV events; the gateway and its clients in this process. Faults come one at a time, since a fleet without a
single engine that is well can only refuse. `run_storm` tells what was seen; tests say what is right.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from agent_clients import Outcome, Session, Shape, Turn, count, percentile
from live_gateway import LiveGateway, live_gateway, until
from resident import Growth, Held
from storm_engines import StormEngine, storm_fleet
from storm_faults import FAULTS, Clock, Fault, Moment

from moongate.router import Holder, InstanceId, SourceId, Tier

UPSTREAM_TIMEOUT_S = 4.0
"""After which a silent engine is given up; more than a freeze lasts."""

HEALED_S = 20.0
"""For everything to be as the engines say, once all is well."""


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
    asked_after: int = 64  # sessions that take one more turn when all is over


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


# --- the storm ------------------------------------------------------------------------------------


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
        await _ask_after(plan, sessions, report)
        await _compare(gateway, engines, report)
        report.counted = await _counted(gateway)
        _add_up(engines, report)
        assert await gateway.metric("moongate_inflight_requests") == 0
        report.held_after = await Held.settled(report.held_before)
    return report


async def _ask_after(plan: Plan, sessions: list[Session], report: Report) -> None:
    """Let some sessions take one more turn, one after the other, and all of them leave."""
    for session in sessions:
        is_asked = len(report.after) < plan.asked_after
        if is_asked and session.messages and session.messages[-1]["role"] == "assistant":
            session.messages.append({"role": "user", "content": "and now?"})
            session.shape = replace(session.shape, answer_tokens=1)
            report.after.append(await session.take_turn(is_stream=True))
            await asyncio.sleep(0.02)  # for what it evicts to be told
        await session.close()


def _add_up(engines: list[StormEngine], report: Report) -> None:
    """Note what the proxies saw."""
    report.broken_by_engines = sum(engine.proxy.broken for engine in engines)
    for events in (engine.events for engine in engines):
        report.events += Counter(
            passed=events.passed, lost=events.lost, repeated=events.repeated,
            swapped=events.swapped,
        )  # fmt: skip


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
        await fault(Moment(engine, clock, chance, plan.fault_s, plan.jump_s))
        report.faults[fault.__name__] += 1
        if number < plan.faults:
            await until(lambda: _all_well(gateway, engines), HEALED_S)
            due_at = max(due_at + plan.fault_every_s, loop.time() + plan.gap_s)
            await asyncio.sleep(due_at - loop.time())
            # A request that was sent again for this fault must not meet the next: it is sent again once.
            await until(lambda: not _is_repeating(gateway), HEALED_S)


def _is_repeating(gateway: LiveGateway) -> bool:
    """Tell whether a request that failed somewhere waits for its first byte elsewhere."""
    tracked = gateway.core._requests.tracked.values()
    return any(one.failed and not one.has_first_byte for one in tracked)


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
