"""Counters and histograms as plain numbers, turned into Prometheus metrics when they are scraped.

By hand and not the client library's own, whose locks and label look-ups were a seventh of what a small
request costs (docs/decisions/0007). One thread counts, the event loop's; the library still writes the
page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


class Tally(Collector):
    """A counter, one for each combination of its labels' values that came up."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self._describes = (name, text, tuple(labels))
        self._counts: dict[Labels, float] = {} if labels else {(): 0.0}
        registry.register(self)

    def begin(self, *values: str) -> None:
        """Show each of these values of its one label from the start, so that its first rise is seen as one."""
        self._counts = {**{(value,): 0.0 for value in values}, **self._counts}

    def add(self, amount: float, *labels: str) -> None:
        self._counts[labels] = self._counts.get(labels, 0.0) + amount

    def total(self, *labels: str) -> float:
        """Return the sum over all combinations that begin with these labels."""
        return sum(n for values, n in self._counts.items() if values[: len(labels)] == labels)

    def collect(self) -> Iterable[Metric]:
        name, text, labels = self._describes
        family = CounterMetricFamily(name, text, labels=labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family


class Distribution(Collector):
    """A histogram, one for each combination of its labels' values that came up."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._describes = (name, text, tuple(labels))
        self._bounds = tuple(buckets)
        self._counts: dict[Labels, list[int]] = {}  # by bucket, what exceeds the last bound last
        self._sums: dict[Labels, float] = {}
        if not labels:
            self._begin(())
        registry.register(self)

    def observe(self, value: float, *labels: str) -> None:
        counts = self._counts.get(labels) or self._begin(labels)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def _begin(self, labels: Labels) -> list[int]:
        self._sums[labels] = 0.0
        counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
        return counts

    def collect(self) -> Iterable[Metric]:
        name, text, labels = self._describes
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, counts in self._counts.items():
            below, buckets = 0, []
            names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
            for bound, count in zip(names, counts, strict=True):
                below += count
                buckets.append((bound, below))
            family.add_metric(values, buckets, self._sums[values])
        yield family
