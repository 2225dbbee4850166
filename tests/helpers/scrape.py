"""A gateway's `/metrics`, read as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

CONTRACT: Mapping[str, frozenset[str]] = {
    name: frozenset(labels)
    for name, labels in {
        "moongate_requests_total": ("route", "model", "code"),
        "moongate_inflight_requests": ("instance",),
        "moongate_routed_total": ("instance", "policy", "reason"),
        "moongate_route_seconds": (),
        "moongate_tokenize_seconds": ("mode",),
        "moongate_ttft_seconds": ("instance",),
        "moongate_e2e_seconds": (),
        "moongate_prompt_tokens_total": ("source",),
        "moongate_delivered_cached_tokens_total": (),
        "moongate_index_blocks": ("instance", "tier"),
        "moongate_index_events_total": ("instance", "kind"),
        "moongate_index_gaps_total": ("instance",),
        "moongate_index_trust": ("instance",),
        "moongate_instance_up": ("instance",),
        "moongate_queue_requests": (),
        "moongate_rejected_total": ("reason",),
        "moongate_retries_total": ("reason",),
        "moongate_pd_handoffs_total": ("result",),
        "moongate_pool_lookup_seconds": (),
        "moongate_pool_up": (),
        "moongate_redis_up": (),
        "moongate_pool_key_mismatch_total": (),
        "moongate_route_fallback_total": ("reason",),
        "moongate_config_reloads_total": ("result",),
    }.items()
}
"""The names and labels that people rely on (INTERFACE, section 6)."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """The series of one scrape: labels by the name of a sample."""

    series: Mapping[str, list[dict[str, str]]]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        series: dict[str, list[dict[str, str]]] = {}
        for family in text_string_to_metric_families(text):
            series.setdefault(family.name, [])
            if family.type == "counter":
                series.setdefault(f"{family.name}_total", [])
            for sample in family.samples:
                series.setdefault(sample.name, []).append(sample.labels)
        return cls(series)

    @property
    def count(self) -> int:
        return sum(len(labels) for labels in self.series.values())

    def labels(self, name: str) -> set[str]:
        """Return the names of a sample's labels."""
        return {key for labels in self.series[name] for key in labels}

    def values(self, label: str) -> set[str]:
        """Return all values that a label has anywhere."""
        return {
            labels[label] for found in self.series.values() for labels in found if label in labels
        }


async def scrape(client: httpx.AsyncClient) -> Scrape:
    return Scrape.parse((await client.get("/metrics")).text)
