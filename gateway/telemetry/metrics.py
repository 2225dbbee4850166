"""Prometheus metrics: counters that the edge keeps, and gauges read from the core when scraped.

Names and labels are the contract's (INTERFACE, section 6). No label holds a text that a client
chose: models that no instance serves share one value, routes are named by their templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moongate.gateway.auth.rates import Measure
from moongate.gateway.instances.monitor import Monitor
from moongate.gateway.pool.pooling import Pooling
from moongate.gateway.pool.seeding import SeedingResult
from moongate.gateway.prompts.divergence import Divergence
from moongate.gateway.prompts.prompt import PromptPipeline
from moongate.gateway.prompts.prompt_outline import Cause
from moongate.gateway.proxy.handing_over import HandoffResult
from moongate.gateway.replicas.shared_state import SharedState
from moongate.gateway.telemetry import merged_metrics
from moongate.gateway.telemetry.receipt import Receipt
from moongate.gateway.telemetry.tallies import Distribution, Tally
from moongate.gateway.telemetry.trace_export import TraceResult
from moongate.router import FailureKind, RouterCore, Tier

SHED_CODES = frozenset(
    {
        "no_instance", "queue_full", "queue_timeout", "gateway_pool", "body_too_large", "headers_too_large",
        "invalid_api_key", *(measure.value for measure in Measure),
    }
)  # fmt: skip
"""Refusals for want of room or of rights, which `moongate_rejected_total` counts by reason."""

UNKNOWN_MODEL = "unknown"
UNMATCHED_ROUTE = "unmatched"

SECONDS_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 4, 6, 10, 15, 20, 30, 60, 120, 300, 600,
)  # fmt: skip
"""From a prefix that is held, to 180 K tokens computed on one GPU (some 20 s) or on a processor."""

DECISION_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)
SETTLE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
POOL_BUCKETS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1)
TOKENIZE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 4)
TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536, 131_072, 262_144)


class Metrics:
    """What the edge counts. `registry` is this gateway's own, so that tests can have several."""

    def __init__(
        self, core: RouterCore, prompts: PromptPipeline, clock: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Tally(
            "moongate_requests", "Requests answered", ["route", "model", "code"], registry=r
        )
        self.routed = Tally(
            "moongate_routed", "Requests forwarded", ["instance", "policy", "reason"], registry=r
        )
        self.route_seconds = Distribution(
            "moongate_route_seconds", "Time to decide", buckets=DECISION_BUCKETS, registry=r
        )
        self.tokenize_seconds = Distribution(
            "moongate_tokenize_seconds", "Time until a prompt was read, by how it is known",
            ["mode"], buckets=TOKENIZE_BUCKETS, registry=r,
        )  # fmt: skip
        self.settle_seconds = Distribution(
            "moongate_settle_seconds", "Time that turns waited for events of the turn before",
            buckets=SETTLE_BUCKETS, registry=r,
        )  # fmt: skip
        self.queue_seconds = Distribution(
            "moongate_queue_seconds", "Time that requests waited for an instance with room",
            buckets=SECONDS_BUCKETS, registry=r,
        )  # fmt: skip
        self.ttft_seconds = Distribution(
            "moongate_ttft_seconds", "Time from a request's arrival to its answer's first byte",
            ["instance"], buckets=SECONDS_BUCKETS, registry=r,
        )  # fmt: skip
        self.e2e_seconds = Distribution(
            "moongate_e2e_seconds", "Time from a request's arrival to its answer's end",
            buckets=SECONDS_BUCKETS, registry=r,
        )  # fmt: skip
        self.prompt_tokens = Tally(
            "moongate_prompt_tokens", "Prompt tokens, by where routing expected them to come from",
            ["source"], registry=r,
        )  # fmt: skip
        self.delivered_cached_tokens = Tally(
            "moongate_delivered_cached_tokens", "Cached prompt tokens that engines reported",
            registry=r,
        )  # fmt: skip
        self.reuse_error_tokens = Distribution(
            "moongate_reuse_error_tokens",
            "By how many tokens an engine's reported reuse was less or more than routing expected",
            ["direction"], buckets=TOKEN_BUCKETS, registry=r,
        )  # fmt: skip
        self.delivered_pool_tokens = Tally(
            "moongate_delivered_pool_tokens",
            "Prompt tokens that engines reported to have from the pool", registry=r,
        )  # fmt: skip
        self.rejected = Tally(
            "moongate_rejected", "Requests refused by the gateway", ["reason"], registry=r
        )
        self.retries = Tally(
            "moongate_retries", "Attempts repeated elsewhere", ["reason"], registry=r
        )
        self.handoffs = Tally(
            "moongate_pd_handoffs", "Hand-offs from prefill to decode, by how they ended",
            ["result"], registry=r,
        )  # fmt: skip
        self.ids_forwarded = Tally(
            "moongate_ids_forwarded", "Attempts that took the prompt's token ids to the engine",
            ["instance"], registry=r,
        )  # fmt: skip
        self.broken_off = Tally(
            "moongate_broken_off", "Answers that an engine ended before they were complete",
            ["instance"], registry=r,
        )  # fmt: skip
        self.route_fallback = Tally(
            "moongate_route_fallback", "Prompts that could not be read exactly", ["reason"],
            registry=r,
        )  # fmt: skip
        self.divergences = Tally(
            "moongate_prefix_divergences", "Turns that did not begin like the turn before",
            ["cause"], registry=r,
        )  # fmt: skip
        self.diverged_tokens = Tally(
            "moongate_prefix_lost_tokens", "Prompt tokens that could not be reused for that",
            ["cause"], registry=r,
        )  # fmt: skip
        self.traces = Tally(
            "moongate_traces", "Traces recorded, by what became of them", ["result"], registry=r
        )
        self.seedings = Tally(
            "moongate_seedings", "Hot prefixes put onto one more instance, by how that ended",
            ["result"], registry=r,
        )  # fmt: skip
        self.pool_lookup_seconds = Distribution(
            "moongate_pool_lookup_seconds", "Time that a turn's look-up in the pool took",
            buckets=POOL_BUCKETS, registry=r,
        )  # fmt: skip
        self._begin_at_zero()
        r.register(_CurrentState(core, prompts, clock))

    def _begin_at_zero(self) -> None:
        """Let what is alarming when it first happens be there before it does."""
        self.prompt_tokens.begin("device", "pool", "recompute")
        self.rejected.begin(*sorted(SHED_CODES))
        self.retries.begin(*(kind.value for kind in FailureKind))
        self.handoffs.begin(*(result.value for result in HandoffResult))
        self.divergences.begin(*(cause.value for cause in Cause))
        self.diverged_tokens.begin(*(cause.value for cause in Cause))
        self.seedings.begin(*(result.value for result in SeedingResult))
        self.traces.begin(*(result.value for result in TraceResult))

    def note_reuse(self, receipt: Receipt) -> None:
        """Compare what was expected with what the engine reported, if it did."""
        error = receipt.reuse_error_tokens
        if error is not None:
            direction = "exact" if error == 0 else "less" if error < 0 else "more"
            self.reuse_error_tokens.observe(abs(error), direction)

    def note_traces(self, count: int, result: TraceResult) -> None:
        self.traces.add(count, result.value)

    def note_divergence(self, found: Divergence) -> None:
        cause = found.difference.cause.value
        self.divergences.add(1, cause)
        self.diverged_tokens.add(found.lost_tokens, cause)

    async def tell(self, _: bytes) -> bytes:
        """Return all of them, for another worker (`merged_metrics.py`)."""
        return merged_metrics.encode(merged_metrics.snapshot(self.registry))

    def watch(
        self, monitor: Monitor, pooling: Pooling | None, state: SharedState | None = None
    ) -> None:
        """Show as well what engines report of themselves, and the pool and Redis if there are any."""
        self.registry.register(_Reported(monitor, pooling, state))


class _CurrentState(Collector):
    """Reads the core and the prompt pipeline at the time of the scrape, so that nothing is counted twice."""

    def __init__(
        self, core: RouterCore, prompts: PromptPipeline, clock: Callable[[], float]
    ) -> None:
        self._core = core
        self._prompts = prompts
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        yield from self._instance_metrics()
        yield from self._index_metrics()
        admission, reading = self._core.admission, self._prompts.waiting
        held = len(admission.queue) if admission is not None else 0
        yield GaugeMetricFamily(
            "moongate_queue_requests", "Requests that wait before they are forwarded",
            reading + held,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "moongate_reading_requests", "Of these, those whose prompt is being read", reading
        )
        memory = GaugeMetricFamily("moongate_prompt_memory_bytes", "What was tokenised before")
        memory.add_metric([], self._prompts.memory_bytes)
        yield memory
        if self._core.outbox.is_open:
            yield GaugeMetricFamily(
                "moongate_peers", "Other gateways whose load is known", float(len(self._core.peers))
            )

    def _instance_metrics(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("moongate_instance_up", "1 if healthy", labels=["instance"])
        inflight = GaugeMetricFamily(
            "moongate_inflight_requests", "Requests forwarded and unfinished", labels=["instance"]
        )
        trust = GaugeMetricFamily(
            "moongate_index_trust", "2 exact, 1 degraded, 0 approximate", labels=["instance"]
        )
        breakers = GaugeMetricFamily(
            "moongate_breaker_state", "0 closed, 1 half open, 2 open", labels=["instance"]
        )
        openings = CounterMetricFamily(
            "moongate_breaker_openings", "Times that an instance's breaker opened",
            labels=["instance"],
        )  # fmt: skip
        slowness = GaugeMetricFamily(
            "moongate_instance_slowness",
            "How many times later first bytes come than from others; 1: like them",
            labels=["instance"],
        )  # fmt: skip
        now = self._clock()
        for instance in self._core.fleet:
            name, holders = [instance.spec.id], instance.holders
            breakers.add_metric(name, float(instance.breaker.state(now)))
            openings.add_metric(name, instance.breaker.openings)
            slowness.add_metric(name, instance.latency.slowness)
            up.add_metric(name, float(instance.is_healthy and instance.facts is not None))
            loads = (self._core.loads.get_own(holder).active_requests for holder in holders)
            inflight.add_metric(name, sum(loads))
            trust.add_metric(name, min(self._core.sources.trust(holder) for holder in holders))
        yield from (up, inflight, trust, breakers, openings, slowness)

    def _index_metrics(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "moongate_index_blocks", "Blocks held, as announced", labels=["instance", "tier"]
        )
        for instance in self._core.fleet:
            known = set(self._core.index.holders)
            for tier in Tier:
                held = sum(self._core.index.count(h, tier) for h in instance.holders if h in known)
                blocks.add_metric([instance.spec.id, tier.value], held)
        yield blocks
        events = CounterMetricFamily(
            "moongate_index_events", "Blocks in KV events, by what became of them",
            labels=["instance", "kind"],
        )  # fmt: skip
        gaps = CounterMetricFamily(
            "moongate_index_gaps", "Event batches found missing", labels=["instance"]
        )
        for instance in self._core.fleet:
            states = self._core.sources.of(instance.spec.id)
            counts = [state.ledger.counts for state in states]
            for kind, count in (
                ("stored", sum(c.stored_blocks for c in counts)),
                ("removed", sum(c.removed_blocks for c in counts)),
                ("orphan", sum(c.orphan_blocks for c in counts)),
                ("ignored", sum(c.ignored_blocks for c in counts)),
                ("malformed", sum(c.malformed_events for c in counts)),
            ):
                events.add_metric([instance.spec.id, kind], count)
            gaps.add_metric([instance.spec.id], sum(s.feed.counts.gap_batches for s in states))
        yield from (events, gaps)


class _Reported(Collector):
    """What engines and the pool say of themselves."""

    def __init__(
        self, monitor: Monitor, pooling: Pooling | None, state: SharedState | None
    ) -> None:
        self._monitor = monitor
        self._pooling = pooling
        self._state = state

    def collect(self) -> Iterable[Metric]:
        yield self._cached_tokens()
        if self._pooling is not None:
            yield from _pool_metrics(self._pooling)
        if self._state is not None:
            yield GaugeMetricFamily(
                "moongate_redis_up", "1 if Redis answers", float(self._state.is_up)
            )

    def _cached_tokens(self) -> Metric:
        cached = CounterMetricFamily(
            "moongate_engine_cached_tokens",
            "Prompt tokens that the engine did not compute, as it reports, by where it had them from",
            labels=["instance", "source"],
        )
        for instance_id, by_source in self._monitor.cached_by_source.items():
            for source, tokens in by_source.items():
                cached.add_metric([instance_id, source], tokens)
        return cached


def _pool_metrics(pooling: Pooling) -> Iterator[Metric]:
    state, counts, health = pooling.health.state, pooling.counts, pooling.health
    gauges: tuple[tuple[str, str, float | None], ...] = (
        ("moongate_pool_up", "1 if the pool answers", float(health.is_up)),
        ("moongate_pool_keys", "Keys in the pool", state.key_count if state else None),
        ("moongate_pool_bytes", "Bytes in the pool", state.allocated_bytes if state else None),
        ("moongate_pool_capacity_bytes", "Its size", state.capacity_bytes if state else None),
    )
    for name, text, value in gauges:
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)
    for name, text, count in (
        ("moongate_pool_lookups", "Prompts looked up in the pool", counts.lookups),
        ("moongate_pool_asked_keys", "Keys that the pool was asked for", counts.asked_keys),
        ("moongate_pool_round_trips", "Calls that this took", counts.round_trips),
        ("moongate_pool_failures", "Checks and look-ups without an answer", health.counts.failures),
        ("moongate_pool_overruns", "Look-ups that took more than their budget",
         health.counts.overruns),
        ("moongate_pool_restarts", "Times that the pool had lost everything", health.counts.restarts),
        ("moongate_pool_key_mismatch", "Stored blocks that aren't under the keys made here",
         counts.key_mismatches),
        ("moongate_pool_shortfalls", "Answers for which the engine reused less than was expected",
         counts.shortfalls),
    ):  # fmt: skip
        yield CounterMetricFamily(name, text, value=count)
