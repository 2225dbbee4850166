"""The live stream and the dashboard's files over HTTP: what they say, and what they don't cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live_gateway import LiveGateway, live_gateway, until
from pd_fleet import pd_fleet
from redis_process import RedisProcess, needs_redis

from moongate.gateway.admin.live_view import DECISIONS_SHOWN_MAX, KEY_CHARS_MAX, SESSIONS_SHOWN_MAX
from moongate.simulator.server import SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

SYSTEM = {"role": "system", "content": "You are an agent that writes def and class. " * 30}
USER = {"role": "user", "content": "return the import of a lambda " * 30}


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[SimEngine]:
    engine = SimEngine(SimEngineConfig(kv_events_port=0, kv_replay_port=0))
    await engine.start()
    yield engine
    await engine.stop()


@contextlib.asynccontextmanager
async def watching(
    gateway: LiveGateway, headers: Any = None
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Watch a gateway. Yields an iterator of what the page would know after each frame."""
    async with gateway.client.stream("GET", "/admin/live", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")

        async def states() -> AsyncIterator[dict[str, Any]]:
            parts: dict[str, Any] = {}
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    frame = json.loads(line[6:])
                    assert frame["is_whole"] == (not parts)
                    parts |= frame["parts"]
                    yield parts

        yield states()


async def first_state(gateway: LiveGateway) -> dict[str, Any]:
    async with watching(gateway) as states:
        return await anext(states)


def asking(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "content": text, "max_tokens": 3, **more}


async def test_what_it_shows_is_what_the_metrics_say(engine: SimEngine) -> None:
    async with live_gateway([engine.url]) as gateway:
        for text in ("hello " * 200, "hello " * 200, "other " * 100):
            assert (await gateway.chat(**asking(text))).status_code == 200
        totals = (await first_state(gateway))["totals"]
        assert totals["requests"] == await gateway.metric("moongate_requests_total") == 3
        for source in ("device", "pool", "recompute"):
            counted = await gateway.metric("moongate_prompt_tokens_total", source=source)
            assert totals[f"{source}_tokens"] == counted
        delivered = await gateway.metric("moongate_delivered_cached_tokens_total")
        assert totals["delivered_cached_tokens"] == delivered > 0
        assert totals["turns_seen"] == await gateway.metric("moongate_ttft_seconds_count")


@needs_redis
async def test_one_of_several_gateways_says_so(engine: SimEngine, tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as server:
        state = {"kind": "redis", "url": server.url}
        async with live_gateway([engine.url], state=state) as one:
            assert (await first_state(one))["gateway"]["others"] == 0
            async with live_gateway([engine.url], state=state) as other:
                for gateway in (one, other):
                    async with watching(gateway) as states, asyncio.timeout(5.0):
                        while (await anext(states))["gateway"]["others"] != 1:
                            pass


async def test_a_session_shows_who_holds_it_and_its_turn_what_became_of_it(
    engine: SimEngine,
) -> None:
    async with live_gateway([engine.url]) as gateway:
        headers = {"x-session-id": "one"}
        for _ in range(2):
            await gateway.chat(headers=headers, **asking("hello " * 200))
        await until(lambda: _holds(gateway, 192))
        state = await first_state(gateway)
    (session,) = state["sessions"]["shown"]
    assert (session["key"], session["turns"], session["instance"]) == ("one", 2, "a")
    (held,) = session["held"]
    size = state["instances"]["shown"][0]["block_size_tokens"]
    blocks = session["prompt_tokens"] // size
    assert held == {
        "instance": "a", "rank": None, "tokens": blocks * size, "expected_tokens": blocks * size,
    }  # fmt: skip
    latest, first = state["decisions"]["shown"]
    assert first["reason"] == latest["reason"] == "only_choice"
    assert latest["delivered_tokens"] == latest["device_tokens"] > 0
    assert first["delivered_tokens"] == 0
    assert latest["status"] == 200
    assert latest["ttft_ms"] > 0
    slowest = state["slowest"][0]
    assert slowest["candidates"][0]["instance"] == "a"
    assert "prefill" in slowest["candidates"][0]["cost_terms_ms"]
    assert sum(sum(tokens) for _, *tokens in state["reuse"]) == 2 * session["prompt_tokens"]


def _holds(gateway: LiveGateway, tokens: int) -> bool:
    return gateway.core.index.total * 16 >= tokens


async def test_a_drained_instance_shows_in_the_next_frames(engine: SimEngine) -> None:
    async with live_gateway([engine.url]) as gateway, watching(gateway) as states:
        assert (await anext(states))["instances"]["shown"][0]["state"] == "up"
        began = time.monotonic()
        await gateway.client.post("/admin/instances/a/drain")
        async for state in states:
            if state["instances"]["shown"][0]["state"] == "draining":
                break
        assert time.monotonic() - began < 2.0


async def test_a_divergence_is_shown_without_a_word_of_the_prompt() -> None:
    headers, changed = (
        {"x-session-id": "one"},
        {**SYSTEM, "content": "At 10:31. " + SYSTEM["content"]},
    )
    options: Any = {"observability": {"keep_text": True}}
    async with pd_fleet(prefill=0, decode=0, both=1, **options) as fleet:
        for system in (SYSTEM, changed):
            body: Any = {"messages": [system, USER], "max_tokens": 2}
            assert (await fleet.gateway.chat(headers=headers, **body)).status_code == 200
        state = await first_state(fleet.gateway)
    (report,) = state["divergences"]
    (session,) = state["sessions"]["shown"]
    assert (report["cause"], report["session"]) == ("system", session["hash"])
    assert report["lost_tokens"] > 256
    for word in ("agent", "10:31", "lambda"):
        assert word not in json.dumps(state)


async def test_a_frame_is_bounded_whatever_clients_send(engine: SimEngine) -> None:
    async with live_gateway([engine.url]) as gateway:
        keys = [f"{number}-" + "<k>" * 400 for number in range(300)]
        for key in keys:
            # No prompt to read, so that it is quick.
            body = {"model": "sim", "input": "x"}
            await gateway.client.post("/v1/embeddings", json=body, headers={"x-session-id": key})
        state = await first_state(gateway)
    assert len(state["sessions"]["shown"]) == SESSIONS_SHOWN_MAX
    assert len(state["decisions"]["shown"]) == DECISIONS_SHOWN_MAX
    assert max(len(s["key"]) for s in state["sessions"]["shown"]) <= KEY_CHARS_MAX
    assert len(json.dumps(state)) < 64_000


async def test_a_viewer_that_leaves_is_forgotten_and_a_stop_ends_the_others(
    engine: SimEngine,
) -> None:
    async with live_gateway([engine.url], drain={"limit_s": 30.0}) as gateway:
        async with watching(gateway) as states:
            await anext(states)
        assert not await _makes_frames(gateway)
        async with watching(gateway) as states:
            await anext(states)
            began = time.monotonic()
            gateway.server.request_stop()
            rest = [state["gateway"]["is_draining"] async for state in states]
        assert rest[-1] is True
        assert time.monotonic() - began < 3.0, "a stream would keep the server for drain.limit_s"


async def _makes_frames(gateway: LiveGateway) -> bool:
    """Tell whether some task still makes frames."""
    await asyncio.sleep(0.2)
    return any("_keep_making" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_with_a_key_the_stream_asks_for_it_and_the_page_does_not(
    engine: SimEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADMIN_X", "s3cret")
    async with live_gateway([engine.url], auth={"admin_key_env": "ADMIN_X"}) as gateway:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = await gateway.client.get("/admin/live", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
        async with watching(gateway, {"authorization": "Bearer s3cret"}) as states:
            assert (await anext(states))["instances"]["count"] == 1
        assert (await gateway.client.get("/ui")).status_code == 200


async def test_without_a_key_the_gateways_own_page_may_drain_from_this_machine_only(
    engine: SimEngine,
) -> None:
    async with live_gateway([engine.url]) as gateway:
        port = gateway.port
        for host, origin, status in (
            (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", 200),
            (f"localhost:{port}", f"http://localhost:{port}", 200),
            (f"[::1]:{port}", f"http://[::1]:{port}", 200),
            (f"127.0.0.1:{port}", "http://127.0.0.1:3000", 403),  # another program's page
            (f"127.0.0.1:{port}", "null", 403),
            (f"evil.example:{port}", f"http://evil.example:{port}", 403),  # a name that points here
            (f"192.0.2.7:{port}", f"http://192.0.2.7:{port}", 403),
            (f"127.0.0.1:{port}", f"https://127.0.0.1:{port}", 403),
        ):
            answer = await gateway.client.post(
                "/admin/instances/a/undrain", headers={"host": host, "origin": origin}
            )
            assert answer.status_code == status, (host, origin)
        both = {"origin": gateway.url, "x-forwarded-for": "192.0.2.1"}
        proxied = await gateway.client.post("/admin/instances/a/drain", headers=both)
        assert proxied.status_code == 403


async def test_the_page_is_whole_strict_and_asked_for_once(engine: SimEngine) -> None:
    async with live_gateway([engine.url]) as gateway:
        page = await gateway.client.get("/ui")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        names = set(re.findall(r'(?:src|href)="([^"#]+)"', page.text))
        while names:
            name = names.pop()
            assert re.fullmatch(r"ui/[a-z]+\.(js|css|svg)", name), "an asset from elsewhere"
            file = await gateway.client.get(f"/{name}")
            assert file.status_code == 200, name
            assert file.headers["content-security-policy"] == policy
            again = {"if-none-match": file.headers["etag"]}
            assert (await gateway.client.get(f"/{name}", headers=again)).status_code == 304
            if name.endswith(".js"):
                assert file.headers["content-type"].startswith("text/javascript")
                assert "innerHTML" not in file.text
                imports = re.findall(r'from "\./([^"]+)"', file.text)
                names |= {f"ui/{imported}" for imported in imports} - {name}
                if "main.js" not in name:
                    names -= {f"ui/{n}" for n in ("dom.js", "format.js")}
        missing = await gateway.client.get("/ui/../app.py")
        assert missing.status_code == 404
        assert (await gateway.client.get("/ui/nothing.js")).json()["error"]["code"] == "not_found"


async def test_the_page_is_not_counted_as_a_request_of_a_client(engine: SimEngine) -> None:
    async with live_gateway([engine.url]) as gateway:
        await gateway.client.get("/ui")
        await first_state(gateway)
        assert await gateway.metric("moongate_requests_total") == 0
