"""What clients write steers neither the log nor where the gateway connects to."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from fake_engine import FakeEngine, Received
from live_gateway import live_gateway
from raw_client import CHAT, get, post, raw_client

from moongate.gateway.telemetry.logs import JsonFormatter, TextFormatter

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

NASTY = "x\x1b[31m\x07\x85\u00a0"
"""What a header or a path can hold: no line ends, but what steers a terminal."""

WORSE = "y\r\n2026-01-01 00:00:00,000 ERROR root: made up\x1b[2J\u2028\u202e" + "z" * 5000

HEADERS = (
    "authorization", "x-api-key", "x-request-id", "x-session-id", "x-moongate-session", "session-id",
    "x-moongate-priority", "x-moongate-policy", "x-moongate-session-end", "traceparent", "tracestate",
    "user-agent", "referer", "origin", "cookie", "x-forwarded-for", "content-type", "accept", "host",
    "expect", "x-made-up",
)  # fmt: skip


def checked(records: list[logging.LogRecord]) -> None:
    """Let each record be one line, of bounded length, without what steers a terminal, in either form."""
    for record in records:
        if record.name.startswith(("httpx", "httpcore", "asyncio")):
            continue  # this test's own client
        for line in (TextFormatter().format(record), JsonFormatter().format(record)):
            head, *traceback = line.split("\n")
            assert len(head) < 2000, head
            assert all(further.startswith("    ") for further in traceback)
            assert not set(line) & set("\r\x1b\x07\x85\u2028\u202e")
            assert "made up" not in line or "\\u000d" in line or "\\r" in line


async def test_no_client_can_write_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bodies: list[Any] = [
        {"model": WORSE, "messages": [{"role": "user", "content": "x"}]},
        {"model": "m", "messages": [{"role": WORSE, "content": WORSE}], "user": WORSE},
        {"model": "m", "messages": [], WORSE: 1},
        {"model": "m", "messages": [{}], "metadata": {"user_id": WORSE}, "prompt_cache_key": WORSE},
        {"model": "m", "messages": [{}], "stream": WORSE},
        {"model": "m", "input": WORSE, "previous_response_id": WORSE},
        {"model": "m", "input": "x", "previous_response_id": {WORSE: 1}, "background": True},
        WORSE,
    ]

    async def answer(request: Received) -> None:
        """Fail in the client's own words."""
        await request.answer(500, json.dumps({"error": {"message": WORSE}}).encode())

    async with FakeEngine(answer) as engine:
        settings: dict[str, Any] = {"policy": {"name": "kv_cost", "allow_override": True}}
        async with live_gateway([engine.url], **settings) as gateway:
            requests = [post(json.dumps(body).encode(), path=p) for body in bodies for p in PATHS]
            requests += [post(b"not JSON " + WORSE.encode("utf-8"))]
            requests += [get(f"/{NASTY}"), post(path=f"/v1/responses/{NASTY}/cancel")]
            requests += [get("/v1/responses/a%0d%0aERROR%20made%20up%1b[2J"), get("/ui/%0d%0a%1b")]
            requests += [post(b"{}", f"{name}: {NASTY}", path=p) for name in HEADERS for p in PATHS]
            requests += [get("/v1/models", f"{name}: {NASTY}") for name in HEADERS]
            requests += [
                f"{NASTY} / HTTP/1.1\r\n\r\n".encode("latin-1"),
                b"\x16\x03\x01\x1b[31m\r\n",
            ]
            for request in requests:
                async with raw_client(gateway.port) as client:
                    await client.send(request)
                    told = await client.answer()
                assert not set(str(told.headers)) & set("\x1b\x07")
            assert await gateway.metric("moongate_requests_total", code="500") < len(requests)
        checked(caplog.records)
    assert any("made up" not in record.getMessage() for record in caplog.records)


PATHS = (CHAT, "/v1/responses", "/v1/messages", "/v1/embeddings", "/nowhere")


# --- where it connects to -------------------------------------------------------------------------


def bodies_with(url: str) -> Mapping[str, list[dict[str, Any]]]:
    """Return bodies that name an address wherever a body can."""
    image = {"type": "image_url", "image_url": {"url": f"{url}/i.png"}}
    audio = {"type": "input_audio", "input_audio": {"url": url, "data": url, "format": "wav"}}
    video = {"type": "video_url", "video_url": {"url": url}}
    params = {
        "do_remote_prefill": True, "remote_bootstrap_addr": url, "remote_engine_id": "x",
        "remote_host": "127.0.0.1", "remote_port": int(url.rpartition(":")[2]), "transfer_id": "x",
    }  # fmt: skip
    mcp = {"type": "mcp", "server_label": "x", "server_url": url}
    return {
        CHAT: [
            {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "x"}]}]}
            for part in (image, audio, video)
        ]
        + [
            {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": params},
            {"messages": [{"role": "user", "content": "x"}], "tools": [mcp], "base_url": url},
        ],
        "/v1/completions": [{"prompt": url, "kv_transfer_params": params, "prompt_embeds": url}],
        "/v1/responses": [
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": url}]}]},
            {"input": "x", "tools": [mcp], "prompt": {"id": url}},
        ],
        "/v1/messages": [
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {"type": "url", "url": url}}],
                    }
                ],
                "max_tokens": 1,
                "mcp_servers": [{"type": "url", "url": url, "name": "x"}],
            }
        ],
        "/v1/embeddings": [{"input": url}],
    }


