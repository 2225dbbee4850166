"""The metrics of several workers as those of one gateway.

What each counts for itself is summed, histograms as well. What all of them watch alike (an instance, its
events, the pool) would be counted as often as there are workers: of that the highest count stands, and of
what says whether something is well the least. Counts of a worker that has ended stay (`Retired`), so that
no sum ever falls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

WATCHED_COUNTERS = frozenset(
    {
        "moongate_index_events",
        "moongate_index_gaps",
        "moongate_engine_cached_tokens",
        "moongate_pool_restarts",
        "moongate_config_reloads",
        "moongate_discovery_lookups",
    }
)
"""Counts of what happened elsewhere, which every worker sees."""

SUMMED_GAUGES = frozenset(
    {
        "moongate_inflight_requests",
        "moongate_queue_requests",
        "moongate_reading_requests",
        "moongate_prompt_memory_bytes",
    }
)
LEAST_GAUGES = frozenset(
    {"moongate_instance_up", "moongate_index_trust", "moongate_pool_up", "moongate_redis_up"}
)
"""Others are read of what all see alike, and the highest value stands."""

Labels = tuple[tuple[str, str], ...]


class _Sample(msgspec.Struct, array_like=True, frozen=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True, frozen=True):
    """One metric of one worker."""

    name: str
    text: str
    kind: str  # counter, gauge or histogram
    samples: list[_Sample]

    @property
    def is_counted(self) -> bool:
        return self.kind in ("counter", "histogram")


encode = msgspec.msgpack.Encoder().encode
read = msgspec.msgpack.Decoder(list[Family]).decode

NOTHING = encode([])
"""Of a worker that has nothing to tell."""


def snapshot(registry: CollectorRegistry) -> list[Family]:
    """Return all metrics as they are."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [_Sample(s.name, dict(s.labels), s.value) for s in metric.samples],
        )
        for metric in registry.collect()
    ]


def merge(snapshots: Sequence[Sequence[Family]]) -> list[Family]:
    """Return the metrics of all together."""
    by_name: dict[str, list[Family]] = {}
    for families in snapshots:
        for family in families:
            by_name.setdefault(family.name, []).append(family)
    return [_merge_one(families) for families in by_name.values()]


def exposition(families: Iterable[Family]) -> bytes:
    """Return the page that is scraped."""
    registry = CollectorRegistry()
    registry.register(_Merged(families))
    return generate_latest(registry)


class Retired:
    """What workers that have ended had counted, and what those that run had when they were last asked."""

    def __init__(self) -> None:
        self._running: dict[str, list[Family]] = {}
        self._ended: list[Family] = []

    def note(self, peer: str, families: Sequence[Family]) -> None:
        self._running[peer] = [family for family in families if family.is_counted]

    def end(self, peer: str) -> None:
        self._ended = merge([self._ended, self._running.pop(peer, [])])

    @property
    def families(self) -> list[Family]:
        return self._ended


def _merge_one(families: Sequence[Family]) -> Family:
    name, kind = families[0].name, families[0].kind
    if name in LEAST_GAUGES:
        combine = min
    elif name in WATCHED_COUNTERS or (kind == "gauge" and name not in SUMMED_GAUGES):
        combine = max
    else:
        combine = sum  # type: ignore[assignment]
    values: dict[tuple[str, Labels], list[float]] = {}
    for family in families:
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            values.setdefault(key, []).append(sample.value)
    samples = [_Sample(key, dict(labels), combine(said)) for (key, labels), said in values.items()]
    return Family(name, families[0].text, kind, samples)


class _Merged(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for sample in family.samples:
                labels: Mapping[str, str] = sample.labels
                metric.add_sample(sample.name, dict(labels), sample.value)
            yield metric
