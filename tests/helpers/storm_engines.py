"""Simulated engines in processes of their own, with what lies between them and a gateway in a test's hands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from event_proxy import EventProxy
from fault_proxy import FaultProxy
from processes import MOONGATE, Child, free_port

ENGINES = 3
BLOCKS = 4000
"""Of an engine: fewer than all conversations have together, so that blocks are evicted."""

ENGINE_START_S = 15.0


class StormEngine:
    """One engine's process and what lies between it and the gateway."""

    def __init__(self, name: str, logs: Path, chance: random.Random) -> None:
        self.name = name
        self._http, self._events, self._replay = (free_port() for _ in range(3))
        self._log = logs / f"engine-{name}.log"
        self._seed = str(ord(name))
        self._child: Child | None = None
        self.proxy = FaultProxy(self._http)
        self.events = EventProxy(f"tcp://127.0.0.1:{self._events}", chance)

    @property
    def settings(self) -> dict[str, object]:
        return {
            "id": self.name,
            "url": self.proxy.url,
            "kv_events": self.events.endpoint,
            "kv_replay": f"tcp://127.0.0.1:{self._replay}",
        }

    async def start(self) -> None:
        argv = [
            *MOONGATE, "sim-engine", "--port", str(self._http), "--model", "m",
            "--kv-events-port", str(self._events), "--kv-replay-port", str(self._replay),
            "--blocks", str(BLOCKS), "--prefill-tokens-per-s", "20000",
            "--decode-tokens-per-s", "40",
        ]  # fmt: skip
        url = f"http://127.0.0.1:{self._http}"
        self._child = Child.start(argv, url, self._log, {"PYTHONHASHSEED": self._seed})
        await asyncio.to_thread(self._child.wait_until, "/health", ENGINE_START_S)

    async def begin(self) -> None:
        """Start for the first time."""
        await self.start()
        self.proxy.listen()
        await self.events.start()

    async def kill(self) -> None:
        assert self._child is not None
        self._child.kill()
        await self.proxy.leave()
        await self.events.stop()

    async def restart(self) -> None:
        await self.start()
        self.proxy.listen()
        await self.events.start()

    def signal(self, number: signal.Signals) -> None:
        assert self._child is not None
        os.kill(self._child.process.pid, number)

    async def end(self) -> None:
        if self._child is not None:
            self._child.kill()
        with contextlib.suppress(AssertionError):
            await self.proxy.leave()
            await self.events.__aexit__()

    async def cached(self, client: httpx.AsyncClient) -> set[int]:
        """Return the blocks of its cache by the names that its events tell."""
        answer = await client.get(f"http://127.0.0.1:{self._http}/sim/cache")
        return {int(digest[-16:], 16) for digest in answer.json()["0"]}


@contextlib.asynccontextmanager
async def storm_fleet(logs: Path, chance: random.Random) -> AsyncIterator[list[StormEngine]]:
    engines = [StormEngine("abc"[n], logs, chance) for n in range(ENGINES)]
    try:
        await asyncio.gather(*(engine.begin() for engine in engines))
        yield engines
    finally:
        for engine in engines:
            await engine.end()
