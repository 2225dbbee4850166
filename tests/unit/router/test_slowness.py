"""Who is slow next to the others, by their first-byte times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.router.slowness import SLOWNESS_MAX, Latencies, Latency

KIND = ("both", "m")


class Group:
    """Instances of one kind, whose first bytes take as long as the test says."""

    def __init__(self, count: int = 3) -> None:
        self.now = 0.0
        self.latencies = Latencies()
        self.members = [Latency() for _ in range(count)]

    def go_on(self, seconds: int, *times_ms: float | None, expected_ms: float = 0.0) -> None:
        """Let each instance have a first byte each second, after so long. None: it has none."""
        for _ in range(seconds):
            for latency, ms in zip(self.members, times_ms, strict=True):
                if ms is not None:
                    self.latencies.observe(latency, KIND, expected_ms, ms)
            self.now += 1.0
            self.latencies.review(((KIND, latency) for latency in self.members), self.now)

    @property
    def slownesses(self) -> list[float]:
        return [latency.slowness for latency in self.members]


def test_instances_that_are_alike_are_not_slow_however_long_it_takes() -> None:
    group = Group()
    group.go_on(20, 50, 60, 70)
    assert group.slownesses == [1, 1, 1]
    group.go_on(60, 5000, 6000, 7000)  # all of them
    assert group.slownesses == [1, 1, 1]


def test_one_that_is_five_times_slower_is_found_in_seconds_and_forgotten_when_it_is_over() -> None:
    group = Group()
    group.go_on(30, 50, 50, 50)
    group.go_on(10, 250, 50, 50)
    assert group.slownesses[0] > 1.5
    group.go_on(50, 250, 50, 50)
    assert group.slownesses == [pytest.approx(4.0, rel=0.1), 1, 1]
    group.go_on(60, 50, 50, 50)
    assert group.slownesses == [1, 1, 1]


def test_what_was_expected_is_no_slowness() -> None:
    """One has long prompts to compute, as is known, and the others short ones."""
    group = Group()
    for _ in range(40):
        group.latencies.observe(group.members[0], KIND, 2000.0, 2050.0)
        group.go_on(1, None, 55, 50, expected_ms=5.0)
    assert group.slownesses == [1, 1, 1]


def test_a_single_stall_says_nothing() -> None:
    group = Group()
    group.go_on(30, 50, 50, 50)
    group.go_on(1, 60_000, 50, 50)
    assert group.slownesses == [1, 1, 1]


def test_one_that_is_not_heard_of_any_more_is_believed_less_and_less() -> None:
    group = Group()
    group.go_on(60, 400, 50, 50)
    was = group.slownesses[0]
    group.go_on(60, None, 50, 50)
    assert 1 < group.slownesses[0] < was
    group.go_on(120, None, 50, 50)
    assert group.slownesses == [1, 1, 1]


def test_where_half_are_slow_the_fast_half_counts() -> None:
    group = Group(2)
    group.go_on(60, 500, 50)
    assert group.slownesses[0] > 3
    assert group.slownesses[1] == 1


def test_one_alone_is_compared_with_nobody() -> None:
    group = Group(1)
    group.go_on(20, 50)
    group.go_on(20, 5000)
    assert group.slownesses == [1]


def test_instances_of_other_models_and_roles_are_not_compared() -> None:
    latencies, small, large = Latencies(), Latency(), Latency()
    for second in range(60):
        latencies.observe(small, ("both", "small"), 0.0, 50.0)
        latencies.observe(large, ("both", "large"), 0.0, 5000.0)
        kinds = [(("both", "small"), small), (("both", "large"), large)]
        latencies.review(kinds, float(second))
    assert (small.slowness, large.slowness) == (1, 1)


def test_it_is_looked_at_once_a_second() -> None:
    latencies = Latencies()
    assert latencies.is_due(0.0)
    latencies.review([], 0.0)
    assert not latencies.is_due(0.9)
    assert latencies.is_due(1.0)


@given(st.lists(st.tuples(*[st.floats(0.0, 1e9)] * 3), max_size=80))
def test_whatever_is_observed_it_is_bounded(rounds: list[tuple[float, float, float]]) -> None:
    group = Group()
    for times_ms in rounds:
        group.go_on(1, *times_ms)
        assert all(1 <= slowness <= SLOWNESS_MAX for slowness in group.slownesses)
        assert min(group.slownesses) == 1
        assert all(math.isfinite(latency.mean) for latency in group.members)
