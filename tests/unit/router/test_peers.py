"""Other gateways before the same fleet: events in, loads and overlaps out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moongate.router import (
    EndPrediction,
    Event,
    FailureKind,
    Forward,
    Holder,
    InstanceId,
    Load,
    Outcome,
    PeerId,
    PeerLeft,
    PeerLoad,
    PeerPredicted,
    PeerPredictionEnded,
    PeerReported,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    RouterCore,
    ShareLoad,
    SharePrediction,
    SourceId,
    SourceOpened,
    WakeAt,
    WakeUp,
    make_policy,
)
from moongate.router.commands import Command
from moongate.router.events import InstanceProbed, ReplayEnded
from moongate.router.foreign_predictions import STRIDE_TOKENS
from moongate.router.invariants import check
from moongate.router.peers import PEERS_MAX

from .builders import A, B, C, add, arrived, chain, feed, forward_in, make_core

HA, HB = Holder(A), Holder(B)
P, Q = PeerId("p"), PeerId("q")
R = RequestId("r")
LONG = range(2 * STRIDE_TOKENS)  # two strides, at block size 2


def peer_core(*instances: InstanceId, peer: PeerId = Q) -> RouterCore:
    """Return a core with others beside it, whose instances publish events and have nothing yet."""
    core = RouterCore(make_policy("kv_cost"), random.Random(1).randrange, peer=peer)
    for instance_id in instances or (A, B, C):
        add(core, instance_id)
        feed(core, SourceOpened(SourceId(instance_id), has_replay=True))
        feed(core, ReplayEnded(SourceId(instance_id), 1, is_complete=True))
    return core


def reported(peer: PeerId = P, *, is_whole: bool = False, **loads: int) -> PeerReported:
    """Return a report of this many requests on each instance, of 100 tokens."""
    told = tuple(
        (Holder({"a": A, "b": B}[name]), PeerLoad(Load(n, 100 * n, 10 * n), n))
        for name, n in loads.items()
    )
    return PeerReported(peer, told, is_whole, lease_s=5.0)


def test_what_others_have_given_counts_with_our_own() -> None:
    core = make_core(A, B)
    assert WakeAt(5.0) in feed(core, reported(a=3))
    feed(core, reported(Q, a=1, b=1))
    assert core.loads.get(HA) == Load(4, 400, 40)
    assert core.loads.get_own(HA) == Load()
    assert forward_in(feed(core, arrived("r", 1, 2, 3))).holder == HB
    assert core.loads.get(HB) == Load(2, 103, 11)
    assert core.loads.loads == {HB: Load(1, 3, 1)}
    assert core.sessions.count(HA) == 4
    check(core)


def test_a_report_says_what_is_and_not_what_changed() -> None:
    core = make_core(A, B)
    feed(core, reported(a=3), reported(a=3), reported(b=1))
    assert core.loads.get(HA).active_requests == 3
    feed(core, reported(a=2))
    assert (core.loads.get(HA).active_requests, core.loads.get(HB).active_requests) == (2, 1)
    feed(core, reported(a=2, is_whole=True))
    assert core.loads.get(HB) == Load()
    feed(core, reported(is_whole=True))
    assert core.loads.elsewhere == {}
    check(core)


def test_of_a_gateway_that_is_silent_nothing_is_left_after_its_lease() -> None:
    core = make_core(A, B)
    core.handle(reported(a=3), 0.0)
    core.handle(reported(Q, a=1), 2.0)
    core.handle(reported(b=1), 3.0)  # holds what it said before
    core.handle(WakeUp(), 7.0)
    assert core.loads.get(HA).active_requests == 3
    core.handle(WakeUp(), 8.0)
    assert core.loads.elsewhere == {}
    assert len(core.peers) == 0


def test_a_gateway_that_stops_leaves_nothing_behind() -> None:
    core = make_core(A)
    feed(core, reported(a=3), PeerLeft(P), PeerLeft(Q))
    assert core.loads.elsewhere == {}


def test_no_more_gateways_are_heard_than_the_limit() -> None:
    core = make_core(A)
    feed(core, *(reported(PeerId(f"{n}"), a=1) for n in range(PEERS_MAX + 1)))
    assert core.loads.get(HA).active_requests == PEERS_MAX


def predicted(*token_ids: int, holder: Holder = HB, lifetime_s: float = 60.0) -> PeerPredicted:
    blocks = chain(*token_ids)
    told = tuple(blocks[STRIDE_TOKENS // 2 - 1 :: STRIDE_TOKENS // 2])
    return PeerPredicted(P, R, holder, told, blocks[-1], lifetime_s)


def overlap(core: RouterCore, holder: Holder, *token_ids: int, now: float = 0.0) -> int:
    decision = core.explain(arrived("x", *token_ids).request, now)
    assert decision is not None
    return {r.holder: r.candidate.overlap_tokens for r in decision.ranking}[holder]


def test_a_prompt_goes_where_another_gateway_has_sent_its_beginning() -> None:
    core = peer_core()
    feed(core, predicted(*LONG))
    forward = forward_in(feed(core, arrived("r", *LONG, 1, 2, 3)))
    assert (forward.holder, forward.decision.device_tokens) == (HB, len(LONG))


def test_what_was_predicted_elsewhere_ends_with_its_request() -> None:
    core = peer_core()
    feed(core, predicted(*LONG))
    core.handle(PeerPredictionEnded(P, R), 10.0)
    core.handle(WakeUp(), 10.9)
    assert overlap(core, HB, *LONG, 1, now=10.9) == len(LONG)
    core.handle(WakeUp(), 11.0)
    assert overlap(core, HB, *LONG, 1, now=11.0) == 0


def test_what_never_reached_its_instance_is_assumed_no_more() -> None:
    core = peer_core()
    feed(core, predicted(*LONG), PeerPredictionEnded(P, R, is_void=True))
    assert overlap(core, HB, *LONG, 1) == 0


def test_predictions_live_as_long_as_they_may_and_no_longer_than_the_limit() -> None:
    core = peer_core()
    feed(core, predicted(*LONG, lifetime_s=1e6))
    core.handle(WakeUp(), 600.0)
    assert overlap(core, HB, *LONG, 1, now=600.0) == 0


def test_an_instance_that_is_gone_has_nothing_that_others_predicted() -> None:
    core = peer_core()
    feed(core, predicted(*LONG), InstanceProbed(B, is_healthy=False, is_gone=True))
    feed(core, InstanceProbed(B, is_healthy=True))
    assert overlap(core, HB, *LONG, 1) == 0


def test_of_an_instance_that_is_not_known_nothing_is_predicted() -> None:
    core = peer_core(A)
    feed(core, predicted(*LONG))
    add(core, B)
    assert overlap(core, HB, *LONG, 1) == 0


def test_a_session_goes_on_at_another_gateway_as_the_session_that_it_is() -> None:
    core = peer_core()
    feed(core, predicted(*LONG))
    forward_in(feed(core, arrived("r", *LONG, 1, 2, 3)))
    assert core.lineages.find_history(chain(*LONG, 1, 2, 3)) > 0
    assert core.sessions.count_own(HB) == 0  # no new one


# --- what others are told -------------------------------------------------------------------------


def shared(commands: list[Command]) -> list[Command]:
    return [c for c in commands if isinstance(c, ShareLoad | SharePrediction | EndPrediction)]


def test_others_are_told_what_a_request_changes() -> None:
    core = peer_core(A)
    prompt = chain(*LONG)
    stride = STRIDE_TOKENS // 2
    commands = shared(feed(core, arrived("r", *LONG)))
    assert commands == [
        # The last token is computed in any case, so the last block counts for nothing.
        SharePrediction(R, HA, (prompt[stride - 1],), prompt[-1], 60.0),
        ShareLoad(HA, PeerLoad(Load(1, len(LONG), len(prompt) - 1), 1)),
    ]
    commands = shared(feed(core, RequestFirstByte(R)))
    assert commands == [ShareLoad(HA, PeerLoad(Load(1, 0, len(prompt) - 1), 1))]
    commands = shared(feed(core, RequestFinished(R, Outcome.ANSWERED)))
    assert commands == [EndPrediction(R), ShareLoad(HA, PeerLoad(Load(), 1))]
    assert core.outbox.whole() == [(HA, PeerLoad(Load(), 1))]


def test_others_are_told_that_a_request_did_not_reach_its_instance() -> None:
    core = peer_core()
    forward_in(feed(core, arrived("r", *LONG)))
    commands = shared(feed(core, RequestFailed(R, FailureKind.UNREACHABLE)))
    assert commands[0] == EndPrediction(R, is_void=True)
    assert isinstance(commands[2], SharePrediction)


def test_a_gateway_alone_tells_nothing() -> None:
    core = make_core(A)
    assert shared(feed(core, arrived("r", *LONG))) == []
    assert core.loads.changed == {}


def test_what_two_gateways_sent_to_one_instance_at_once_is_reserved_once() -> None:
    one, other = peer_core(A, peer=P), peer_core(A, peer=Q)
    commands = {core: feed(core, arrived("r", *LONG, 1)) for core in (one, other)}
    for peer, core, hearing in ((P, one, other), (Q, other, one)):
        for command in commands[core]:
            if (event := tell(peer, command)) is not None:
                commands[hearing] = feed(hearing, event)
    assert one.loads.get_own(HA).queued_prefill_tokens == len(LONG) + 1
    assert other.loads.get_own(HA).queued_prefill_tokens == 0
    feed(other, RequestFirstByte(R, shows_prefill=True), RequestFinished(R, Outcome.ANSWERED))
    check(other)


# --- bursts ---------------------------------------------------------------------------------------


def tell(peer: PeerId, command: Command) -> Event | None:
    """Return what another gateway's core is given of this one's command."""
    match command:
        case ShareLoad():
            loads = ((command.holder, command.load),)
            return PeerReported(peer, loads, is_whole=False, lease_s=5.0)
        case SharePrediction():
            return PeerPredicted(
                peer, command.request_id, command.holder, command.blocks, command.tail,
                command.lifetime_s,
            )  # fmt: skip
        case EndPrediction():
            return PeerPredictionEnded(peer, command.request_id, command.is_void)
        case _:
            return None


@pytest.mark.parametrize("lag", [0, 2, 10])
def test_a_burst_of_one_cold_prompt_is_computed_on_two_instances_at_most(lag: int) -> None:
    """Of 80 K tokens, over two gateways, each of which hears of the other `lag` requests late."""
    cores = (peer_core(peer=P), peer_core(peer=Q))
    asked = arrived("r", *range(80_000)).request
    waiting: list[tuple[int, RouterCore, Event]] = []
    used: set[Holder] = set()
    for n in range(200):
        while waiting and waiting[0][0] <= n:
            _, hearing, said = waiting.pop(0)
            hearing.handle(said, n * 0.001)
        core, other = cores if n % 2 else cores[::-1]
        request = replace(asked, id=RequestId(f"r{n}"))
        commands = core.handle(RequestArrived(request), n * 0.001)
        used |= {c.holder for c in commands if isinstance(c, Forward)}
        peer = P if core is cores[0] else Q
        told = [event for c in commands if (event := tell(peer, c)) is not None]
        waiting += [(n + lag, other, event) for event in told]
    assert len(used) <= 2
    for core in cores:
        check(core)
