"""What one request takes of its rates, from a guess to what the engine reports."""

import asyncio

import pytest

from moongate.gateway.auth.access import Meter, duration, is_open
from moongate.gateway.auth.rates import LocalRates, Measure, RateLimits
from moongate.gateway.auth.tenants import Tenant
from moongate.gateway.errors import GatewayError

TENANT = Tenant("a", limits=RateLimits(tokens_per_minute=1000), rate_name="a")


class Counting:
    """One tenant's requests, all at the same time."""

    def __init__(self, tenant: Tenant = TENANT) -> None:
        self.rates = LocalRates()
        self._tenant = tenant

    def begin(self, body_bytes: int = 400) -> Meter:
        meter = Meter(self._tenant, self.rates, lambda: 0.0)
        asyncio.run(meter.begin(body_bytes))
        return meter

    def left(self) -> int:
        limits = self._tenant.limits
        verdict = asyncio.run(self.rates.take(self._tenant.rate_name, limits, 0, 0.0))
        return verdict.rooms[Measure.TOKENS].remaining


def test_a_guess_becomes_the_prompt_and_then_what_the_engine_reports() -> None:
    one = Counting()
    meter = one.begin()
    assert one.left() == 900
    meter.note_prompt(250)
    assert one.left() == 750
    meter.note_prompt(None)
    assert one.left() == 750
    meter.ended(200, 260, 40)
    assert one.left() == 700
    meter.end(1, 1)
    meter.give_back()
    assert one.left() == 700  # it has ended once


def test_what_is_not_reported_counts_as_far_as_it_is_known() -> None:
    one = Counting()
    meter = one.begin()
    meter.note_prompt(250)
    meter.ended(200, None, None)
    assert one.left() == 750


def test_what_an_engine_refuses_costs_nothing() -> None:
    one = Counting()
    one.begin().ended(400, None, None)
    one.begin().give_back()
    assert one.left() == 1000


def test_a_body_of_images_is_not_taken_for_text() -> None:
    tenant = Tenant("a", limits=RateLimits(tokens_per_minute=1_000_000), rate_name="a")
    one = Counting(tenant)
    one.begin(50_000_000)
    assert one.left() == 1_000_000 - (1 << 18)


def test_one_that_is_not_let_in_gives_nothing_back() -> None:
    one = Counting()
    one.begin(4000)
    meter = Meter(TENANT, one.rates, lambda: 0.0)
    assert meter.headers() == {}
    with pytest.raises(GatewayError) as caught:
        asyncio.run(meter.begin(4000))
    error = caught.value
    assert (error.status, error.code, error.reason) == (
        429, "rate_limit_exceeded", "tokens_per_minute",
    )  # fmt: skip
    assert error.headers == {"retry-after": "1"}
    assert error.message == (
        "the rate limit is reached: tokens_per_minute is 1000; try again in 1 s"
    )
    meter.give_back()
    meter.end(0, 0)
    assert one.left() == 0
    assert meter.headers() == {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m0s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0171, "18ms"), (1.0, "1s"), (1.2, "2s"), (59.5, "1m0s"), (360.0, "6m0s")],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_only_what_watches_and_the_page_is_open() -> None:
    assert all(map(is_open, ("/health", "/ready", "/metrics", "/ui", "/ui/main.js")))
    closed = ("", "/", "/health/", "/metricsx", "/uix", "/v1/models", "/HEALTH", "//health")
    assert not any(map(is_open, closed))
