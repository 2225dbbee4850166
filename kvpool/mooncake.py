"""A Mooncake master, asked over its HTTP interface.

Read-only: these questions take no lease and move nothing. aiohttp and not httpx, of which a question
would cost 2.3 ms of processor time instead of 0.15.

Source: Mooncake 0.3.13 `master_admin_service` (run): `/batch_query_keys` answers for each key with
the replicas in memory, on a shared disk and on a client's own disk, apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson
from yarl import URL

from moongate.kvpool.store import PoolState, PoolUnavailable, Replica

KEYS_PER_CALL = 200
"""Of 140 characters each: a URL of 28 KB, of which the master takes three times as much."""

CHECK_S = 2.0
"""For the master's page of metrics, which is asked for in the background."""

_KEEP_ALIVE_S = 30.0

_METRIC = re.compile(r"^(?P<name>master_\w+) (?P<value>\d+(?:\.\d+)?)$", re.MULTILINE)


class MooncakeMaster:
    """The master at `url` (`http://host:9003`). Create it inside the event loop, and `close` it."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=_KEEP_ALIVE_S), trust_env=False
        )
        self._puts = 0
        self._restarts = 0

    async def look_up(self, keys: Sequence[str]) -> Mapping[str, Replica]:
        found: dict[str, Replica] = {}
        for start in range(0, len(keys), KEYS_PER_CALL):
            part = ",".join(keys[start : start + KEYS_PER_CALL])
            found |= _read_answer(await self._get(f"/batch_query_keys?keys={part}", self._timeout))
        return found

    async def check(self) -> PoolState:
        """See `PoolStore.check`. Its counters begin anew in a new process, by which one is noticed."""
        page = await self._get("/metrics", aiohttp.ClientTimeout(total=CHECK_S))
        values = {
            found["name"]: int(float(found["value"]))
            for found in _METRIC.finditer(page.decode("utf-8", "replace"))
        }
        if "master_key_count" not in values:
            raise PoolUnavailable(f"{self._url}/metrics: not a Mooncake master's")
        puts = values.get("master_put_end_requests_total", 0)
        puts += values.get("master_batch_put_end_requests_total", 0)
        # A ping is counted every second, so a new process shows even while nothing is stored.
        puts += values.get("master_ping_requests_total", 0)
        if puts < self._puts:
            self._restarts += 1
        self._puts = puts
        return PoolState(
            epoch=str(self._restarts),
            key_count=values["master_key_count"],
            allocated_bytes=values.get("master_allocated_bytes"),
            capacity_bytes=values.get("master_total_capacity_bytes"),
            evicted_keys=values.get("master_evicted_key_count"),
        )

    async def close(self) -> None:
        await self._session.close()

    async def _get(self, target: str, limit: aiohttp.ClientTimeout) -> bytes:
        """Raises: PoolUnavailable."""
        # Marked as encoded: keys have no character that needs it, and looking takes longer than asking.
        url = URL(self._url + target, encoded=True)
        try:
            async with self._session.get(url, timeout=limit) as answer:
                body = await answer.read()
        except TimeoutError as error:
            raise PoolUnavailable(f"{self._url}: no answer in time") from error
        except aiohttp.ClientError as error:
            raise PoolUnavailable(f"{self._url}: {error}") from error
        if answer.status != 200:
            raise PoolUnavailable(f"{self._url}{target[:40]}: status {answer.status}")
        return body


def _read_answer(body: bytes) -> dict[str, Replica]:
    """Return the keys that exist, of a `/batch_query_keys` answer. Raises: PoolUnavailable."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise PoolUnavailable("/batch_query_keys: the answer is not JSON") from error
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict):
        raise PoolUnavailable('/batch_query_keys: expected an object "data" by key')
    return {
        key: replica for key, entry in data.items() if (replica := _read_entry(entry)) is not None
    }


def _read_entry(entry: Any) -> Replica | None:
    """Return the replica that a reader would take: from memory, where there is one."""
    if not isinstance(entry, dict) or not entry.get("ok"):
        return None
    for name in ("values", "nof_values", "local_disk_values", "disk_values"):
        for value in entry.get(name) or ():
            if isinstance(value, dict):
                size = value.get("size_", value.get("object_size_", value.get("object_size", 0)))
                return Replica(
                    endpoint=str(
                        value.get("transport_endpoint_") or value.get("transport_endpoint") or ""
                    ),
                    size_bytes=size if isinstance(size, int) else 0,
                    on_disk=name != "values",
                )
    return None
