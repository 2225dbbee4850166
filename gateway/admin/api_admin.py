"""The operators' API: health, readiness, metrics, and what the router knows and would do.

FastAPI, since this is not the hot path and its schema is worth having. Read-only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from moongate.gateway.admin.api_models import list_models
from moongate.gateway.admin.api_schema import ERRORS, UNREADY
from moongate.gateway.auth.access import Access
from moongate.gateway.auth.admin_guard import AdminGuard
from moongate.gateway.auth.client_guard import CallerGuard, family_of, tenant_of
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.config.reload import Reloader
from moongate.gateway.driver import Driver
from moongate.gateway.errors import GatewayError, error_body
from moongate.gateway.instances.monitor import Monitor
from moongate.gateway.instances.roster import Roster
from moongate.gateway.pool.pooling import Pooling
from moongate.gateway.replicas.shared_state import SharedState
from moongate.gateway.replicas.worker_views import WorkerViews
from moongate.gateway.telemetry import merged_metrics
from moongate.gateway.telemetry.metrics import SHED_CODES, UNKNOWN_MODEL, UNMATCHED_ROUTE, Metrics
from moongate.router import Holder, Role, Tier
from moongate.router.fleet import InstanceState


class Readiness:
    """Whether new work should come here. `is_draining` once the gateway was told to stop."""

    def __init__(self) -> None:
        self.is_draining = False


def make_admin_app(
    live: LiveSettings,
    driver: Driver,
    monitor: Monitor,
    metrics: Metrics,
    readiness: Readiness,
    roster: Roster,
    access: Access,
    pooling: Pooling | None = None,
    state: SharedState | None = None,
    views: WorkerViews | None = None,
    reloader: Reloader | None = None,
) -> FastAPI:
    """Return the application for everything that is not proxied. `views`: of all workers, if several."""
    app = FastAPI(
        title="moongate",
        docs_url=None,
        redoc_url=None,
        openapi_url="/admin/openapi.json",
        responses=ERRORS,
    )
    core = driver.core
    guard = CallerGuard(access, AdminGuard(live))

    @app.middleware("http")
    async def check_caller(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        try:
            guard.check(request)
        except GatewayError as error:
            return _refused_caller(request, error, metrics)
        answer = await call_next(request)
        if request.url.path.startswith("/v1/"):
            # By the route's template, never by what the client wrote in its place.
            template = getattr(request.scope.get("route"), "path", UNMATCHED_ROUTE)
            metrics.requests.add(1, template, UNKNOWN_MODEL, str(answer.status_code))
        return answer

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """The process is alive. `degraded` names what it has to do without."""
        lacking = _lacking(pooling, state, reloader)
        return {"status": "ok", **({"degraded": lacking} if lacking else {})}

    @app.get("/ready", responses=UNREADY)
    async def ready() -> JSONResponse:
        """Whether a request could be routed now, and if not, why. `degraded`: as in `/health`."""
        reasons = unready_reasons(driver, readiness)
        lacking = _lacking(pooling, state, reloader)
        degraded = {"degraded": lacking} if lacking else {}
        config = {"config_hash": reloader.digest} if reloader is not None else {}
        body = {"ready": not reasons, "reasons": reasons, **degraded, **config}
        return JSONResponse(body, status_code=503 if reasons else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def scrape() -> Response:
        if views is None:
            return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
        told = await views.gather("metrics")
        families = merged_metrics.merge([merged_metrics.read(said) for said in told.values()])
        return Response(merged_metrics.exposition(families), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        listed = list_models(core, live.current.models.aliases, tenant_of(request))
        if not listed["data"]:
            raise GatewayError(503, "no instance is up", "no_instance")
        return listed

    @app.get("/admin/instances")
    async def instances() -> dict[str, Any]:
        """Address, origin, state, role, trust, load and tokens held, of each instance."""
        return {"instances": [instance_as_json(driver, roster, state) for state in core.fleet]}

    @app.get("/admin/index")
    async def index() -> dict[str, Any]:
        """Blocks held, and the state of each event source."""
        pool = {"pool": pooling.as_json()} if pooling is not None else {}
        return {**_index_as_json(driver, monitor), **pool}

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        """A parameter has a value that it can't have."""
        first = error.errors()[0]
        name = str(first["loc"][-1])
        refusal = GatewayError(400, f"{name}: {first['msg']}", "invalid_request", name)
        return _refusal(refusal)

    @app.exception_handler(GatewayError)
    async def refused(_: Request, error: GatewayError) -> Response:
        return _refusal(error)

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: ClientDisconnect) -> Response:
        """Nobody receives this; but without it the server would report a bug."""
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def not_here(request: Request, error: HTTPException) -> Response:
        if not request.url.path.startswith("/v1/"):  # those are counted where they are answered
            metrics.requests.add(1, UNMATCHED_ROUTE, UNKNOWN_MODEL, str(error.status_code))
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        body = error_body(message, error.status_code, _code_of(error.status_code))
        return _error_response(error.status_code, body, error.headers or {})

    return app


def _refused_caller(request: Request, error: GatewayError, metrics: Metrics) -> Response:
    """Count and answer a request by whoever may not call. What was asked for is not looked at."""
    if error.code in SHED_CODES:
        metrics.rejected.add(1, error.code)
        metrics.requests.add(1, UNMATCHED_ROUTE, UNKNOWN_MODEL, str(error.status))
    body = error.body(family_of(request.url.path))
    return _error_response(error.status, body, error.headers)


