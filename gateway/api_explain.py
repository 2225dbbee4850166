"""`POST /admin/explain`: where a request would go now, and why; nothing is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from moongate.gateway.admin_guard import read_body
from moongate.gateway.aliases import Aliases
from moongate.gateway.body import find_session_key, find_user, name_session, parse_body
from moongate.gateway.divergence import Divergence, Divergences
from moongate.gateway.driver import Driver
from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import read_headers
from moongate.gateway.legs import may_hand_over, stays_whole
from moongate.gateway.pooling import Pooling, PromptTokens
from moongate.gateway.prompt import PromptPipeline
from moongate.gateway.prompt_fields import read_salt
from moongate.gateway.receipt import decision_as_json
from moongate.gateway.response_turns import ResponseTurns
from moongate.gateway.routes import PROXIED, PromptKind, Route
from moongate.gateway.settings import Settings
from moongate.router import Request as RouterRequest
from moongate.router import RequestId


def make_explain_route(
    settings: Settings,
    driver: Driver,
    prompts: PromptPipeline,
    turns: ResponseTurns,
    divergences: Divergences,
    pooling: Pooling | None = None,
) -> APIRouter:
    """Return the route of the dry run."""
    router, aliases = APIRouter(), Aliases(settings.models.aliases)

    @router.post("/admin/explain")
    async def explain(request: Request, route: str | None = None) -> JSONResponse:
        """Dry run: where a request body would go now, with every candidate and cost term.

        `route`: the one that the body is for; else it is told by the body's fields.
        """
        raw = await read_body(request, settings.limits.body_bytes_max)
        asked = _route_of(raw, route)
        body, _ = aliases.resolve(parse_body(raw, asked), asked)
        if asked.kind is PromptKind.RESPONSES:
            body = (await turns.begin(body, asked)).body
        assert body.model is not None
        cards = driver.core.fleet.model_cards()
        if body.model not in cards:
            raise GatewayError(404, "the model does not exist", "model_not_found", "model")
        read = await prompts.read(asked, body)
        headers = read_headers(request.scope["headers"])
        session_key = find_session_key(headers, body, settings.session.header)
        diverges: Divergence | None = None
        if session_key and read.fields and read.prompt:
            salt = read_salt(body)
            diverges = divergences.explain(session_key, body.model, read.fields, salt, read.prompt)
        hands_over = driver.core.fleet.has_prefill(body.model)
        would_be = RouterRequest(
            id=RequestId("explain"),
            model=body.model,
            prompt=read.prompt,
            is_prompt_missing=read.fallback is not None,
            session_key=session_key,
            tie_key=find_user(body),
            may_hand_over=hands_over and may_hand_over(asked, body),
            stays_whole=hands_over and stays_whole(asked, body),
        )
        if pooling is not None and read.prompt is not None and read.is_nameable:
            known = PromptTokens(read.prompt, read.tokens, read_salt(body), cards[body.model])
            would_be = await pooling.enrich(would_be, known)
        decision = driver.core.explain(would_be, driver.clock())
        if decision is None:
            raise GatewayError(503, "no instance can take the request now", "no_instance")
        divergence = diverges.as_json() if diverges is not None else None
        told = {
            "model": body.model,
            "session": name_session(session_key) if session_key is not None else None,
            "fallback": read.fallback,
            "divergence": divergence,
        }
        return JSONResponse({**decision_as_json(decision), **told})

    return router


def _route_of(raw: bytes, path: str | None) -> Route:
    """Return the route that a body is for. Raises: GatewayError (400)."""
    if path is None:
        body = parse_body(raw, Route("/admin/explain", needs_model=True))
        return PROXIED[_path_by_fields(body.top)]
    if path not in PROXIED or not PROXIED[path].needs_model:
        names = ", ".join(name for name, route in PROXIED.items() if route.needs_model)
        raise GatewayError(400, f"route: expected one of {names}", "invalid_request", "route")
    return PROXIED[path]


def _path_by_fields(fields: Mapping[str, Any]) -> str:
    if "messages" in fields:
        return "/v1/messages" if "system" in fields else "/v1/chat/completions"
    return "/v1/responses" if "input" in fields else "/v1/completions"
