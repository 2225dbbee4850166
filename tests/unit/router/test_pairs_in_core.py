"""Requests of two legs in the core: where they go, what is reserved, and what comes after a failure."""

from __future__ import annotations

import dataclasses

import pytest

from moongate.router import (
    Command,
    FailureKind,
    Forward,
    Holder,
    InstanceId,
    InstanceProbed,
    InstanceRemoved,
    Outcome,
    Policy,
    PrefillEnded,
    PrefillFailed,
    Probe,
    Reason,
    Reject,
    RelayFailure,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    Role,
    RouterCore,
    RouterLimits,
    SourceId,
    SourceOpened,
)
from moongate.router.events import Event
from moongate.router.invariants import check
from moongate.router.load import Load

from .builders import add, batch, feed, forward_in, make_core, request, stored

P, Q = InstanceId("p"), InstanceId("q")
D, E, B = InstanceId("d"), InstanceId("e"), InstanceId("b")
HP, HQ, HD, HE, HB = map(Holder, (P, Q, D, E, B))
R = RequestId("r")
SENT = [FailureKind.DISCONNECTED, FailureKind.TIMEOUT, FailureKind.STATUS]
UNSENT = [FailureKind.UNREACHABLE, FailureKind.NO_CONNECTION]


def core_of(
    prefill: tuple[InstanceId, ...] = (P,),
    decode: tuple[InstanceId, ...] = (D,),
    both: tuple[InstanceId, ...] = (),
    policy: str | Policy = "kv_cost",
    attempts_max: int = 2,
) -> RouterCore:
    core = make_core(policy=policy, limits=RouterLimits(attempts_max=attempts_max))
    add(core, *prefill, role=Role.PREFILL)
    add(core, *decode, role=Role.DECODE)
    add(core, *both)
    return core


def receive(core: RouterCore, instance_id: InstanceId) -> None:
    """Let it be known that an instance of both roles can fetch what another has prefilled."""
    instance = core.fleet.find(instance_id)
    assert instance is not None
    instance.spec = dataclasses.replace(instance.spec, receives=True)
    core.candidates.reset()


def arrived(
    name: str, *token_ids: int, may_hand_over: bool = True, stays_whole: bool = False
) -> RequestArrived:
    known = request(name, *token_ids)
    return RequestArrived(
        dataclasses.replace(known, may_hand_over=may_hand_over, stays_whole=stays_whole)
    )


def hear(core: RouterCore, *events: Event, now: float = 0.0) -> list[Command]:
    """Hand the events over and return the commands of the last; the invariants hold after each."""
    commands: list[Command] = []
    for event in events:
        commands = core.handle(event, now)
        check(core)
    return commands


def sent(core: RouterCore, *events: Event, now: float = 0.0) -> Forward:
    return forward_in(hear(core, *events, now=now))


def failed(kind: FailureKind) -> RequestFailed:
    return RequestFailed(R, kind)


def answered(name: str = "r") -> RequestFinished:
    return RequestFinished(RequestId(name), Outcome.ANSWERED)


def suspended(core: RouterCore) -> list[str]:
    return [i.spec.id for i in core.fleet if not i.breaker.is_closed]


# --- on the way -----------------------------------------------------------------------------------


def test_a_prompt_goes_to_a_pair_and_both_are_reserved() -> None:
    core = core_of()
    forward = sent(core, arrived("r", *range(9)))
    assert (forward.prefill, forward.holder, forward.attempt) == (HP, HD, 1)
    assert forward.decision.prefill is not None
    assert forward.decision.prefill.holder == HP
    # The prompt is queued once, and its blocks lie on both.
    assert (core.loads.get(HP), core.loads.get(HD)) == (Load(1, 9, 4), Load(1, 0, 4))
    hear(core, PrefillEnded(R))
    assert (core.loads.get(HP), core.loads.get(HD)) == (Load(), Load(1, 0, 4))
    hear(core, RequestFirstByte(R, shows_prefill=True), answered())
    assert core.loads.loads == {}
    assert core.requests == {}


