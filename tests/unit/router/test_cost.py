"""What a placement costs, term by term, and what is learned of an instance's speed."""

import pytest

from moongate.router.cost import (
    OBSERVED_TOKENS_MIN,
    CostWeights,
    LearnedRate,
    Pricing,
)


def terms(
    *,
    weight: float = 1.0,
    queued_prefill_tokens: int = 0,
    active_requests: int = 0,
    recent_sessions: int = 0,
    prompt_tokens: int = 1000,
    overlap_tokens: float = 0,
    best_reuse_tokens: float = 0,
    history_tokens: int = 0,
    departures: int = 0,
) -> dict[str, float]:
    pricing = Pricing(
        weights=CostWeights(active_request_ms=25.0, history_weight=2.0),
        tokens_per_ms=10.0,
        prompt_tokens=prompt_tokens,
        best_reuse_tokens=best_reuse_tokens,
        history_tokens=history_tokens,
        departures=departures,
    )
    return pricing.terms_ms(
        weight, queued_prefill_tokens, active_requests, recent_sessions, overlap_tokens
    )


IDLE = {
    "queue": 0.0,
    "active": 0.0,
    "sessions": 0.0,
    "prefill": 100.0,
    "history": 0.0,
    "shared": 0.0,
}


def test_sessions_lately_begun_there_are_charged_to_new_sessions_only() -> None:
    assert terms(recent_sessions=3) == IDLE | {"sessions": 30.0}
    assert terms(recent_sessions=3, history_tokens=500, overlap_tokens=500)["sessions"] == 0.0


def test_an_idle_cold_holder_costs_the_prompts_prefill() -> None:
    assert terms() == IDLE


def test_an_overlap_saves_its_prefill() -> None:
    assert terms(overlap_tokens=400) == IDLE | {"prefill": 60.0}


def test_an_overlap_beyond_an_estimated_prompt_costs_nothing_less_than_zero() -> None:
    assert terms(overlap_tokens=1200)["prefill"] == 0.0


def test_tokens_ahead_and_unfinished_requests_add_to_the_cost() -> None:
    found = terms(queued_prefill_tokens=500, active_requests=3)
    assert found == IDLE | {"queue": 50.0, "active": 75.0}


def test_an_instance_of_twice_the_weight_is_twice_as_fast_at_everything() -> None:
    found = terms(weight=2.0, queued_prefill_tokens=500, active_requests=3, recent_sessions=2)
    assert found == IDLE | {"queue": 25.0, "active": 37.5, "sessions": 10.0, "prefill": 50.0}


def test_a_history_computed_again_is_charged_twice_over() -> None:
    found = terms(history_tokens=800, overlap_tokens=300, best_reuse_tokens=300)
    assert found == IDLE | {"prefill": 70.0, "history": 100.0}


def test_a_history_from_which_many_depart_is_charged_less() -> None:
    found = terms(history_tokens=800, departures=3)
    assert found["history"] == 2.0 * 80.0 / 4


def test_a_second_copy_of_what_many_share_is_credited() -> None:
    found = terms(best_reuse_tokens=800, departures=3)
    assert found == IDLE | {"shared": -60.0}


def test_the_best_overlap_itself_gets_no_credit() -> None:
    assert terms(overlap_tokens=800, best_reuse_tokens=800, departures=3)["shared"] == 0.0


# --- the rate -------------------------------------------------------------------------------------


def test_a_rate_is_the_prior_until_something_was_observed() -> None:
    rate = LearnedRate(8.0, 128)
    assert rate.per_ms == 8.0
    rate.observe(amount=1000, elapsed_ms=250.0)
    assert rate.per_ms == 4.0


def test_later_observations_count_three_tenths_each() -> None:
    rate = LearnedRate(8.0, 128)
    rate.observe(amount=1000, elapsed_ms=250.0)
    rate.observe(amount=1000, elapsed_ms=100.0)
    assert rate.per_ms == pytest.approx(4.0 + 0.3 * 6.0)


@pytest.mark.parametrize(("tokens", "elapsed_ms"), [(OBSERVED_TOKENS_MIN - 1, 10.0), (1000, 0.0)])
def test_short_prefills_and_impossible_times_teach_nothing(tokens: int, elapsed_ms: float) -> None:
    rate = LearnedRate(8.0, 128)
    rate.observe(tokens, elapsed_ms)
    assert rate.learned is None


@pytest.mark.parametrize(("elapsed_ms", "learned"), [(1e-6, 1600.0), (1e9, 0.04)])
def test_a_learned_rate_is_bounded(elapsed_ms: float, learned: float) -> None:
    rate = LearnedRate(8.0, 128)
    rate.observe(amount=1000, elapsed_ms=elapsed_ms)
    assert rate.per_ms == learned
