"""`GET /admin/decisions`: the receipts of recent requests, newest or slowest first.

Where several workers serve, those of all of them; each numbers its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import orjson
from fastapi import APIRouter, Query

from moongate.gateway.replicas.worker_views import WorkerViews
from moongate.gateway.telemetry.receipt import receipt_as_json
from moongate.gateway.telemetry.recent import RecentReceipts, Wanted

LIMIT_MAX = 1000

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX)]
Number = Annotated[int, Query(ge=0)]


Told = dict[str, Any]


class _Asked(msgspec.Struct, array_like=True, frozen=True):
    """What one worker asks the others for."""

    wanted: Wanted
    limit: int
    slowest: Literal["ttft", "e2e"] | None


_encode = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(_Asked).decode

ORDERS: Mapping[str | None, Callable[[Told], float]] = {
    None: lambda told: float(told["began_at_s"]),
    "ttft": lambda told: float(told["ttft_ms"] or 0.0),
    "e2e": lambda told: float((told["outcome"] or {}).get("e2e_ms") or 0.0),
}


def make_decision_route(recent: RecentReceipts, views: WorkerViews | None = None) -> APIRouter:
    """Return the route of one gateway's receipts. `views`: of all its workers, if there are several."""
    router = APIRouter()

    def find(asked: _Asked) -> list[Told]:
        found = recent.find(asked.wanted, asked.limit, asked.slowest)
        return [receipt_as_json(receipt) for receipt in found]

    async def tell(asked: bytes) -> bytes:
        return orjson.dumps(find(_read(asked)))

    if views is not None:
        views.sources["decisions"] = tell

    @router.get("/admin/decisions")
    async def decisions(
        limit: Limit = 50,
        slowest: Literal["ttft", "e2e"] | None = None,
        session: str | None = None,
        instance: str | None = None,
        request_id: str | None = None,
        after: Number = 0,
    ) -> dict[str, Any]:
        """Recent receipts, with candidates, costs and outcome.

        `slowest`: by time to the first byte, or in all; else the newest come first. `session`: of this
        session key (of a tenant's `TENANT/KEY`), or of the name that receipts show for it. `instance`: that computed the prompt or the
        answer. `after`: only those with a higher number, to follow what happens.
        """
        wanted = Wanted(session, instance, request_id, after)
        asked = _Asked(wanted, limit, slowest)
        if views is None:
            return {"decisions": find(asked)}
        said = await views.gather("decisions", _encode(asked))
        told = [one for content in said.values() if content for one in orjson.loads(content)]
        told.sort(key=ORDERS[slowest], reverse=True)
        return {"decisions": told[:limit]}

    return router
