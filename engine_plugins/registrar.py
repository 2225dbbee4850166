"""An engine announces itself to gateways, renews that while it lives, and withdraws at its end.

Two parts: `make_record` says what there is to announce and is pure; `Announcer` sends it, with a
thread for each gateway, so that a slow one holds up no other. It runs beside an engine and needs the
standard library only.

Nothing is remembered between renewals: each says all, so a gateway that was started again knows the
engine after the next one. An engine that doesn't answer isn't renewed, and drops out when its lease
ends; so does one whose machine is gone.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moongate.engine_plugins.launch_command import LaunchError
from moongate.engine_plugins.vllm_launch import HASH_SEED, EngineLaunch

logger = logging.getLogger(__name__)

LEASE_S_DEFAULT = 30.0
"""A dead machine gets no more requests after this; two renewals in a row may be lost."""

RETRY_S = 2.0
"""After a failure, unless a third of the lease is shorter."""

REQUEST_TIMEOUT_S = 3.0
"""A gateway answers within milliseconds; one that doesn't is asked again after `RETRY_S`."""

WITHDRAWAL_S = 5.0
"""How long the end of an engine waits for gateways; their leases do the rest."""

ID_PATTERN = r"[A-Za-z0-9._-]{1,64}"

_WILDCARDS = ("0.0.0.0", "::", "")


# --- what is announced ----------------------------------------------------------------------------


def make_record(launch: EngineLaunch, *, weight: float = 1.0) -> dict[str, Any]:
    """Return what gateways are told about an engine, but for the lease; what isn't known is absent.

    `ranks` counts data-parallel ranks, `block_size` is in tokens, `weight` is the relative speed.
    `hash_seed` and `hash_algorithm` name the block hashes that its events and pool keys carry. Models
    are left out: gateways ask the engine, whose LoRA adapters come and go, and a list would hide them.
    Raises: LaunchError if no other machine could reach the addresses.
    """
    host = reachable_host(launch)
    handoff, pool = launch.handoff, launch.pool
    bootstrap = None if handoff is None else handoff.bootstrap_port
    record: dict[str, Any] = {
        "url": http_url(host, launch.port),
        "role": launch.role,
        "kv_events": _url("tcp", host, launch.kv_events_port),
        "kv_replay": _url("tcp", host, launch.kv_replay_port),
        "kv_connector": None if handoff is None else handoff.connector,
        "bootstrap_url": None if bootstrap is None else http_url(host, bootstrap),
        "block_size": launch.block_size_tokens,
        "ranks": launch.data_parallel,
        "tensor_parallel": launch.tensor_parallel,
        "pipeline_parallel": launch.pipeline_parallel,
        "hash_algorithm": _option(launch.extra_args, "--prefix-caching-hash-algo") or "sha256",
        "hash_seed": HASH_SEED,
        "weight": weight,
        "pool": pool is not None,
        "pool_master": None if pool is None else pool.master,
        "pool_prefix": None if pool is None else pool.cache_prefix or None,
    }
    return {name: value for name, value in record.items() if value is not None}


def reachable_host(launch: EngineLaunch) -> str:
    """Return the address under which others reach the engine. Raises: LaunchError."""
    host = launch.host if launch.advertise_host is None else launch.advertise_host
    if host in _WILDCARDS:
        raise LaunchError(
            f"advertise_host: an engine that listens on {host!r} can't be announced as that; name"
            " the address at which gateways reach this machine"
        )
    return host


