"""The HTTP face of a Mooncake master, over a pool in this process: for tests of who asks it.

Responsible for the JSON and the metric names of the real one, for a log of what was asked, and for
being restarted, silent and gone. Not for what the pool holds (`kvpool/memory.py`).

Source: mooncake-transfer-engine 0.3.13.post1, the master's admin HTTP.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from moongate.kvpool.memory import MemoryPool
from moongate.kvpool.store import Replica
from moongate.simulator.openai_wire import Json
from moongate.simulator.serving import SocketServer

BUFFER_ADDRESS = 0x7F00_0000_0000
"""Where a value is said to lie; nobody reads there."""

_NOT_FOUND = "OBJECT_NOT_FOUND"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class MasterRequest:
    """One request that came."""

    path: str
    keys: tuple[str, ...] = ()


class PoolMaster:
    """A master on localhost. It keeps its port from one `start` to the next.

    One client pings it once a second, and each put is a batch of one: so its counters say.

    `is_silent`: connections are accepted and requests read, and never answered. `disk_keys`: keys
    whose value is on a disk only.
    """

    def __init__(
        self,
        pool: MemoryPool,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`port` 0: any free one, the same at each start."""
        self.pool = pool
        self.port = port
        self.is_silent = False
        self.disk_keys: set[str] = set()
        self.requests: list[MasterRequest] = []
        """What came, oldest first; tests may clear it."""
        self._host = host
        self._clock = clock
        self._started_at = clock()
        self._server: SocketServer | None = None
        self._stored_before = 0
        self._evicted_before = 0

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    @property
    def queries(self) -> list[tuple[str, ...]]:
        """Return the keys of each look-up that came."""
        return [request.keys for request in self.requests if request.keys]

    async def start(self) -> None:
        """Raises OSError for an address in use."""
        assert self._server is None, "started already"
        self._started_at = self._clock()
        self._server = SocketServer(self._host, self.port)
        self.port = self._server.port
        self._server.serve(self._app())

    async def stop(self) -> None:
        """End at once: connections break off."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.cut()
            await server.stop()

    async def restart(self) -> None:
        """End and start again; nothing is remembered, and counters begin at 0."""
        await self.stop()
        self.pool.clear()
        self._stored_before = self.pool.stored_keys
        self._evicted_before = self.pool.evicted_keys
        await self.start()

    # -- routes -------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        routes = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/query_key": self._query_key,
            "/batch_query_keys": self._batch_query_keys,
            "/get_all_keys": self._get_all_keys,
        }
        return Starlette(routes=[Route(path, self._logged(one)) for path, one in routes.items()])

    def _logged(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            parameters = request.query_params
            text = parameters.get("keys") or parameters.get("key") or ""
            keys = tuple(text.split(",")) if text else ()
            self.requests.append(MasterRequest(request.url.path, keys))
            if self.is_silent:
                await asyncio.Event().wait()
            return await handler(request)

        return handle

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("OK")

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(self._render_metrics())

    async def _query_key(self, request: Request) -> Response:
        key = request.query_params.get("key", "")
        replica = (await self.pool.look_up([key])).get(key)
        if replica is None:
            return PlainTextResponse(_NOT_FOUND, status_code=404)
        entry = self._entry(key, replica)
        descriptors = entry["values"] or entry["disk_values"]
        return PlainTextResponse("".join(json.dumps(one) + "\n" for one in descriptors))

    async def _batch_query_keys(self, request: Request) -> Response:
        keys = [key for key in request.query_params.get("keys", "").split(",") if key]
        if not keys:
            return JSONResponse({"success": False, "error": "No keys provided"}, status_code=400)
        replicas = await self.pool.look_up(keys)
        data = {key: self._entry(key, replicas.get(key)) for key in keys}
        return JSONResponse({"success": True, "data": data})

    async def _get_all_keys(self, _: Request) -> Response:
        return PlainTextResponse("".join(f"{key}\n" for key in self.pool))

    # -- what they say ------------------------------------------------------------------------

    def _entry(self, key: str, replica: Replica | None) -> Json:
        """Return what is told of one key; `replica` None: it does not exist."""
        entry: Json = {
            "ok": replica is not None,
            "error": None if replica is not None else _NOT_FOUND,
            "values": None,
            "disk_values": None,
            "local_disk_values": None,
            "nof_values": None,
        }
        if replica is None:
            return entry
        if replica.on_disk or key in self.disk_keys:
            file = {"file_path": f"/pool/{key}", "object_size": replica.size_bytes}
            return {**entry, "disk_values": [file]}
        buffer = {
            "size_": replica.size_bytes,
            "buffer_address_": BUFFER_ADDRESS,
            "protocol_": "tcp",
            "transport_endpoint_": replica.endpoint,
        }
        return {**entry, "values": [buffer]}

    def _render_metrics(self) -> str:
        pool = self.pool
        stored_keys = pool.stored_keys - self._stored_before
        evicted_keys = pool.evicted_keys - self._evicted_before
        values: list[tuple[str, str, int]] = [
            ("master_key_count", "gauge", len(pool)),
            ("master_allocated_bytes", "gauge", pool.allocated_bytes),
            ("master_total_capacity_bytes", "gauge", pool.capacity_bytes),
            ("master_evicted_key_count", "counter", evicted_keys),
            ("master_successful_evictions_total", "counter", evicted_keys),
            ("master_batch_put_end_items_total", "counter", stored_keys),
            ("master_batch_put_end_requests_total", "counter", stored_keys),
            ("master_ping_requests_total", "counter", int(self._clock() - self._started_at)),
        ]
        return "".join(
            f"# HELP {name} {name}\n# TYPE {name} {kind}\n{name} {value}\n"
            for name, kind, value in values
        )
