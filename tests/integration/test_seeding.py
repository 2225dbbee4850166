"""Seedings over sockets: a popular system prompt reaches a second engine before any client goes there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from live_gateway import LiveGateway, live_gateway, until

from moongate.gateway.pool.seeding import Seeding
from moongate.kvpool.memory import MemoryPool
from moongate.router import BlockSpace, Holder, InstanceId, Tier
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.simulator.debugging import Fault
from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import PoolSegment, SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

PROFILE = EngineProfile(
    prefill_tokens_per_s=100_000.0, decode_tokens_per_s=100.0, kv_bytes_per_token=100
)
CONFIG = SimEngineConfig(
    profile=PROFILE, model="m", kv_events_port=0, kv_replay_port=0,
    pool_segment=PoolSegment.STANDALONE,
)  # fmt: skip
SYSTEM = [1000 + n % 7 for n in range(2000)]  # 125 blocks


@dataclass
class Rig:
    """Two engines that share a pool, of which one has the system prompt, and a gateway."""

    gateway: LiveGateway
    engines: dict[str, SimEngine]
    pool: MemoryPool
    home: str = ""

    @property
    def other(self) -> str:
        return next(name for name in self.engines if name != self.home)

    async def ask(self, number: int, **fields: Any) -> httpx.Response:
        """Send the system prompt with a question of its own."""
        prompt = [*SYSTEM, *[500 + number] * 50]
        body = {"model": "m", "prompt": prompt, "max_tokens": 30, "stream": True, **fields}
        return await self.gateway.client.post("/v1/completions", json=body)

    async def crowd(self, count: int = 4, first: int = 1, **fields: Any) -> list[httpx.Response]:
        numbers = range(first, first + count)
        return await asyncio.gather(*(self.ask(number, **fields) for number in numbers))

    async def seedings(self, result: str) -> float:
        return await self.gateway.metric("moongate_seedings_total", result=result)

    def received(self, name: str) -> list[Any]:
        """Return the completions that an engine got."""
        received = self.engines[name].debugging.received
        return [one for one in received if one.path == "/v1/completions"]

    def blocks(self, name: str) -> int:
        return self.gateway.core.index.count(Holder(InstanceId(name)), Tier.DEVICE)

    def inflight(self) -> int:
        return self.gateway.inflight()


@contextlib.asynccontextmanager
async def rig(
    config: SimEngineConfig = CONFIG, pool_bytes: int = 1 << 26, **seeding: Any
) -> AsyncIterator[Rig]:
    pool = MemoryPool(pool_bytes)
    engines = {name: SimEngine(config, pool) for name in "ab"}
    await asyncio.gather(*(engine.start() for engine in engines.values()))
    section = {"kind": "memory", "lookup_budget_ms": 1000, "seeding": seeding}
    try:
        async with live_gateway(
            [engine.url for engine in engines.values()],
            memory_pool=pool, pool=section, policy={"name": "home_policy:Home"},
        ) as gateway:  # fmt: skip
            one = Rig(gateway, engines, pool)
            await until(lambda: gateway.metric("moongate_pool_up"))
            first = await one.ask(0, max_tokens=1)
            assert first.status_code == 200, first.text
            one.home = first.headers["x-moongate-instance"]
            await until(lambda: len(pool) >= 125)
            await until(lambda: one.blocks(one.home) >= 125)
            await until(lambda: all(i.key_space is not None for i in gateway.core.fleet))
            yield one
    finally:
        await asyncio.gather(*(e.stop() for e in engines.values()), return_exceptions=True)


async def test_a_popular_prompt_gets_a_second_holder_before_any_client_goes_there() -> None:
    async with rig() as one:
        answers = await one.crowd()
        assert {a.headers["x-moongate-instance"] for a in answers} == {one.home}
        await until(lambda: one.seedings("done"))
        await until(lambda: one.blocks(one.other) == 125)
        (sent,) = one.received(one.other)
        assert await one.gateway.metric("moongate_routed_total", instance=one.other) == 0
        chain = hash_prompt(BlockSpace(16), pack_tokens(SYSTEM))
        index = one.gateway.core.index
        found = index.find_overlaps(chain, 125, index.mask(index.holders))
        assert {h.instance_id: o.confirmed_blocks for h, o in found.items()} == {"a": 125, "b": 125}
        assert sent.body == {"model": "m", "prompt": SYSTEM, "max_tokens": 1, "stream": False}
        statistics = one.engines[one.other].runners[0].model.statistics()
        assert statistics.external_hits_tokens == 1984  # all but the last block came from the pool
        assert one.inflight() == 0


async def test_a_seeding_keeps_the_salt_of_its_prompt() -> None:
    async with rig() as one:
        await one.ask(0, cache_salt="s", max_tokens=1)
        await until(lambda: len(one.pool) >= 250)
        await one.crowd(cache_salt="s")
        await until(lambda: one.seedings("done"))
        salted = [r for name in "ab" for r in one.received(name) if "cache_salt" in r.body]
        assert sum(r.body["max_tokens"] == 1 and len(r.body["prompt"]) == 2000 for r in salted) == 1


async def test_a_seeding_that_fails_harms_nobody() -> None:
    async with rig() as one:
        one.engines[one.other].debugging.always = Fault(500)
        answers = await one.crowd()
        assert {a.status_code for a in answers} == {200}
        await until(lambda: one.seedings("failed"))
        assert await one.seedings("done") == 0
        assert one.inflight() == 0
        assert await one.gateway.metric("moongate_instance_up", instance=one.other) == 1
        assert all(i.breaker.is_closed for i in one.gateway.core.fleet)
        await one.crowd(first=10)
        assert len(one.received(one.other)) == 1  # and it is not tried again at once


async def test_a_seeding_that_breaks_in_a_way_that_is_a_bug_ends_nevertheless(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_down(*_: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Seeding, "_send", break_down)
    async with rig() as one:
        await one.crowd()
        await until(lambda: one.seedings("failed"))
        assert one.inflight() == 0, "it is no load any more"
    assert "a bug" in caplog.text


async def test_a_stopping_gateway_cancels_what_it_seeds() -> None:
    slow = dataclasses.replace(PROFILE, kv_link_bytes_per_s=1000.0)  # 200 s for a seeding
    async with rig(dataclasses.replace(CONFIG, profile=slow)) as one:
        await one.crowd()
        await until(lambda: one.received(one.other))
        assert one.inflight() == 1  # it is load while it runs
        core = one.gateway.core
    assert not core.loads.reservations


@pytest.mark.parametrize("seeding", [{"enabled": "off"}, {"pool_use_max": 0.0001}])
async def test_nothing_is_seeded_where_the_operator_says_so(seeding: dict[str, Any]) -> None:
    async with rig(**seeding) as one:
        await until(lambda: one.gateway.metric("moongate_pool_bytes"))  # as it was checked last
        await one.crowd()
        await one.crowd(first=10)
        assert one.received(one.other) == []
