"""The core as a whole: events in, commands out."""

import dataclasses
import random

import pytest

from moongate.router import (
    BatchReceived,
    BlockSpace,
    FailureKind,
    Forward,
    Holder,
    InstanceAdded,
    InstanceDescribed,
    InstanceId,
    InstanceProbed,
    InstanceRemoved,
    InstanceSpec,
    Outcome,
    Probe,
    Prompt,
    Reason,
    Reject,
    RejectReason,
    RelayFailure,
    ReplayEnded,
    Request,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    RequestReplay,
    Role,
    RouterCore,
    RouterLimits,
    SourceClosed,
    SourceId,
    SourceLost,
    SourceOpened,
    SourceReconnected,
    Tier,
    Trust,
    WakeAt,
    WakeUp,
    make_policy,
)
from moongate.router.blocks import hash_text
from moongate.router.events import BlocksCleared, BlocksUnreadable
from moongate.router.load import Load
from moongate.router.model import TEXT_SPACE

from .builders import (
    MODEL,
    SOURCE_A,
    SOURCE_B,
    SPACE,
    A,
    B,
    C,
    add,
    arrived,
    batch,
    facts,
    feed,
    forward_in,
    make_core,
    removed,
    request,
    send,
    side_stored,
    stored,
)

HA, HB = Holder(A), Holder(B)
R, S, T = RequestId("r"), RequestId("s"), RequestId("t")


def with_sources(*instance_ids: InstanceId, has_replay: bool | None = None) -> RouterCore:
    """Return a core whose instances are up and publish events.

    By default the sources are known to have said nothing yet; with `has_replay` given they are only
    opened.
    """
    core = make_core(*instance_ids)
    for instance_id in instance_ids:
        source = SourceId(instance_id)
        feed(core, SourceOpened(source, has_replay is not False))
        if has_replay is None:
            feed(core, ReplayEnded(source, 1, is_complete=True))
    return core


def overlaps(core: RouterCore, *token_ids: int) -> dict[str, tuple[int, int]]:
    """Return each candidate's (confirmed, whole) overlap in tokens."""
    decision = core.explain(request("x", *token_ids), now=0.0)
    assert decision is not None
    return {
        str(c.holder): (c.candidate.confirmed_tokens, c.candidate.overlap_tokens)
        for c in decision.ranking
    }


def trust(core: RouterCore, holder: Holder = HA) -> Trust:
    return core.sources.trust(holder)


def finished(request_id: RequestId, outcome: Outcome = Outcome.ANSWERED) -> RequestFinished:
    return RequestFinished(request_id, outcome)


# --- a request's way ------------------------------------------------------------------------------


def test_a_request_goes_to_the_holder_of_its_prefix() -> None:
    core = with_sources(A, B)
    feed(core, batch(0, stored(71, 72, tokens=[1, 2, 3, 4]), source=SOURCE_B))
    forward = forward_in(feed(core, arrived("r", 1, 2, 3, 4, 5)))
    assert (forward.request_id, forward.holder, forward.attempt) == (R, HB, 1)
    decision = forward.decision
    assert (decision.policy, decision.reason) == ("kv_cost", Reason.DEVICE_PREFIX)
    assert (decision.prompt_tokens, decision.device_tokens) == (5, 4)
    first, second = (ranked.candidate for ranked in decision.ranking)
    assert (first.holder, first.overlap_tokens, first.confirmed_tokens) == (HB, 4, 4)
    assert (second.holder, second.overlap_tokens, second.trust) == (HA, 0, Trust.EXACT)
    assert decision.ranking[0].cost_ms == pytest.approx(1 / 8)


def test_the_last_token_is_always_computed() -> None:
    core = with_sources(A)
    feed(core, batch(0, stored(71, 72, tokens=[1, 2, 3, 4])))
    assert overlaps(core, 1, 2, 3, 4) == {"a": (2, 2)}


def test_a_forward_is_reserved_in_the_same_step() -> None:
    core = make_core(A)
    feed(core, arrived("r", 1, 2, 3, 4, 5))
    assert core.loads.get(HA) == Load(1, 5, 2)
    feed(core, RequestFirstByte(R))
    assert core.loads.get(HA) == Load(1, 0, 2)
    feed(core, RequestFirstByte(R))
    assert feed(core, finished(R)) == []
    assert core.loads.get(HA) == Load()
    assert core.requests == {}


def test_a_burst_of_one_cold_prefix_follows_the_first_by_prediction() -> None:
    core = make_core(A, B)
    long = range(2000)
    assert send(core, arrived("r", *long)) == HA
    assert overlaps(core, *long) == {"a": (0, 1998), "b": (0, 0)}


def test_what_is_predicted_counts_until_its_events_must_have_come() -> None:
    core = with_sources(A, B)
    feed(core, arrived("r", 1, 2, 3))
    feed(core, batch(0, stored(71, tokens=[1, 2])))  # confirms it
    feed(core, arrived("s", 8, 9, 10))
    core.handle(finished(S), 10.0)
    assert core.index.next_expiry() == 11.0
    core.handle(finished(R), 10.0)
    assert core.index.predicted_count(HB) == 1
    core.handle(WakeUp(), 11.0)
    assert core.index.predicted_count(HB) == 0
    assert overlaps(core, 1, 2, 3)["a"] == (2, 2)


def test_without_events_a_prediction_outlives_its_request() -> None:
    core = make_core(A)
    assert WakeAt(600.0) in feed(core, arrived("r", 1, 2, 3))
    core.handle(finished(R), 10.0)
    core.handle(WakeUp(), 599.0)
    assert overlaps(core, 1, 2, 3) == {"a": (0, 2)}
    core.handle(WakeUp(), 600.0)
    assert overlaps(core, 1, 2, 3) == {"a": (0, 0)}


def test_an_estimated_prompt_is_found_by_its_text() -> None:
    core = with_sources(A, B)
    text = Prompt(130, {TEXT_SPACE: hash_text(b"x" * 520)}, is_exact=False)
    forward = forward_in(feed(core, RequestArrived(Request(R, MODEL, text))))
    assert WakeAt(600.0) not in feed(core, finished(R))  # asked for with the forward
    decision = core.explain(Request(S, MODEL, text), now=0.0)
    assert decision is not None
    assert [(c.holder, c.candidate.overlap_tokens) for c in decision.ranking] == [
        (forward.holder, 128),
        (HB, 0),
    ]


