"""The metrics: those that people rely on are there, and clients can't make more of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from pathlib import Path

import aiohttp
import pytest
from all_metrics import scrape_everything
from fake_engine import FakeEngine, Received, chat_answer
from live_gateway import live_gateway
from redis_process import needs_redis
from scrape import CONTRACT, scrape

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

HISTOGRAM_LABELS = {"le"}


@needs_redis
async def test_every_metric_of_the_contract_is_there_with_its_labels(tmp_path: Path) -> None:
    shown = await scrape_everything(tmp_path)
    missing = set()
    for name, labels in CONTRACT.items():
        sample = f"{name}_bucket" if f"{name}_bucket" in shown.series else name
        if sample not in shown.series:
            missing.add(name)
            continue
        assert shown.series[sample], f"{name} has no series"
        assert shown.labels(sample) - HISTOGRAM_LABELS == labels, name
    assert missing == set()


async def test_every_metric_has_a_help_text_and_a_documented_name() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        text = (await gateway.client.get("/metrics")).text
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert names == helped
    assert all(name.startswith("moongate_") for name in names)


# --- what was expected, and what was delivered ----------------------------------------------------


@pytest.mark.parametrize(
    ("delivered", "direction", "error_tokens"),
    [(64, "exact", 0), (16, "less", 48), (160, "more", 96), (None, None, 0)],
)
async def test_the_error_of_a_prediction_is_counted_by_its_direction(
    delivered: int | None, direction: str | None, error_tokens: int
) -> None:
    answers = iter([None, delivered])

    async def act(request: Received) -> None:
        await request.answer(200, chat_answer(cached_tokens=next(answers)))

    async with FakeEngine(act) as engine:
        instances = [{"id": "a", "url": engine.url, "block_size": 16}]
        async with live_gateway([], instances=instances) as gateway:
            for _ in range(2):
                answer = await gateway.client.post(
                    "/v1/completions", json={"model": "m", "prompt": list(range(1, 75))}
                )
            assert answer.headers["x-moongate-device-tokens"] == "64"
            name = "moongate_reuse_error_tokens"
            assert await gateway.metric(f"{name}_sum") == error_tokens
            if direction is not None:
                assert await gateway.metric(f"{name}_count", direction=direction) == 1
            assert await gateway.metric(f"{name}_count") == (direction is not None)


# --- C102, C103: what clients choose makes no series ----------------------------------------------


async def test_c102_models_that_nobody_serves_share_one_series() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        await gateway.chat()
        before = (await scrape(gateway.client)).count
        for n in range(1000):
            assert (await gateway.chat(model=f"made-up-{n}")).status_code == 404
        after = await scrape(gateway.client)
        assert after.count - before <= 10
        assert not any(name.startswith("made-up") for name in after.values("model"))
        count = await gateway.metric("moongate_requests_total", model="unknown", code="404")
        assert count == 1000
        assert await gateway.metric("moongate_requests_total", code="200") == 1
        assert await gateway.metric("moongate_requests_total") == 1001


async def test_c103_paths_are_counted_by_their_templates() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        before = (await scrape(gateway.client)).count
        for n in range(500):
            assert (await gateway.client.get(f"/scan/{n}/x.php")).status_code == 404
            assert (await gateway.client.get(f"/v1/scan{n}")).status_code == 404
            assert (await gateway.client.get(f"/v1/responses/resp_{n}")).status_code == 404
        for method in ("PATCH", "OPTIONS", "BREW"):
            for path in ("/v1/models", "/v1/chat/completions", "/nowhere"):
                answer = await gateway.client.request(method, path)
                assert answer.status_code in (400, 404, 405), (method, path)
        after = await scrape(gateway.client)
        assert after.count - before <= 20
        assert {"unmatched", "/v1/responses/{response_id}"} <= after.values("route")
        by_route = {
            route: await gateway.metric("moongate_requests_total", route=route, code="404")
            for route in ("unmatched", "/v1/responses/{response_id}")
        }
        assert by_route == {"unmatched": 1002.0, "/v1/responses/{response_id}": 500.0}


async def test_what_ten_thousand_clients_send_makes_no_series() -> None:
    """Distinct models, users, sessions, ids, policies and headers; as a property of the whole page."""
    async with FakeEngine() as a, FakeEngine() as b:
        async with (
            live_gateway([a.url, b.url], policy={"allow_override": True}) as gateway,
            aiohttp.ClientSession(gateway.url) as clients,
        ):
            await _send_odd_requests(clients, range(100))
            before = await scrape(gateway.client)
            await _send_odd_requests(clients, range(100, 10_000))
            after = await scrape(gateway.client)
            assert after.count - before.count <= 10
            names = ("model", "route", "reason", "policy", "code", "instance")
            shown = {value for name in names for value in after.values(name)}
            assert not any("odd" in value for value in shown)
            assert await gateway.metric("moongate_requests_total") == 10_000
            assert len(a.received) + len(b.received) > 2000
            shown_last = (await gateway.client.get("/admin/decisions?limit=1000")).json()
            assert len(shown_last["decisions"]) == 1000


async def _send_odd_requests(clients: aiohttp.ClientSession, numbers: Iterable[int]) -> None:
    waiting = iter(numbers)

    async def send() -> None:
        for n in waiting:
            body, headers = _odd_request(n)
            async with clients.post("/v1/chat/completions", data=body, headers=headers) as answer:
                assert answer.status in (200, 400, 404)
                await answer.read()

    await asyncio.gather(*(send() for _ in range(16)))


def _odd_request(n: int) -> tuple[bytes, dict[str, str]]:
    """Return a request that differs from all others wherever a client can differ."""
    chance = random.Random(n)
    headers = {
        "x-request-id": f"odd-{n}",
        "x-session-id": f"odd-session-{n}",
        "x-moongate-policy": chance.choice(["kv_cost", "round_robin", "least_loaded", f"odd-{n}"]),
        "traceparent": f"00-{n:032x}-{n + 1:016x}-01",
        f"x-odd-{n}": "x",
    }
    fields = {
        "model": "m" if n % 3 == 0 else f"odd-{n}",
        "messages": [{"role": "user", "content": f"odd {n}"}],
        "user": f"odd-{n}",
        "prompt_cache_key": f"odd-{n}",
        f"odd_{n}": n,
    }
    return json.dumps(fields).encode(), headers
