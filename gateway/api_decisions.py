"""`GET /admin/decisions`: the receipts of recent requests, newest or slowest first."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from moongate.gateway.receipt import receipt_as_json
from moongate.gateway.recent import RecentReceipts, Wanted

LIMIT_MAX = 1000

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX)]
Number = Annotated[int, Query(ge=0)]


def make_decision_route(recent: RecentReceipts) -> APIRouter:
    """Return the route of one gateway's receipts."""
    router = APIRouter()

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
        found = recent.find(wanted, limit, slowest)
        return {"decisions": [receipt_as_json(receipt) for receipt in found]}

    return router