def partial(count: int, *token_ids: int) -> Prompt:
    """Return a prompt of about `count` tokens of which these are known."""
    known = request("x", *token_ids).prompt
    assert known is not None
    return dataclasses.replace(known, token_count=count, is_exact=False)


def test_a_prompt_known_in_part_is_found_by_that_part() -> None:
    core = with_sources(A, B)
    feed(core, batch(0, stored(71, 72, tokens=[1, 2, 3, 4]), source=SOURCE_B))
    beginning = partial(300, 1, 2, 3, 4)
    forward = forward_in(feed(core, RequestArrived(Request(R, MODEL, beginning))))
    assert (forward.holder, forward.decision.device_tokens) == (HB, 4)
    assert core.loads.get(HB) == Load(1, 296, 2)
    assert len(core.settling) == 0
    core.handle(RequestFirstByte(R, shows_prefill=True), 10.0)
    assert core.fleet.tokens_per_ms == 8.0, "an estimate teaches nothing"


def test_of_a_prompt_known_in_part_that_part_is_predicted_until_events_confirm_it() -> None:
    core = with_sources(A)
    beginning = partial(300, 1, 2, 3, 4)
    feed(core, RequestArrived(Request(R, MODEL, beginning)))
    assert core.index.next_expiry() == 60.0
    assert overlaps(core, 1, 2, 3, 4, 5) == {"a": (0, 4)}
    feed(core, finished(R))
    assert core.index.next_expiry() == 1.0


def test_a_prompt_known_in_part_continues_the_turn_that_ended_there() -> None:
    core = make_core(A, B)
    assert send(core, arrived("r", *range(4000))) == HA
    beginning = partial(4100, *range(4000))
    decision = forward_in(feed(core, RequestArrived(Request(S, MODEL, beginning)))).decision
    assert decision.ranking[0].holder == HA
    assert decision.ranking[1].terms_ms["history"] == pytest.approx(3 * 4000 / 8)


def test_only_what_is_not_confirmed_is_predicted() -> None:
    core = with_sources(A)
    feed(core, batch(0, stored(71, 72, tokens=[1, 2, 3, 4])))
    feed(core, arrived("r", 1, 2, 3, 4, 5, 6, 7))
    assert core.index.predicted_count(HA) == 1
    assert overlaps(core, 1, 2, 3, 4, 5, 6, 7) == {"a": (4, 6)}


def test_a_prompt_that_is_not_known_has_no_overlap() -> None:
    core = make_core(A, B)
    decision = forward_in(feed(core, arrived("r"))).decision
    assert (decision.prompt_tokens, decision.device_tokens) == (None, 0)
    assert decision.reason is Reason.LOAD


def test_a_prompt_that_could_not_be_read_is_a_fallback() -> None:
    core = make_core(A, B)
    unread = Request(R, MODEL, is_prompt_missing=True)
    assert forward_in(feed(core, RequestArrived(unread))).decision.reason is Reason.FALLBACK


def test_the_only_candidate_is_the_reason() -> None:
    core = make_core(A)
    assert forward_in(feed(core, arrived("r", 1, 2))).decision.reason is Reason.ONLY_CHOICE


def test_a_request_may_ask_for_another_policy_by_name() -> None:
    core = make_core(A, B, others=[make_policy("round_robin")])
    decision = forward_in(feed(core, arrived("r", policy="round_robin"))).decision
    assert decision.policy == "round_robin"
    decision = forward_in(feed(core, arrived("s", policy="no such"))).decision
    assert decision.policy == "kv_cost"


def test_the_policies_that_a_request_may_ask_for_are_known() -> None:
    core = make_core(others=[make_policy("random")])
    assert [core.has_policy(n) for n in ("kv_cost", "random", "x")] == [True, True, False]


def test_round_robin_goes_by_what_was_chosen_before() -> None:
    core = make_core(A, B, C, policy="round_robin")
    assert [send(core, arrived(name)).instance_id for name in "rstu"] == [A, B, C, A]


def test_explain_changes_nothing_not_even_chance() -> None:
    def decide(explains: bool) -> list[Holder]:
        core = RouterCore(make_policy("random"), random.Random(1).randrange)
        add(core, A, B, C)
        holders: list[Holder] = []
        for n in range(20):
            if explains:
                assert core.explain(request("x", 1, 2, 3), now=0.0) is not None
            holders.append(send(core, arrived(str(n))))
        return holders

    assert decide(explains=True) == decide(explains=False)


def test_a_decision_shows_the_runner_up_and_an_explanation_all() -> None:
    core = make_core(A, B, C)
    explained = core.explain(request("x", 1, 2, 3), now=0.0)
    assert explained is not None
    decision = forward_in(feed(core, arrived("r", 1, 2, 3))).decision
    assert [c.holder.instance_id for c in decision.ranking] == [A, B]
    assert [c.holder.instance_id for c in explained.ranking] == [A, B, C]
    assert explained.ranking[:2] == decision.ranking


def test_nothing_is_explained_without_a_candidate() -> None:
    assert make_core().explain(request("r", 1, 2), now=0.0) is None


# --- sessions and shared prefixes -----------------------------------------------------------------


def test_the_next_turn_goes_home_though_home_is_busier() -> None:
    core = make_core(A, B)
    session = list(range(4000))
    assert send(core, arrived("r", *session)) == HA
    feed(core, RequestFirstByte(R), finished(R))
    others = [send(core, arrived(f"o{n}", 5000 + n)) for n in range(4)]
    assert others == [HB, HA, HB, HA]
    feed(core, arrived("busy", 6000), RequestFirstByte(RequestId("busy")))
    decision = forward_in(feed(core, arrived("s", *session, *range(100)))).decision
    assert decision.ranking[0].holder == HA
    assert decision.ranking[1].terms_ms["history"] == pytest.approx(3 * 4000 / 8)


def test_an_instance_whose_block_size_is_not_known_does_not_hide_what_is_continued() -> None:
    core = make_core(A)
    add(core, B, described=facts(size=None))
    spaces = (SPACE, TEXT_SPACE)
    assert core.spaces(MODEL) == set(spaces)
    prompt = request("r", 1, 2, 3, 4, 5).prompt
    assert prompt is not None
    both = dataclasses.replace(prompt, chains={**prompt.chains, TEXT_SPACE: ()})
    first = forward_in(feed(core, RequestArrived(Request(R, MODEL, both))))
    decision = core.explain(Request(S, MODEL, both), now=0.0)
    assert decision is not None
    terms = {c.holder: c.terms_ms["history"] for c in decision.ranking}
    # What is only predicted is worth 0.9 of its tokens.
    assert terms[first.holder] == pytest.approx(3 * (4 - 0.9 * 4) / 8)
    assert max(terms.values()) == pytest.approx(3 * 4 / 8)


