"""A tenant's rates over several gateways: together they let through what one would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from live_gateway import LiveGateway, live_gateway, until
from redis_process import RedisProcess, needs_redis

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60), needs_redis]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path) as running:
        yield running


async def ask(gateway: LiveGateway) -> int:
    headers = {"authorization": "Bearer gw-1"}
    return (
        await gateway.client.post("/v1/chat/completions", json=CHAT, headers=headers)
    ).status_code


async def test_two_gateways_let_through_what_one_would(
    server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GW_A", "gw-1")
    settings: dict[str, Any] = {
        "state": {"kind": "redis", "url": server.url},
        "auth": {"keys": [{"key_env": "GW_A", "tenant": "a", "requests_per_minute": 5}]},
    }
    async with (
        FakeEngine() as engine,
        live_gateway([engine.url], **settings) as one,
        live_gateway([engine.url], **settings) as other,
    ):
        statuses = Counter([await ask(gateway) for _ in range(4) for gateway in (one, other)])
        assert statuses == {200: 5, 429: 3}
        refused = await one.client.post(
            "/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer gw-1"}
        )
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 12
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(engine.received) == 5


async def test_without_redis_each_counts_for_itself_and_nobody_is_refused_for_it(
    server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GW_A", "gw-1")
    keys = [{"key_env": "GW_A", "tenant": "a", "requests_per_minute": 3, "tokens_per_minute": 1000}]
    async with (
        FakeEngine() as engine,
        live_gateway(
            [engine.url], auth={"keys": keys}, state={"kind": "redis", "url": server.url}
        ) as gateway,
    ):
        assert await ask(gateway) == 200
        server.stop()
        await until(lambda: not gateway.server.gateway._state.is_up)  # type: ignore[union-attr]
        assert [await ask(gateway) for _ in range(4)] == [200, 200, 200, 429]
