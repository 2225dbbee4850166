"""Two gateways and Redis, for long: Redis frozen for 20 s under load. The short forms are in
`tests/integration/test_shared_loads.py`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml
from fake_engine import FakeEngine, Received, chat_answer
from live_gateway import until
from processes import MOONGATE, Child, free_port
from redis_process import RedisProcess, needs_redis

pytestmark = [pytest.mark.soak, pytest.mark.asyncio, pytest.mark.timeout(300), needs_redis]

REQUESTS_PER_S = 40
FROZEN_S = 20.0
CLEAN_S = 20.0


async def _answer(request: Received) -> None:
    await asyncio.sleep(0.02)
    await request.answer(200, chat_answer("m"))


@contextlib.asynccontextmanager
async def gateways(
    directory: Path, server: RedisProcess, urls: list[str], count: int
) -> AsyncIterator[list[Child]]:
    """Run gateways as processes of their own."""
    settings = {
        "state": {"kind": "redis", "url": server.url},
        "instances": [{"id": "abc"[n], "url": url} for n, url in enumerate(urls)],
    }
    config = directory / "gateway.yaml"
    config.write_text(yaml.safe_dump(settings))
    children = []
    try:
        for n in range(count):
            port = free_port()
            argv = [*MOONGATE, "serve", "-c", str(config), "--port", str(port)]
            log = directory / f"gateway-{n}.log"
            children.append(Child.start(argv, f"http://127.0.0.1:{port}", log))
        for child in children:
            await asyncio.to_thread(child.wait_until, "/ready", 40.0)
        yield children
    finally:
        for child in children:
            await asyncio.to_thread(child.stop)


async def load(clients: list[httpx.AsyncClient], seconds: float) -> list[float]:
    """Send chats at a steady rate to all in turn; return how long each took, in s. None may fail."""
    chance = random.Random(1)
    took: list[float] = []

    async def chat(number: int) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": f"{chance.random()}"}]}
        began = time.monotonic()
        answer = await clients[number % len(clients)].post("/v1/chat/completions", json=body)
        took.append(time.monotonic() - began)
        assert answer.status_code == 200, answer.text

    began, tasks = time.monotonic(), []
    for number in range(int(seconds * REQUESTS_PER_S)):
        await asyncio.sleep(max(0.0, began + number / REQUESTS_PER_S - time.monotonic()))
        tasks.append(asyncio.create_task(chat(number)))
    await asyncio.gather(*tasks)
    return sorted(took)


async def _redis_up(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith("moongate_redis_up ")).split()[1])


async def test_c82_redis_frozen_for_20_s_under_load(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(RedisProcess(tmp_path))
        engines = [await stack.enter_async_context(FakeEngine(_answer)) for _ in range(3)]
        urls = [engine.url for engine in engines]
        children = await stack.enter_async_context(gateways(tmp_path, server, urls, 2))
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=child.url, trust_env=False, timeout=30)
            )
            for child in children
        ]
        await load(clients, 5.0)  # connections, caches of code
        clean = await load(clients, CLEAN_S)
        server.freeze()
        frozen = await load(clients, FROZEN_S)
        assert [await _redis_up(client) for client in clients] == [0.0, 0.0]
        server.thaw()
        thawed_at = time.monotonic()

        async def are_up() -> bool:
            return [await _redis_up(client) for client in clients] == [1.0, 1.0]

        await until(are_up, 10.0)
        back_s = time.monotonic() - thawed_at
        p99 = [took[int(len(took) * 0.99)] for took in (clean, frozen)]
        print(
            f"p99 clean {p99[0] * 1000:.1f} ms, frozen {p99[1] * 1000:.1f} ms; back {back_s:.1f} s"
        )
        assert p99[1] - p99[0] <= 0.06
        for child in children:
            lines = [line for line in child.log.read_text().splitlines() if "does not" in line]
            assert len(lines) == 1, lines