def test_a_prompt_that_is_only_text_to_the_fleet_continues_nothing() -> None:
    core = make_core()
    add(core, A, B, described=facts(size=None))
    assert core.spaces(MODEL) == {TEXT_SPACE}
    prompt = Prompt(5, {TEXT_SPACE: ()})
    assert feed(core, RequestArrived(Request(R, MODEL, prompt)))
    assert len(core.lineages) == 0


# --- models and spaces ----------------------------------------------------------------------------


def test_a_model_that_no_instance_serves_is_unknown() -> None:
    core = make_core(A)
    assert feed(core, arrived("r", model="other")) == [Reject(R, RejectReason.UNKNOWN_MODEL)]
    assert core.requests == {}


def test_a_model_may_yet_be_served_by_an_instance_not_heard_of() -> None:
    core = make_core(A)
    feed(core, InstanceAdded(InstanceSpec(B)))
    rejected = Reject(R, RejectReason.NO_INSTANCE, retry_after_s=2.0)
    assert feed(core, arrived("r", model="other")) == [rejected]


def test_while_all_instances_are_down_a_client_may_try_again() -> None:
    core = make_core(A)
    feed(core, InstanceProbed(A, is_healthy=False, is_gone=True))
    rejected = Reject(R, RejectReason.NO_INSTANCE, retry_after_s=2.0)
    assert feed(core, arrived("r", 1, 2)) == [rejected]


def test_a_prefill_instance_gets_no_whole_requests() -> None:
    core = make_core(A)
    add(core, B, role=Role.PREFILL)
    assert [send(core, arrived(name)) for name in "rst"] == [HA, HA, HA]


def test_c42_events_of_engines_with_other_hash_seeds_match() -> None:
    core = with_sources(A, B)
    feed(
        core,
        batch(0, stored(71, tokens=[1, 2])),
        batch(0, stored(b"\xfe" * 32, tokens=[1, 2]), source=SOURCE_B),
    )
    assert overlaps(core, 1, 2, 3) == {"a": (2, 2), "b": (2, 2)}


def test_c44_adapter_and_base_model_match_their_own_blocks_only() -> None:
    core = make_core()
    add(core, A, B, described=facts(adapters=("ad-1",)))
    feed(core, SourceOpened(SOURCE_A, False), SourceOpened(SOURCE_B, False))
    tokens = list(range(400))
    feed(
        core,
        batch(0, stored(*range(200), tokens=tokens, lora="ad-1")),
        batch(0, stored(*range(200), tokens=tokens), source=SOURCE_B),
    )
    spaces = (SPACE, BlockSpace(2, "ad-1"))
    assert core.spaces("ad-1") == {BlockSpace(2, "ad-1")}
    assert core.spaces(MODEL) == {SPACE}
    adapter = forward_in(feed(core, arrived("r", *tokens, 1, model="ad-1", spaces=spaces)))
    base = forward_in(feed(core, arrived("s", *tokens, 1, spaces=spaces)))
    assert [adapter.holder, base.holder] == [HA, HB]
    assert [c.candidate.confirmed_tokens for c in adapter.decision.ranking] == [400, 0]
    assert [c.candidate.confirmed_tokens for c in base.decision.ranking] == [400, 0]


def test_c46_the_block_size_of_the_events_counts_and_sizes_mix() -> None:
    core = make_core()
    add(core, A, B, C, described=facts(size=16))
    feed(core, SourceOpened(SOURCE_A, False), SourceOpened(SOURCE_B, False))
    tokens = list(range(260))
    feed(
        core,
        batch(0, stored(*range(4), tokens=tokens[:256], size=64)),
        batch(0, stored(1, tokens=tokens[:256], size=256, group=4), source=SOURCE_B),
    )
    spaces = {BlockSpace(16), BlockSpace(64), BlockSpace(256)}
    assert core.spaces(MODEL) == spaces
    decision = core.explain(request("r", *tokens, spaces=sorted(spaces)), now=0.0)
    assert decision is not None
    found = {c.holder.instance_id: c.candidate.confirmed_tokens for c in decision.ranking}
    assert found == {A: 256, B: 256, C: 0}
    decision = core.explain(request("s", *tokens[:200], spaces=sorted(spaces)), now=0.0)
    assert decision is not None
    found = {c.holder.instance_id: c.candidate.confirmed_tokens for c in decision.ranking}
    assert found == {A: 192, B: 0, C: 0}


# --- failures -------------------------------------------------------------------------------------


def test_a_failed_attempt_is_tried_once_elsewhere() -> None:
    core = make_core(A, B, C)
    assert send(core, arrived("r", 1, 2, 3)) == HA
    commands = feed(core, RequestFailed(R, FailureKind.STATUS, 500))
    forward = forward_in(commands)
    assert (forward.holder, forward.attempt) == (HB, 2)
    assert core.loads.get(HA) == Load()
    assert core.loads.get(HB) == Load(1, 3, 1)
    assert feed(core, RequestFailed(R, FailureKind.STATUS, 500)) == [RelayFailure(R)]
    assert core.requests == {}


def test_what_is_full_is_no_attempt_and_is_not_charged() -> None:
    core = make_core(A, B, C)
    assert send(core, arrived("r", 1, 2, 3)) == HA
    for holder in (HB, Holder(C)):
        forward = forward_in(feed(core, RequestFailed(R, FailureKind.FULL)))
        assert (forward.holder, forward.attempt) == (holder, 1)
        assert core.loads.get(holder) == Load(1, 3, 1)
    feed(core, finished(R))
    assert all(instance.breaker.is_closed for instance in core.fleet)


def test_a_full_instance_that_was_removed_meanwhile_is_no_trouble() -> None:
    core = make_core(A, B)
    assert send(core, arrived("r", 1, 2, 3)) == HA
    feed(core, InstanceRemoved(A))
    assert forward_in(feed(core, RequestFailed(R, FailureKind.FULL))).holder == HB


def test_c26_one_that_is_rate_limited_has_done_nothing_and_is_not_charged() -> None:
    core = with_sources(A, B)
    assert send(core, arrived("r", 1, 2, 3)) == HA
    forward = forward_in(feed(core, RequestFailed(R, FailureKind.RATE_LIMITED, 429)))
    assert (forward.holder, forward.attempt) == (HB, 1)
    assert core.index.predicted_count(HA) == 0
    feed(core, finished(R))
    assert all(instance.breaker.is_closed for instance in core.fleet)


