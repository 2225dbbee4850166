"""The gateway as one ASGI application: constructs the parts and wires them, in one place."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import FastAPI

from moongate import __version__
from moongate.gateway.admin.api_admin import Readiness, make_admin_app, unready_reasons
from moongate.gateway.admin.api_decisions import make_decision_route
from moongate.gateway.admin.api_explain import make_explain_route
from moongate.gateway.admin.api_instances import make_instance_routes
from moongate.gateway.admin.api_live import make_live_routes
from moongate.gateway.admin.api_reload import make_reload_routes
from moongate.gateway.admin.api_responses import make_response_routes
from moongate.gateway.admin.live import LiveFeed
from moongate.gateway.admin.live_view import LiveView
from moongate.gateway.auth.access import Access
from moongate.gateway.client_protocol import ClientRequest
from moongate.gateway.config.config_file import Loaded
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.config.reload import Reloader, ReloadMetrics
from moongate.gateway.config.settings import Settings
from moongate.gateway.driver import Driver, Recorder
from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import clean_request_id, make_request_id, read_headers
from moongate.gateway.instances.dns_discovery import DiscoveryMetrics, DnsDiscovery
from moongate.gateway.instances.dns_names import Resolve, Resolver
from moongate.gateway.instances.engine_api import EngineApi
from moongate.gateway.instances.links import Links
from moongate.gateway.instances.monitor import Monitor
from moongate.gateway.instances.roster import Roster
from moongate.gateway.pool.pooling import Pooling
from moongate.gateway.pool.seeding import Seeding
from moongate.gateway.prompts.divergence import Divergence, Divergences
from moongate.gateway.prompts.prompt import PromptPipeline
from moongate.gateway.proxy.hotpath import HotPath
from moongate.gateway.replicas.peering import Peering
from moongate.gateway.replicas.shared_rates import SharedRates
from moongate.gateway.replicas.shared_registry import SharedRegistry
from moongate.gateway.replicas.shared_state import SharedState
from moongate.gateway.replicas.worker_views import WorkerViews
from moongate.gateway.responses.response_sharing import SharedResponses
from moongate.gateway.responses.response_store import ResponseStore
from moongate.gateway.responses.response_turns import ResponseTurns
from moongate.gateway.telemetry.logs import use_format
from moongate.gateway.telemetry.merged_metrics import NOTHING
from moongate.gateway.telemetry.metrics import Metrics
from moongate.gateway.telemetry.otlp import resource
from moongate.gateway.telemetry.recent_turns import RecentTurns
from moongate.gateway.telemetry.trace_export import TraceExporter
from moongate.gateway.telemetry.tracing import Tracing
from moongate.kvpool.members import KeyRules
from moongate.kvpool.memory import MemoryPool
from moongate.kvpool.mooncake import MooncakeMaster
from moongate.kvpool.store import PoolStore
from moongate.router import (
    PeerId,
    Reconfigured,
    RouterCore,
    RouterLimits,
    SeedingLimits,
    make_policy,
)
from moongate.router.policy import BUILT_IN, Policy

logger = logging.getLogger(__name__)

MEMORY_POOL_BYTES = 1 << 30
"""Of a pool in this process that nobody has given: no engine can reach it, so it stays empty."""

POOL_TIMEOUT_S = 2.0
"""For a call to the pool's master that no turn waits for; those have their own, shorter budget."""

WORKER_READY_S = 10.0
"""For a worker to find its instances before it listens."""

