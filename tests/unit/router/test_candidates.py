"""The candidates that are kept: built anew when something about them changed, and only then."""

from dataclasses import replace

from moongate.router import (
    FailureKind,
    InstanceDescribed,
    InstanceProbed,
    Outcome,
    RequestFailed,
    RequestFinished,
    RequestId,
    RouterCore,
    SourceOpened,
    Trust,
)
from moongate.router.model import BlockSpace, InstanceId
from moongate.router.policy import Candidate

from .builders import (
    MODEL,
    SOURCE_A,
    SPACE,
    A,
    B,
    C,
    add,
    arrived,
    batch,
    facts,
    feed,
    make_core,
    send,
    stored,
)

R, S = RequestId("r"), RequestId("s")


def members(core: RouterCore, model: str = MODEL) -> list[Candidate]:
    return core.candidates.members(core.candidates.group(model, now=0.0))


def names(core: RouterCore, model: str = MODEL) -> list[str]:
    return [str(candidate.holder) for candidate in members(core, model)]


def test_what_did_not_change_is_kept() -> None:
    core = make_core(A, B)
    first = members(core)
    feed(core, arrived("r", 1, 2, 3))
    again = members(core)
    assert again[0] != first[0]
    assert again[1] is first[1]
    assert core.candidates.group(MODEL, 0.0) is core.candidates.group(MODEL, 9.0)


def test_load_turn_and_sessions_are_as_they_are_now() -> None:
    core = make_core(A)
    feed(core, arrived("r", 1, 2, 3))
    (loaded,) = members(core)
    assert (loaded.active_requests, loaded.queued_prefill_tokens) == (1, 3)
    assert (loaded.last_chosen, loaded.recent_sessions) == (1, 1)
    feed(core, RequestFinished(R, Outcome.ANSWERED))
    (idle,) = members(core)
    assert (idle.active_requests, idle.queued_prefill_tokens) == (0, 0)


def test_a_session_that_says_that_it_ends_is_not_counted_any_more() -> None:
    core = make_core(A)
    feed(core, arrived("1", 1, 2, 3), arrived("2", 7, 8, 9))
    assert members(core)[0].recent_sessions == 2
    last = arrived("3", 1, 2, 3, 4, 5, 6)
    feed(core, replace(last, request=replace(last.request, ends_session=True)))
    assert members(core)[0].recent_sessions == 1
    only = arrived("4", 11, 12, 13)
    feed(core, replace(only, request=replace(only.request, ends_session=True)))
    assert members(core)[0].recent_sessions == 1


def test_a_session_that_is_no_longer_recent_is_not_counted() -> None:
    core = make_core(A, B, policy="round_robin")
    for n in range(70):
        feed(core, arrived(str(n), n, n, n))
    assert [c.recent_sessions for c in members(core)] == [32, 32]


def test_trust_follows_the_sources() -> None:
    core = make_core(A)
    assert [c.trust for c in members(core)] == [Trust.APPROXIMATE]
    feed(core, SourceOpened(SOURCE_A, has_replay=False), batch(0))
    assert [c.trust for c in members(core)] == [Trust.EXACT]
    feed(core, batch(2))
    assert [c.trust for c in members(core)] == [Trust.DEGRADED]


def test_who_is_a_candidate_follows_health_and_discovery() -> None:
    core = make_core(A, B)
    assert names(core) == ["a", "b"]
    feed(core, InstanceProbed(A, is_healthy=False, is_gone=True))
    assert names(core) == ["b"]
    feed(core, InstanceDescribed(B, facts(ranks=(0, 1))))
    assert names(core) == ["b@0", "b@1"]
    add(core, C)
    assert names(core) == ["b@0", "b@1", "c"]


def test_the_same_facts_again_change_nothing() -> None:
    core = make_core(A)
    group = core.candidates.group(MODEL, 0.0)
    feed(core, InstanceDescribed(A, facts()), InstanceProbed(A, is_healthy=True))
    assert core.candidates.group(MODEL, 0.0) is group


def test_while_a_breaker_is_open_the_time_decides() -> None:
    core = make_core(A, B)
    assert send(core, arrived("r")).instance_id == A
    feed(core, RequestFailed(R, FailureKind.STATUS, 500), RequestFinished(R, Outcome.ANSWERED))
    assert names(core) == ["b"]
    later = core.candidates.group(MODEL, now=1.0)
    assert [str(seat.holder) for seat in later.seats] == ["a", "b"]
    assert core.candidates.group(MODEL, now=1.0) is not later


def test_those_excluded_are_left_out_this_once() -> None:
    core = make_core(A, B)
    without = core.candidates.group(MODEL, 0.0, excluded=[A])
    assert [str(seat.holder) for seat in without.seats] == ["b"]
    assert names(core) == ["a", "b"]


def test_models_that_nobody_serves_leave_nothing_behind() -> None:
    core = make_core(A)
    for n in range(100):
        assert names(core, f"no such {n}") == []
        assert core.spaces(f"no such {n}") == frozenset()
    assert core.candidates._groups == {}
    assert core.candidates._spaces == {}


def test_holders_are_grouped_by_the_space_of_their_blocks() -> None:
    core = make_core(A)
    add(core, B, described=facts(size=16))
    add(core, C, described=facts(adapters=("ad-1",)))
    group = core.candidates.group(MODEL, 0.0)
    assert group.masks.keys() == {SPACE, BlockSpace(16)}
    assert core.candidates.group("ad-1", 0.0).masks.keys() == {BlockSpace(2, "ad-1")}
    assert core.spaces(MODEL) == {SPACE, BlockSpace(16)}
    assert core.spaces(MODEL) is core.spaces(MODEL)
    assert core.candidates.outdated() == []


def test_the_block_size_of_the_first_events_moves_a_holder_to_another_space() -> None:
    core = make_core()
    add(core, A, described=facts(size=16))
    feed(core, SourceOpened(SOURCE_A, has_replay=False))
    assert core.spaces(MODEL) == {BlockSpace(16)}
    feed(core, batch(0, stored(71, tokens=[1, 2])))
    assert core.spaces(MODEL) == core.candidates.group(MODEL, 0.0).masks.keys() == {SPACE}


def test_nothing_is_kept_of_a_holder_that_is_not_asked_about() -> None:
    core = make_core(A)
    core.candidates.touch(members(core)[0].holder._replace(instance_id=InstanceId("other")))
    assert core.candidates.outdated() == []
