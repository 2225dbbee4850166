"""The operators' routes that change which instances there are, and who may call them."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import read_headers
from moongate.gateway.roster import Change, Roster, read_record

DRY_RUNS = frozenset({"/admin/explain"})
"""Posts that change nothing."""

RECORD_BYTES_MAX = 65_536

PASSED_ON = ("origin", "forwarded", "x-forwarded-for", "x-real-ip")
"""Headers of a request that comes from elsewhere though its connection is from this machine."""


class AdminGuard:
    """Who may call `/admin`: with a key configured whoever has it, else changes only from loopback."""

    def __init__(self, key_env: str | None) -> None:
        self._key = os.environ[key_env].encode() if key_env is not None else None

    def check(self, request: Request) -> None:
        """Raises: GatewayError (401, 403)."""
        headers = read_headers(request.scope["headers"])
        if self._key is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            key = given.strip().encode("latin-1", "replace")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key, self._key):
                raise GatewayError(
                    401, "the admin key is missing or wrong; send it as a bearer token", "unauthorized",
                    headers={"www-authenticate": "Bearer"},
                )  # fmt: skip
        elif request.method not in ("GET", "HEAD") and request.url.path not in DRY_RUNS:
            _check_is_local(request, headers)


def _check_is_local(request: Request, headers: Mapping[str, str]) -> None:
    """Raises: GatewayError (403)."""
    if not _is_loopback(request):
        raise GatewayError(
            403, "without auth.admin_key_env, changes are taken from this machine only", "forbidden"
        )
    passed_on = next((name for name in PASSED_ON if name in headers), None)
    if passed_on is not None:
        raise GatewayError(
            403,
            f"without auth.admin_key_env, changes with {passed_on} (of a proxy or a browser) are"
            " not taken",
            "forbidden",
        )


def _is_loopback(request: Request) -> bool:
    host = request.client.host if request.client is not None else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def make_instance_routes(roster: Roster) -> APIRouter:
    """Return the routes that add, renew, drain and remove instances."""
    router = APIRouter(prefix="/admin/instances")

    @router.post("")
    async def add(request: Request) -> JSONResponse:
        """Add an instance; it stays until it is removed, or for `lease_s`."""
        return _changed(roster.add(read_record(await _read_json(request))))

    @router.put("/{instance_id}")
    async def announce(instance_id: str, request: Request) -> JSONResponse:
        """An engine says that it is there, or still there, for `lease_s`."""
        return _changed(roster.announce(read_record(await _read_json(request), instance_id)))

    @router.delete("/{instance_id}")
    async def leave(instance_id: str, *, withdrawn: bool = False) -> JSONResponse:
        """Drain an instance, then remove it. `withdrawn`: it is its engine that says so."""
        if withdrawn:
            roster.withdraw(instance_id)
        else:
            roster.leave(instance_id)
        return JSONResponse({"id": instance_id, "state": "draining"}, 202)

    @router.post("/{instance_id}/drain")
    async def drain(instance_id: str) -> dict[str, Any]:
        """Give an instance no more work; what it has under way goes on."""
        roster.drain(instance_id)
        return {"id": instance_id, "state": "draining"}

    @router.post("/{instance_id}/undrain")
    async def undrain(instance_id: str) -> dict[str, Any]:
        """Give a drained instance work again."""
        roster.undrain(instance_id)
        return {"id": instance_id, "state": "undrained"}

    return router


def _changed(change: Change) -> JSONResponse:
    return JSONResponse({"change": change.value}, 201 if change is Change.ADDED else 200)


async def _read_json(request: Request) -> Any:
    """Raises: GatewayError (400, 413, 415)."""
    kind = read_headers(request.scope["headers"]).get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise GatewayError(415, "expected content-type: application/json", "unsupported_media_type")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > RECORD_BYTES_MAX:
            raise GatewayError(
                413, f"the body is larger than {RECORD_BYTES_MAX} bytes", "body_too_large"
            )
    try:
        return orjson.loads(bytes(body))
    except orjson.JSONDecodeError as error:
        raise GatewayError(400, f"the body is not JSON: {error}", "invalid_request") from error
