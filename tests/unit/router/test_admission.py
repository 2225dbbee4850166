"""What starts, what waits, what is refused, and what it is told: the core with bounded instances."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from moongate.router import (
    Command,
    Event,
    FailureKind,
    Forward,
    Hold,
    Holder,
    InstanceDescribed,
    InstanceDraining,
    InstanceProbed,
    InstanceRemoved,
    Outcome,
    Prompt,
    Reject,
    RejectReason,
    RelayFailure,
    Request,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    Role,
    RouterCore,
    RouterLimits,
    WakeAt,
    WakeUp,
)
from moongate.router.admission import AdmissionLimits, StartRate, find_speed
from moongate.router.invariants import check

from .builders import MODEL, SPACE, A, B, add, chain, facts, make_core, request


def bounded(*instances: Any, requests: int | None = 1, **limits: Any) -> RouterCore:
    """Return a core whose instances run one request each, unless said otherwise."""
    admission = AdmissionLimits(requests, **limits)
    return make_core(*instances, policy="least_loaded", limits=RouterLimits(admission=admission))


def arrive(core: RouterCore, name: str, now: float = 0.0, **fields: Any) -> list[Command]:
    fields = {"session_key": name, **fields}
    commands = core.handle(RequestArrived(dataclasses.replace(request(name), **fields)), now)
    check(core)
    return without_wakes(commands)


def finish(
    core: RouterCore, name: str, now: float = 0.0, outcome: Outcome = Outcome.ANSWERED
) -> list[Command]:
    commands = core.handle(RequestFinished(RequestId(name), outcome), now)
    check(core)
    return without_wakes(commands)


def finished(request_id: RequestId) -> RequestFinished:
    return RequestFinished(request_id, Outcome.ANSWERED)


def without_wakes(commands: list[Command]) -> list[Command]:
    return [command for command in commands if not isinstance(command, WakeAt)]


def started(commands: list[Command]) -> list[str]:
    assert all(isinstance(command, Forward) for command in commands), commands
    return [command.request_id for command in commands if isinstance(command, Forward)]


# --- room -----------------------------------------------------------------------------------------


def test_without_bounds_all_start() -> None:
    core = make_core(A)
    assert core.admission is None
    assert started([c for n in range(100) for c in arrive(core, f"r{n}")]) == [
        f"r{n}" for n in range(100)
    ]


def test_where_there_is_room_a_request_starts_at_once_and_else_it_waits() -> None:
    core = bounded(A, B)
    assert started(arrive(core, "r")) == ["r"]
    assert started(arrive(core, "s")) == ["s"]
    assert arrive(core, "t") == [Hold(RequestId("t"))]
    (forward,) = finish(core, "s")
    assert isinstance(forward, Forward)
    assert (forward.request_id, forward.holder) == ("t", Holder(B))


def test_a_full_instance_is_no_candidate_however_good() -> None:
    admission = AdmissionLimits(1)
    core = make_core(A, B, policy="session_hash", limits=RouterLimits(admission=admission))
    first = core.handle(RequestArrived(request("r", session_key="k")), 0.0)
    second = core.handle(RequestArrived(request("s", session_key="k")), 0.0)
    holders = [c.holder for c in (*first, *second) if isinstance(c, Forward)]
    assert len(set(holders)) == 2


@pytest.mark.parametrize("event", ["first_byte", "finished"])
def test_prompts_that_wait_to_be_computed_keep_others_out_whatever_these_cost(event: str) -> None:
    core = make_core(
        A, limits=RouterLimits(admission=AdmissionLimits(instance_prefill_tokens_max=10))
    )

    def come(name: str, tokens: int) -> list[Command]:
        return without_wakes(core.handle(RequestArrived(request(name, *range(tokens))), 0.0))

    assert started(come("r", 9)) == ["r"]
    assert started(come("s", 500)) == [
        "s"
    ]  # what it adds doesn't matter: it isn't kept out for good
    assert come("t", 1) == [Hold(RequestId("t"))]
    assert finish(core, "r") == []
    if event == "first_byte":
        assert started(core.handle(RequestFirstByte(RequestId("s")), 0.0)) == ["t"]
    else:
        assert started(finish(core, "s")) == ["t"]


def test_another_instance_that_comes_up_lets_start_what_waits() -> None:
    core = bounded(A)
    arrive(core, "r")
    arrive(core, "s")
    commands: list[Command] = []
    add(core, B)
    assert core.requests.keys() == {"r", "s"}
    commands = core.handle(InstanceDraining(B, is_draining=True), 0.0)
    assert commands == []


def test_a_request_that_fails_everywhere_makes_room() -> None:
    core = bounded(A)
    arrive(core, "r")
    arrive(core, "s")
    commands = core.handle(RequestFailed(RequestId("r"), FailureKind.TIMEOUT), 0.0)
    assert [type(c) for c in commands] == [RelayFailure, Forward]


def test_a_retry_does_not_wait() -> None:
    core = bounded(A, B)
    arrive(core, "r")
    arrive(core, "s")
    commands = core.handle(RequestFailed(RequestId("r"), FailureKind.STATUS, 503), 0.0)
    assert started(without_wakes(commands)) == ["r"]


def test_while_good_instances_are_full_those_with_open_breakers_get_nothing() -> None:
    core = bounded(A, B)
    for instance in core.fleet:
        if instance.spec.id == A:
            instance.breaker.failed(RequestId("x"), 0.0)
    core.candidates.reset()
    assert started(arrive(core, "r")) == ["r"]
    assert arrive(core, "s") == [Hold(RequestId("s"))]
    # When its back-off has ended, it gets a trial: with whatever happens next.
    assert started(core.handle(InstanceProbed(B, is_healthy=True), 1.0)) == ["s"]


def test_where_nobody_serves_it_a_request_does_not_wait() -> None:
    core = bounded(A)
    arrive(core, "r")
    (reject,) = arrive(core, "s", model="nope")
    assert isinstance(reject, Reject)
    assert reject.reason is RejectReason.UNKNOWN_MODEL


def test_models_wait_for_their_own_instances() -> None:
    core = bounded(A)
    add(core, B, described=facts("other"))
    arrive(core, "r")
    assert arrive(core, "s") == [Hold(RequestId("s"))]
    assert started(arrive(core, "t", model="other")) == ["t"]
    assert arrive(core, "u", model="other") == [Hold(RequestId("u"))]
    assert started(finish(core, "t")) == ["u"]


def test_who_prefills_for_others_has_bounds_too() -> None:
    core = bounded(requests=1)
    add(core, A, role=Role.PREFILL)
    add(core, B, role=Role.DECODE)
    add(core, type(A)("d"), role=Role.DECODE)
    fields = {"may_hand_over": True}
    first = arrive(core, "r", **fields, prompt=request("p", *range(9)).prompt)
    assert [type(c) for c in first] == [Forward]
    assert isinstance(first[0], Forward)
    assert first[0].prefill is not None
    # A decode instance has room, but its prompt would have to be computed there.
    held = arrive(core, "s", **fields, prompt=request("p", *range(20, 29)).prompt)
    assert held == [Hold(RequestId("s"))]


# --- other models' queues -------------------------------------------------------------------------


def two_models(**limits: Any) -> RouterCore:
    """Return a core whose A runs MODEL and B the model `other`, one request each."""
    core = bounded(A, **limits)
    add(core, B, described=facts("other"))
    return core


def test_what_can_start_starts_though_the_queue_for_others_is_full() -> None:
    core = two_models(queue_requests_max=2)
    for name in ("r", "s", "t"):
        arrive(core, name, tenant="a")
    assert started(arrive(core, "u", tenant="b", model="other")) == ["u"]
    assert core.admission is not None
    assert [each.request.id for each in core.admission.queue] == ["s", "t"]


def test_what_can_start_starts_though_others_wait_for_long() -> None:
    core = warmed_up(wait_s_max=5.0)
    add(core, B, described=facts("other"))
    for n in range(7):
        arrive(core, f"s{n}", now=10.0)
    assert started(arrive(core, "u", now=10.0, model="other")) == ["u"]


def test_a_wait_is_estimated_among_those_that_compete_for_the_same_instances() -> None:
    core = warmed_up(wait_s_max=5.0)
    add(core, B, described=facts("other"))
    for n in range(7):
        arrive(core, f"s{n}", now=10.0)
    arrive(core, "runs", now=10.0, model="other")
    # Nothing is known of the pace of these; and none of those seven are before them.
    for n in range(3):
        assert arrive(core, f"u{n}", now=10.0, model="other") == [Hold(RequestId(f"u{n}"))]
    (reject,) = arrive(core, "late", now=10.0)
    assert isinstance(reject, Reject)
    assert reject.retry_after_s == pytest.approx(7.0, rel=0.01)


def test_an_adapters_requests_compete_with_those_of_its_model() -> None:
    core = warmed_up(wait_s_max=5.0)
    core.handle(InstanceDescribed(A, facts(MODEL, adapters=("adapter",))), 10.0)
    for n in range(7):
        arrive(core, f"s{n}", now=10.0)
    (reject,) = arrive(core, "late", now=10.0, model="adapter")
    assert isinstance(reject, Reject)
    assert reject.reason is RejectReason.QUEUE_TIMEOUT


def test_in_a_full_queue_the_model_with_most_waiting_gives_way() -> None:
    core = two_models(queue_requests_max=3)
    arrive(core, "runs there", model="other")
    for name in ("r", "s", "t", "u"):
        arrive(core, name)
    reject, hold = arrive(core, "v", model="other")
    assert isinstance(reject, Reject)
    assert (reject.request_id, reject.reason) == ("u", RejectReason.QUEUE_FULL)
    assert hold == Hold(RequestId("v"))


def test_what_may_not_wait_at_all_takes_nobodys_place() -> None:
    core = bounded(A, queue_requests_max=2)
    for name in ("r", "s", "t"):
        arrive(core, name, tenant="a")
    (reject,) = arrive(core, "u", tenant="b", wait_s_max=0.0)
    assert isinstance(reject, Reject)
    assert (reject.request_id, reject.reason) == ("u", RejectReason.QUEUE_TIMEOUT)


# --- nobody is left -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (InstanceProbed(A, is_healthy=False, is_gone=True), RejectReason.NO_INSTANCE),
        (InstanceDraining(A, is_draining=True), RejectReason.NO_INSTANCE),
        (InstanceRemoved(A), RejectReason.UNKNOWN_MODEL),  # all that are left are known
    ],
)
def test_when_nobody_is_left_what_waits_is_refused_as_newcomers_are(
    event: Event, reason: RejectReason
) -> None:
    core = two_models()
    for name in ("r", "s", "t"):
        arrive(core, name)
    arrive(core, "runs there", model="other")
    arrive(core, "stays", model="other")
    told = without_wakes(core.handle(event, 1.0))
    rejects = [command for command in told if isinstance(command, Reject)]
    assert [reject.request_id for reject in rejects] == ["s", "t"]
    (newcomer,) = arrive(core, "u", now=1.0)
    assert isinstance(newcomer, Reject)
    assert newcomer.reason is reason
    as_newcomer = dataclasses.replace(newcomer, request_id=RequestId("s"))
    assert rejects[0] == as_newcomer
    assert core.admission is not None
    assert [each.request.id for each in core.admission.queue] == ["stays"]


def test_when_its_model_is_gone_what_waits_is_told_so() -> None:
    core = bounded(A)
    arrive(core, "r")
    arrive(core, "s")
    commands = core.handle(InstanceDescribed(A, facts("another")), 0.0)
    (reject,) = (command for command in commands if isinstance(command, Reject))
    assert (reject.request_id, reject.reason) == ("s", RejectReason.UNKNOWN_MODEL)


def test_one_failed_check_of_several_refuses_nothing() -> None:
    core = bounded(A)
    arrive(core, "r")
    arrive(core, "s")
    assert without_wakes(core.handle(InstanceProbed(A, is_healthy=False), 0.0)) == []
    commands = core.handle(InstanceProbed(A, is_healthy=False), 1.0)
    assert [type(c) for c in without_wakes(commands)] == [Reject]


def test_while_one_is_left_that_could_take_it_a_request_waits() -> None:
    core = bounded(A, B)
    for name in ("r", "s", "t"):
        arrive(core, name)
    assert without_wakes(core.handle(InstanceProbed(B, is_healthy=False, is_gone=True), 0.0)) == []
    assert core.admission is not None
    assert [each.request.id for each in core.admission.queue] == ["t"]


def test_open_breakers_alone_refuse_nothing() -> None:
    core = bounded(A)
    arrive(core, "r")
    arrive(core, "s")
    for instance in core.fleet:
        instance.breaker.failed(RequestId("x"), 0.0)
    core.candidates.reset()
    assert without_wakes(core.handle(WakeUp(), 0.0)) == []
    assert started(finish(core, "r")) == ["s"]


# --- leaving and time -----------------------------------------------------------------------------


def test_who_leaves_while_waiting_costs_nothing() -> None:
    core = bounded(A)
    arrive(core, "r")
    arrive(core, "s")
    arrive(core, "t")
    assert finish(core, "s", outcome=Outcome.CLIENT_LEFT) == []
    assert core.loads.get(Holder(A)).active_requests == 1
    assert started(finish(core, "r")) == ["t"]


def test_what_waits_too_long_is_refused_when_the_time_has_come() -> None:
    core = bounded(A, wait_s_max=10.0)
    arrive(core, "r")
    commands = core.handle(RequestArrived(request("s")), 1.0)
    assert commands == [Hold(RequestId("s")), WakeAt(11.0)]
    (reject,) = without_wakes(core.handle(WakeUp(), 11.0))
    assert reject == Reject(RequestId("s"), RejectReason.QUEUE_TIMEOUT, 1.0)
    check(core)
    assert finish(core, "r", now=12.0) == []


def test_a_client_may_allow_less_but_not_more() -> None:
    core = bounded(A, wait_s_max=10.0)
    arrive(core, "r")
    arrive(core, "s", wait_s_max=2.0)
    arrive(core, "t", wait_s_max=99.0)
    assert core.admission is not None
    assert {w.request.id: w.deadline for w in core.admission.queue} == {"s": 2.0, "t": 10.0}
    assert [type(command) for command in arrive(core, "u", wait_s_max=0.0)] == [Reject]


def warmed_up(**limits: Any) -> RouterCore:
    """Return a core whose one instance has let one request start each second for a while, 256 tokens each.

    At 10 s, one runs and none waits.
    """
    core = bounded(A, **limits)
    arrive(core, "r0")
    for second in range(1, 11):
        arrive(core, f"r{second}", now=second - 1.0)
        assert started(finish(core, f"r{second - 1}", now=float(second))) == [f"r{second}"]
    return core


def test_what_would_be_too_late_is_refused_at_once_and_told_when_to_come_back() -> None:
    core = warmed_up(wait_s_max=5.0)
    for n in range(7):
        assert arrive(core, f"s{n}", now=10.0) == [Hold(RequestId(f"s{n}"))]
    (reject,) = arrive(core, "late", now=10.0)
    assert isinstance(reject, Reject)
    assert reject.reason is RejectReason.QUEUE_TIMEOUT
    # Seven wait, of which one starts each second.
    assert reject.retry_after_s == pytest.approx(7.0, rel=0.01)


def test_a_full_queue_refuses_and_tells_when_to_come_back() -> None:
    core = warmed_up(queue_requests_max=3)
    for n in range(3):
        arrive(core, f"s{n}", now=10.0)
    (reject,) = arrive(core, "t", now=10.0)
    assert isinstance(reject, Reject)
    assert (reject.request_id, reject.reason) == ("t", RejectReason.QUEUE_FULL)
    assert reject.retry_after_s == pytest.approx(3.0, rel=0.01)


def test_in_a_full_queue_who_has_much_waiting_gives_way_to_who_has_little() -> None:
    core = bounded(A, queue_requests_max=3)
    arrive(core, "r")
    for n in range(3):
        arrive(core, f"s{n}", tenant="a")
    reject, hold = arrive(core, "t", tenant="b")
    assert isinstance(reject, Reject)
    assert reject.request_id == "s2"
    assert hold == Hold(RequestId("t"))


def test_a_standstill_makes_the_expected_wait_longer() -> None:
    rate = StartRate()
    rate.began(0.0)
    for second in range(1, 11):
        rate.started(100, float(second))
    assert find_speed([rate], 10.0) == pytest.approx(100.0)
    later = find_speed([rate], 20.0)
    assert later is not None
    assert 30.0 < later < 60.0


def test_the_pace_of_long_ago_counts_little() -> None:
    rate = StartRate()
    rate.began(0.0)
    for second in range(1, 11):
        rate.started(100, float(second))
    rate.began(1000.0)
    for n in range(1, 31):
        rate.started(100, 1000.0 + n * 2)
    assert find_speed([rate], 1060.0) == pytest.approx(50.0, rel=0.05)


# --- short and long -------------------------------------------------------------------------------


def waits_of_short_turns(*, is_bounded: bool) -> list[float]:
    """Return how long 30 short turns wait, in s, that come 1 s after ten prompts of 100,000 tokens.

    One instance, which computes 10,000 tokens a second, first come first served, as vLLM does.
    """
    limits = AdmissionLimits(
        instance_prefill_tokens_max=20_000 if is_bounded else 10**9, wait_s_max=1000.0
    )
    core = make_core(A, limits=RouterLimits(admission=limits))
    arrivals = [(0.0, f"long{n}", 100_000) for n in range(10)]
    arrivals += [(1.0 + n / 100, f"short{n}", 1000) for n in range(30)]
    sizes = {name: size for _, name, size in arrivals}
    came = {name: at for at, name, _ in arrivals}
    begun: dict[str, float] = {}
    given: list[str] = []  # to the engine, in order
    ends_at = math.inf  # the prompt that it computes

    while arrivals or given:
        now = min(arrivals[0][0] if arrivals else math.inf, ends_at)
        if now == ends_at:
            done, ends_at = RequestId(given.pop(0)), math.inf
            events: list[Event] = [RequestFirstByte(done), finished(done)]
        else:
            _, name, size = arrivals.pop(0)
            known = Prompt(size, {SPACE: chain(int(name.strip("longshrt")), size)})
            events = [RequestArrived(Request(RequestId(name), MODEL, known, session_key=name))]
        for event in events:
            given += [c.request_id for c in core.handle(event, now) if isinstance(c, Forward)]
        if given and given[0] not in begun:
            begun[given[0]] = now
            ends_at = now + sizes[given[0]] / 10_000
    return sorted(begun[f"short{n}"] - came[f"short{n}"] for n in range(30))


def test_long_prompts_do_not_starve_short_turns() -> None:
    unbounded, fair = waits_of_short_turns(is_bounded=False), waits_of_short_turns(is_bounded=True)
    assert unbounded[0] == pytest.approx(99.0)  # behind all ten of the long ones
    # Behind the one that runs, and then behind each other.
    assert fair[-1] < 9.0 + 30 * 0.1
