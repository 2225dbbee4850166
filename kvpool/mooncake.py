"""A Mooncake master, asked over its HTTP interface.

Read-only: these questions take no lease and move nothing.

Source: Mooncake 0.3.13 `master_admin_service` (run): `/batch_query_keys` answers for each key with
the replicas in memory, on a shared disk and on a client's own disk, apart. It decodes the address
first and takes it apart at commas then.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import orjson

from moongate.kvpool.keys import KEY_SEPARATOR
from moongate.kvpool.mooncake_http import GetFailed, get_body, open_session
from moongate.kvpool.store import PoolState, PoolUnavailable, Replica

KEYS_PER_CALL = 200
"""Of 140 characters each: a URL of 28 KB, of which the master takes three times as much."""

CHECK_S = 2.0
"""For the master's page of metrics, which is asked for in the background."""

_KEEP_ALIVE_S = 30.0
"""Much longer than the time between two checks, so that a turn finds a connection open."""

BODY_BYTES_MAX = 4 << 20
"""An answer of 200 keys with a few replicas each is 200 KB; the page of metrics is smaller."""

_ORDINARY = f"{string.ascii_letters}{string.digits}-._~@:,".encode()

_METRIC = re.compile(r"^(?P<name>master_\w+) (?P<value>[-+.0-9eE]+)$", re.MULTILINE)
_COUNTER = re.compile(r"^# TYPE (?P<name>master_\w+) counter$", re.MULTILINE)


class MooncakeMaster:
    """The master at `url` (`http://host:9003`). Create it inside the event loop, and `close` it."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._session = open_session(_KEEP_ALIVE_S)
        self._counters: Mapping[str, int] = {}
        self._restarts = 0

    async def look_up(self, keys: Sequence[str]) -> Mapping[str, Replica]:
        found: dict[str, Replica] = {}
        for start in range(0, len(keys), KEYS_PER_CALL):
            part = _join(keys[start : start + KEYS_PER_CALL])
            if part:
                answer = await self._get(f"/batch_query_keys?keys={part}", self._timeout_s)
                found |= _read_answer(answer)
        return found

    async def check(self) -> PoolState:
        """See `PoolStore.check`. Counters begin anew in a new process, by which one is noticed.

        A client's ping is counted every second, so one shows even while nothing is stored.
        """
        page = await self._get("/metrics", CHECK_S)
        text = page.decode("utf-8", "replace")
        values = {f["name"]: _whole(f["value"]) for f in _METRIC.finditer(text)}
        if "master_key_count" not in values:
            raise PoolUnavailable(f"{self._url}/metrics: not a Mooncake master's")
        counters = {f["name"]: values.get(f["name"], 0) for f in _COUNTER.finditer(text)}
        if any(counters.get(name, 0) < count for name, count in self._counters.items()):
            self._restarts += 1
        self._counters = counters
        return PoolState(
            epoch=str(self._restarts),
            key_count=values["master_key_count"],
            allocated_bytes=values.get("master_allocated_bytes"),
            capacity_bytes=values.get("master_total_capacity_bytes"),
            evicted_keys=values.get("master_evicted_key_count"),
        )

    async def close(self) -> None:
        await self._session.close()

    async def _get(self, target: str, timeout_s: float) -> bytes:
        """Raises: PoolUnavailable."""
        try:
            return await get_body(
                self._session,
                self._url,
                target,
                timeout_s=timeout_s,
                bytes_max=BODY_BYTES_MAX,
                is_encoded=True,
            )
        except GetFailed as error:
            raise PoolUnavailable(str(error)) from error


def _join(keys: Sequence[str]) -> str:
    """Return keys as the address names them. One with a comma is left out: it can't be asked for.

    Cost: 17 us for 200 ordinary keys, which need no quoting; 0.3 ms for others.
    """
    joined = ",".join(keys)
    has_commas = joined.count(",") >= len(keys)
    if not has_commas and not joined.encode("utf-8", "surrogatepass").translate(None, _ORDINARY):
        return joined
    whole = (key for key in keys if KEY_SEPARATOR not in key)
    return ",".join(quote(key, safe="@:", errors="surrogatepass") for key in whole)


def _whole(text: str) -> int:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return 0


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
    if not isinstance(entry, dict) or entry.get("ok") is not True:
        return None
    for name in ("values", "nof_values", "local_disk_values", "disk_values"):
        values = entry.get(name)
        for value in values if isinstance(values, list) else ():
            if isinstance(value, dict):
                return Replica(_endpoint_of(value), _size_of(value), on_disk=name != "values")
    return None


def _endpoint_of(value: Mapping[str, Any]) -> str:
    names = ("transport_endpoint_", "transport_endpoint")
    endpoints = (value.get(name) for name in names)
    return next((e for e in endpoints if isinstance(e, str) and e), "")


def _size_of(value: Mapping[str, Any]) -> int:
    """Return the size, which each kind of replica calls otherwise. 0: it doesn't say."""
    sizes = (value.get(name) for name in ("size_", "object_size_", "object_size"))
    return next((size for size in sizes if isinstance(size, int) and size > 0), 0)
