"""Token buckets: what is let in, what is told, and that nothing is made up out of a clock."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.gateway.auth import rates
from moongate.gateway.auth.rates import (
    Bucket,
    LocalRates,
    Measure,
    RateLimits,
    Room,
    TokenBuckets,
    Verdict,
)

THREE = RateLimits(requests_per_minute=3)
TOKENS = RateLimits(tokens_per_minute=600)
REQUESTS = Measure.REQUESTS


def test_a_minutes_worth_may_come_at_once_and_then_what_flows_in() -> None:
    buckets = TokenBuckets()
    verdicts = [buckets.take(THREE, 0, now=100.0) for _ in range(4)]
    assert [verdict.lacking for verdict in verdicts] == [None, None, None, REQUESTS]
    assert [v.rooms[REQUESTS].remaining for v in verdicts] == [2, 1, 0, 0]
    assert verdicts[3].retry_after_s == 20.0
    assert buckets.take(THREE, 0, now=119.9).lacking is REQUESTS
    assert buckets.take(THREE, 0, now=120.0).lacking is None
    assert buckets.take(THREE, 0, now=120.0).lacking is REQUESTS


def test_what_is_refused_costs_nothing() -> None:
    buckets = TokenBuckets()
    for _ in range(3):
        buckets.take(THREE, 0, now=0.0)
    waits = [buckets.take(THREE, 0, now=now).retry_after_s for now in (0.0, 5.0, 10.0)]
    assert waits == [20.0, 15.0, 10.0]


def test_a_prompt_of_more_than_a_minute_has_is_served_and_paid_off() -> None:
    buckets = TokenBuckets()
    assert buckets.take(TOKENS, 1200, now=0.0) == Verdict({Measure.TOKENS: Room(600, 0, 120.0)})
    refused = buckets.take(TOKENS, 1, now=30.0)
    assert refused.lacking is Measure.TOKENS
    assert refused.retry_after_s == pytest.approx(30.1)  # 300 are owed, and one is to be there
    assert buckets.take(TOKENS, 1, now=60.2).lacking is None


def test_tokens_are_settled_in_both_directions() -> None:
    buckets = TokenBuckets()
    buckets.take(TOKENS, 100, now=0.0)
    buckets.settle(TOKENS, 400, now=0.0)
    assert buckets.take(TOKENS, 0, now=0.0).rooms[Measure.TOKENS].remaining == 100
    buckets.settle(TOKENS, -500, now=0.0)
    assert buckets.take(TOKENS, 0, now=0.0).rooms[Measure.TOKENS].remaining == 600
    buckets.settle(TOKENS, -500, now=0.0)
    assert buckets.take(TOKENS, 0, now=0.0).rooms[Measure.TOKENS].remaining == 600


def test_what_lacks_for_longer_is_what_is_told() -> None:
    both = RateLimits(requests_per_minute=60, tokens_per_minute=60)
    buckets = TokenBuckets()
    for _ in range(60):
        buckets.take(both, 0, now=0.0)
    buckets.settle(both, 70, now=0.0)
    refused = buckets.take(both, 5, now=0.0)
    assert (refused.lacking, refused.retry_after_s) == (Measure.TOKENS, 11.0)
    # Refused for one, it is not counted in the other.
    assert buckets.take(both, 5, now=11.0).rooms[REQUESTS].remaining == 10


def test_a_changed_limit_begins_full_and_one_that_is_gone_is_not_told() -> None:
    buckets = TokenBuckets()
    for _ in range(3):
        buckets.take(THREE, 0, now=0.0)
    assert (
        buckets.take(RateLimits(requests_per_minute=2), 0, now=0.0).rooms[REQUESTS].remaining == 1
    )
    assert buckets.take(RateLimits(), 0, now=0.0) == Verdict({})


def test_a_clock_that_goes_back_fills_nothing() -> None:
    bucket = Bucket(60, now=100.0)
    bucket.take(60, now=100.0)
    assert bucket.level(now=40.0) == 0.0
    assert bucket.level(now=100.0) == 0.0
    assert bucket.level(now=101.0) == 1.0


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=60),
)
def test_in_any_minute_at_most_two_minutes_worth_is_let_in(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    """A full bucket, and what flows into it meanwhile. Whoever waits as told is let in."""
    buckets, limits, now = TokenBuckets(), RateLimits(requests_per_minute=limit), 0.0
    let_in: list[float] = []
    for pause, count in steps:
        now += pause
        for _ in range(count):
            verdict = buckets.take(limits, 0, now)
            if verdict.lacking is None:
                let_in.append(now)
            else:
                now += verdict.retry_after_s + 1e-6
                assert buckets.take(limits, 0, now).lacking is None
                let_in.append(now)
    for began in let_in:
        assert sum(began <= at < began + 60.0 for at in let_in) <= 2 * limit + 1


def test_names_are_counted_apart() -> None:
    one = LocalRates()
    for _ in range(3):
        asyncio.run(one.take("a", THREE, 0, 0.0))
    assert asyncio.run(one.take("a", THREE, 0, 0.0)).lacking is REQUESTS
    assert asyncio.run(one.take("b", THREE, 0, 0.0)).lacking is None
    one.settle("c", TOKENS, 900, 0.0)
    assert asyncio.run(one.take("c", TOKENS, 1, 0.0)).lacking is Measure.TOKENS
    assert len(one) == 3


def test_names_that_nobody_uses_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "BUCKETS_MAX", 2)
    one = LocalRates()
    asyncio.run(one.take("a", THREE, 0, 0.0))
    asyncio.run(one.take("b", THREE, 0, 50.0))
    asyncio.run(one.take("c", THREE, 0, 60.0))  # a is full again
    assert len(one) == 2
    assert asyncio.run(one.take("b", THREE, 0, 60.0)).rooms[REQUESTS].remaining == 1
