"""Instances that die, come back, or were never there, and requests that are at fault themselves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter

import pytest
from fake_engine import FakeEngine, Received, chat_answer
from live_gateway import LiveGateway, live_gateway, until

from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

INTERVAL_S = 0.2
FAST = EngineProfile(prefill_tokens_per_s=200_000.0, decode_tokens_per_s=2_000.0)


def prompt(seed: int, words: int = 200) -> str:
    return " ".join(f"word{seed}x{n}" for n in range(words))


# --- C87: a node dies under traffic, and comes back -----------------------------------------------


async def test_c87_a_dead_instance_gets_nothing_and_its_share_again_when_it_is_back() -> None:
    """30 requests a second, as in the case; times are scaled by the interval of the checks."""
    config = SimEngineConfig(profile=FAST, model="m", kv_events_port=0, kv_replay_port=0)
    engines = [SimEngine(config) for _ in range(3)]
    for engine in engines:
        await engine.start()
    statuses: Counter[int] = Counter()
    homes: dict[int, str] = {}
    health = {"interval_s": INTERVAL_S, "timeout_s": 1.0}
    async with live_gateway([e.url for e in engines], health=health) as gateway:

        async def send(n: int) -> None:
            answer = await gateway.chat(content=prompt(n), max_tokens=2)
            statuses[answer.status_code] += 1
            homes[n] = answer.headers.get("x-moongate-instance", "")

        async def traffic(start: int, count: int) -> list[str]:
            """Send at a steady rate and return where the requests went."""
            homes.clear()
            sending = []
            for n in range(start, start + count):
                sending.append(asyncio.create_task(send(n)))
                await asyncio.sleep(1 / 30)
            await asyncio.gather(*sending)
            return list(homes.values())

        assert Counter(await traffic(0, 30)).keys() == {"a", "b", "c"}
        port = engines[0].port
        killing = asyncio.create_task(engines[0].stop())
        await traffic(100, int(2 * INTERVAL_S * 30) + 1)  # until it has failed two checks
        await killing
        assert "a" not in await traffic(200, 60)
        assert statuses == {200: statuses.total()}  # what was in flight was sent again

        engines[0] = SimEngine(dataclasses.replace(config, port=port or 0))
        await engines[0].start()
        await asyncio.sleep(2 * INTERVAL_S)
        back = Counter(await traffic(300, 60))
        assert 10 <= back["a"] <= 30, back  # a fair share is 20
        # What it computed since is known, and only that.
        seen = next(n for n, home in homes.items() if home == "a")
        again = await gateway.chat(content=prompt(seen), max_tokens=2)
        assert again.headers["x-moongate-instance"] == "a"
        assert again.headers["x-moongate-reason"] == "device_prefix"
        assert statuses == {200: statuses.total()}
    for engine in engines:
        await engine.stop()


# --- C89: requests that are at fault themselves ---------------------------------------------------


@pytest.mark.parametrize("fault", ["400", "404", "422", "429", "left"])
async def test_c89_a_requests_own_fault_is_not_held_against_its_instance(fault: str) -> None:
    async def act(request: Received) -> None:
        match request.json().get("x_fault"):
            case None:
                await request.answer(200, chat_answer())
            case "left":
                await request.client_left.wait()
            case status:
                await request.answer(int(status), b'{"error":{"message":"no"}}')

    async with FakeEngine(act) as a, FakeEngine(act) as b:
        async with live_gateway([a.url, b.url]) as gateway:
            for n in range(20):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05 if fault == "left" else 5):
                        answer = await gateway.chat(content=f"x{n}", x_fault=fault)
                        assert answer.status_code == int(fault)
            assert await states(gateway) == {"a": "up", "b": "up"}
            answers = [await gateway.chat(content=f"y{n}") for n in range(10)]
            assert [answer.status_code for answer in answers] == [200] * 10
            assert {answer.headers["x-moongate-instance"] for answer in answers} == {"a", "b"}
            # One that has no room is no fault: another is asked, and nobody is charged.
            repeated = await gateway.metric("moongate_retries_total", reason="rate_limited")
            assert (repeated > 0) == (fault == "429")
            assert await gateway.metric("moongate_retries_total") == repeated
            assert await gateway.metric("moongate_breaker_openings_total") == 0
            assert await gateway.metric("moongate_breaker_state") == 0


async def states(gateway: LiveGateway) -> dict[str, str]:
    listed = (await gateway.client.get("/admin/instances")).json()["instances"]
    return {instance["id"]: instance["state"] for instance in listed}


# --- C91: instances that are not there at the start -----------------------------------------------


async def test_c91_one_that_is_down_holds_nobody_up() -> None:
    async with FakeEngine() as a, FakeEngine() as b:
        urls = [a.url, "http://127.0.0.1:9", b.url]
        async with live_gateway(urls, wait_ready=False) as gateway:
            await until(lambda: _is_ready(gateway), 5.0)
            assert (await gateway.chat()).status_code == 200


async def test_c91_when_all_are_down_the_first_that_comes_is_enough() -> None:
    engines = [FakeEngine() for _ in range(3)]
    for engine in engines:
        await engine.start()  # for a port
        await engine.stop()
    health = {"interval_s": INTERVAL_S, "timeout_s": 1.0}
    async with live_gateway([e.url for e in engines], wait_ready=False, health=health) as gateway:
        await until(lambda: _knows_all(gateway))
        assert (await gateway.client.get("/health")).status_code == 200
        ready = await gateway.client.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["reasons"] == ["no instance is up (a, b, c)"]
        refused = await gateway.chat()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        await engines[1].start()
        await until(lambda: _is_ready(gateway), 2 * INTERVAL_S + 0.3)
        assert (await gateway.chat()).headers["x-moongate-instance"] == "b"
        await engines[1].stop()


async def _is_ready(gateway: LiveGateway) -> bool:
    return (await gateway.client.get("/ready")).status_code == 200


async def _knows_all(gateway: LiveGateway) -> bool:
    return set((await states(gateway)).values()) == {"down"}
