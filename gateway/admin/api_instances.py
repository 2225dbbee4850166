"""The operators' routes that change which instances there are."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from moongate.gateway.admin.api_schema import ADDED, ANNOUNCED, CHANGED
from moongate.gateway.auth.admin_guard import read_body
from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import read_headers
from moongate.gateway.instances.roster import Change, Roster, read_record

RECORD_BYTES_MAX = 65_536
"""A record is some 500 bytes."""


def make_instance_routes(roster: Roster) -> APIRouter:
    """Return the routes that add, renew, drain and remove instances."""
    router = APIRouter(prefix="/admin/instances")

    @router.post("", responses=CHANGED, openapi_extra=ADDED)
    async def add(request: Request) -> JSONResponse:
        """Add an instance; it stays until it is removed, or for `lease_s`."""
        return _changed(roster.add(read_record(await _read_json(request))))

    @router.put("/{instance_id}", responses=CHANGED, openapi_extra=ANNOUNCED)
    async def announce(instance_id: str, request: Request) -> JSONResponse:
        """An engine says that it is there, or still there, for `lease_s`."""
        return _changed(roster.announce(read_record(await _read_json(request), instance_id)))

    @router.delete("/{instance_id}", status_code=202)
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
    body = await read_body(request, RECORD_BYTES_MAX)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise GatewayError(400, f"the body is not JSON: {error}", "invalid_request") from error
