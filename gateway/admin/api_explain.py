"""`POST /admin/explain`: where a request would go now, and why; nothing is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from moongate.gateway.admin.api_schema import EXPLAINED
from moongate.gateway.auth.access import Access
from moongate.gateway.auth.admin_guard import read_body
from moongate.gateway.auth.tenants import ANYBODY
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.dialects.aliases import Aliases
from moongate.gateway.dialects.body import name_session, parse_body, with_cache_salt
from moongate.gateway.dialects.prompt_fields import read_salt
from moongate.gateway.dialects.routes import PROXIED, PromptKind, Route
from moongate.gateway.driver import Driver
from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import read_headers
from moongate.gateway.pool.pooling import Pooling, PromptTokens
from moongate.gateway.prompts.divergence import Divergence, Divergences
from moongate.gateway.prompts.prompt import PromptPipeline
from moongate.gateway.proxy.request_reading import RequestReader
from moongate.gateway.responses.response_turns import ResponseTurns
from moongate.gateway.telemetry.receipt import decision_as_json
from moongate.router import RequestId


def make_explain_route(
    live: LiveSettings,
    driver: Driver,
    prompts: PromptPipeline,
    turns: ResponseTurns,
    access: Access,
    divergences: Divergences,
    pooling: Pooling | None = None,
) -> APIRouter:
    """Return the route of the dry run."""
    router = APIRouter()
    reader = RequestReader(live, driver, access)

    @router.post("/admin/explain", openapi_extra=EXPLAINED)
    async def explain(
        request: Request, route: str | None = None, tenant: str | None = None
    ) -> JSONResponse:
        """Dry run: where a request body would go now, with every candidate and cost term.

        `route`: the one that the body is for; else it is told by the body's fields. `tenant`: whose it would be;
        else nobody's, and what is cached for tenants is not found.
        """
        settings = live.current
        aliases = Aliases(settings.models.aliases)
        raw = await read_body(request, settings.limits.body_bytes_max)
        asked = _route_of(raw, route)
        body, _ = aliases.resolve(parse_body(raw, asked), asked)
        whose = access.tenants.named(tenant) if tenant is not None else ANYBODY
        if whose.cache_salt is not None and asked.is_cached:
            body = with_cache_salt(body, whose.cache_salt)
        if asked.kind is PromptKind.RESPONSES:
            body = (await turns.begin(whose.name, body, asked)).body
        model = reader.find_model(body)
        read = await prompts.read(asked, body)
        headers = read_headers(request.scope["headers"])
        policy = reader.find_policy(headers)
        would_be = reader.request(
            RequestId("explain"), asked, body, headers, read, model, policy, whose
        )
        diverges: Divergence | None = None
        if would_be.session_key and read.fields and read.prompt:
            diverges = divergences.explain(
                would_be.session_key, model, read.fields, read_salt(body), read.prompt
            )
        if pooling is not None and read.prompt is not None and not read.has_media:
            known = PromptTokens(
                read.prompt, read.tokens, read_salt(body), driver.core.fleet.model_cards()[model]
            )
            would_be = await pooling.enrich(would_be, known)
        decision = driver.core.explain(would_be, driver.clock())
        if decision is None:
            raise reader.unavailable()
        divergence = diverges.as_json() if diverges is not None else None
        told = {
            "model": model,
            "session": name_session(would_be.session_key)
            if would_be.session_key is not None
            else None,
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
