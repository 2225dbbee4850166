"""Hand-offs between engines, on sockets: a prefill engine's server and a decoder's client.

Responsible for the bootstrap server's `/query` as Mooncake's, for asking a prefill engine for a
transfer, and for how long each side waits for what. What vLLM's engines do between them over ZMQ and
a transfer engine is here HTTP of our own (`/sim/…`), so that it works between processes. Not for what
is held (`transfer.py`) or freed (`runner.py`).

Limits and failures, as the engine's own:
- An engine id is looked up once, at the bootstrap server: three attempts. If it is not there the
  request fails at once.
- From then on the address is known for good. If nobody answers there any more, or the answer is
  cut off, the decoder does not notice, and waits until its limit.
- A prefill engine waits for a transfer to become ready as long as it would hold one.
- NIXL: an address where nobody answers, or another engine, fails the request at once.

Source: vLLM 0.32.0 `mooncake/mooncake_connector.py`, `mooncake/mooncake_utils.py`,
`nixl/base_worker.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moongate.simulator.transfer import MooncakeSource, NixlSource, Source

logger = logging.getLogger(__name__)

HOLD_S = 480.0
"""VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: how long a transfer is held, or waited for."""

RECEIVE_LIMIT_FACTOR = 540 / 480
"""A decoder waits a minute longer than the prefill engine, so that that one gives up first."""

LEASE_S = 30.0
"""`kv_lease_duration` of NIXL."""

HEARTBEATS_PER_LEASE = 6
LEASE_EXTENSION_FACTOR = 2 / 3

QUERY_ATTEMPTS = 3
QUERY_PAUSE_S = 0.1
QUERY_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    hold_s: float = HOLD_S
    lease_s: float = LEASE_S

    @property
    def receive_limit_s(self) -> float:
        return self.hold_s * RECEIVE_LIMIT_FACTOR


class Inbox:
    """A decoder's way to prefill engines."""

    def __init__(self, times: HandoffTimes) -> None:
        self._times = times
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=times.receive_limit_s,
            limits=httpx.Limits(max_connections=None),
        )
        self._addresses: dict[str, str] = {}

    async def close(self) -> None:
        await self._client.aclose()

    async def receive(self, source: Source) -> bool:
        """Return whether the KV is ready, and freed at the prefill engine."""
        if isinstance(source, NixlSource):
            return await self._read(source)
        address = self._addresses.get(source.engine_id) or await self._find(source)
        return address is not None and await self._pull(address, source)

    async def prolong(self, source: NixlSource) -> None:
        """Send one heartbeat, and wait until the next is due."""
        await self._post(source, "/sim/heartbeat")
        await asyncio.sleep(self._times.lease_s / HEARTBEATS_PER_LEASE)

    async def _find(self, source: MooncakeSource) -> str | None:
        for attempt in range(QUERY_ATTEMPTS):
            if attempt:
                await asyncio.sleep(QUERY_PAUSE_S)
            try:
                response = await self._client.get(
                    f"{source.bootstrap_url}/query", timeout=QUERY_LIMIT_S
                )
                self._learn(response.raise_for_status().json())
                break
            except httpx.RequestError as error:
                logger.warning("bootstrap server %s: %r", source.bootstrap_url, error)
            except (httpx.HTTPStatusError, httpx.InvalidURL, ValueError, KeyError) as error:
                logger.warning("bootstrap server %s: %r", source.bootstrap_url, error)
                break
        return self._addresses.get(source.engine_id)

    def _learn(self, ranks: Mapping[str, Any]) -> None:
        for rank in ranks.values():
            self._addresses[rank["engine_id"]] = rank["worker_addr"]["0"]["0"]

    async def _pull(self, address: str, source: MooncakeSource) -> bool:
        body = {"engine_id": source.engine_id, "transfer_id": source.transfer_id}
        url = address.replace("tcp://", "http://") + "/sim/pull"
        try:
            async with asyncio.timeout(self._times.receive_limit_s):
                try:
                    response = await self._client.post(url, json=body)
                    if response.status_code == httpx.codes.OK:
                        return bool(response.json()["is_coming"])
                except httpx.HTTPError as error:
                    logger.warning("prefill engine at %s: %r", address, error)
                await asyncio.Event().wait()  # nothing tells the decoder
        except TimeoutError:
            pass
        return False

    async def _read(self, source: NixlSource) -> bool:
        response = await self._post(source, "/sim/read")
        return response is not None and response.status_code == httpx.codes.OK

    async def _post(self, source: NixlSource, path: str) -> httpx.Response | None:
        body = {"engine_id": source.engine_id, "transfer_id": source.request_id}
        url = f"http://{source.host}:{source.port}{path}"
        try:
            return await self._client.post(url, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            logger.warning("prefill engine at %s: %r", url, error)
            return None


class Holder(Protocol):
    """What a prefill rank does for decoders; see `runner.py`."""

    stale_reads: int

    @property
    def engine_id(self) -> str: ...
    async def hand_over(self, transfer_id: str, wait_s: float) -> bool: ...
    def release(self, transfer_id: str) -> bool: ...
    def prolong(self, transfer_id: str, lease_s: float) -> None: ...


class HandoffApi:
    """The bootstrap server's routes, and those that decoders come to."""

    def __init__(
        self, holders: Mapping[int, Holder], address: Callable[[], str], times: HandoffTimes
    ) -> None:
        """`holders` by rank; `address` is this server's own, as host:port."""
        self._holders = holders
        self._address = address
        self._times = times
        self.pulls: list[str] = []
        """The transfers that decoders asked for, oldest first."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/query", self.query, methods=["GET"]),
                Route("/sim/pull", self.pull, methods=["POST"]),
                Route("/sim/read", self.read, methods=["POST"]),
                Route("/sim/heartbeat", self.heartbeat, methods=["POST"]),
            ]
        )

    async def query(self, _: Request) -> Response:
        worker = {"0": {"0": f"tcp://{self._address()}"}}
        return JSONResponse(
            {
                str(rank): {"engine_id": holder.engine_id, "worker_addr": worker}
                for rank, holder in self._holders.items()
            }
        )

    async def pull(self, request: Request) -> Response:
        holder, transfer_id = await self._find(request)
        if holder is None:
            return Response(status_code=404)
        self.pulls.append(transfer_id)
        return JSONResponse({"is_coming": await holder.hand_over(transfer_id, self._times.hold_s)})

    async def read(self, request: Request) -> Response:
        """A read needs no help, so it succeeds, whatever lies there by now; then it is told."""
        holder, transfer_id = await self._find(request)
        if holder is None:
            return Response(status_code=404)
        self.pulls.append(transfer_id)
        if not holder.release(transfer_id):
            logger.error(
                "request %s: its blocks were read when they were held no more", transfer_id
            )
            holder.stale_reads += 1
        return Response()

    async def heartbeat(self, request: Request) -> Response:
        holder, transfer_id = await self._find(request)
        if holder is not None:
            holder.prolong(transfer_id, self._times.lease_s * LEASE_EXTENSION_FACTOR)
        return Response()

    async def _find(self, request: Request) -> tuple[Holder | None, str]:
        body = await request.json()
        engine_id, transfer_id = body["engine_id"], body["transfer_id"]
        holders = (one for one in self._holders.values() if one.engine_id == engine_id)
        return next(holders, None), transfer_id