def test_a_client_that_leaves_gives_both_reservations_back() -> None:
    core = core_of()
    hear(core, arrived("r", *range(9)), RequestFinished(R, Outcome.CLIENT_LEFT))
    assert core.loads.loads == {}


def test_each_is_assumed_to_hold_the_prompt_once_its_leg_is_sent() -> None:
    core = core_of()
    hear(core, arrived("r", *range(9)))
    assert [core.index.predicted_count(holder) for holder in (HP, HD)] == [4, 0]
    hear(core, PrefillEnded(R))
    assert [core.index.predicted_count(holder) for holder in (HP, HD)] == [4, 4]


@pytest.mark.parametrize("kind", [*UNSENT, FailureKind.FULL])
def test_what_was_not_sent_is_not_assumed(kind: FailureKind) -> None:
    core = core_of(prefill=(P, Q), decode=(D, E))
    hear(core, arrived("r", *range(9)))
    prefill = core.requests[R].answering.holder
    hear(core, PrefillFailed(R, kind))
    assert core.index.predicted_count(prefill) == 0
    hear(core, PrefillEnded(R))
    decode = core.requests[R].answering.holder
    hear(core, failed(kind))
    assert core.index.predicted_count(decode) == 0


def test_what_was_assumed_before_stays_assumed() -> None:
    core = core_of(decode=(D, E), policy="session_hash")
    hear(core, arrived("x", *range(5)), PrefillEnded(RequestId("x")), answered("x"))
    hear(core, arrived("r", *range(9)), PrefillFailed(R, FailureKind.FULL))
    assert core.index.predicted_count(HP) == 2


def test_what_may_not_be_handed_over_is_computed_where_it_is_decoded() -> None:
    core = core_of()
    forward = sent(core, arrived("r", *range(9), may_hand_over=False))
    assert (forward.prefill, forward.holder) == (None, HD)
    assert forward.decision.reason is Reason.ONLY_CHOICE


def test_what_stays_whole_goes_to_an_instance_of_both_roles() -> None:
    core = core_of(both=(B,))
    assert sent(core, arrived("r", may_hand_over=False, stays_whole=True)).holder == HB
    none = core_of()
    assert isinstance(hear(none, arrived("r", may_hand_over=False, stays_whole=True))[0], Reject)


def test_without_an_instance_that_decodes_nothing_is_prefilled() -> None:
    core = core_of(decode=())
    assert isinstance(hear(core, arrived("r", 1, 2, 3))[0], Reject)


def test_a_turn_that_adds_little_stays_and_it_is_not_the_only_choice() -> None:
    core = core_of()
    tokens = list(range(1000))
    source = SourceId(D)
    feed(core, SourceOpened(source, has_replay=False))
    feed(core, batch(0, stored(*range(500), tokens=tokens), source=source))
    forward = sent(core, arrived("s", *tokens, 1, 2, 3))
    assert (forward.prefill, forward.holder) == (None, HD)
    assert forward.decision.reason is Reason.DEVICE_PREFIX
    hear(core, answered("s"))
    assert sent(core, arrived("t", *tokens, *range(2000, 6000))).prefill == HP


def test_a_prefill_instance_is_found_by_what_it_holds() -> None:
    core = core_of(prefill=(P, Q))
    source = SourceId(Q)
    feed(core, SourceOpened(source, has_replay=False))
    feed(core, batch(0, stored(71, 72, tokens=[1, 2, 3, 4]), source=source))
    decision = sent(core, arrived("r", 1, 2, 3, 4, 5)).decision
    assert decision.prefill is not None
    assert (decision.prefill.holder, decision.device_tokens) == (HQ, 4)
    assert decision.reason is Reason.DEVICE_PREFIX


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_loaded", "session_hash"])
def test_every_policy_hands_over(policy: str) -> None:
    forward = sent(core_of(policy=policy), arrived("r"))
    assert (forward.prefill, forward.holder) == (HP, HD)


