"""C105: while long prompts are tokenised, everything else goes on."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Received, chat_answer, stream_event
from processes import Child, start_gateway

import moongate.simulator

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

MODEL_PATH = Path(moongate.simulator.__file__).parent / "model"
LONG_CHARS = 500_000
LONG_PROMPTS = 8
ROUNDS = 2
CHUNK_S = 1 / 30

PROBE = """
import http.client, json, sys, threading, time
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
health, chat = (http.client.HTTPConnection(sys.argv[1]) for _ in range(2))
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
delays = {"health": [], "small": []}
while not ended.is_set():
    for name, connection, request in (
        ("health", health, ("GET", "/health")),
        ("small", chat, ("POST", "/v1/chat/completions", body)),
    ):
        began = time.perf_counter()
        connection.request(*request)
        assert connection.getresponse().read()
        delays[name].append(time.perf_counter() - began)
    time.sleep(0.02)
print(json.dumps(delays))
"""


async def answers(request: Received) -> None:
    if not request.json().get("stream"):
        await request.answer(200, chat_answer())
        return
    await request.start_stream()
    while not request.client_left.is_set():
        await request.send_chunk(stream_event("x"))
        await asyncio.sleep(CHUNK_S)


def long_body(chance: random.Random) -> bytes:
    words = ["".join(chance.choices("abcdefghij {}()=\n", k=7)) for _ in range(LONG_CHARS // 8)]
    message = {"role": "user", "content": " ".join(words)}
    return json.dumps({"model": "m", "messages": [message]}).encode()


async def watch_stream(gateway: Child, gaps: list[float]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}], "stream": True}
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=10.0, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        came = time.perf_counter()
        async for _ in answer.aiter_raw():
            gaps.append(time.perf_counter() - came)
            came = time.perf_counter()


async def measure(gateway: Child, bodies: list[bytes]) -> dict[str, list[float]]:
    """Return delays of `/health` and of small requests while these are read."""
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROBE, gateway.url.removeprefix("http://"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0, trust_env=False) as client:
        await asyncio.sleep(0.5)
        posts = [client.post("/v1/chat/completions", content=body) for body in bodies]
        assert {answer.status_code for answer in await asyncio.gather(*posts)} <= {200}
        await asyncio.sleep(0.5)
    printed, _ = await asyncio.wait_for(probe.communicate(b""), 10.0)
    delays: dict[str, list[float]] = json.loads(printed)
    return delays


def at(share: float, values: list[float]) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def test_c105_long_prompts_hold_nobody_up(tmp_path: Path) -> None:
    chance = random.Random(1)
    rounds = [[long_body(chance) for _ in range(LONG_PROMPTS)] for _ in range(ROUNDS)]
    gaps: list[float] = []
    async with FakeEngine(answers) as engine:
        settings: dict[str, Any] = {
            "instances": [{"id": "a", "url": engine.url}],
            "tokenizer": {"mode": "local", "path": str(MODEL_PATH)},
        }
        gateway = await asyncio.to_thread(start_gateway, tmp_path, settings)
        stream = asyncio.create_task(watch_stream(gateway, gaps))
        try:
            quiet = await measure(gateway, [])
            busy = [await measure(gateway, bodies) for bodies in rounds]
        finally:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            await asyncio.to_thread(gateway.kill)
    for delays in busy:
        assert max(delays["health"]) < 0.25
        assert at(0.95, delays["small"]) - at(0.95, quiet["small"]) < 0.05
    assert len(gaps) > 60
    assert at(0.99, gaps) < 0.15