def test_c26_four_are_asked_at_most() -> None:
    names = [InstanceId(f"i{n}") for n in range(6)]
    core = make_core(*names)
    feed(core, arrived("r"))
    limited = RequestFailed(R, FailureKind.RATE_LIMITED, 429)
    kinds = [[type(c) for c in feed(core, limited)] for _ in range(4)]
    assert kinds == [[Forward], [Forward], [Forward], [RelayFailure]]


@pytest.mark.parametrize("retries", [True, False])
def test_silence_is_repeated_only_if_the_operator_wants_it(retries: bool) -> None:
    core = make_core(A, B, limits=RouterLimits(retries_timeouts=retries))
    feed(core, arrived("r"))
    commands = feed(core, RequestFailed(R, FailureKind.TIMEOUT))
    assert [type(command) for command in commands] == [Forward if retries else RelayFailure]


def test_c89_a_refused_trial_neither_closes_the_breaker_nor_opens_it_again() -> None:
    core = make_core(A, B)
    fail_over(core, R, now=0.0)
    assert send(core, arrived("other"), now=0.5) == HB
    assert send(core, arrived("s"), now=1.0) == HA
    core.handle(finished(S, Outcome.REFUSED), now=1.0)
    (breaker,) = (i.breaker for i in core.fleet if i.spec.id == A)
    assert (breaker.is_closed, breaker.openings, breaker.trial) == (False, 1, None)
    assert send(core, arrived("t"), now=1.0) == HA


def test_where_all_are_full_the_client_is_told() -> None:
    core = make_core(A, B)
    feed(core, arrived("r"), RequestFailed(R, FailureKind.FULL))
    assert feed(core, RequestFailed(R, FailureKind.FULL)) == [RelayFailure(R)]
    assert core.requests == {}
    assert core.loads.loads == {}


def test_a_failure_with_nobody_else_goes_to_the_client_and_charges_nobody() -> None:
    core = make_core(A)
    feed(core, arrived("r"))
    assert feed(core, RequestFailed(R, FailureKind.TIMEOUT)) == [RelayFailure(R)]
    assert send(core, arrived("s")) == HA


def test_c49_a_refused_connection_takes_the_instance_out_at_once() -> None:
    core = make_core(A, B)
    feed(core, arrived("r", 1, 2, 3))
    commands = feed(core, RequestFailed(R, FailureKind.UNREACHABLE))
    assert [type(command) for command in commands] == [Probe, Forward]
    assert commands[0] == Probe(A)
    assert core.index.predicted_count(HA) == 0
    assert [send(core, arrived(str(n), 1, 2, 3)) for n in range(50)] == [HB] * 50


def test_a_lost_connection_is_looked_into() -> None:
    core = make_core(A, B)
    feed(core, arrived("r"))
    commands = feed(core, RequestFailed(R, FailureKind.DISCONNECTED))
    assert commands[0] == Probe(A)
    assert send(core, arrived("s")) == HA


def test_an_answer_broken_off_is_looked_into() -> None:
    core = make_core(A)
    feed(core, arrived("r"))
    assert feed(core, finished(R, Outcome.BROKEN_OFF)) == [Probe(A)]


def fail_over(core: RouterCore, request_id: RequestId, now: float) -> None:
    """Let a request fail on A and be answered by B."""
    assert send(core, arrived(request_id), now) == HA
    core.handle(RequestFailed(request_id, FailureKind.STATUS, 500), now)
    core.handle(finished(request_id), now)


def test_c49_an_instance_that_fails_what_another_serves_backs_off() -> None:
    core = make_core(A, B)
    fail_over(core, R, now=0.0)
    assert send(core, arrived("s"), now=0.9) == HB
    assert send(core, arrived("t"), now=1.0) == HA  # the trial
    assert send(core, arrived("u"), now=1.1) == HB


def test_c49_a_trial_that_fails_doubles_the_back_off() -> None:
    core = make_core(A, B)
    fail_over(core, R, now=0.0)
    fail_over(core, S, now=1.0)
    assert send(core, arrived("t"), now=2.9) == HB
    core.handle(finished(T), now=2.9)
    assert send(core, arrived("u"), now=3.0) == HA


def test_c49_a_trial_that_is_answered_ends_the_back_off() -> None:
    core = make_core(A, B)
    fail_over(core, R, now=0.0)
    assert send(core, arrived("s"), now=1.0) == HA
    core.handle(finished(S), now=1.0)
    assert send(core, arrived("other"), now=1.0) == HB
    fail_over(core, T, now=1.0)
    assert send(core, arrived("u"), now=1.9) == HB
    assert send(core, arrived("v"), now=2.0) == HA


@pytest.mark.parametrize("is_answered", [True, False])
def test_c49_a_trial_whose_client_left_lets_another_through(is_answered: bool) -> None:
    core = make_core(A, B)
    fail_over(core, R, now=0.0)
    assert send(core, arrived("other"), now=0.5) == HB
    assert send(core, arrived("s"), now=1.0) == HA
    core.handle(finished(S, Outcome.CLIENT_LEFT), now=1.0)
    assert send(core, arrived("t"), now=1.0) == HA
    outcome = Outcome.ANSWERED if is_answered else Outcome.BROKEN_OFF
    core.handle(finished(T, outcome), now=1.0)
    assert core.fleet.available(MODEL, 1.0, [B])[0].breaker.trial is None


def test_c49_a_trial_that_nobody_could_serve_lets_another_through() -> None:
    core = make_core(A, B)
    fail_over(core, R, now=0.0)
    assert send(core, arrived("other"), now=0.5) == HB
    assert send(core, arrived("s"), now=1.0) == HA
    core.handle(RequestFailed(S, FailureKind.STATUS, 500), now=1.0)
    assert core.handle(RequestFailed(S, FailureKind.STATUS, 500), now=1.0) == [RelayFailure(S)]
    assert core.fleet.available(MODEL, 1.0, [B])[0].breaker.trial is None


def test_c49_requests_that_failed_together_are_one_reason_to_back_off() -> None:
    core = make_core(A, B, policy="session_hash")
    key = next(k for k in "abcdef" if send_by_session(core, f"x{k}", k) == HA)
    for name in "rst":
        assert send_by_session(core, name, key) == HA
    for name in "rst":
        feed(core, RequestFailed(RequestId(name), FailureKind.STATUS, 500))
        feed(core, finished(RequestId(name)))
    assert [i.spec.id for i in core.fleet.available(MODEL, 0.9, [])] == [B]
    assert [i.spec.id for i in core.fleet.available(MODEL, 1.0, [])] == [A, B]


