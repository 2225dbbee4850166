"""A simulated engine that is five times slower than two others gets less, on real sockets."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from live_gateway import LiveGateway, live_gateway

from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

FAST = EngineProfile(prefill_tokens_per_s=4000.0, decode_tokens_per_s=2000.0)
SLOW = EngineProfile(prefill_tokens_per_s=800.0, decode_tokens_per_s=400.0)


async def shares(gateway: LiveGateway, count: int, first: int) -> Counter[str]:
    """Send streams at a steady rate, 12 a second, and return where they went."""

    async def send(number: int) -> str:
        text = " ".join(f"w{number}x{n}" for n in range(60))
        answer = await gateway.chat(content=text, max_tokens=2, stream=True)
        assert answer.status_code == 200
        return answer.headers["x-moongate-instance"]

    tasks = []
    for number in range(first, first + count):
        tasks.append(asyncio.create_task(send(number)))
        await asyncio.sleep(1 / 12)
    return Counter(await asyncio.gather(*tasks))


@pytest.mark.parametrize("policy", ["round_robin", "kv_cost"])
async def test_a_slow_engine_gets_less(policy: str) -> None:
    engines = [
        SimEngine(SimEngineConfig(profile=profile, model="m", kv_events_port=0, kv_replay_port=0))
        for profile in (SLOW, FAST, FAST)
    ]
    for engine in engines:
        await engine.start()
    async with live_gateway([e.url for e in engines], policy={"name": policy}) as gateway:
        await shares(gateway, 96, 0)  # by then it has been noticed
        found = await shares(gateway, 120, 1000)
        listed = (await gateway.client.get("/admin/instances")).json()["instances"]
        slowness = await gateway.metric("moongate_instance_slowness", instance="a")
    for engine in engines:
        await engine.stop()
    assert found["a"] / found.total() < 0.22, found  # a third without
    if policy == "round_robin":  # the other one may explain it by the speed that it learns
        assert slowness > 1.5
        assert listed[0]["slowness"] == pytest.approx(slowness, abs=0.5)
    assert [i["state"] for i in listed] == ["up"] * 3