@pytest.mark.parametrize("has_messages", [True, False])
async def test_no_field_and_no_header_makes_the_gateway_connect_anywhere(
    has_messages: bool,
) -> None:
    """Images and their like are the engine's to fetch, or to refuse."""
    async with FakeEngine() as engine, FakeEngine() as elsewhere:
        engine.has_messages = has_messages
        async with live_gateway([engine.url]) as gateway:
            sent = 0
            host = f"127.0.0.1:{elsewhere.port}"
            headers = {
                "x-forwarded-host": host, "forwarded": f"host={host}", "x-original-url": elsewhere.url,
                "x-moongate-instance": elsewhere.url, "x-prefiller-host-port": host,
                "x-data-parallel-host-port": host, "destination": elsewhere.url, "referer": elsewhere.url,
            }  # fmt: skip
            for path, bodies in bodies_with(elsewhere.url).items():
                for body in bodies:
                    answer = await gateway.client.post(
                        path, json={"model": "m", **body}, headers=headers
                    )
                    assert answer.status_code in (200, 400), answer.text
                    sent += answer.status_code == 200
            assert len(engine.received) == sent >= 8
            assert not any("kv_transfer_params" in body for body in engine.bodies)
            for request in (
                f"GET {elsewhere.url}/v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n",
                f"GET http://user@{host}/ HTTP/1.1\r\nhost: {host}\r\n\r\n",
                f"CONNECT {host} HTTP/1.1\r\nhost: {host}\r\n\r\n",
                f"GET //{host}/v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n",
            ):
                async with raw_client(gateway.port) as client:
                    await client.send(request.encode())
                    assert (await client.answer()).status in (200, 400, 404, 405)
        assert elsewhere.connections == 0


async def test_an_engines_redirect_is_not_followed() -> None:
    async with FakeEngine() as engine, FakeEngine() as elsewhere:
        location = {"location": f"{elsewhere.url}/v1/chat/completions"}

        async def redirect(request: Received) -> None:
            await request.answer(307, b"{}", location)

        engine.handler = redirect
        async with live_gateway([engine.url]) as gateway:
            answer = await gateway.chat()
            assert (answer.status_code, answer.headers["location"]) == (307, location["location"])
        engine.side_calls["/health"] = redirect
        async with live_gateway([engine.url], wait_ready=False) as gateway:
            assert (await gateway.chat()).status_code == 503
        assert elsewhere.connections == 0


async def test_only_operators_say_which_engines_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GW_A", "gw-1")
    monkeypatch.setenv("ADMIN", "gw-admin")
    auth = {"keys": [{"key_env": "GW_A", "tenant": "a"}], "admin_key_env": "ADMIN"}
    async with FakeEngine() as engine, FakeEngine() as elsewhere:
        record = {"id": "evil", "url": elsewhere.url, "lease_s": 60}
        async with live_gateway([engine.url], auth=auth) as gateway:
            for headers in ({}, {"authorization": "Bearer gw-1"}, {"x-api-key": "gw-admin"}):
                for method, path in (
                    ("POST", "/admin/instances"), ("PUT", "/admin/instances/evil"),
                    ("DELETE", "/admin/instances/a"), ("POST", "/admin/instances/a/drain"),
                    ("POST", "/admin/explain"), ("GET", "/admin/decisions"),
                ):  # fmt: skip
                    answer = await gateway.client.request(
                        method, path, json=record, headers=headers
                    )
                    assert answer.status_code == 401, (method, path)
            assert elsewhere.connections == 0

            operator = {"authorization": "Bearer gw-admin"}
            for wrong, param in (
                ({"url": "file:///etc/passwd"}, "url"),
                ({"url": "http://user:pw@h"}, "url"),
                ({"url": f"{elsewhere.url}/path?x"}, "url"),
                ({"url": "gopher://h"}, "url"),
                ({"api_key_env": "ADMIN"}, "api_key_env"),
                ({"tls": {"ca": "/etc/passwd"}}, "tls"),
                ({"kv_events": "inproc://x"}, "kv_events"),
                ({"kv_events": "ipc:///tmp/x"}, "kv_events"),
                ({"kv_events": "tcp://h:1", "kv_replay": "ipc:///tmp/x"}, "kv_replay"),
                ({"bootstrap_url": "file:///x", "role": "prefill"}, "bootstrap_url"),
            ):
                answer = await gateway.client.post(
                    "/admin/instances", json={**record, **wrong}, headers=operator
                )
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
                assert "passwd" not in answer.text or param == "url"
            assert elsewhere.connections == 0