def send_by_session(core: RouterCore, name: str, session_key: str) -> Holder:
    return send(core, arrived(name, session_key=session_key))


def test_c49_the_end_of_an_earlier_request_lets_no_second_trial_through() -> None:
    core = make_core(A, B)
    early = RequestId("early")
    assert send(core, arrived(early)) == HA
    assert send(core, arrived("other")) == HB
    fail_over(core, R, now=0.0)
    assert send(core, arrived("trial"), now=1.0) == HA
    core.handle(finished(early, Outcome.CLIENT_LEFT), now=1.0)
    assert send(core, arrived("s"), now=1.0) == HB


def test_with_three_attempts_both_that_failed_are_charged() -> None:
    core = make_core(A, B, C, limits=RouterLimits(attempts_max=3))
    feed(
        core,
        arrived("r"),
        RequestFailed(R, FailureKind.STATUS, 500),
        RequestFailed(R, FailureKind.STATUS, 500),
        finished(R),
    )
    assert [i.spec.id for i in core.fleet.available(MODEL, 0.9, [])] == [C]


def test_an_instance_that_is_down_is_not_suspended_as_well() -> None:
    core = make_core(A, B)
    feed(core, arrived("r"), RequestFailed(R, FailureKind.UNREACHABLE), finished(R))
    feed(core, InstanceProbed(A, is_healthy=True))
    assert send(core, arrived("s")) == HA


def test_the_predictions_of_a_removed_instance_are_gone_before_its_requests_end() -> None:
    core = with_sources(A, B)
    assert send(core, arrived("r", 1, 2, 3)) == HA
    feed(core, InstanceRemoved(A))
    assert feed(core, finished(R)) == []
    assert core.predicting == {}


def test_what_happens_to_a_request_of_a_removed_instance_concerns_nobody_else() -> None:
    core = make_core(A, B)
    feed(core, arrived("r", 1, 2, 3), arrived("s", 4, 5, 6), arrived("t", 7, 8, 9))
    feed(core, InstanceRemoved(A))
    feed(core, RequestFirstByte(R))
    assert feed(core, finished(R)) == []
    forward = forward_in(feed(core, RequestFailed(T, FailureKind.UNREACHABLE)))
    assert forward.holder == HB
    assert feed(core, finished(T)) == []
    assert core.loads.get(HA) == Load()


# --- learning -------------------------------------------------------------------------------------


def test_the_prefill_rate_is_learned_from_an_undisturbed_first_byte() -> None:
    core = make_core(A)
    feed(core, arrived("r", *range(400)))
    core.handle(RequestFirstByte(R, shows_prefill=True), 0.2)
    assert core.fleet.tokens_per_ms == pytest.approx(2.0)


def test_a_whole_answer_or_an_error_teaches_nothing() -> None:
    core = make_core(A)
    feed(core, arrived("r", *range(400)))
    core.handle(RequestFirstByte(R), 0.001)
    assert core.fleet.tokens_per_ms == 8.0


def test_a_prefill_behind_another_teaches_nothing() -> None:
    core = make_core(A)
    feed(core, arrived("r", *range(400)), arrived("s", *range(500, 900)))
    core.handle(RequestFirstByte(S, shows_prefill=True), 0.2)
    assert core.fleet.tokens_per_ms == 8.0


def test_the_time_of_a_prompt_that_could_not_be_read_makes_nobody_slow() -> None:
    for is_missing in (False, True):
        core = make_core(A, B)
        for number in range(20):
            now = 10.0 * number
            for name in ("r", "s"):  # at once, so on both
                asked = Request(RequestId(f"{name}{number}"), MODEL, is_prompt_missing=is_missing)
                core.handle(RequestArrived(asked), now)
            holders = {
                key: tracked.leg.holder for key, tracked in core.requests.items() if tracked.leg
            }
            for key, holder in sorted(holders.items(), key=lambda item: item[1] == HA):
                then = now + (4.0 if holder == HA else 0.1)
                core.handle(RequestFirstByte(key, shows_prefill=True), then)
                core.handle(RequestFinished(key, Outcome.ANSWERED), then)
        slow = max(state.latency.slowness for state in core.fleet)
        assert (slow == 1.0) == is_missing


# --- the fleet ------------------------------------------------------------------------------------


def test_a_new_instance_is_checked_at_once() -> None:
    assert feed(make_core(), InstanceAdded(InstanceSpec(A))) == [Probe(A)]


def test_an_instance_gets_work_once_it_is_described_and_healthy() -> None:
    core = make_core()
    feed(core, InstanceAdded(InstanceSpec(A)), InstanceProbed(A, is_healthy=True))
    assert isinstance(feed(core, arrived("r"))[0], Reject)
    feed(core, InstanceDescribed(A, facts()))
    assert send(core, arrived("s")) == HA


def test_what_concerns_an_unknown_instance_is_ignored() -> None:
    core = make_core(A)
    assert feed(core, InstanceRemoved(B)) == []
    assert feed(core, InstanceProbed(B, is_healthy=True)) == []
    assert feed(core, InstanceDescribed(B, facts())) == []
    assert feed(core, SourceOpened(SOURCE_B, has_replay=True)) == []
    assert feed(core, batch(0, BlocksCleared(), source=SOURCE_B)) == []


def test_a_removed_instance_leaves_nothing_in_the_index() -> None:
    core = with_sources(A, B)
    feed(core, batch(0, stored(71, tokens=[1, 2])), arrived("r", 1, 2, 3, 4, 5))
    feed(core, InstanceRemoved(A))
    assert core.index.holders == (HB,)
    assert core.index.total == 0
    assert overlaps(core, 1, 2, 3) == {"b": (0, 0)}


def test_an_instance_that_is_gone_loses_its_predictions_and_keeps_what_it_confirmed() -> None:
    core = with_sources(A)
    feed(core, batch(0, stored(71, tokens=[1, 2])), arrived("r", 1, 2, 3, 4, 5))
    feed(core, InstanceProbed(A, is_healthy=False, is_gone=True))
    assert core.index.predicted_count(HA) == 0
    assert core.index.count(HA, Tier.DEVICE) == 1


