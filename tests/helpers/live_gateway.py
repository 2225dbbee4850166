"""A gateway in this process, on a real socket, before engines that a test controls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from moongate.gateway.app import Gateway
from moongate.gateway.config.config_file import ConfigFile
from moongate.gateway.config.settings import Settings
from moongate.gateway.driver import Recorder
from moongate.gateway.instances.dns_names import Resolve
from moongate.gateway.server import GatewayServer, listen
from moongate.kvpool.store import PoolStore

READY_S = 10.0


class LiveGateway:
    """What a test sees of a running gateway."""

    def __init__(self, server: GatewayServer, client: httpx.AsyncClient) -> None:
        self.server = server
        self.client = client
        self.core = server.gateway.core

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def chat(
        self, *, content: str = "hi", headers: Any = None, **body: Any
    ) -> httpx.Response:
        """Post a chat request; fields of `body` replace the defaults."""
        fields = {"model": "m", "messages": [{"role": "user", "content": content}], **body}
        return await self.client.post("/v1/chat/completions", json=fields, headers=headers)

    def inflight(self) -> int:
        """Return the requests that the core counts as unfinished, on all instances."""
        return sum(load.active_requests for load in self.core.loads.loads.values())

    async def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value summed over the series that have these labels."""
        text = (await self.client.get("/metrics")).text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if all(w in line for w in wanted)
        )


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Return when `condition()` holds; the test fails if it doesn't in time."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert asyncio.get_running_loop().time() < deadline, "not in time"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def live_gateway(
    urls: Sequence[str],
    *,
    wait_ready: bool = True,
    memory_pool: PoolStore | None = None,
    clock: Callable[[], float] = time.monotonic,
    recorder: Recorder | None = None,
    file: Path | None = None,
    resolve: Resolve | None = None,
    **settings: Any,
) -> AsyncIterator[LiveGateway]:
    """Run a gateway before these instances (named a, b, ...). Settings as in the file.

    `memory_pool`: the one in this process, for `pool={"kind": "memory"}`. `recorder`: is told all
    that the core is. `file`: the settings are written there, and the gateway is started from it. `resolve`:
    in place of DNS.
    """
    instances = settings.pop(
        "instances", [{"id": "abcdefgh"[n], "url": url} for n, url in enumerate(urls)]
    )
    merged: Mapping[str, Any] = {
        "health": {"interval_s": 0.2, "timeout_s": 1.0},
        "drain": {"limit_s": 1.0},
        **settings,
        "instances": instances,
    }
    loaded = None
    if file is not None:
        file.write_text(yaml.safe_dump(merged))
        loaded = ConfigFile(file).load()
    wanted = loaded.settings if loaded is not None else Settings.model_validate(merged)
    server = GatewayServer(
        Gateway(
            wanted,
            clock=clock,
            seed=1,
            recorder=recorder,
            pool=memory_pool,
            loaded=loaded,
            resolve=resolve,
        ),
        listen("127.0.0.1", 0),
    )
    serving = asyncio.create_task(server.serve())
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", timeout=30.0, trust_env=False, limits=limits
    ) as client:
        gateway = LiveGateway(server, client)
        try:
            await until(lambda: server.has_started, READY_S)
            if wait_ready:
                ready = [i["id"] for i in instances]
                await until(lambda: _are_up(gateway, ready), READY_S)
            yield gateway
        finally:
            server.request_stop()
            await serving


def _are_up(gateway: LiveGateway, names: Sequence[str]) -> bool:
    up = {i.spec.id for i in gateway.core.fleet if i.is_healthy and i.facts is not None}
    return set(names) <= up
