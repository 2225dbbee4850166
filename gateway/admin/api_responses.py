"""`/v1/responses/{id}`: stored responses, told and forgotten. Whichever instance answered may be gone."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from moongate.gateway.auth.client_guard import tenant_of
from moongate.gateway.responses.background import Background
from moongate.gateway.responses.response_turns import ResponseTurns

JSON = "application/json"


def make_response_routes(turns: ResponseTurns, background: Background) -> APIRouter:
    """Return the routes of one gateway's stored responses."""
    routes = APIRouter()

    @routes.get("/v1/responses/{response_id}")
    async def retrieve(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        """Return a stored response. 404: unknown, expired, or not stored.

        `stream`: the events of one in the background, those to come included, behind the one whose
        `sequence_number` is `starting_after`.
        """
        name = tenant_of(request).name, response_id
        if stream:
            events = await background.follow(name, starting_after)
            return StreamingResponse(events, media_type="text/event-stream")
        return Response((await turns.find(*name, "response_id")).response, media_type=JSON)

    @routes.delete("/v1/responses/{response_id}")
    async def forget(request: Request, response_id: str) -> dict[str, object]:
        """Forget a stored response; responses that continue it stay whole."""
        await background.delete((tenant_of(request).name, response_id))
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        """End what runs in the background; a client just closes the others."""
        name = tenant_of(request).name, response_id
        return Response(await background.cancel(name), media_type=JSON)

    return routes
