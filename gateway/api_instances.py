"""The operators' routes that change which instances there are, and who may call them."""

from __future__ import annotations

import hmac
import ipaddress
import os
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import read_headers
from moongate.gateway.roster import Change, Roster, read_record

RECORD_BYTES_MAX = 65_536


class AdminGuard:
    """Who may call `/admin`: with a key configured whoever has it, else changes only from loopback."""

    def __init__(self, key_env: str | None) -> None:
        self._key = os.environ[key_env].encode() if key_env is not None else None

    def check(self, request: Request) -> None:
        """Raises: GatewayError (401, 403)."""
        if self._key is not None:
            headers = read_headers(request.scope["headers"])
            given = headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode("latin-1", "replace"), self._key):
                raise GatewayError(
                    401, "the admin key is missing or wrong; send it as a bearer token", "unauthorized",
                    headers={"www-authenticate": "Bearer"},
                )  # fmt: skip
        elif request.method not in ("GET", "HEAD") and not _is_loopback(request):
            raise GatewayError(
                403,
                "without auth.admin_key_env, changes are taken from this machine only",
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
        return _changed(roster.announce(read_record(await _read_json(request))))

    @router.put("/{instance_id}")
    async def announce(instance_id: str, request: Request) -> JSONResponse:
        """An engine says that it is there, or still there, for `lease_s`."""
        return _changed(roster.announce(read_record(await _read_json(request), instance_id)))

    @router.delete("/{instance_id}")
    async def leave(instance_id: str) -> JSONResponse:
        """Drain an instance, then remove it."""
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
    """Raises: GatewayError (400, 413)."""
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
