"""What prompts cost is learned from first tokens: with their context, per instance, whatever outliers say."""

from __future__ import annotations

import math
import random

import pytest

from moongate.router.cost import LearnedRate, span_tokens
from moongate.router.rates import FITTED_AFTER, PrefillRate, RelativeSpeed

TOKEN_MS, CONTEXT_MS = 0.1, 0.1 / 20_000


def taught(count: int, noise: float = 0.0, outliers: int = 0) -> PrefillRate:
    chance, rate = random.Random(1), PrefillRate(LearnedRate(8.0, 128))
    for number in range(count):
        tokens, reused = chance.randint(200, 8_000), chance.randint(0, 100_000)
        ms = tokens * TOKEN_MS + tokens * (reused + tokens / 2) * CONTEXT_MS
        ms *= chance.uniform(1 - noise, 1 + noise)
        is_outlier = outliers and number % outliers == outliers - 1
        rate.observe(tokens, reused, ms * (1000 if is_outlier else 1))
    return rate


def test_the_cost_of_tokens_before_it_is_told_apart_once_enough_is_known() -> None:
    assert taught(FITTED_AFTER - 1).context_tokens == math.inf
    rate = taught(FITTED_AFTER)
    assert rate.per_ms == pytest.approx(1 / TOKEN_MS)
    assert rate.context_tokens == pytest.approx(20_000)


def test_a_span_costs_more_the_later_it_begins() -> None:
    assert span_tokens(0, 1_000, math.inf) == 1_000
    assert span_tokens(20_000, 21_000, 20_000) == pytest.approx(2_025)


@pytest.mark.parametrize("outliers", [0, 20])
def test_noise_and_stalls_change_little(outliers: int) -> None:
    rate, exact = taught(200, noise=0.3, outliers=outliers), taught(50)
    assert rate.expected_ms(2_000, 50_000) == pytest.approx(
        exact.expected_ms(2_000, 50_000), rel=0.25
    )


def test_no_cost_is_negative_however_the_times_are() -> None:
    chance, rate = random.Random(2), PrefillRate(LearnedRate(8.0, 128))
    for _ in range(500):
        rate.observe(chance.randint(1, 9_000), chance.randint(0, 90_000), chance.uniform(-1, 1e5))
        assert rate.per_ms > 0
        assert rate.context_tokens > 0
        assert rate.expected_ms(100, 100) > 0


def test_an_instance_is_like_the_others_until_it_is_shown_not_to_be() -> None:
    speed = RelativeSpeed()
    assert speed.factor == 1.0
    speed.observe(1 / 3)
    assert speed.factor == 1.0
    for _ in range(30):
        speed.observe(1 / 3)
    assert 0.4 < speed.factor < 0.6


def test_what_may_be_chance_is_taken_as_chance() -> None:
    speed = RelativeSpeed()
    for _ in range(30):
        speed.observe(0.8)
    assert speed.factor == 1.0


def test_an_instance_that_is_well_again_is_found_to_be() -> None:
    speed = RelativeSpeed()
    for ratio in [1 / 3] * 40 + [1.0] * 60:
        speed.observe(ratio)
    assert speed.factor == 1.0


@pytest.mark.parametrize("ratio", [1e-9, 1e9])
def test_what_is_believed_of_an_instance_is_bounded(ratio: float) -> None:
    speed = RelativeSpeed()
    for _ in range(100):
        speed.observe(ratio)
    assert 0.25 <= speed.factor <= 4.0