def test_an_explanation_names_the_pair_and_all_that_could_decode() -> None:
    core = core_of(decode=(D, E))
    decision = core.explain(arrived("r", *range(9)).request, now=0.0)
    assert decision is not None
    assert decision.prefill is not None
    assert [place.holder for place in decision.ranking] == [HD, HE]
    assert core.loads.loads == {}


# --- learning -------------------------------------------------------------------------------------


def test_a_prefill_leg_teaches_the_prefill_rate_and_a_first_byte_that_of_the_transfer() -> None:
    core = core_of()
    hear(core, arrived("r", *range(400)))
    hear(core, PrefillEnded(R), now=0.2)
    assert core.fleet.tokens_per_ms == pytest.approx(2.0)
    hear(core, RequestFirstByte(R, shows_prefill=True), now=0.21)
    assert core.fleet.handoff_tokens_per_ms == pytest.approx(40.0)
    assert core.fleet.tokens_per_ms == pytest.approx(2.0)


def test_only_what_the_decode_side_lacks_was_transferred() -> None:
    core = core_of(policy="round_robin")
    hear(core, arrived("r", *range(200)), PrefillEnded(R), answered())
    hear(core, arrived("r", *range(400)), PrefillEnded(R))
    hear(core, RequestFirstByte(R, shows_prefill=True), now=0.01)
    assert core.fleet.handoff_tokens_per_ms == pytest.approx(20.2)  # 99 blocks were there


@pytest.mark.parametrize("is_held", [True, False])
def test_a_prompt_computed_again_teaches_nothing_of_transfers(is_held: bool) -> None:
    core = core_of()
    hear(core, arrived("r", *range(400)), PrefillEnded(R, is_held))
    hear(core, RequestFirstByte(R, shows_prefill=True), now=0.01)
    assert core.fleet.handoff_tokens_per_ms == (40.0 if is_held else 50.0)


def test_a_prefill_behind_another_teaches_nothing() -> None:
    core = core_of()
    hear(core, arrived("r", *range(400)), arrived("s", *range(500, 900)))
    hear(core, PrefillEnded(RequestId("s")), now=0.2)
    assert core.fleet.tokens_per_ms == 8.0


def test_a_whole_answer_teaches_nothing_of_transfers() -> None:
    core = core_of()
    hear(core, arrived("r", *range(400)), PrefillEnded(R))
    hear(core, RequestFirstByte(R), now=0.01)
    assert core.fleet.handoff_tokens_per_ms == 50.0


# --- a prefill that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*SENT, *UNSENT])
def test_c67_a_failed_prefill_is_tried_on_another_prefill_instance(kind: FailureKind) -> None:
    core = core_of(prefill=(P, Q))
    hear(core, arrived("r", *range(9)))
    forward = sent(core, PrefillFailed(R, kind))
    assert (forward.prefill, forward.holder, forward.attempt) == (HQ, HD, 2)
    assert core.loads.get(HP) == Load()
    assert (core.loads.get(HQ), core.loads.get(HD)) == (Load(1, 9, 4), Load(1, 0, 4))
    hear(core, PrefillEnded(R), answered())
    is_down = kind is FailureKind.UNREACHABLE
    assert suspended(core) == ([] if is_down else [P])


def test_then_it_is_computed_where_it_is_decoded_and_then_the_client_is_told() -> None:
    core = core_of(prefill=(P, Q))
    hear(core, arrived("r", *range(9)), PrefillFailed(R, FailureKind.STATUS))
    forward = sent(core, PrefillFailed(R, FailureKind.STATUS))
    assert (forward.prefill, forward.holder, forward.attempt) == (None, HD, 3)
    assert core.loads.get(HD) == Load(1, 9, 4)
    assert hear(core, failed(FailureKind.STATUS)) == [RelayFailure(R)]
    assert core.loads.loads == {}
    assert suspended(core) == []  # it may be the request's own fault