def test_an_instance_may_be_gone_before_it_was_described() -> None:
    core = make_core()
    assert feed(core, InstanceAdded(InstanceSpec(A)), InstanceProbed(A, False, is_gone=True)) == []
    assert core.index.holders == ()


def test_health_needs_as_many_checks_as_the_limits_say() -> None:
    core = make_core(A, B, limits=RouterLimits(down_after=2))
    feed(core, InstanceProbed(A, is_healthy=False))
    assert send(core, arrived("r")) == HA
    feed(core, InstanceProbed(A, is_healthy=False))
    assert [send(core, arrived(name)) for name in "st"] == [HB, HB]


# --- sources --------------------------------------------------------------------------------------


def test_c51_a_gap_is_asked_for_once_and_the_index_is_as_without_loss() -> None:
    core = with_sources(A, has_replay=True)
    feed(core, ReplayEnded(SOURCE_A, 1, is_complete=True))

    def event(n: int, replay_id: int | None = None) -> BatchReceived:
        parent = 100 + n - 1 if n else None
        return batch(n, stored(100 + n, tokens=[n, n], parent=parent), replay_id=replay_id)

    live = [event(n) for n in (*range(10), 15)]
    commands = [command for e in live for command in feed(core, e)]
    assert commands == [RequestReplay(SOURCE_A, from_sequence=10, replay_id=2)]
    for n in range(10, 16):
        assert feed(core, event(n, replay_id=2)) == []
    assert feed(core, ReplayEnded(SOURCE_A, 2, is_complete=True)) == []
    tokens = [n for n in range(16) for _ in range(2)]
    assert overlaps(core, *tokens, 99) == {"a": (32, 32)}
    state = core.sources.find(SOURCE_A)
    assert state is not None
    assert (state.feed.counts.gap_batches, state.feed.counts.lost_batches) == (5, 0)


def test_c54_a_restarted_engine_holds_only_what_it_stored_since() -> None:
    core = with_sources(A)
    many = [stored(100 + n, tokens=[n, n]) for n in range(50)]
    feed(core, *(batch(n) for n in range(900)), batch(900, *many))
    assert core.index.count(HA, Tier.DEVICE) == 50
    again = [batch(n, stored(n, tokens=[n, 7]), process="q") for n in range(3)]
    feed(core, arrived("r", 5, 5, 6, 6, 1), *again)
    assert core.index.count(HA, Tier.DEVICE) == 3
    assert core.index.predicted_count(HA) == 0
    assert overlaps(core, 0, 0, 1) == {"a": (0, 0)}
    assert overlaps(core, 2, 7, 1) == {"a": (2, 2)}
    assert trust(core) is Trust.EXACT


def test_c57_a_cleared_cache_attracts_nothing_any_more() -> None:
    core = with_sources(A, B)
    prefix = list(range(400))
    feed(core, batch(0, stored(*range(200), tokens=prefix)), arrived("r", *prefix, 1, 2, 3))
    assert overlaps(core, *prefix, 1)["a"] == (400, 400)
    feed(core, RequestFirstByte(R), finished(R), batch(1, BlocksCleared()))
    assert overlaps(core, *prefix, 1) == {"a": (0, 0), "b": (0, 0)}
    others = [send(core, arrived(f"s{n}", *range(1000 * n, 1000 * n + 50))) for n in range(1, 21)]
    assert [others.count(HA), others.count(HB)] == [10, 10]


def test_c57_a_clear_that_was_lost_is_found_once_the_engine_reports_nothing_cached() -> None:
    core = with_sources(A, has_replay=True)
    feed(core, ReplayEnded(SOURCE_A, 1, is_complete=True), batch(0, stored(71, tokens=[1, 2])))
    feed(core, arrived("r", 1, 2, 3), RequestFirstByte(R))  # batch 1, a clear, never comes
    commands = feed(core, RequestFinished(R, Outcome.ANSWERED, cached_tokens=0), now=2.0)
    assert commands[0] == RequestReplay(SOURCE_A, from_sequence=0, replay_id=2)
    feed(core, batch(0, stored(71, tokens=[1, 2]), replay_id=2), now=2.0)
    feed(core, batch(1, BlocksCleared(), replay_id=2), now=2.0)
    feed(core, ReplayEnded(SOURCE_A, 2, is_complete=True), now=2.0)
    assert core.index.count(HA, Tier.DEVICE) == 0
    assert overlaps(core, 1, 2, 3) == {"a": (0, 0)}
    assert trust(core) is Trust.EXACT


@pytest.mark.parametrize(
    ("tokens", "event"),
    [
        ((1, 2, 3), RequestFinished(R, Outcome.ANSWERED, cached_tokens=2)),
        ((1, 2, 3), RequestFinished(R, Outcome.ANSWERED, cached_tokens=None)),
        ((1, 2, 3), RequestFinished(R, Outcome.CLIENT_LEFT, cached_tokens=0)),
        ((7, 8, 9), RequestFinished(R, Outcome.ANSWERED, cached_tokens=0)),
    ],
    ids=["as known", "not told", "not answered", "nothing known"],
)
def test_c57_a_report_that_contradicts_nothing_asks_for_nothing(
    tokens: tuple[int, ...], event: RequestFinished
) -> None:
    core = with_sources(A, has_replay=True)
    feed(core, ReplayEnded(SOURCE_A, 1, is_complete=True), batch(0, stored(71, tokens=[1, 2])))
    commands = feed(core, arrived("r", *tokens), RequestFirstByte(R), event)
    assert [command for command in commands if isinstance(command, RequestReplay)] == []


def test_c57_only_the_sources_of_the_rank_that_was_asked_are_doubted() -> None:
    core = make_core()
    add(core, A, described=facts(ranks=(0, 1)))
    for rank in (0, 1):
        source = SourceId(A, rank)
        feed(core, SourceOpened(source, True, rank), ReplayEnded(source, 1, is_complete=True))
    event = stored(70, tokens=[1, 2])
    feed(core, batch(0, event, source=SourceId(A, 1), rank=1), arrived("r", 1, 2, 3))
    commands = feed(core, RequestFinished(R, Outcome.ANSWERED, cached_tokens=0))
    assert commands[0] == RequestReplay(SourceId(A, 1), 0, 2)


def test_a_clear_leaves_the_copies_on_the_host() -> None:
    core = with_sources(A)
    feed(core, batch(0, stored(71, tokens=[1, 2], tier=Tier.HOST), BlocksCleared()))
    assert overlaps(core, 1, 2, 3) == {"a": (2, 2)}


