"""Plain numbers, as the Prometheus page shows them."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moongate.gateway.telemetry.tallies import Distribution, Tally

LABELS = ("kind", "code", "way", "le")


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return what a scrape of the page reads: values by name and labels' values."""
    page = generate_latest(registry).decode()
    return {
        (
            sample.name,
            tuple(sample.labels[name] for name in LABELS if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_a_tally_counts_by_its_labels() -> None:
    registry = CollectorRegistry()
    tally = Tally("x", "Things", ["kind", "code"], registry=registry)
    assert samples(registry) == {}
    tally.add(1, "a", "200")
    tally.add(2, "a", "200")
    tally.add(1, 'b"', "500")
    assert samples(registry) == {("x_total", ("a", "200")): 3.0, ("x_total", ('b"', "500")): 1.0}


def test_a_tally_tells_its_sum_for_the_first_labels() -> None:
    tally = Tally("x", "Things", ["kind", "code"], registry=CollectorRegistry())
    for kind, code, times in (("a", "200", 2), ("a", "500", 1), ("b", "200", 4)):
        tally.add(times, kind, code)
    assert [tally.total(), tally.total("a"), tally.total("a", "500"), tally.total("c")] == [
        7,
        3,
        1,
        0,
    ]


def test_a_tally_without_labels_is_zero_from_the_start() -> None:
    registry = CollectorRegistry()
    tally = Tally("x", "Things", registry=registry)
    assert samples(registry) == {("x_total", ()): 0.0}
    tally.add(5)
    assert samples(registry) == {("x_total", ()): 5.0}


def test_a_distribution_has_cumulative_buckets_a_sum_and_a_count() -> None:
    registry = CollectorRegistry()
    took = Distribution("t", "Time", ["way"], buckets=(0.5, 1, 2), registry=registry)
    for seconds in (0.1, 0.5, 0.6, 2.0, 9.0):
        took.observe(seconds, "a")
    assert samples(registry) == {
        ("t_bucket", ("a", "0.5")): 2.0,  # a bound belongs to its bucket
        ("t_bucket", ("a", "1.0")): 3.0,
        ("t_bucket", ("a", "2.0")): 4.0,
        ("t_bucket", ("a", "+Inf")): 5.0,
        ("t_count", ("a",)): 5.0,
        ("t_sum", ("a",)): 12.2,
    }


def test_a_distribution_without_labels_is_there_from_the_start() -> None:
    registry = CollectorRegistry()
    took = Distribution("t", "Time", buckets=(1,), registry=registry)
    assert samples(registry)["t_count", ()] == 0.0
    took.observe(3.0)
    assert samples(registry)["t_bucket", ("+Inf",)] == 1.0