def test_where_it_is_served_alone_those_that_could_not_prefill_it_are_charged() -> None:
    core = core_of(prefill=(P, Q))
    hear(core, arrived("r"), *[PrefillFailed(R, FailureKind.STATUS)] * 2, answered())
    assert suspended(core) == [P, Q]


def test_requests_do_without_prefill_instances_that_fail_until_a_trial() -> None:
    core = core_of()
    hear(core, arrived("r", *range(9)), PrefillFailed(R, FailureKind.STATUS), answered())
    assert sent(core, arrived("s", *range(9)), now=0.9).prefill is None
    assert sent(core, arrived("t", *range(9, 18)), now=1.0).prefill == HP  # the trial
    assert sent(core, arrived("u", *range(18, 27)), now=1.0).prefill is None
    hear(core, PrefillEnded(RequestId("t")), now=1.0)
    assert suspended(core) == []
    assert sent(core, arrived("v", *range(27, 36)), now=1.0).prefill == HP


def test_with_one_prefill_instance_a_failure_is_followed_by_one_attempt_alone() -> None:
    core = core_of()
    hear(core, arrived("r"))
    forward = sent(core, PrefillFailed(R, FailureKind.TIMEOUT))
    assert (forward.prefill, forward.attempt) == (None, 2)
    assert hear(core, failed(FailureKind.STATUS)) == [RelayFailure(R)]


def test_with_a_single_attempt_it_is_still_tried_alone() -> None:
    core = core_of(prefill=(P, Q), attempts_max=1)
    hear(core, arrived("r"))
    forward = sent(core, PrefillFailed(R, FailureKind.STATUS))
    assert (forward.prefill, forward.holder, forward.attempt) == (None, HD, 2)
    assert hear(core, failed(FailureKind.STATUS)) == [RelayFailure(R)]


def test_a_prefill_instance_without_room_is_no_attempt() -> None:
    core = core_of(prefill=(P, Q))
    hear(core, arrived("r"))
    forward = sent(core, PrefillFailed(R, FailureKind.FULL))
    assert (forward.prefill, forward.attempt) == (HQ, 1)
    forward = sent(core, PrefillFailed(R, FailureKind.FULL))
    assert (forward.prefill, forward.holder, forward.attempt) == (None, HD, 1)
    hear(core, answered())
    assert suspended(core) == []


def test_an_instance_without_room_for_the_last_resort_is_no_attempt_either() -> None:
    core = core_of(decode=(D, E), attempts_max=1)
    first = sent(core, arrived("r"), PrefillFailed(R, FailureKind.STATUS))
    second = sent(core, failed(FailureKind.FULL))
    assert {first.holder, second.holder} == {HD, HE}
    assert (second.prefill, second.attempt) == (None, 2)


def test_a_prefill_instance_that_is_gone_is_down_at_once() -> None:
    core = core_of(prefill=(P, Q))
    hear(core, arrived("r", 1, 2, 3))
    commands = hear(core, PrefillFailed(R, FailureKind.UNREACHABLE))
    assert commands[0] == Probe(P)
    assert core.index.predicted_count(HP) == 0
    hear(core, answered())
    assert [sent(core, arrived(f"s{n}", n)).prefill for n in range(3)] == [HQ] * 3


def test_a_prefill_instance_that_was_removed_meanwhile_is_no_trouble() -> None:
    core = core_of(prefill=(P, Q))
    hear(core, arrived("r", 1, 2, 3), InstanceRemoved(P))
    assert sent(core, PrefillFailed(R, FailureKind.FULL)).prefill == HQ
    hear(core, InstanceRemoved(Q), PrefillEnded(R), answered())
    assert core.loads.loads == {}


