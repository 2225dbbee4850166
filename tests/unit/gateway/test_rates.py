"""Token buckets: what is let in, what is told, and that nothing is made up out of a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.gateway.auth.rates import (
    LocalRates,
    Measure,
    RateLimits,
    Room,
    Verdict,
)

THREE = RateLimits(requests_per_minute=3)
TOKENS = RateLimits(tokens_per_minute=600)
REQUESTS = Measure.REQUESTS


def test_a_minutes_worth_may_come_at_once_and_then_what_flows_in() -> None:
    one = LocalRates()
    verdicts = [one.take_now("a", THREE, 0, now=100.0) for _ in range(4)]
    assert [verdict.lacking for verdict in verdicts] == [None, None, None, REQUESTS]
    assert [v.rooms[REQUESTS].remaining for v in verdicts] == [2, 1, 0, 0]
    assert verdicts[3].retry_after_s == 20.0
    assert one.take_now("a", THREE, 0, now=119.9).lacking is REQUESTS
    assert one.take_now("a", THREE, 0, now=120.0).lacking is None
    assert one.take_now("a", THREE, 0, now=120.0).lacking is REQUESTS


def test_what_is_refused_costs_nothing() -> None:
    one = LocalRates()
    for _ in range(3):
        one.take_now("a", THREE, 0, now=0.0)
    waits = [one.take_now("a", THREE, 0, now=now).retry_after_s for now in (0.0, 5.0, 10.0)]
    assert waits == [20.0, 15.0, 10.0]


def test_a_prompt_of_more_than_a_minute_has_is_served_and_paid_off() -> None:
    one = LocalRates()
    assert one.take_now("a", TOKENS, 1200, now=0.0) == Verdict(
        {Measure.TOKENS: Room(600, 0, 120.0)}, is_alone=True
    )
    refused = one.take_now("a", TOKENS, 1, now=30.0)
    assert refused.lacking is Measure.TOKENS
    assert refused.retry_after_s == pytest.approx(30.1)  # 300 are owed, and one is to be there
    assert one.take_now("a", TOKENS, 1, now=60.2).lacking is None


def test_tokens_are_settled_in_both_directions() -> None:
    one = LocalRates()
    one.take_now("a", TOKENS, 100, now=0.0)
    one.settle("a", TOKENS, 400, now=0.0)
    assert one.take_now("a", TOKENS, 0, now=0.0).rooms[Measure.TOKENS].remaining == 100
    one.settle("a", TOKENS, -500, now=0.0)
    assert one.take_now("a", TOKENS, 0, now=0.0).rooms[Measure.TOKENS].remaining == 600
    one.settle("a", TOKENS, -500, now=0.0)
    assert one.take_now("a", TOKENS, 0, now=0.0).rooms[Measure.TOKENS].remaining == 600


def test_what_lacks_for_longer_is_what_is_told() -> None:
    both = RateLimits(requests_per_minute=60, tokens_per_minute=60)
    one = LocalRates()
    for _ in range(60):
        one.take_now("a", both, 0, now=0.0)
    one.settle("a", both, 70, now=0.0)
    refused = one.take_now("a", both, 5, now=0.0)
    assert (refused.lacking, refused.retry_after_s) == (Measure.TOKENS, 11.0)
    # Refused for one, it is not counted in the other.
    assert one.take_now("a", both, 5, now=11.0).rooms[REQUESTS].remaining == 10


def test_a_changed_limit_begins_full_and_one_that_is_gone_is_not_told() -> None:
    one = LocalRates()
    for _ in range(3):
        one.take_now("a", THREE, 0, now=0.0)
    assert (
        one.take_now("a", RateLimits(requests_per_minute=2), 0, now=0.0).rooms[REQUESTS].remaining
        == 1
    )
    assert one.take_now("a", RateLimits(), 0, now=0.0) == Verdict({}, is_alone=True)


def test_a_clock_that_goes_back_fills_nothing() -> None:
    one, limits = LocalRates(), RateLimits(requests_per_minute=60)
    for _ in range(60):
        one.take_now("a", limits, 0, now=100.0)
    assert [one.take_now("a", limits, 0, now).lacking for now in (40.0, 100.0, 101.0)] == [
        REQUESTS, REQUESTS, None,
    ]  # fmt: skip


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=60),
)
def test_in_any_minute_at_most_two_minutes_worth_is_let_in(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    """A full bucket, and what flows into it meanwhile. Whoever waits as told is let in."""
    one, limits, now = LocalRates(), RateLimits(requests_per_minute=limit), 0.0
    let_in: list[float] = []
    for pause, count in steps:
        now += pause
        for _ in range(count):
            verdict = one.take_now("a", limits, 0, now)
            if verdict.lacking is None:
                let_in.append(now)
            else:
                now += verdict.retry_after_s + 1e-6
                assert one.take_now("a", limits, 0, now).lacking is None
                let_in.append(now)
    for began in let_in:
        assert sum(began <= at < began + 60.0 for at in let_in) <= 2 * limit + 1


def test_names_are_counted_apart() -> None:
    one = LocalRates()
    for _ in range(3):
        one.take_now("a", THREE, 0, 0.0)
    assert one.take_now("a", THREE, 0, 0.0).lacking is REQUESTS
    assert one.take_now("b", THREE, 0, 0.0).lacking is None
    one.settle("c", TOKENS, 900, 0.0)
    assert one.take_now("c", TOKENS, 1, 0.0).lacking is Measure.TOKENS
    assert len(one) == 3


def test_of_too_many_names_the_one_that_asked_the_longest_ago_is_forgotten() -> None:
    one = LocalRates(buckets_max=2)
    for name in "abac":
        one.take_now(name, THREE, 0, 0.0)
    assert len(one) == 2
    left = {name: one.take_now(name, THREE, 0, 0.0).rooms[REQUESTS].remaining for name in "acb"}
    assert left == {"a": 0, "c": 1, "b": 2}