def test_a_hybrid_models_windows_decide_with_and_a_forward_foretells_them() -> None:
    core = with_sources(A, B)
    for source in (SOURCE_A, SOURCE_B):
        whole = stored(71, 72, 73, tokens=[1, 2, 3, 4, 5, 6])
        feed(core, batch(0, side_stored(72, group=1, needed_tokens=2), whole, source=source))
    feed(core, batch(1, side_stored(73, group=1, needed_tokens=2), source=SOURCE_B))
    assert overlaps(core, *range(1, 10)) == {"a": (4, 4), "b": (6, 6)}
    assert send(core, arrived("r", *range(1, 10))) == HB
    assert overlaps(core, *range(1, 10)) == {"a": (4, 4), "b": (6, 8)}
    feed(core, batch(2, removed(73, group=1), source=SOURCE_B))
    assert overlaps(core, 1, 2, 3, 4, 5, 6, 0) == {"a": (4, 4), "b": (4, 4)}


def test_a_hybrid_holder_leaves_with_its_groups() -> None:
    core = with_sources(A)
    feed(core, batch(0, stored(71, tokens=[1, 2]), side_stored(71, group=1, needed_tokens=2)))
    assert core.index.total == 2
    feed(core, InstanceRemoved(A))
    assert (core.index.total, core.index.holders) == (0, ())


def test_a_removed_block_ends_the_overlap() -> None:
    core = with_sources(A)
    feed(core, batch(0, stored(71, 72, tokens=[1, 2, 3, 4])), batch(1, removed(72)))
    assert overlaps(core, 1, 2, 3, 4, 5) == {"a": (2, 2)}


def test_events_that_cannot_be_used_lower_the_trust() -> None:
    core = with_sources(A, B)
    feed(core, batch(0, BlocksUnreadable("not_msgpack")))
    assert (trust(core, HA), trust(core, HB)) == (Trust.DEGRADED, Trust.EXACT)
    feed(core, batch(0, stored(72, parent=71, tokens=[3, 4]), source=SOURCE_B))
    assert trust(core, HB) is Trust.DEGRADED
    feed(core, batch(1, BlocksCleared()))
    assert trust(core, HA) is Trust.EXACT


def test_a_clear_does_not_tell_what_was_missed_of_the_copies_on_the_host() -> None:
    core = with_sources(A, has_replay=False)
    feed(core, batch(0, stored(71, tokens=[1, 2], tier=Tier.HOST)))
    feed(core, batch(2, BlocksCleared()))  # batch 1 is lost: the host's removals may be in it
    assert trust(core) is Trust.DEGRADED


def test_a_holder_whose_source_has_said_nothing_yet_is_approximate() -> None:
    core = make_core(A)
    assert trust(core) is Trust.APPROXIMATE
    feed(core, SourceOpened(SOURCE_A, has_replay=False))
    assert trust(core) is Trust.APPROXIMATE  # perhaps it never will
    feed(core, batch(0, stored(71, tokens=[1, 2])))
    assert trust(core) is Trust.EXACT
    feed(core, SourceClosed(SOURCE_A))
    assert trust(core) is Trust.APPROXIMATE


def test_a_closed_source_takes_its_blocks_along_and_says_no_more() -> None:
    core = with_sources(A)
    feed(core, batch(0, stored(71, tokens=[1, 2])))
    feed(core, SourceClosed(SOURCE_A))
    assert core.index.total == 0
    assert feed(core, batch(1, stored(72, tokens=[1, 2]))) == []
    assert core.index.total == 0


def test_closing_one_source_leaves_the_instances_others() -> None:
    core = make_core()
    add(core, A, described=facts(ranks=(0, 1)))
    for rank in (0, 1):
        feed(core, SourceOpened(SourceId(A, rank), False, rank))
        feed(core, batch(0, stored(70, tokens=[1, 2]), source=SourceId(A, rank), rank=rank))
    feed(core, SourceClosed(SourceId(A, 0)))
    assert overlaps(core, 1, 2, 3) == {"a@1": (2, 2), "a@0": (0, 0)}


def test_a_reconnected_source_is_verified() -> None:
    core = with_sources(A, has_replay=True)
    feed(core, ReplayEnded(SOURCE_A, 1, is_complete=True), batch(0, BlocksCleared()))
    assert feed(core, SourceReconnected(SOURCE_A)) == [RequestReplay(SOURCE_A, 0, 2)]


def test_c60_each_rank_is_a_holder_and_a_late_one_joins() -> None:
    core = make_core()
    add(core, A, described=facts(ranks=(0, 1, 2, 3)))
    for rank in (0, 1, 3):
        feed(core, SourceOpened(SourceId(A, rank), False, rank))
        prefix = stored(70, tokens=[rank, rank])
        feed(core, batch(0, prefix, source=SourceId(A, rank), rank=rank))
    feed(core, SourceOpened(SourceId(A, 2), False, rank=2), now=10.0)
    feed(core, batch(0, stored(70, tokens=[2, 2]), source=SourceId(A, 2), rank=2), now=10.0)
    for rank in range(4):
        expected = {f"a@{r}": (2, 2) if r == rank else (0, 0) for r in range(4)}
        assert overlaps(core, rank, rank, 9) == expected


def test_c48_the_events_global_rank_counts_and_all_ranks_are_used() -> None:
    core = make_core(policy="round_robin")
    add(core, A, described=facts(ranks=(0, 1, 2, 3)))
    add(core, B, described=facts(ranks=(4, 5, 6, 7)))
    feed(core, SourceOpened(SourceId(B, 1), has_replay=False, rank=1))
    feed(core, batch(0, stored(70, tokens=[1, 2]), source=SourceId(B, 1), rank=5))
    assert overlaps(core, 1, 2, 3)["b@5"] == (2, 2)
    holders = [send(core, arrived(str(n))) for n in range(200)]
    assert {h: holders.count(h) for h in holders} == {
        **{Holder(A, rank): 25 for rank in (0, 1, 2, 3)},
        **{Holder(B, rank): 25 for rank in (4, 5, 6, 7)},
    }


def test_c48_without_known_ranks_there_is_no_rank_to_send() -> None:
    core = with_sources(A)
    feed(core, batch(0, stored(70, tokens=[1, 2]), rank=0))
    assert overlaps(core, 1, 2, 3) == {"a": (2, 2)}
    assert send(core, arrived("r", 1, 2, 3)) == Holder(A, None)