def test_a_refusal_by_the_prefill_instance_is_an_answer_of_that_instance() -> None:
    core = core_of(prefill=(P, Q), decode=(D, E))
    hear(core, arrived("x"), PrefillEnded(RequestId("x")))
    hear(core, RequestFailed(RequestId("x"), FailureKind.STATUS))
    hear(core, PrefillEnded(RequestId("x")), answered("x"))  # D fails what E serves
    assert suspended(core) == [D]
    hear(core, arrived("r"), RequestFirstByte(R), answered())
    assert suspended(core) == [D]  # it has done nothing since
    assert core.loads.loads == {}


def test_a_refusal_that_breaks_off_is_looked_into_where_it_came_from() -> None:
    core = core_of()
    hear(core, arrived("r"))
    assert hear(core, RequestFinished(R, Outcome.BROKEN_OFF)) == [Probe(P)]


# --- a decode leg that fails -------------------------------------------------------------------------


@pytest.mark.parametrize("knows_prompt", [True, False])
@pytest.mark.parametrize("kind", [*UNSENT, FailureKind.FULL])
def test_a_decode_leg_that_was_not_sent_is_delivered_to_another_instance(
    kind: FailureKind, knows_prompt: bool
) -> None:
    core = core_of(decode=(D, E))
    first = sent(core, arrived("r", *(range(9) if knows_prompt else ())))
    hear(core, PrefillEnded(R))
    again = sent(core, failed(kind))
    assert (again.holder, again.prefill, again.is_redelivery) == (HE, None, True)
    assert again.attempt == 1
    assert again.decision.prefill == first.decision.prefill
    assert again.decision.ranking[0].holder == HE
    assert core.loads.get(HD) == Load()
    assert core.loads.get(HE) == (Load(1, 0, 4) if knows_prompt else Load(1, 0, 0))
    hear(core, answered())
    charged = [] if kind is not FailureKind.NO_CONNECTION else [D]
    assert suspended(core) == charged


def test_it_is_redelivered_however_many_attempts_there_were() -> None:
    core = core_of(prefill=(P, Q), decode=(D, E, B), attempts_max=2)
    hear(core, arrived("r"), PrefillFailed(R, FailureKind.STATUS), PrefillEnded(R))
    first = sent(core, failed(FailureKind.UNREACHABLE))
    second = sent(core, failed(FailureKind.FULL))
    assert first.holder != second.holder
    assert {first.attempt, second.attempt} == {2}
    assert hear(core, failed(FailureKind.FULL)) == [RelayFailure(R)]
    assert core.loads.loads == {}


def test_an_instance_of_both_roles_gets_blocks_only_if_it_is_known_to_take_them() -> None:
    core = core_of(both=(B,), policy="round_robin")
    assert sent(core, arrived("r")).holder == HD
    hear(core, PrefillEnded(R))
    assert hear(core, failed(FailureKind.UNREACHABLE)) == [Probe(D), RelayFailure(R)]


def test_where_nobody_only_decodes_instances_of_both_roles_are_taken_to_fetch() -> None:
    core = core_of(decode=(), both=(B,), policy="round_robin")
    forward = sent(core, arrived("r"))
    assert (forward.prefill, forward.holder) == (HP, HB)


def test_an_instance_of_both_roles_takes_it_too() -> None:
    core = core_of(both=(B,), policy="round_robin")
    receive(core, B)
    first = sent(core, arrived("r"))
    hear(core, PrefillEnded(R))
    again = sent(core, failed(FailureKind.UNREACHABLE))
    assert {first.holder, again.holder} == {HB, HD}
    assert again.is_redelivery


def test_where_there_is_no_other_the_client_is_told() -> None:
    core = core_of()
    hear(core, arrived("r"), PrefillEnded(R))
    assert hear(core, failed(FailureKind.FULL)) == [RelayFailure(R)]
    assert core.requests == {}
    assert core.loads.loads == {}


@pytest.mark.parametrize("kind", SENT)
def test_a_decode_leg_that_may_have_arrived_is_computed_anew(kind: FailureKind) -> None:
    core = core_of(decode=(D, E))
    hear(core, arrived("r", *range(9)), PrefillEnded(R))
    forward = sent(core, failed(kind))
    assert (forward.prefill, forward.holder, forward.is_redelivery) == (HP, HE, False)
    assert forward.attempt == 2
    hear(core, PrefillEnded(R), answered())
    assert suspended(core) == [D]


