"""What must hold after every step of the core, as checks; simulation runs them after each step."""

from __future__ import annotations

from collections import Counter

from moongate.router.core import RouterCore
from moongate.router.load import Load
from moongate.router.model import Holder, SideGroup, Tier
from moongate.router.requests import Tracked


def check(core: RouterCore) -> None:
    """Raise AssertionError, with what is wrong, unless all invariants hold.

    Cost: O(everything that the core holds). For tests and simulation.
    """
    _check_holders_are_known(core)
    _check_load_equals_reservations(core)
    _check_peers(core)
    _check_requests(core)
    _check_trials(core)
    _check_seedings(core)
    _check_index_equals_ledgers(core)
    _check_candidates_are_current(core)
    _check_waiting(core)


def _check_holders_are_known(core: RouterCore) -> None:
    known = {instance.spec.id for instance in core.fleet}
    for holder in core.index.holders:
        assert holder.instance_id in known, f"{holder} belongs to no known instance"
    for source, state in core.sources:
        assert source.instance_id in known, f"{source} belongs to no known instance"
        assert state.ledger.holder in core.index.holders, state.ledger.holder


def _check_load_equals_reservations(core: RouterCore) -> None:
    sums: dict[Holder, Load] = {}
    for reservation in core.loads.reservations.values():
        load = sums.setdefault(reservation.holder, Load())
        load.active_requests += 1
        load.queued_prefill_tokens += reservation.prefill_tokens
        load.active_blocks += reservation.blocks
    assert sums == core.loads.loads, (sums, core.loads.loads)


def _check_peers(core: RouterCore) -> None:
    sums = {holder: core.peers.total(holder).load for holder in core.peers.holders}
    assert {h: load for h, load in sums.items() if load != Load()} == core.loads.elsewhere
    core.index.foreign.check()


def _check_requests(core: RouterCore) -> None:
    legs = {leg.reservation: leg for tracked in core.requests.values() for leg in tracked.legs}
    seedings = core.seeder.running if core.seeder is not None else {}
    reserved = set(core.loads.reservations)
    assert legs.keys() | seedings.keys() == reserved, "a leg or a seeding without reservation"
    for tracked in core.requests.values():
        _check_request(tracked, core.limits.attempts_max)
    predicting = {(leg.holder, leg.reservation) for leg in legs.values() if leg.predicted}
    assert predicting == {(h, i) for h, ids in core.predicting.items() for i in ids}, predicting


def _check_request(tracked: Tracked, attempts_max: int) -> None:
    assert tracked.leg is not None
    # One more than others has a request that no prefill instance could do: without a hand-off.
    assert 1 <= tracked.attempt <= attempts_max + tracked.is_alone, tracked
    assert tracked.request.may_hand_over or not tracked.is_alone, tracked
    assert len(set(tracked.tried)) == len(tracked.tried), tracked.tried
    assert set(tracked.failed) <= set(tracked.tried), tracked
    assert tracked.answering.holder.instance_id in tracked.tried, tracked
    if tracked.prefill is not None:
        assert tracked.request.may_hand_over, tracked
        assert tracked.prefill.holder.instance_id != tracked.leg.holder.instance_id, tracked
        assert tracked.handed_over_tokens is None, "kept before it was computed"
    # The prompt is computed once: by the prefill leg, or where it is decoded.
    is_elsewhere = tracked.prefill is not None or tracked.handed_over_tokens is not None
    assert not is_elsewhere or tracked.leg.prefill_tokens == 0, tracked


def _check_trials(core: RouterCore) -> None:
    """A trial that no request answers for would keep its instance without work for good."""
    for instance in core.fleet:
        breaker = instance.breaker
        assert breaker.trial is None or breaker.trial in core.requests, instance
        assert breaker.trial is None or not breaker.is_closed, instance


def _check_seedings(core: RouterCore) -> None:
    seeder = core.seeder
    if seeder is None:
        return
    assert seeder.watched.keys() <= core.requests.keys(), "watches a request that has ended"
    holders = [running.holder for running in seeder.running.values()]
    assert len(holders) <= seeder.limits.at_once_max, holders
    assert len(set(holders)) == len(holders), "two seedings on one instance"
    for seeding_id, running in seeder.running.items():
        assert core.loads.reservations[seeding_id].holder == running.holder, seeding_id


def _check_index_equals_ledgers(core: RouterCore) -> None:
    blocks: Counter[tuple[Holder, SideGroup | None, Tier, bytes]] = Counter()
    members: set[tuple[Holder, SideGroup | None]] = {(h, None) for h in core.index.holders}
    for _, state in core.sources:
        holder = state.ledger.holder
        members |= {(holder, side) for side in state.ledger.sides}
        for tier, block in state.ledger.held():
            blocks[holder, None, tier, block] += 1
        for side_group, tier, block in state.ledger.held_by_sides():
            blocks[holder, side_group, tier, block] += 1
    counts = Counter((holder, side, tier) for holder, side, tier, _ in blocks)
    for holder in core.index.holders:
        for side in (None, *core.index.sides_of(holder)):
            assert (holder, side) in members, (holder, side)
            members.remove((holder, side))
            for tier in Tier:
                count = core.index.count(holder, tier, side)
                assert count == counts[holder, side, tier], (holder, side, tier)
    assert not members, members
    assert core.index.total == blocks.total() <= core.limits.index_blocks_max


def _check_candidates_are_current(core: RouterCore) -> None:
    assert core.candidates.outdated() == []


def _check_waiting(core: RouterCore) -> None:
    admission = core.admission
    if admission is None:
        return
    full = {instance.spec.id for instance in core.fleet if not admission.has_room(instance)}
    assert admission.full_instances() == full, "somebody forgot to tell of a load"
    assert len(admission.queue) <= admission.limits.queue_requests_max
    for waiting in admission.queue:
        assert waiting.request.id not in core.requests, f"{waiting.request.id} waits and runs"
    assert admission.started.keys() <= core.requests.keys(), "a charge of what has ended"