HUB_TIMEOUT_S = 0.05
"""For a call to the workers' hub on a request's way."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Gateway:
    """The application. Its sockets open with the server's lifespan and close with it.

    As an ASGI application it has the operators' routes; the proxied ones come from `ClientProtocol`
    to `answer` and `refuse`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        recorder: Recorder | None = None,
        pool: PoolStore | None = None,
        hub: str | None = None,
        loaded: Loaded | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        """`pool`: the one in this process, for `pool.kind: memory`. `hub`: the socket at which it meets
        other workers. `loaded`: the file of the settings, to be reloaded when it changes; None: they came
        from elsewhere, and stay. `resolve`: in place of DNS."""
        self._live = LiveSettings(settings)
        self._loaded = loaded
        self._resolve = resolve or Resolver().resolve
        self._pool = pool
        self.readiness = Readiness()
        chance = random.Random(secrets.randbits(64) if seed is None else seed)  # noqa: S311
        self._peer = PeerId(make_request_id())
        self._hub_path = hub
        self._has_looked = False  # this worker, at its instances
        self._hub: SharedState | None = None
        has_peers = settings.state.kind != "memory" or hub is not None
        self.core = make_core(settings, chance.randrange, self._peer if has_peers else None)
        self.driver = Driver(self.core, clock, recorder)
        self.access = Access(settings.auth, clock)
        self._clock = clock
        self._opened = AsyncExitStack()
        self._links: Links | None = None
        self._monitor: Monitor | None = None
        self._hot_path: HotPath | None = None
        self._pooling: Pooling | None = None
        self._state: SharedState | None = None
        self._exporter: TraceExporter | None = None
        self._admin: FastAPI | None = None
        self._view: LiveView | None = None
        self._reloader: Reloader | None = None

    @property
    def settings(self) -> Settings:
        """Return the settings in force."""
        return self._live.current

    @property
    def view(self) -> LiveView:
        assert self._view is not None, "the gateway has not been started"
        return self._view

    @property
    def monitor(self) -> Monitor:
        assert self._monitor is not None, "the gateway has not been started"
        return self._monitor

    async def start(self) -> None:
        """Open connections and begin to watch the instances. Call inside the event loop.

        Raises whatever failed; then `stop` closes what has been opened.
        """
        settings, driver, opened = self.settings, self.driver, self._opened
        self._links = Links(self._live)
        opened.push_async_callback(self._links.close)
        prompts = PromptPipeline(
            mode=settings.tokenizer.mode,
            path=settings.tokenizer.path,
            budget_s=settings.tokenizer.budget_ms / 1000,
            waiting_max=settings.limits.queue_requests_max,
            memory_bytes_max=settings.limits.prompt_memory_bytes_max,
            spaces=self.core.spaces,
            remotes=self._find_remotes,
            clock=self._clock,
        )
        opened.callback(prompts.close)
        opened.callback(driver.close)
        metrics = Metrics(self.core, prompts, self._clock)
        self._pooling = self._make_pooling(metrics)
        self._monitor = Monitor(
            driver, self._links, self._live, prompts, self._clock, self._pooling
        )
        opened.push_async_callback(self._monitor.close)
        seeding = self._make_seeding(metrics)
        await self._connect()
        turns = self._make_turns()
        metrics.watch(self._monitor, self._pooling, self._state)
        recent = RecentTurns()

        def note_divergence(found: Divergence) -> None:
            metrics.note_divergence(found)
            recent.note_divergence(found, self._clock())

        divergences = Divergences(note_divergence, keeps_text=settings.observability.keep_text)
        tracing = self._make_tracing(metrics)
        self._hot_path = HotPath(
            self._live, driver, self._links, prompts, metrics, turns, divergences, recent,
            self.access, self._pooling, seeding, tracing,
        )  # fmt: skip
        opened.push_async_callback(self._hot_path.close)
        roster = Roster(driver, self._links, self._monitor, self._clock, self._live)
        opened.push_async_callback(roster.close)
        views = self._make_views(metrics)
        discovery = DnsDiscovery(self._live, roster, self._resolve, self._clock)
        opened.push_async_callback(discovery.close)
        metrics.registry.register(DiscoveryMetrics(discovery))
        self._reloader = self._make_reloader(
            roster, discovery, prompts, divergences, tracing, metrics
        )
        if views is not None and self._reloader is not None:
            views.sources["reload"] = self._reloader.follow
        self._admin = make_admin_app(
            self._live, driver, self._monitor, metrics, self.readiness, roster, self.access,
            self._pooling, self._state, views, self._reloader,
        )  # fmt: skip
        self._admin.include_router(make_reload_routes(self._reloader, views))
        self._admin.include_router(make_instance_routes(roster))
        self._admin.include_router(make_response_routes(turns, self._hot_path.background))
        self._admin.include_router(
            make_explain_route(
                self._live, driver, prompts, turns, self.access, divergences, self._pooling
            )
        )
        self._view = LiveView(
            driver, roster, metrics, recent, prompts, self.readiness, self._pooling
        )
        feed = LiveFeed(self._view, lambda: self.readiness.is_draining)
        self._admin.include_router(make_live_routes(feed))
        self._admin.include_router(make_decision_route(self._hot_path.recent, views))
        if self._exporter is not None:
            self._exporter.start()
        if self._pooling is not None:
            self._pooling.start()
        self._monitor.start()
        roster.start()
        self._start_sharing(roster)
        self.access.start()
        opened.push_async_callback(self.access.close)
        discovery.start()
        if self._reloader is not None:
            self._reloader.start()
        if self._hub is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WORKER_READY_S):
                    await self._until_ready()
            self._has_looked = True

    def _make_reloader(
        self,
        roster: Roster,
        discovery: DnsDiscovery,
        prompts: PromptPipeline,
        divergences: Divergences,
        tracing: Tracing | None,
        metrics: Metrics,
    ) -> Reloader | None:
        """Return what takes changes of the file in, None without a file. Here is who is told of them."""
        if self._loaded is None:
            return None
        assert self._links is not None
        assert self._hot_path is not None
        links, hot_path, pooling = self._links, self._hot_path, self._pooling

        def renew(settings: Settings) -> None:
            links.follow_limits()
            hot_path.renew(settings)
            prompts.set_limits(
                budget_s=settings.tokenizer.budget_ms / 1000,
                waiting_max=settings.limits.queue_requests_max,
                memory_bytes_max=settings.limits.prompt_memory_bytes_max,
            )
            divergences.keep_text(keeps_text=settings.observability.keep_text)
            if tracing is not None:
                tracing.sample(settings.observability.sample_ratio)
            if pooling is not None:
                pooling.budget_s = settings.pool.lookup_budget_ms / 1000
            use_format(settings.observability.log_format)
            discovery.renew()

        reloader = Reloader(
            self._loaded,
            self._live,
            (self._prepare_core, self._prepare_access, roster.prepare),
            renew,
        )
        self._opened.push_async_callback(reloader.close)
        metrics.registry.register(ReloadMetrics(reloader))
        return reloader

    def _prepare_access(self, settings: Settings) -> Callable[[], None]:
        """Return what lets another file's keys hold. Raises: KeyUnreadable."""
        return self.access.prepare(settings.auth)

    def _prepare_core(self, settings: Settings) -> Callable[[], None]:
        """Return what lets the core route as another file says. Raises: PolicyError."""
        is_same_policy = settings.policy == self.settings.policy
        policy, others = (
            (self.core.policy, self.core.others) if is_same_policy else make_policies(settings)
        )
        event = Reconfigured(policy, others, make_limits(settings), make_seeding(settings))
        return functools.partial(self._reconfigure, event)

    def _reconfigure(self, event: Reconfigured) -> None:
        before = self.core.policy.name
        self.driver.handle(event)
        if self.core.policy.name != before:
            self.monitor.describe_all()  # which events are wanted is the policy's

    def reload_soon(self) -> None:
        """Read the configuration file again, as SIGHUP asks."""
        if self._reloader is not None:
            self._reloader.ask()
        else:
            logger.warning("SIGHUP: there is no configuration file to be read again")

    async def _until_ready(self) -> None:
        """Wait until each instance has been looked at once, and there is one to send to, if any is up.

        A worker that listened before would refuse what its siblings could serve.
        """
        while True:
            await asyncio.sleep(0.05)
            are_known = all(instance.was_probed for instance in self.core.fleet)
            is_any_up = any(instance.is_healthy for instance in self.core.fleet)
            is_ready = not unready_reasons(self.driver, self.readiness)
            if self.readiness.is_draining or (are_known and (is_ready or not is_any_up)):
                return

    async def _connect(self) -> None:
        """Meet other gateways, in Redis and at the hub, where there are some."""
        shared = self.settings.state
        if shared.url is not None:
            timeout_s = shared.timeout_ms / 1000
            self._state = SharedState(shared.url, timeout_s=timeout_s, clock=self._clock)
        if self._hub_path is not None:
            self._hub = SharedState(
                f"unix://{self._hub_path}", timeout_s=HUB_TIMEOUT_S, clock=self._clock,
                name=self._peer,
            )  # fmt: skip
        for state in (self._state, self._hub):
            if state is not None:
                self._opened.push_async_callback(state.close)
                await state.start()

    def _make_turns(self) -> ResponseTurns:
        stored, state = self.settings.responses, self._state or self._hub
        store = ResponseStore(stored.ttl_s, stored.bytes_max)
        bytes_max = self.settings.limits.body_bytes_max
        if state is None:
            return ResponseTurns(store, self._clock, body_bytes_max=bytes_max)
        responses = SharedResponses(store, state, stored.ttl_s)
        self._opened.push_async_callback(responses.close)
        return ResponseTurns(store, self._clock, responses, body_bytes_max=bytes_max)

    def _start_sharing(self, roster: Roster) -> None:
        """Begin to tell other gateways what this one does, and to heed what they do."""
        state = self._state or self._hub
        if state is None:
            return
        counters = SharedRates(state)
        self._opened.push_async_callback(counters.close)
        self.access.rates = counters
        peering = Peering(self.driver, state, self._peer)
        self._opened.push_async_callback(peering.close)
        peering.start()
        is_by_redis = self.settings.discovery.kind == "redis"
        registered = self._state if is_by_redis else self._hub
        if registered is not None:
            registry = SharedRegistry(roster, registered, self._peer, self._clock, time.time)
            self._opened.push_async_callback(registry.close)
            registry.start()

    def _make_views(self, metrics: Metrics) -> WorkerViews | None:
        """Return what answers for all workers; None where this process is all."""
        if self._hub is None:
            return None
        views = WorkerViews(self._hub, self._peer)

        async def tell(argument: bytes) -> bytes:
            # What isn't up for one that hasn't looked yet would be down for all.
            return await metrics.tell(argument) if self._has_looked else NOTHING

        views.sources["metrics"] = tell
        self._opened.push_async_callback(views.close)
        views.start()
        return views

    def _make_seeding(self, metrics: Metrics) -> Seeding | None:
        if self.core.seeder is None:
            return None
        assert self._links is not None
        seeding = Seeding(self.driver, self._links, metrics.seedings)
        self._opened.push_async_callback(seeding.close)
        return seeding

    def _make_tracing(self, metrics: Metrics) -> Tracing | None:
        """Return what begins and ends traces, None where nobody takes them."""
        settings = self.settings.observability
        if settings.otlp_endpoint is None:
            return None
        about = {
            "service.name": "moongate",
            "service.version": __version__,
            "service.instance.id": make_request_id(),
        }
        self._exporter = TraceExporter(
            settings.otlp_endpoint, settings.otlp_headers, resource(about), metrics.note_traces
        )
        self._opened.push_async_callback(self._exporter.close)
        return Tracing(self._exporter, settings.sample_ratio, self._clock)

    def _make_pooling(self, metrics: Metrics) -> Pooling | None:
        settings = self.settings.pool
        if settings.kind == "none":
            return None
        # Not `or`: a pool is as long as it has keys, and at first has none.
        store = self._pool if self._pool is not None else MemoryPool(MEMORY_POOL_BYTES)
        if settings.kind == "mooncake":
            store = MooncakeMaster(settings.master_url, timeout_s=POOL_TIMEOUT_S)
        pooling = Pooling(
            store,
            self.driver,
            self._clock,
            budget_s=settings.lookup_budget_ms / 1000,
            rules=KeyRules(
                settings.hash_seeds,
                settings.cache_prefix,
                settings.namespace,
                settings.shards.as_shards() if settings.shards is not None else None,
                settings.master,
            ),
            on_lookup=metrics.pool_lookup_seconds.observe,
        )
        self._opened.push_async_callback(pooling.close)
        return pooling

    async def drain(self) -> None:
        """Let responses in the background end within `drain.limit_s`. A cancellation ends that at once."""
        if self._hot_path is not None:
            await self._hot_path.background.drain(self.settings.drain.limit_s)

    async def stop(self) -> None:
        """Close what `start` opened, the last first. What can't be closed doesn't keep the others open."""
        await self._opened.aclose()

    def _find_remotes(self, model: str) -> list[EngineApi]:
        """Return the instances to be asked about prompts: those that have the model, the least loaded first."""
        instances = self.core.fleet.available(model, self._clock(), ())
        if not instances or self._links is None:
            return []
        loads = self.core.loads
        by_load = sorted(
            instances, key=lambda i: sum(loads.get(h).active_requests for h in i.holders)
        )
        return [self._links.get(instance.spec.id).api for instance in by_load]

    async def answer(self, client: ClientRequest) -> None:
        """Answer a request for a proxied route."""
        assert self._hot_path is not None
        await self._hot_path.answer(client)

    def refuse(self, client: ClientRequest, error: GatewayError) -> None:
        """Answer a request that can't be read."""
        assert self._hot_path is not None
        self._hot_path.refuse(client, error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        assert self._admin is not None
        is_secret = self.access.tenants.are_in
        await self._admin(scope, receive, _with_request_id(scope, send, is_secret))

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.start()
                except BaseException:
                    await self.stop()
                    raise
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return


def _with_request_id(scope: Scope, send: Send, is_secret: Callable[[bytes], bool]) -> Send:
    """Return a `send` that adds the request's id to the answer's headers, as on proxied routes."""
    if scope["type"] != "http":
        return send
    given = read_headers(scope["headers"]).get("x-request-id")
    request_id = clean_request_id(given, is_secret) or make_request_id()

    async def send_with_id(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
        await send(message)

    return send_with_id


def make_core(
    settings: Settings, random_below: Callable[[int], int], peer: PeerId | None = None
) -> RouterCore:
    """Return the routing core that the settings ask for. `peer`: see `RouterCore`."""
    policy, others = make_policies(settings)
    limits, seeding = make_limits(settings), make_seeding(settings)
    return RouterCore(policy, random_below, limits, others, seeding, peer=peer)


def make_policies(settings: Settings) -> tuple[Policy, Sequence[Policy]]:
    """Return the policy in force, and those that a request may name. Raises: PolicyError."""
    policy = make_policy(settings.policy.name, settings.policy.options)
    others: list[Policy] = []
    if settings.policy.allow_override:
        others = [make_policy(name) for name in BUILT_IN if name != policy.name]
    return policy, others


def make_limits(settings: Settings) -> RouterLimits:
    return RouterLimits(
        index_blocks_max=settings.limits.index_blocks_max,
        up_after=settings.health.up_after,
        down_after=settings.health.down_after,
        retry_after_s=settings.health.interval_s,
        retries_timeouts=settings.limits.retry_timeouts,
        breaker=settings.breaker.limits,
        admission=settings.admission.limits(settings.limits.queue_requests_max),
    )


def make_seeding(settings: Settings) -> SeedingLimits | None:
    return settings.pool.seeding.limits if settings.pool.kind != "none" else None