def test_a_publisher_whose_rank_changes_is_void_before() -> None:
    core = make_core()
    add(core, A, described=facts(ranks=(0, 1)))
    feed(core, SourceOpened(SOURCE_A, False, rank=0))
    feed(core, batch(0, stored(70, tokens=[1, 2]), rank=0))
    feed(core, batch(1, stored(71, tokens=[3, 4]), rank=1))
    assert overlaps(core, 1, 2, 3) == {"a@0": (0, 0), "a@1": (0, 0)}
    assert overlaps(core, 3, 4, 5) == {"a@1": (2, 2), "a@0": (0, 0)}


def test_a_source_opened_before_discovery_is_attributed_once_the_ranks_are_known() -> None:
    core = make_core()
    feed(core, InstanceAdded(InstanceSpec(A)), InstanceProbed(A, is_healthy=True))
    feed(core, SourceOpened(SOURCE_A, False, rank=0))
    feed(core, batch(0, stored(70, tokens=[1, 2]), rank=0))
    feed(core, InstanceDescribed(A, facts(ranks=(0, 1))))
    feed(core, batch(1, stored(71, tokens=[3, 4], parent=70), rank=0))
    assert overlaps(core, 1, 2, 3, 4, 5) == {"a@0": (4, 4), "a@1": (0, 0)}
    feed(core, InstanceDescribed(A, facts(ranks=(0, 1))))
    assert core.index.count(Holder(A, 0), Tier.DEVICE) == 2


# --- time -----------------------------------------------------------------------------------------


def test_the_core_is_woken_for_what_is_due_next_and_once() -> None:
    core = with_sources(A, has_replay=True)  # asks to be woken at 10 s, for the first replay
    assert [type(command) for command in feed(core, arrived("r", 1, 2, 3))] == [Forward]
    ended = core.handle(ReplayEnded(SOURCE_A, 1, is_complete=True), 2.0)
    assert ended == [WakeAt(3.0)]
    woken = core.handle(WakeUp(), 3.0)
    assert woken == [RequestReplay(SOURCE_A, 0, 2), WakeAt(13.0)]
    assert core.handle(WakeUp(), 13.0) == [WakeAt(43.0)]
    assert trust(core) is Trust.DEGRADED


def test_a_limit_bounds_the_index() -> None:
    core = make_core(A, limits=RouterLimits(index_blocks_max=1))
    feed(core, SourceOpened(SOURCE_A, False))
    feed(core, batch(0, stored(71, 72, tokens=[1, 2, 3, 4])))
    assert core.index.total == 1
    assert trust(core) is Trust.DEGRADED


def test_what_comes_after_a_lost_connection_waits_for_the_verification() -> None:
    core = with_sources(A, has_replay=True)
    feed(core, ReplayEnded(SOURCE_A, 1, is_complete=True), SourceLost(SOURCE_A))
    feed(core, batch(0, stored(71, 72, tokens=[1, 2, 3, 4])))
    assert core.index.total == 0
    assert feed(core, SourceReconnected(SOURCE_A)) == [RequestReplay(SOURCE_A, 0, 2)]
    feed(core, ReplayEnded(SOURCE_A, 2, is_complete=True))
    assert core.index.total == 2


def test_a_request_that_ends_leaves_what_another_will_fill() -> None:
    core = with_sources(A)
    feed(core, arrived("r", 1, 2, 3, 4, 5, 6, 7), arrived("s", 1, 2, 3, 4, 8, 9, 7))
    feed(core, finished(R, Outcome.CLIENT_LEFT))
    feed(core, WakeUp(), now=2.0)
    assert overlaps(core, 1, 2, 3, 4, 5, 6, 7) == {"a": (0, 4)}
    feed(core, finished(S), now=2.0)
    feed(core, WakeUp(), now=4.0)
    assert overlaps(core, 1, 2, 3, 4, 5, 6, 7) == {"a": (0, 0)}


def test_an_empty_fleet_has_no_instance_rather_than_an_unknown_model() -> None:
    assert feed(make_core(), arrived("r", 1)) == [
        Reject(R, RejectReason.NO_INSTANCE, retry_after_s=2.0)
    ]


def test_a_turn_that_follows_at_once_is_not_settled_before_the_last_events_came() -> None:
    core = with_sources(A, B)
    feed(core, arrived("r", 1, 2, 3, 4, 5))
    feed(core, batch(0, stored(71, 72, tokens=[1, 2, 3, 4]), source=SOURCE_A))
    following = request("s", 1, 2, 3, 4, 5, 6, 7, 8)
    assert core.is_settled(following, now=0.0)  # the answer is under way
    feed(core, RequestFinished(R, Outcome.ANSWERED, completion_tokens=2))
    assert not core.is_settled(following, now=0.0)
    assert core.is_settled(request("t", 9, 9, 9), now=0.0)
    feed(core, batch(1, stored(73, parent=72, tokens=[5, 6]), source=SOURCE_A))
    assert core.is_settled(following, now=0.0)
    assert overlaps(core, 1, 2, 3, 4, 5, 6, 7, 8) == {"a": (6, 6), "b": (0, 0)}


def test_without_exact_events_nothing_is_waited_for() -> None:
    core = make_core(A)
    feed(core, arrived("r", 1, 2, 3, 4, 5))
    feed(core, RequestFinished(R, Outcome.ANSWERED, completion_tokens=2))
    assert core.is_settled(request("s", 1, 2, 3, 4, 5, 6, 7, 8), now=0.0)


def test_an_instance_is_synced_once_its_sources_follow_their_streams() -> None:
    core = make_core(A)
    assert core.sources.are_synced(A)  # has none
    feed(core, SourceOpened(SOURCE_A, has_replay=True))
    assert not core.sources.are_synced(A)
    feed(core, ReplayEnded(SOURCE_A, 1, is_complete=True))
    assert core.sources.are_synced(A)


def test_a_request_without_an_exact_prompt_waits_for_nothing() -> None:
    core = with_sources(A)
    assert core.is_settled(Request(R, MODEL), now=0.0)


def test_ignored_blocks_settle_nothing() -> None:
    core = with_sources(A)
    feed(core, arrived("r", 1, 2, 3, 4, 5))
    feed(core, batch(0, stored(71, 72, tokens=[1, 2, 3, 4])))
    feed(core, RequestFinished(R, Outcome.ANSWERED, completion_tokens=2))
    feed(core, batch(1, stored(73, parent=72, tokens=[5, 6], tier=Tier.POOL)))
    assert not core.is_settled(request("s", 1, 2, 3, 4, 5, 6, 7, 8), now=0.0)
