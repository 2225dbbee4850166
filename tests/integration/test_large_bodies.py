"""C21: large bodies reach the engine as they are, cost little memory, and hold nobody up."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fake_engine import FakeEngine
from processes import Child, start_gateway

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

MIB = 1 << 20


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[FakeEngine, Child]]:
    """Run a gateway with its defaults in a process of its own, so that its memory can be told."""
    async with FakeEngine() as engine:
        settings = {"instances": [{"id": "a", "url": engine.url}]}
        gateway = await asyncio.to_thread(start_gateway, tmp_path, settings)
        try:
            yield engine, gateway
        finally:
            await asyncio.to_thread(gateway.kill)


def images(size: int) -> bytes:
    """Return a chat body with three images."""
    image = base64.b64encode(bytes(n % 256 for n in range(4096)) * (size // 3 // 5462)).decode()
    url = f"data:image/png;base64,{image}"
    content = [
        {"type": "text", "text": "compare"},
        *[{"type": "image_url", "image_url": {"url": url}}] * 3,
    ]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()


def codex(size: int) -> bytes:
    """Return a body as of an agent that sends its whole history as one."""
    items = [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "word " * 200}],
        }
        for _ in range(size // 1080)
    ]
    return json.dumps({"model": "m", "instructions": "be brief", "input": items}).encode()


def memory_bytes(gateway: Child, field: str) -> int:
    """Return a figure of /proc/<pid>/status: VmRSS, or VmHWM, which is its highest."""
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def forget_the_peak(gateway: Child) -> None:
    Path(f"/proc/{gateway.process.pid}/clear_refs").write_text("5")


@pytest.mark.parametrize(
    ("path", "body", "times"),
    [
        ("/v1/chat/completions", images(9 * MIB), 4),
        ("/v1/chat/completions", images(30 * MIB), 4),
        # Its prompt is read, and its input kept for the response that continues it.
        ("/v1/responses", codex(3 * MIB), 6),
    ],
    ids=["chat-9MiB", "chat-30MiB", "responses-3MiB"],
)
async def test_c21_a_large_body_reaches_the_engine_as_it_is(
    path: str, body: bytes, times: int, served: tuple[FakeEngine, Child]
) -> None:
    engine, gateway = served
    async with httpx.AsyncClient(base_url=gateway.url, timeout=10.0, trust_env=False) as client:
        small = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        assert (await client.post("/v1/chat/completions", json=small)).status_code == 200
        before = memory_bytes(gateway, "VmRSS")
        forget_the_peak(gateway)
        assert (await client.post(path, content=body)).status_code == 200
        growth = memory_bytes(gateway, "VmHWM") - before
    assert engine.received[-1].body == body
    assert growth < times * len(body), f"{growth / len(body):.1f} times the body"


PROBE = """
import http.client, sys, threading, time
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
connection = http.client.HTTPConnection(sys.argv[1])
while not ended.is_set():
    began = time.perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    print(time.perf_counter() - began)
    time.sleep(0.0005)
"""


async def test_c21_a_large_body_holds_nobody_up(served: tuple[FakeEngine, Child]) -> None:
    _, gateway = served
    # In a process of its own: what this one does with the body takes longer than the gateway does.
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROBE, gateway.url.removeprefix("http://"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with httpx.AsyncClient(base_url=gateway.url, timeout=10.0, trust_env=False) as client:
        for size in (9, 30, 9, 30):
            answer = await client.post("/v1/chat/completions", content=images(size * MIB))
            assert answer.status_code == 200
    printed, _ = await asyncio.wait_for(probe.communicate(b""), 10.0)
    delays = sorted(map(float, printed.split()))
    assert delays[len(delays) * 99 // 100] < 0.1


async def test_c21_a_body_of_nothing_but_lists_is_refused_before_they_are_made(
    served: tuple[FakeEngine, Child],
) -> None:
    """Read whole, each of these takes seconds and 25 times its size, after which it would be refused as well."""
    engine, gateway = served
    keys = (b'"messages"', b'"mess\\u0061ges"', b'"messages":[1],"messages"')
    async with httpx.AsyncClient(base_url=gateway.url, timeout=10.0, trust_env=False) as client:
        before = memory_bytes(gateway, "VmRSS")
        forget_the_peak(gateway)
        for key in keys:
            body = b'{"model":"m",' + key + b":[" + b"[]," * (14 * MIB // 3) + b"1]}"
            answer = await client.post("/v1/chat/completions", content=body)
            assert answer.status_code == 400
            assert "lists, objects, names and texts" in answer.json()["error"]["message"]
        growth = memory_bytes(gateway, "VmHWM") - before
    assert growth < 6 * len(body), f"{growth / len(body):.1f} times the body"
    assert engine.received == []