def _refusal(error: GatewayError) -> Response:
    return _error_response(error.status, error.body(), error.headers)


def _error_response(status: int, body: bytes, headers: Mapping[str, str]) -> Response:
    return Response(body, status, dict(headers), media_type="application/json")


def _code_of(status: int) -> str:
    return {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")


def _lacking(
    pooling: Pooling | None, state: SharedState | None, reloader: Reloader | None
) -> list[str]:
    """Return what should be there and isn't: requests are served all the same."""
    lacks_pool = pooling is not None and not pooling.health.is_up
    lacks_redis = state is not None and not state.is_up
    lacks_config = reloader is not None and bool(reloader.problems)
    return ["pool"] * lacks_pool + ["redis"] * lacks_redis + ["configuration"] * lacks_config


def unready_reasons(driver: Driver, readiness: Readiness) -> list[str]:
    reasons: list[str] = []
    if readiness.is_draining:
        reasons.append("the gateway is stopping")
    fleet = list(driver.core.fleet)
    up = [i for i in fleet if i.is_healthy and i.facts is not None and not i.is_draining]
    if not up:
        names = ", ".join(i.spec.id for i in fleet) or "none is known"
        reasons.append(f"no instance is up ({names})")
    elif all(i.spec.role is Role.PREFILL for i in up):
        reasons.append("no instance that decodes is up, only some that prefill")
    return reasons


def instance_as_json(driver: Driver, roster: Roster, state: InstanceState) -> dict[str, Any]:
    """Return what `/admin/instances` says of an instance. Tokens of each cache, by tier."""
    core, listing = driver.core, roster.describe(state.spec.id)
    size = core.candidates.block_size_tokens(state)
    blocks = state.facts.capacity_blocks if state.facts is not None else None
    return {
        "id": state.spec.id,
        "url": listing.url,
        "origin": listing.origin.value,
        "lease_s_left": listing.lease_s_left,
        "role": state.spec.role.value,
        "weight": state.spec.weight,
        "state": _state_of(state, driver.clock()),
        "slowness": round(state.latency.slowness, 2),
        "breaker": {
            "state": state.breaker.state(driver.clock()).name.lower(),
            "openings": state.breaker.openings,
        },
        "models": [card.name for card in state.facts.models] if state.facts is not None else [],
        "block_size_tokens": size,
        "capacity_tokens": blocks * size if blocks is not None and size is not None else None,
        "caches": [
            {
                "rank": holder.rank,
                "trust": core.sources.trust(holder).name.lower(),
                "active_requests": core.loads.get(holder).active_requests,
                "queued_prefill_tokens": core.loads.get(holder).queued_prefill_tokens,
                "tokens_held": _tokens_held(driver, holder, size),
                "predicted_tokens": _predicted_tokens(driver, holder, size),
            }
            for holder in state.holders
        ],
    }


def _tokens_held(driver: Driver, holder: Holder, block_size_tokens: int | None) -> dict[str, int]:
    index = driver.core.index
    if block_size_tokens is None or not index.has_holder(holder):
        return {tier.value: 0 for tier in Tier}
    return {tier.value: index.count(holder, tier) * block_size_tokens for tier in Tier}


def _predicted_tokens(driver: Driver, holder: Holder, block_size_tokens: int | None) -> int:
    """Return what is assumed beyond that, after forwards that no event has confirmed yet."""
    index = driver.core.index
    if block_size_tokens is None or not index.has_holder(holder):
        return 0
    return index.predicted_count(holder) * block_size_tokens


def _state_of(state: InstanceState, now: float) -> str:
    if state.is_draining:
        return "draining"
    if state.facts is None and not state.is_healthy:
        return "down" if state.was_probed else "unknown"
    if not state.is_healthy:
        return "down"
    return "up" if state.breaker.lets_through(now) else "suspended"


def _index_as_json(driver: Driver, monitor: Monitor) -> dict[str, Any]:
    core = driver.core
    sources = []
    for source, state in core.sources:
        subscriber = monitor.subscribers.get(source)
        feed, counts = state.feed, state.ledger.counts
        sources.append(
            {
                "instance": source.instance_id,
                "publisher": source.publisher,
                "cache": str(state.ledger.holder),
                "endpoint": subscriber.publisher.endpoint if subscriber is not None else None,
                "trust": feed.trust.name.lower(),
                "epoch": feed.epoch,
                "next_sequence": feed.expected,
                "block_size_tokens": state.ledger.block_size_tokens,
                "blocks": {t.value: core.index.count(state.ledger.holder, t) for t in Tier},
                "batches": feed.counts.batches,
                "duplicates": feed.counts.duplicates,
                "gaps": feed.counts.gap_batches,
                "lost": feed.counts.lost_batches,
                "resyncs": feed.counts.replays,
                "restarts": feed.counts.restarts,
                "orphan_blocks": counts.orphan_blocks,
                "malformed_events": counts.malformed_events,
                "refused_blocks": counts.refused_blocks,
                "unreadable_messages": dict(subscriber.unreadable) if subscriber else {},
            }
        )
    predicted = {str(h): core.index.predicted_count(h) for h in core.index.holders}
    return {"blocks": core.index.total, "predicted_blocks": predicted, "sources": sources}
