"""Instances that are announced, added, drained or removed at one gateway are so at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fake_engine import FakeEngine, Received, chat_answer
from live_gateway import LiveGateway, live_gateway, until
from redis_process import RedisProcess, needs_redis

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60), needs_redis]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path) as running:
        yield running


@contextlib.asynccontextmanager
async def together(
    server: RedisProcess, urls: list[str] | None = None
) -> AsyncIterator[tuple[LiveGateway, LiveGateway]]:
    settings: dict[str, Any] = {
        "state": {"kind": "redis", "url": server.url},
        "discovery": {"kind": "redis"},
    }
    async with live_gateway(urls or [], **settings) as one:
        async with live_gateway(urls or [], **settings) as other:
            yield one, other


async def answer(request: Received) -> None:
    await request.answer(200, chat_answer("m"))


async def states(gateway: LiveGateway) -> dict[str, str]:
    listed = (await gateway.client.get("/admin/instances")).json()["instances"]
    return {instance["id"]: instance["state"] for instance in listed}


async def announce(
    gateway: LiveGateway, engine: FakeEngine, name: str = "e", lease_s: float = 60.0
) -> httpx.Response:
    return await gateway.client.put(
        f"/admin/instances/{name}", json={"url": engine.url, "lease_s": lease_s}
    )


def are(gateway: LiveGateway, **wanted: str) -> Any:
    async def check() -> bool:
        return await states(gateway) == wanted

    return check


async def test_an_engine_that_announces_itself_to_one_is_known_to_all(
    server: RedisProcess,
) -> None:
    async with FakeEngine(answer) as engine, together(server) as (one, other):
        assert (await announce(one, engine)).status_code == 201
        await until(are(other, e="up"))
        assert (await other.chat()).status_code == 200
        assert (await announce(other, engine)).json() == {"change": "renewed"}
        assert (await other.client.delete("/admin/instances/e?withdrawn=true")).status_code == 202
        await until(are(one))
        await until(are(other))
        assert (await announce(other, engine)).status_code == 201
        await until(are(one, e="up"))


async def test_a_gateway_that_starts_finds_what_is_there(server: RedisProcess) -> None:
    settings: dict[str, Any] = {
        "state": {"kind": "redis", "url": server.url},
        "discovery": {"kind": "redis"},
    }
    async with FakeEngine(answer) as engine, live_gateway([], **settings) as one:
        assert (await announce(one, engine)).status_code == 201
        await until(lambda: server.client().hlen("moongate:instances") == 1)
        async with live_gateway([], **settings) as other:
            await until(are(other, e="up"))
        assert 86_000 < server.client().ttl("moongate:instances") <= 86_400


async def test_what_is_drained_at_one_is_drained_at_all_and_its_renewals_don_t_change_that(
    server: RedisProcess,
) -> None:
    async with (
        FakeEngine(answer) as a,
        FakeEngine(answer) as engine,
        together(server, [a.url]) as (one, other),
    ):
        await announce(one, engine)
        await until(are(other, a="up", e="up"))
        for name in ("a", "e"):  # of the file, and announced
            assert (await other.client.post(f"/admin/instances/{name}/drain")).status_code == 200
        await until(are(one, a="draining", e="draining"))
        await announce(one, engine)
        await announce(other, engine)
        assert await states(one) == await states(other) == {"a": "draining", "e": "draining"}
        for name in ("a", "e"):
            assert (await one.client.post(f"/admin/instances/{name}/undrain")).status_code == 200
        await until(are(other, a="up", e="up"))


async def test_what_an_operator_removed_at_one_is_kept_out_by_all(server: RedisProcess) -> None:
    async with FakeEngine(answer) as engine, together(server) as (one, other):
        await announce(one, engine)
        await until(are(other, e="up"))
        assert (await one.client.delete("/admin/instances/e")).status_code == 202
        await until(are(other))
        assert (await announce(other, engine)).status_code == 409
        assert (await other.client.post("/admin/instances/e/undrain")).status_code == 200

        async def is_let_in() -> bool:
            return (await announce(one, engine)).status_code in (200, 201)

        await until(is_let_in)


async def test_a_lease_that_is_renewed_anywhere_holds_everywhere_and_ends_everywhere(
    server: RedisProcess,
) -> None:
    async with FakeEngine(answer) as engine, together(server) as (one, other):
        await announce(one, engine, lease_s=5.0)
        await until(are(other, e="up"))
        for number in range(12):
            await announce((one, other)[number % 2], engine, lease_s=5.0)
            await until(are(other, e="up"))
            await asyncio.sleep(0.5)
        assert await states(one) == {"e": "up"}
        await until(are(one), 8.0)
        await until(are(other), 3.0)


async def test_while_redis_is_away_no_lease_ends_and_what_changed_is_told_later(
    server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "moongate")
    async with FakeEngine(answer) as engine, together(server) as (one, other):
        await announce(one, engine, lease_s=2.0)
        await until(are(other, e="up"))
        server.stop()
        for _ in range(8):
            await announce(one, engine, lease_s=2.0)  # only one of them hears it
            await asyncio.sleep(0.5)
        assert await states(other) == {"e": "up"}
        assert (await other.chat()).status_code == 200
        await one.client.post("/admin/instances/e/drain")
        server.start()
        for _ in range(20):
            await announce(one, engine, lease_s=2.0)
            if (await states(other)) == {"e": "draining"}:
                break
            await asyncio.sleep(0.5)
        assert await states(other) == {"e": "draining"}


async def test_what_is_flushed_is_written_again(server: RedisProcess) -> None:
    async with FakeEngine(answer) as engine, together(server) as (one, other):
        await announce(one, engine)
        await until(are(other, e="up"))
        server.client().flushall()
        await until(lambda: server.client().hlen("moongate:instances") == 1)
        assert await states(one) == await states(other) == {"e": "up"}


async def test_the_latest_change_holds_whoever_made_it_and_what_is_not_ours_is_passed_over(
    server: RedisProcess,
) -> None:
    async with FakeEngine(answer) as engine, together(server) as (one, other):
        await announce(one, engine)
        await until(are(other, e="up"))
        server.client().hset("moongate:instances", "x", b"\x00rubbish")
        for value in (b"\xff", b"\x98\x01"):
            server.client().publish("moongate:0:instances", value)
        for gateway in (one, other) * 3:
            await gateway.client.post("/admin/instances/e/drain")
        await one.client.post("/admin/instances/e/undrain")
        await until(are(other, e="up"))
        await asyncio.sleep(2.5)  # past a refresh
        assert await states(one) == await states(other) == {"e": "up"}


async def test_what_the_file_names_anew_is_there_for_who_starts_later(
    server: RedisProcess, tmp_path: Path
) -> None:
    """It was removed by an operator; the file that names it again says something newer."""
    settings: dict[str, Any] = {
        "state": {"kind": "redis", "url": server.url},
        "discovery": {"kind": "redis"},
    }
    file = tmp_path / "gateway.yaml"
    async with FakeEngine(answer) as a, FakeEngine(answer) as b:
        async with live_gateway([a.url, b.url], file=file, **settings) as one:
            assert (await one.client.delete("/admin/instances/b")).status_code == 202
            await until(are(one, a="up"))
            content = yaml.safe_load(file.read_text())
            content["instances"][1]["weight"] = 2.0
            file.write_text(yaml.safe_dump(content))
            assert (await one.client.post("/admin/reload")).status_code == 200
            await until(are(one, a="up", b="up"))
            await asyncio.sleep(0.3)  # what one says is written
            instances = content["instances"]
            async with live_gateway([], instances=instances, **settings) as other:
                await until(lambda: len(other.core.peers) == 1)
                await asyncio.sleep(1.0)
                assert await states(other) == {"a": "up", "b": "up"}
