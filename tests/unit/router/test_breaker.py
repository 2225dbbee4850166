"""When an instance's breaker opens, what it lets through, and when it closes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moongate.router.breaker import TRIAL_S, Breaker, BreakerLimits, BreakerState
from moongate.router.model import RequestId

R, S = RequestId("r"), RequestId("s")


def opened(now: float = 100.0) -> Breaker:
    breaker = Breaker()
    assert breaker.failed(R, now)
    return breaker


def test_closed_lets_everything_through() -> None:
    breaker = Breaker()
    assert breaker.lets_through(0.0)
    breaker.begin_trial(R, 0.0)
    assert breaker.trial is None
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_a_failure_that_another_instance_could_have_avoided_opens_at_once() -> None:
    breaker = opened()
    assert breaker.state(100.9) is BreakerState.OPEN
    assert not breaker.lets_through(100.9)
    assert breaker.state(101.0) is BreakerState.HALF_OPEN
    assert breaker.lets_through(101.0)


def test_half_open_lets_one_through_at_a_time() -> None:
    breaker = opened()
    breaker.begin_trial(R, 101.0)
    breaker.begin_trial(S, 101.0)
    assert breaker.trial == R
    assert not breaker.lets_through(101.0)
    breaker.end_trial(S)
    assert not breaker.lets_through(101.0)
    breaker.end_trial(R)
    assert breaker.lets_through(101.0)


def test_c49_the_back_off_doubles_up_to_its_limit() -> None:
    breaker, spans, now = Breaker(), [], 100.0
    for _ in range(7):
        breaker.begin_trial(R, now)
        assert breaker.failed(R, now)
        assert breaker.open_until is not None
        spans.append(breaker.open_until - now)
        now = breaker.open_until
    assert spans == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert breaker.openings == 7


def test_requests_that_failed_together_open_it_once() -> None:
    breaker = opened()
    assert not breaker.failed(S, 100.0)
    assert breaker.open_until == 101.0
    assert breaker.openings == 1


def test_an_answer_closes_it_and_begins_anew() -> None:
    breaker = opened()
    breaker.begin_trial(R, 101.0)
    assert breaker.failed(R, 101.0)
    assert breaker.answered()
    assert breaker.lets_through(101.0)
    assert not breaker.answered()
    breaker.failed(R, 102.0)
    assert breaker.open_until == 103.0


def test_failures_that_prove_nothing_open_it_when_they_come_in_a_row() -> None:
    breaker = Breaker(BreakerLimits(failures_max=3))
    assert [breaker.may_have_failed(R, 0.0) for _ in range(2)] == [False, False]
    breaker.answered()
    assert [breaker.may_have_failed(R, 0.0) for _ in range(3)] == [False, False, True]
    assert breaker.state(0.0) is BreakerState.OPEN


def test_a_trial_that_may_have_failed_has_failed() -> None:
    breaker = opened()
    breaker.begin_trial(S, 101.0)
    assert not breaker.may_have_failed(R, 101.0)
    assert breaker.may_have_failed(S, 101.0)
    assert breaker.open_until == 103.0


def test_a_trial_whose_stream_has_begun_closes_it_on_trust() -> None:
    breaker = opened()
    breaker.begin_trial(R, 101.0)
    assert not breaker.began(S)
    assert breaker.began(R)
    assert breaker.lets_through(101.0)
    assert breaker.may_have_failed(S, 105.0)  # broken off: at once, and for twice as long
    assert breaker.open_until == 107.0
    breaker.begin_trial(R, 107.0)
    assert breaker.began(R)
    assert not breaker.answered()
    assert not breaker.may_have_failed(S, 110.0)


def test_a_trial_of_which_nothing_comes_lets_another_through() -> None:
    breaker = opened()
    breaker.begin_trial(R, 101.0)
    assert not breaker.lets_through(101.0 + TRIAL_S - 0.1)
    assert breaker.lets_through(101.0 + TRIAL_S)
    breaker.begin_trial(S, 101.0 + TRIAL_S)
    assert breaker.trial == S
    assert not breaker.failed(R, 112.0)  # the trial is another's
    assert breaker.failed(S, 112.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["failed", "may_have_failed", "answered", "begin", "began", "end", "wait"]
            ),
            st.sampled_from([R, S]),
        )
    )
)
def test_whatever_happens_it_lets_through_again_by_and_by(steps: list[tuple[str, str]]) -> None:
    breaker, now = Breaker(), 0.0
    for step, name in steps:
        request_id = RequestId(name)
        match step:
            case "failed":
                breaker.failed(request_id, now)
            case "may_have_failed":
                breaker.may_have_failed(request_id, now)
            case "answered":
                breaker.answered()
            case "begin":
                breaker.begin_trial(request_id, now)
            case "began":
                breaker.began(request_id)
            case "end":
                breaker.end_trial(request_id)
            case _:
                now += 0.5
        assert breaker.trial is None or not breaker.is_closed
        assert breaker.failures < breaker.limits.failures_max or not breaker.is_closed
    # Also with a trial of which nothing is heard any more.
    assert breaker.lets_through(now + max(breaker.limits.open_s_max, TRIAL_S))
