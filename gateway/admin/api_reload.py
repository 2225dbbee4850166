"""`/admin/reload`: read the configuration file again, and whether it is in force."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.responses import JSONResponse

from moongate.gateway.config.reload import Outcome, Reloader, Result
from moongate.gateway.errors import GatewayError
from moongate.gateway.replicas.worker_views import WorkerViews

CODES = {
    Result.FAILED: (400, "invalid_configuration"),
    Result.NEEDS_RESTART: (409, "needs_restart"),
}


def make_reload_routes(reloader: Reloader | None, views: WorkerViews | None = None) -> APIRouter:
    """Return the routes. `reloader` None: the gateway was not started from a file. `views`: of all workers."""
    router = APIRouter(prefix="/admin/reload")

    def get_reloader() -> Reloader:
        """Raises: GatewayError (409)."""
        if reloader is None:
            raise GatewayError(409, "this gateway was not started from a file", "no_configuration")
        return reloader

    @router.post("")
    async def reload() -> JSONResponse:
        """Let the file hold as it is now, or tell what keeps it from that; then nothing has changed."""
        taken_from = get_reloader()
        outcome = await taken_from.reload()
        if outcome.result is not Result.OK:
            return _refusal(outcome)
        if views is not None:
            await _let_others_follow(views, taken_from.digest.encode())
        return JSONResponse({"changed": list(outcome.changed), "config_hash": taken_from.digest})

    @router.get("")
    async def state() -> dict[str, Any]:
        """Which file is in force, and what is wrong with the one that is there, if it is another."""
        asked = get_reloader()
        return {"config_hash": asked.digest, "problems": list(asked.problems)}

    return router


async def _let_others_follow(views: WorkerViews, digest: bytes) -> None:
    """Let all workers have the same file in force. Raises: GatewayError (503) if one says that it has
    another; who does not answer in time is not waited for."""
    told = await views.gather("reload", digest)
    behind = [peer for peer, said in told.items() if said and said != digest]
    if behind:
        raise GatewayError(
            503,
            f"{len(behind)} of {len(told)} workers can't take the file; their log says why",
            "workers_differ",
        )


def _refusal(outcome: Outcome) -> JSONResponse:
    status, code = CODES[outcome.result]
    error = orjson.loads(GatewayError(status, "\n".join(outcome.problems), code).body())
    return JSONResponse({**error, "problems": list(outcome.problems)}, status)
