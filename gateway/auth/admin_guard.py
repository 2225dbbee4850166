"""What guards the operators' routes: who may call them, and how much they may send."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from fastapi import Request

from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import read_headers

DRY_RUNS = frozenset({"/admin/explain"})
"""Posts that change nothing."""

PASSED_ON = ("origin", "forwarded", "x-forwarded-for", "x-real-ip")
"""Headers of a request that comes from elsewhere though its connection is from this machine."""


class AdminGuard:
    """Who may call `/admin`: with a key configured whoever has it, else changes only from loopback, and where
    clients need keys everything."""

    def __init__(self, live: LiveSettings) -> None:
        self._live = live

    def _find_key(self) -> bytes | None:
        key_env = self._live.current.auth.admin_key_env
        return os.environ[key_env].encode() if key_env is not None else None

    def check(self, request: Request, *, asks_clients: bool = False) -> None:
        """`asks_clients`: they need keys, so what others do is not for everybody to read.

        Raises: GatewayError (401, 403).
        """
        headers = read_headers(request.scope["headers"])
        own_key = self._find_key()
        if own_key is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            key = given.strip().encode("latin-1", "replace")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key, own_key):
                raise GatewayError(
                    401, "the admin key is missing or wrong; send it as a bearer token", "unauthorized",
                    headers={"www-authenticate": "Bearer"},
                )  # fmt: skip
        elif asks_clients or _changes_something(request):
            _check_is_local(request, headers, self._live.current.listen.host)


def _changes_something(request: Request) -> bool:
    return request.method not in ("GET", "HEAD") and request.url.path not in DRY_RUNS


def _check_is_local(request: Request, headers: Mapping[str, str], listen_host: str) -> None:
    """A connection from this machine may be of a browser on it, whose pages come from anywhere: what a page calls has
    the name in `host` by which it was reached, and a name that somebody else's server lets point here would make
    that server's page one of the gateway's.

    Raises: GatewayError (403).
    """
    if not _is_loopback(request):
        raise GatewayError(
            403, "without auth.admin_key_env, this is taken from this machine only", "forbidden"
        )
    own = "origin" if _is_own_page(headers) else None
    passed_on = next((name for name in PASSED_ON if name in headers and name != own), None)
    if passed_on is not None:
        raise GatewayError(
            403,
            f"without auth.admin_key_env, this is not taken with {passed_on} (of a proxy or a browser)",
            "forbidden",
        )
    name = _name_in(headers.get("host", ""))
    if not (_names_this_machine(name) or name == listen_host.lower()):
        raise GatewayError(
            403,
            "without auth.admin_key_env, this is taken under localhost, a loopback address or listen.host only; "
            f"the request's host is {name[:80]!r}",
            "forbidden",
        )


def _is_own_page(headers: Mapping[str, str]) -> bool:
    """Tell whether a browser on this machine calls for a page of this very gateway: the dashboard."""
    host = headers.get("host", "")
    return headers.get("origin") == f"http://{host}" and _names_this_machine(_name_in(host))


def _name_in(host: str) -> str:
    """Return the name of a `host` header, in lower case and without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # a bracket too many
        return ""


def _names_this_machine(name: str) -> bool:
    return name == "localhost" or _is_loop(name)


def _is_loopback(request: Request) -> bool:
    return _is_loop(request.client.host if request.client is not None else "")


def _is_loop(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return the whole body. Raises: GatewayError (413)."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > bytes_max:
            raise GatewayError(413, f"the body is larger than {bytes_max} bytes", "body_too_large")
    return bytes(body)
