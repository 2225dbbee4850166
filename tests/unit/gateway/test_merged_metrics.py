"""Several workers' metrics as one gateway's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from moongate.gateway.telemetry import merged_metrics
from moongate.gateway.telemetry.merged_metrics import Family, Retired, merge
from moongate.gateway.telemetry.tallies import Distribution, Tally


def told(requests: int, up: float, inflight: float, events: int) -> list[Family]:
    """Return what a worker tells, over the wire."""
    registry = CollectorRegistry()
    Tally("moongate_requests", "r", ["code"], registry=registry).add(requests, "200")
    seconds = Distribution("moongate_e2e_seconds", "s", buckets=(1, 2), registry=registry)
    for _ in range(requests):
        seconds.observe(1.5)

    class Seen:
        def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
            families: list[GaugeMetricFamily | CounterMetricFamily] = []
            for name, value in (
                ("moongate_instance_up", up),
                ("moongate_inflight_requests", inflight),
                ("moongate_index_blocks", 10 * inflight),
            ):
                families.append(GaugeMetricFamily(name, "g", labels=["instance"]))
                families[-1].add_metric(["a"], value)
            families.append(CounterMetricFamily("moongate_index_events", "c", value=events))
            return families

    registry.register(Seen())
    return merged_metrics.read(merged_metrics.encode(merged_metrics.snapshot(registry)))


def values(families: list[Family]) -> dict[str, float]:
    page = merged_metrics.exposition(families).decode()
    return {
        sample.name + "".join(f"{{{v}}}" for v in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_what_each_counts_is_summed_and_what_all_see_is_not() -> None:
    found = values(merge([told(3, 1.0, 2.0, 100), told(4, 0.0, 1.0, 90)]))
    assert found == {
        "moongate_requests_total{200}": 7.0,
        "moongate_e2e_seconds_bucket{1.0}": 0.0,
        "moongate_e2e_seconds_bucket{2.0}": 7.0,
        "moongate_e2e_seconds_bucket{+Inf}": 7.0,
        "moongate_e2e_seconds_count": 7.0,
        "moongate_e2e_seconds_sum": 10.5,
        "moongate_instance_up{a}": 0.0,
        "moongate_inflight_requests{a}": 3.0,
        "moongate_index_blocks{a}": 20.0,
        "moongate_index_events_total": 100.0,
    }


def test_one_alone_is_as_it_is() -> None:
    one = told(3, 1.0, 2.0, 100)
    assert values(merge([one])) == values(one)


def test_counts_of_a_worker_that_ended_stay_and_its_gauges_do_not() -> None:
    retired = Retired()
    retired.note("p", told(3, 1.0, 2.0, 100))
    retired.note("p", told(5, 1.0, 2.0, 110))
    retired.note("q", told(1, 1.0, 2.0, 1))
    assert retired.families == []
    retired.end("p")
    retired.end("p")
    found = values(merge([retired.families, told(1, 1.0, 0.0, 7)]))
    assert found["moongate_requests_total{200}"] == 6.0
    assert found["moongate_inflight_requests{a}"] == 0.0
    assert found["moongate_index_events_total"] == 110.0