def default_id(launch: EngineLaunch) -> str:
    """Return a name for the instance that no other has: its address. Raises: LaunchError."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{reachable_host(launch)}-{launch.port}")


def http_url(host: str, port: int) -> str:
    """Return the base address of a server."""
    return _url("http", host, port)


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _option(arguments: Sequence[str], flag: str) -> str | None:
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else next(iter(arguments[position + 1 :]), None)
    return None


@dataclass(frozen=True, slots=True)
class Announcement:
    """Who is told what, and how often."""

    gateways: tuple[str, ...]
    """Base addresses, such as `http://10.0.0.5:8000`."""
    instance_id: str
    record: Mapping[str, Any]
    health_url: str
    """Asked before each renewal; anything but 200 lets the lease run out."""
    lease_s: float = LEASE_S_DEFAULT
    """How long the announcement holds. It is renewed after a third of it."""
    admin_key: str | None = None
    """Sent as bearer token."""


def check_announcement(announcement: Announcement) -> None:
    """Raises: LaunchError."""
    if not re.fullmatch(ID_PATTERN, announcement.instance_id):
        raise LaunchError(
            f"announce_id: {announcement.instance_id!r}; choose 1 to 64 letters, digits, dots,"
            " dashes and underscores"
        )
    if announcement.lease_s <= 0:
        raise LaunchError(
            f"lease_s: {announcement.lease_s} is too short; choose seconds, such as 30"
        )
    for gateway in announcement.gateways:
        try:
            parts = urllib.parse.urlsplit(gateway)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:  # a bracket too many
            is_address = False
        if not is_address:
            raise LaunchError(f"announce: {gateway!r} is no http address of a gateway")


# --- sending --------------------------------------------------------------------------------------


class SendError(Exception):
    """A request failed; the text says how."""


Send = Callable[[str, str, bytes | None, Mapping[str, str]], None]
"""Method, address, body and headers of a request that must be answered with success."""


def send_http(method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> None:
    """Send one request, past any proxy. Raises: SendError."""
    request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=REQUEST_TIMEOUT_S):
            pass
    except urllib.error.HTTPError as error:
        with error:
            told = error.read(300).decode(errors="replace").strip()
        raise SendError(f"answered {error.code}: {told}") from error
    except (OSError, ValueError) as error:  # URLError and time-outs are among the former
        raise SendError(str(getattr(error, "reason", error))) from error


class Announcer:
    """Keeps one engine announced to its gateways, from `start` until `withdraw`."""

    def __init__(self, announcement: Announcement, send: Send = send_http) -> None:
        self._announcement = announcement
        self._send = send
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_announced, args=(gateway.rstrip("/"),), daemon=True)
            for gateway in announcement.gateways
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def withdraw(self) -> None:
        """Take the announcements back, as far as gateways answer in time. Once is enough."""
        self._stopping.set()
        deadline = time.monotonic() + WITHDRAWAL_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _keep_announced(self, gateway: str) -> None:
        interval_s = self._announcement.lease_s / 3
        was_announced, wait_s = False, 0.0
        problem_before: str | None = "not yet tried"
        while not self._stopping.wait(wait_s):
            problem = self._announce(gateway)
            if problem != problem_before:
                self._tell(gateway, problem)
            was_announced = was_announced or problem is None
            problem_before = problem
            wait_s = interval_s if problem is None else min(RETRY_S, interval_s)
        if was_announced:
            self._withdraw(gateway)

    def _tell(self, gateway: str, problem: str | None) -> None:
        if problem is None:
            logger.info("announced to %s as %s", gateway, self._announcement.instance_id)
        else:
            logger.warning("not announced to %s: %s", gateway, problem)

    def _announce(self, gateway: str) -> str | None:
        """Return what was in the way."""
        try:
            self._send("GET", self._announcement.health_url, None, {})
        except SendError as error:
            return f"the engine doesn't answer: {error}"
        record = {**self._announcement.record, "lease_s": self._announcement.lease_s}
        try:
            self._send("PUT", self._address(gateway), json.dumps(record).encode(), self._headers())
        except SendError as error:
            return str(error)
        return None

    def _withdraw(self, gateway: str) -> None:
        try:
            # Without the parameter it is an operator who wants the engine kept out.
            address = f"{self._address(gateway)}?withdrawn=true"
            self._send("DELETE", address, None, self._headers())
        except SendError as error:
            logger.warning("%s was not told of the end: %s", gateway, error)

    def _address(self, gateway: str) -> str:
        return f"{gateway}/admin/instances/{self._announcement.instance_id}"

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self._announcement.admin_key is not None:
            headers["authorization"] = f"Bearer {self._announcement.admin_key}"
        return headers
