"""Gateways that, between them, show every metric: they have routed, failed, refused, handed over, pooled."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fake_engine import FakeEngine, Received, chat_answer
from live_gateway import LiveGateway, live_gateway, until
from otlp_receiver import Collector
from pd_fleet import pd_fleet
from redis_process import RedisProcess
from scrape import Scrape, scrape

from moongate.kvpool.memory import MemoryPool
from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import SimEngine, SimEngineConfig

FAST = EngineProfile(prefill_tokens_per_s=200_000.0, decode_tokens_per_s=2_000.0)


async def scrape_everything(directory: Path) -> Scrape:
    """Return what several gateways together have shown after traffic of every kind.

    Starts a Redis (`needs_redis`), which works in `directory`.
    """
    series: dict[str, list[dict[str, str]]] = {}
    for part in (
        await _of_events_and_pool(),
        await _of_failures(directory),
        await _of_handoffs(),
        await _of_shared_state(directory),
    ):
        for name, labels in part.series.items():
            series.setdefault(name, []).extend(labels)
    return Scrape(series)


async def _of_events_and_pool() -> Scrape:
    sims = [
        SimEngine(SimEngineConfig(profile=FAST, model="m", kv_events_port=0, kv_replay_port=0))
        for _ in range(2)
    ]
    for sim in sims:
        await sim.start()
    async with Collector() as collector:
        async with live_gateway(
            [sim.url for sim in sims],
            memory_pool=MemoryPool(1 << 20),
            pool={"kind": "memory"},
            observability={"otlp_endpoint": collector.url},
        ) as gateway:
            exporter = gateway.server.gateway._exporter
            assert exporter is not None
            exporter._interval_s = 0.05
            text = " ".join(f"word{n}" for n in range(300))
            session = {"x-session-id": "s"}
            for changed in ("", "", "changed "):
                await gateway.chat(content=changed + text, max_tokens=2, headers=session)
                await asyncio.sleep(0.1)
            await until(lambda: _has(gateway, "moongate_traces_total"))
            shown = await scrape(gateway.client)
    for sim in sims:
        await sim.stop()
    return shown


async def _has(gateway: LiveGateway, name: str) -> bool:
    return bool((await scrape(gateway.client)).series[name])


async def _of_failures(directory: Path) -> Scrape:
    async def act(request: Received) -> None:
        if request.json().get("x_act") == "break":
            await request.start_stream()
            await request.send_chunk(b"data: {}\n\n")
            request.cut()
        elif len(a.received) + len(b.received) == 1:
            request.cut()
        else:
            await request.answer(200, chat_answer(cached_tokens=0))

    async with FakeEngine(act) as a, FakeEngine(act) as b:
        async with live_gateway(
            [a.url, b.url], file=directory / "gateway.yaml", limits={"body_bytes_max": 4096}
        ) as gateway:
            await gateway.chat()
            await gateway.chat(stream=True, x_act="break")
            await gateway.chat(content="x" * 5000)
            return await scrape(gateway.client)


async def _of_handoffs() -> Scrape:
    async with pd_fleet() as fleet:
        await fleet.complete()
        return await scrape(fleet.gateway.client)


async def _of_shared_state(directory: Path) -> Scrape:
    with RedisProcess(directory) as redis:
        state = {"kind": "redis", "url": redis.url}
        async with FakeEngine() as engine, live_gateway([engine.url], state=state) as gateway:
            return await scrape(gateway.client)