def test_nothing_is_redelivered_of_a_prefill_that_keeps_nothing() -> None:
    core = core_of(decode=(D, E))
    hear(core, arrived("r", *range(9)), PrefillEnded(R, is_held=False))
    forward = sent(core, failed(FailureKind.UNREACHABLE))
    assert (forward.prefill, forward.holder, forward.is_redelivery) == (HP, HE, False)


def test_a_redelivery_teaches_the_rate_of_what_its_own_instance_lacked() -> None:
    core = core_of(decode=(D, E))
    hear(core, arrived("r", *range(400)), PrefillEnded(R))
    hear(core, failed(FailureKind.UNREACHABLE), now=5.0)
    hear(core, RequestFirstByte(R, shows_prefill=True), now=5.01)
    assert core.fleet.handoff_tokens_per_ms == pytest.approx(40.0)


# --- trials -----------------------------------------------------------------------------------------


def suspend_decode(core: RouterCore) -> None:
    """Let D fail what E serves."""
    hear(core, arrived("x"), PrefillEnded(RequestId("x")))
    assert core.requests[RequestId("x")].answering.holder == HD
    hear(core, RequestFailed(RequestId("x"), FailureKind.STATUS))
    hear(core, PrefillEnded(RequestId("x")), answered("x"))
    assert suspended(core) == [D]


def test_a_trial_whose_leg_was_never_sent_lets_another_through() -> None:
    core = core_of(prefill=(P, Q), decode=(D, E), policy="round_robin")
    suspend_decode(core)
    forward = sent(core, arrived("r"), now=1.0)
    assert forward.holder == HD  # its trial
    # The prefill fails before D has got anything; whoever comes next may try D.
    again = sent(core, PrefillFailed(R, FailureKind.STATUS), now=1.0)
    instance = core.fleet.find(D)
    assert instance is not None
    assert instance.breaker.trial == (R if again.holder == HD else None)
    hear(core, PrefillEnded(R), answered(), now=1.0)
    assert instance.breaker.trial is None


def test_a_trial_that_finds_no_room_lets_another_through() -> None:
    core = core_of(decode=(D, E), policy="round_robin")
    suspend_decode(core)
    assert sent(core, arrived("r"), now=1.0).holder == HD
    hear(core, PrefillEnded(R), now=1.0)
    assert sent(core, failed(FailureKind.FULL), now=1.0).holder == HE
    instance = core.fleet.find(D)
    assert instance is not None
    assert instance.breaker.trial is None


def test_an_instance_that_comes_back_prefills_again() -> None:
    core = core_of()
    hear(core, InstanceProbed(P, is_healthy=False, is_gone=True))
    assert sent(core, arrived("r", 1, 2, 3)).prefill is None
    hear(core, answered(), InstanceProbed(P, is_healthy=True))
    assert sent(core, arrived("s", 4, 5, 6)).prefill == HP


def test_a_decode_instance_that_has_a_turn_does_not_settle_what_the_pool_could_do() -> None:
    """A prefill instance may fetch it, so that nothing is held up where answers are decoded."""
    core = core_of()
    for source in (SourceId(P), SourceId(D)):
        feed(core, SourceOpened(source, has_replay=False))
    tokens = tuple(range(20))
    names = range(1, 11)
    feed(core, batch(0, stored(*names, tokens=tokens), source=SourceId(D)))
    whole = dataclasses.replace(request("r", *tokens), may_hand_over=False)
    assert core.covers(whole, 0.0)
    handed_over = dataclasses.replace(whole, may_hand_over=True)
    assert not core.covers(handed_over, 0.0)
    feed(core, batch(0, stored(*names, tokens=tokens), source=SourceId(P)))
    assert core.covers(handed_over, 0.0)
