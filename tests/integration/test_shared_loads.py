"""Gateways that share load and predictions: each routes by what the others do as well, through real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Received, chat_answer
from live_gateway import LiveGateway, live_gateway, until
from redis_process import RedisProcess, needs_redis

from moongate.router import Holder, InstanceId
from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60), needs_redis]

PROFILE = EngineProfile(prefill_tokens_per_s=20_000.0, decode_tokens_per_s=200.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path) as running:
        yield running


@contextlib.asynccontextmanager
async def sims(count: int, profile: EngineProfile = PROFILE) -> AsyncIterator[list[SimEngine]]:
    engines = [
        SimEngine(
            SimEngineConfig(
                profile=profile, model="m", kv_events_port=0, kv_replay_port=0, hash_seed=str(n)
            )
        )
        for n in range(count)
    ]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield engines


@contextlib.asynccontextmanager
async def peers(
    server: RedisProcess, urls: list[str], count: int = 2, **settings: Any
) -> AsyncIterator[list[LiveGateway]]:
    """Run gateways that know of each other."""
    state = {"kind": "redis", "url": server.url}
    async with contextlib.AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(live_gateway(urls, state=state, **settings))
            for _ in range(count)
        ]
        await until(lambda: all(len(g.core.peers) == count - 1 for g in gateways))
        yield gateways


def elsewhere(gateway: LiveGateway) -> dict[str, int]:
    """Return the requests that the others have under way, by instance."""
    loads = gateway.core.loads.elsewhere
    return {str(holder): load.active_requests for holder, load in loads.items()}


class Held:
    """An engine's handler that answers once it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.waiting = 0

    async def __call__(self, request: Received) -> None:
        self.waiting += 1
        await self.may_answer.wait()
        await request.answer(200, chat_answer("m"))


async def test_each_sees_what_the_others_have_under_way(server: RedisProcess) -> None:
    held = Held()
    async with (
        FakeEngine(held) as a,
        FakeEngine(held) as b,
        peers(server, [a.url, b.url]) as (
            one,
            other,
        ),
    ):
        tasks = [asyncio.create_task(one.chat(content=f"{n}")) for n in range(6)]
        await until(lambda: sum(elsewhere(other).values()) == 6)
        assert elsewhere(other) == {"a": 3, "b": 3}
        assert other.inflight() == 0
        assert other.core.loads.get(Holder(InstanceId("a"))).active_requests == 3
        assert await other.metric("moongate_inflight_requests") == 0
        held.may_answer.set()
        await asyncio.gather(*tasks)
        await until(lambda: elsewhere(other) == {})


async def test_c84_load_is_counted_over_all_gateways_together(server: RedisProcess) -> None:
    """The first has all the clients of one instance's prefix, the other all others."""
    held = Held()
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(held)) for _ in range(3)]
        one, other = await stack.enter_async_context(peers(server, [e.url for e in engines]))
        tasks = []
        for n in range(15):
            for gateway in (one, other):
                tasks.append(asyncio.create_task(gateway.chat(content=f"{n}")))
                await asyncio.sleep(0.02)
        await until(lambda: held.waiting == 30)
        counts = [
            one.core.loads.get(Holder(InstanceId(name))).active_requests for name in ("a", "b", "c")
        ]
        assert max(counts) - min(counts) <= 1, counts
        held.may_answer.set()
        await asyncio.gather(*tasks)


SIXTH = {"name": "kv_cost", "options": {"active_request_ms": 10.0, "session_ms": 1.5}}
"""With a prompt of 16 K tokens as it is with one of 95 K by default."""


async def test_a_burst_of_one_cold_prompt_is_prefilled_on_two_instances_at_most(
    server: RedisProcess,
) -> None:
    settings: dict[str, Any] = {"policy": SIXTH, "health": {"interval_s": 0.2, "timeout_s": 10.0}}
    async with (
        sims(3) as engines,
        peers(server, [e.url for e in engines], **settings) as gateways,
    ):
        prompt = " ".join(f"word{n}" for n in range(3000))
        answers = await asyncio.gather(
            *(gateways[n % 2].chat(content=prompt, max_tokens=2) for n in range(200))
        )
        assert {answer.status_code for answer in answers} == {200}
        assert int(answers[0].headers["x-moongate-prompt-tokens"]) > 12_000
        where = Counter(answer.headers["x-moongate-instance"] for answer in answers)
        assert len(where) <= 2, where
        await until(lambda: all(elsewhere(gateway) == {} for gateway in gateways))
