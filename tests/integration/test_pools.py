"""Connections to instances: enough by default, bounded where the operator says so, never shared."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_engine import FakeEngine, Received, stream_event
from live_gateway import live_gateway, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(15)]


async def stream_until_left(request: Received) -> None:
    await request.start_stream()
    await request.send_chunk(stream_event("x"))
    await request.client_left.wait()


async def test_c107_many_streams_on_one_instance_do_not_hold_up_another() -> None:
    async with FakeEngine(stream_until_left, model="m1") as a, FakeEngine(model="m2") as b:
        async with live_gateway([a.url, b.url]) as gateway:
            streams = [
                asyncio.create_task(gateway.chat(model="m1", stream=True)) for _ in range(150)
            ]
            await until(lambda: len(a.received) == 150)
            began = time.monotonic()
            chats = await asyncio.gather(*(gateway.chat(model="m2") for _ in range(50)))
            assert time.monotonic() - began < 1.0
            assert {chat.status_code for chat in chats} == {200}
            assert (await gateway.client.get("/health")).status_code == 200
            assert await gateway.metric("moongate_inflight_requests", instance="a") == 150
            assert await gateway.metric("moongate_instance_up", instance="a") == 1
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await until(lambda: gateway.inflight() == 0)


async def test_c107_an_instances_full_pool_is_told_apart_from_its_failure() -> None:
    limits = {"connections_per_instance_max": 3}
    async with FakeEngine(stream_until_left, model="m1") as a, FakeEngine(model="m2") as b:
        async with live_gateway([a.url, b.url], limits=limits) as gateway:
            streams = [asyncio.create_task(gateway.chat(model="m1", stream=True)) for _ in range(3)]
            await until(lambda: len(a.received) == 3)
            refused = [await gateway.chat(model="m1") for _ in range(2)]
            for answer in refused:
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "gateway_pool"
                assert int(answer.headers["retry-after"]) >= 1
            assert await gateway.metric("moongate_rejected_total", reason="gateway_pool") == 2
            assert await gateway.metric("moongate_rejected_total") == 2
            assert await gateway.metric("moongate_retries_total") == 0
            assert await gateway.metric("moongate_instance_up", instance="a") == 1
            assert gateway.inflight() == 3
            assert (await gateway.chat(model="m2")).status_code == 200  # a pool of its own
            streams[0].cancel()
            await asyncio.gather(streams[0], return_exceptions=True)
            await until(lambda: gateway.inflight() == 2)
            another = asyncio.create_task(gateway.chat(model="m1", stream=True))
            await until(lambda: len(a.received) == 4)
            for stream in (*streams, another):
                stream.cancel()
            await asyncio.gather(*streams, another, return_exceptions=True)
            await until(lambda: gateway.inflight() == 0)


async def test_c108_a_connection_that_the_engine_closes_when_idle_costs_no_request() -> None:
    async def close_behind(request: Received) -> None:
        await request.answer(200, b"{}")
        await asyncio.sleep(0.01)
        request.writer.close()  # with no word of it in the answer

    async with FakeEngine(close_behind) as engine, live_gateway([engine.url]) as gateway:
        for n in range(60):
            assert (await gateway.chat()).status_code == 200
            await asyncio.sleep(0.009 + n % 5 * 0.0005)  # before, while and after it closes
        assert len(engine.received) == 60
        assert await gateway.metric("moongate_retries_total") == 0
        assert await gateway.metric("moongate_instance_up", instance="a") == 1


async def test_c107_what_does_not_fit_into_one_pool_goes_elsewhere() -> None:
    limits = {"connections_per_instance_max": 2}
    async with FakeEngine(stream_until_left) as a, FakeEngine(stream_until_left) as b:
        async with live_gateway(
            [a.url, b.url], limits=limits, policy={"name": "session_hash"}
        ) as gateway:
            key = {"x-session-id": "same"}
            streams = [
                asyncio.create_task(gateway.chat(stream=True, headers=key)) for _ in range(4)
            ]
            await until(lambda: len(a.received) + len(b.received) == 4)
            assert len(a.received) == len(b.received) == 2
            refused = await gateway.chat(headers=key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gateway_pool")
            assert await gateway.metric("moongate_retries_total", reason="full") == 4 - 1
            assert gateway.inflight() == 4
            for name in "ab":
                assert await gateway.metric("moongate_instance_up", instance=name) == 1
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await until(lambda: gateway.inflight() == 0)
            assert all(i.breaker.is_closed for i in gateway.core.fleet)
