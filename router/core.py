"""RouterCore: events in, commands out; the only place where routing state changes.

A plain function of its state, the event, the time and the chance it was given: deciding and
reserving are one step, so nobody can decide on stale load, and a recording of `(now, event)` replays
to the same commands. The parts do the work; here is only which part an event concerns.

What it guarantees after each step is written down as checks in `invariants.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from moongate.router.admission import Admission, AdmissionLimits
from moongate.router.breaker import BreakerLimits
from moongate.router.candidates import CandidateTable
from moongate.router.choosing import PLACES, Choice, Chooser
from moongate.router.commands import (
    Command,
    Decision,
    Forward,
    Hold,
    Probe,
    Reject,
    RejectReason,
    WakeAt,
)
from moongate.router.cost import PREFILL_TOKENS_PER_MS_PRIOR
from moongate.router.events import (
    BatchReceived,
    Event,
    FailureKind,
    InstanceAdded,
    InstanceChanged,
    InstanceDescribed,
    InstanceDraining,
    InstancePooled,
    InstanceProbed,
    InstanceRemoved,
    Outcome,
    PeerLeft,
    PeerPredicted,
    PeerPredictionEnded,
    PeerReported,
    PoolChecked,
    PrefillEnded,
    PrefillFailed,
    Reconfigured,
    ReplayEnded,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    SeedingEnded,
    SourceClosed,
    SourceLost,
    SourceOpened,
    SourceReconnected,
    WakeUp,
)
from moongate.router.fair_queue import kind_of
from moongate.router.fleet import Fleet, InstanceState
from moongate.router.index import OwnershipIndex
from moongate.router.lineage import Lineages, RecentSessions
from moongate.router.load import LoadTable
from moongate.router.model import (
    TEXT_SPACE,
    BlockHash,
    BlockSpace,
    Duty,
    Holder,
    InstanceFacts,
    InstanceId,
    PeerId,
    Request,
    RequestId,
)
from moongate.router.peers import Outbox, PeerEvent, Peers
from moongate.router.policy import Policy, RandomBelow
from moongate.router.requests import (
    CONFIRMATION_GRACE_S,
    Leg,
    Requests,
    Tracked,
    TrackingLimits,
    alone,
)
from moongate.router.seeding import Seeder, SeedingLimits
from moongate.router.settling import Settling
from moongate.router.sources import SourceEvent, Sources


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """What bounds the core, and the health thresholds."""

    index_blocks_max: int = 4_000_000  # about 190 bytes each
    attempts_max: int = 2  # one try, one retry elsewhere
    retries_timeouts: bool = True  # also of a request on which an engine may have worked for long
    rate_limits_max: int = 4  # instances that are asked for a request that gets 429
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    prediction_s: float = 60.0  # where events will confirm: how long a prefill may take
    approximate_prediction_s: float = 600.0  # without events: how long an idle prefix may last
    up_after: int = 1  # successful checks in a row
    down_after: int = 2  # failed ones
    prefill_tokens_per_ms: float = PREFILL_TOKENS_PER_MS_PRIOR
    retry_after_s: float = 2.0  # told to clients when no instance is up: a health interval


class RouterCore:
    """The routing state of one gateway. `policies` by name; `policy` is the one in force.

    `seeding` None: hot prefixes stay where they are. `peer`: what this gateway is to others before the
    same fleet, which are told what it does; None: there are none.
    """

    def __init__(
        self,
        policy: Policy,
        random_below: RandomBelow,
        limits: RouterLimits | None = None,
        others: Sequence[Policy] = (),
        seeding: SeedingLimits | None = None,
        *,
        peer: PeerId | None = None,
    ) -> None:
        self.limits = limits or RouterLimits()
        self.policy = policy
        self._peer = peer
        self.others = others
        self._policies = {p.name: p for p in (*others, policy)}
        self._random_below = random_below
        self.fleet = Fleet(self.limits.prefill_tokens_per_ms, self.limits.breaker)
        self.index = OwnershipIndex(self.limits.index_blocks_max)
        self.loads = LoadTable()
        self.lineages = Lineages()
        self.sessions = RecentSessions()
        self.settling = Settling()
        self.sources = Sources(self.index, self.settling)
        self.candidates = CandidateTable(
            self.fleet, self.index, self.sources, self.loads, self.sessions
        )
        self.outbox = Outbox(self.loads, self.sessions, is_open=peer is not None)
        self.peers = Peers(
            self.loads,
            self.index,
            self.lineages,
            self.sessions,
            self.candidates,
            CONFIRMATION_GRACE_S,
        )
        self._chooser = Chooser(self.fleet, self.index, self.candidates, self.lineages)
        self._requests = Requests(
            self.fleet,
            self.index,
            self.loads,
            self.lineages,
            self.sessions,
            self.settling,
            self.candidates,
            self.outbox,
            TrackingLimits(self.limits.prediction_s, self.limits.approximate_prediction_s),
        )
        self.seeder = (
            Seeder(seeding, self.fleet, self.index, self.loads, self.candidates)
            if seeding is not None
            else None
        )
        self.admission: Admission | None = None
        """Where instances are bounded, and requests may have to wait. None: all start at once."""
        self._set_admission_limits(self.limits.admission)
        self._wake_at: float | None = None

    @property
    def requests(self) -> dict[RequestId, Tracked]:
        """Return the unfinished requests."""
        return self._requests.tracked

    @property
    def predicting(self) -> dict[Holder, dict[RequestId, Leg]]:
        """Return the legs under way whose blocks are assumed, by holder."""
        return self._requests.predicting

    # --- the one entry ----------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in what happened and return what to do. `now`: monotonic seconds, never falling."""
        self.index.expire(now)
        self.peers.expire(now)
        commands = self._dispatch(event, now)
        admission = self.admission
        if admission is not None and admission.has_waiting and _may_admit(event):
            commands += self._admit(admission, now)
        return [*commands, *self.outbox.take(), *self._schedule(now)]

    def _dispatch(self, event: Event, now: float) -> list[Command]:
        match event:
            case RequestArrived():
                return self._request_arrived(event.request, now)
            case PrefillEnded():
                self._requests.prefill_ended(event, now)
                return []
            case RequestFirstByte():
                self._requests.first_byte(event, now)
                return self._seed(event.request_id, now)
            case RequestFailed() | PrefillFailed():
                return self._request_failed(event, now)
            case RequestFinished():
                commands = self._request_finished(event, now)
                if event.outcome is Outcome.ANSWERED:
                    return [*commands, *self._seed(event.request_id, now)]
                self._forget_beginning(event.request_id)
                return commands
            case (
                SourceOpened()
                | BatchReceived()
                | ReplayEnded()
                | SourceLost()
                | SourceReconnected()
                | SourceClosed()
            ):
                instance = self.fleet.find(event.source.instance_id)
                return self.sources.handle(event, instance, now) if instance is not None else []
            case (
                InstanceAdded()
                | InstanceChanged()
                | InstanceRemoved()
                | InstanceDescribed()
                | InstanceProbed()
                | InstancePooled()
                | InstanceDraining()
            ):
                return self._fleet_changed(event)
            case PoolChecked() | SeedingEnded():
                self._seeding_changed(event, now)
                return []
            case PeerReported() | PeerPredicted() | PeerPredictionEnded() | PeerLeft():
                self._peer_told(event, now)
                return []
            case Reconfigured():
                self._reconfigured(event)
                return []
            case WakeUp():
                return self._woke(now)
            case _:
                assert_never(event)

    def _seed(self, request_id: RequestId, now: float) -> list[Command]:
        return [*self.seeder.began(request_id, now)] if self.seeder is not None else []

    def _forget_beginning(self, request_id: RequestId) -> None:
        if self.seeder is not None:
            self.seeder.gave_up(request_id)

    def _peer_told(self, event: PeerEvent, now: float) -> None:
        self.peers.handle(event, now)
        if not isinstance(event, PeerPredicted) or self._peer is None:
            return
        if event.peer < self._peer:
            self._requests.yield_prefill(event.holder, event.blocks)

    def _seeding_changed(self, event: PoolChecked | SeedingEnded, now: float) -> None:
        if self.seeder is None:
            return
        if isinstance(event, PoolChecked):
            self.seeder.pool_checked(event)
        else:
            self.seeder.ended(event, now)

    def _reconfigured(self, event: Reconfigured) -> None:
        """Route by something else from now on. Requests under way stay where they are."""
        self.policy, self.others = event.policy, event.others
        self._policies = {p.name: p for p in (*event.others, event.policy)}
        # The index keeps its size: what should go could not be told.
        self.limits = replace(event.limits, index_blocks_max=self.limits.index_blocks_max)
        self.fleet.set_breaker_limits(event.limits.breaker)
        self._set_admission_limits(event.limits.admission)
        if self.seeder is not None and event.seeding is not None:
            self.seeder.limits = event.seeding

    def _set_admission_limits(self, limits: AdmissionLimits) -> None:
        """Let other bounds hold. Who waits goes on waiting, or starts if there is room by them."""
        if self.admission is not None:
            self.admission.limits = limits
            self.candidates.reset()  # who has room is told by other bounds
        elif limits.are_on:
            self.admission = Admission(limits, self.fleet, self.loads, self.candidates)

    def _woke(self, now: float) -> list[Command]:
        self._wake_at = None
        commands: list[Command] = []
        for source in self.sources.take_due(now):
            instance = self._requests.get_instance(source.instance_id)
            commands += self.sources.woke(source, instance, now)
        return commands

    def _schedule(self, now: float) -> list[Command]:
        """Ask for a wake-up if something is due before the one already asked for."""
        at = _earliest(self.index.next_expiry(), self.peers.next_expiry(), self.sources.next_wake())
        if self.admission is not None and self.admission.has_waiting:
            at = _earliest(at, self.admission.next_expiry())
        if at is None or (self._wake_at is not None and self._wake_at <= at):
            return []
        self._wake_at = max(at, now)
        return [WakeAt(self._wake_at)]

    # --- requests ---------------------------------------------------------------------------------

    def _request_arrived(self, request: Request, now: float) -> list[Command]:
        assert request.id not in self.requests, request.id
        for instance in self.fleet.review_latencies(now):
            for holder in instance.holders:
                self.candidates.touch(holder)
        if self.admission is None:
            choice = self._choose(request, now, self._random_below)
            return (
                [self._refuse(request)] if choice is None else [self._begin(request, choice, now)]
            )
        return self._start_or_hold(self.admission, request, now)

    def _begin(self, request: Request, choice: Choice, now: float) -> Forward:
        tracked = self.requests[request.id] = Tracked(request)
        forward = self._requests.begin(tracked, choice, now)
        if self.seeder is not None:
            self.seeder.placed(request, choice, now)
        return forward

    def _start_or_hold(self, admission: Admission, request: Request, now: float) -> list[Command]:
        # What waits is asked first: the end of a breaker's back-off makes room without an event.
        commands = self._admit(admission, now) if admission.has_waiting else []
        full = admission.full_instances()
        if not full or admission.can_start(kind_of(request), full, now):
            choice = self._choose(request, now, self._random_below, full)
            begun = self._refuse(request) if choice is None else self._begin(request, choice, now)
            return [*commands, begun]
        if not admission.is_served(kind_of(request), now):
            return [*commands, self._refuse(request)]
        tokens = admission.expected_tokens(request, self._chooser.find_reuse(request, now))
        refused = admission.offer(request, tokens, now)
        if refused is None:
            return [*commands, Hold(request.id)]
        is_own = refused.request_id == request.id
        return [*commands, refused, *([] if is_own else [Hold(request.id)])]

    def _admit(self, admission: Admission, now: float) -> list[Command]:
        """Let start what can, and refuse what has waited for too long, or for nobody any more."""
        commands: list[Command] = [self._refuse(r) for r in admission.take_unserved(now)]
        commands += admission.expire(now)
        while True:
            full = admission.full_instances()
            if len(full) == len(self.fleet):
                return commands  # nobody could start: the queue need not be asked
            taken = admission.take(admission.starter(full, now), now)
            if taken is None:
                return commands
            request = taken.waiting.request
            choice = self._choose(request, now, self._random_below, full)
            assert choice is not None, taken
            admission.begin(taken, choice.decision.reused_tokens)
            commands.append(self._begin(request, choice, now))

    def _refuse(self, request: Request) -> Reject:
        """Its model is unknown to the whole fleet, or no instance that has it (or may) is up."""
        is_described = [instance.facts is not None for instance in self.fleet]
        is_known = request.model in self.fleet.model_cards()
        if not is_known and is_described and all(is_described):
            return Reject(request.id, RejectReason.UNKNOWN_MODEL)
        return self._reject(request.id, RejectReason.NO_INSTANCE)

    def _reject(self, request_id: RequestId, reason: RejectReason) -> Reject:
        return Reject(request_id, reason, retry_after_s=self.limits.retry_after_s)

    def _try_forward(self, tracked: Tracked, now: float) -> Forward | None:
        """Choose a holder, or a pair, and reserve it, in one step. None: nobody is left to choose."""
        request = alone(tracked.request) if tracked.is_alone else tracked.request
        choice = self._choose_other(tracked, request, now)
        return self._requests.begin(tracked, choice, now) if choice is not None else None

    def _request_finished(self, event: RequestFinished, now: float) -> list[Command]:
        if self.admission is not None:
            if self.admission.leave(event.request_id):
                return []
            self.admission.ended(self.requests[event.request_id].request, event)
        leg = self._requests.tracked[event.request_id].leg
        assert leg is not None
        commands = self._requests.finished(event, now)
        is_answered = event.outcome is Outcome.ANSWERED
        if is_answered and event.cached_tokens == 0 and leg.confirmed_tokens:
            # It had nothing of what it was known to have: perhaps the news was lost.
            instance = self.fleet.find(leg.holder.instance_id)
            if instance is not None:
                commands += self.sources.doubt(leg.holder, instance, now)
        return commands

    def _redeliver(self, tracked: Tracked, now: float) -> Forward | None:
        """Choose who else fetches the blocks that a prefill instance keeps for the request."""
        choice = self._choose_other(tracked, alone(tracked.request), now, Duty.RECEIVE)
        return self._requests.redeliver(tracked, choice, now) if choice is not None else None

    def _choose_other(
        self, tracked: Tracked, request: Request, now: float, duty: Duty = Duty.ALL
    ) -> Choice | None:
        excluded = [*tracked.failed, *tracked.full]
        return self._choose(request, now, self._random_below, excluded, duty=duty)

    def _request_failed(self, event: RequestFailed | PrefillFailed, now: float) -> list[Command]:
        """An attempt failed before its first byte: try once more elsewhere, or let it be told."""
        requests = self._requests
        tracked, redelivers = requests.tracked[event.request_id], requests.can_redeliver(event)
        commands = requests.failed(event, now)
        if redelivers:
            forward = self._redeliver(tracked, now)
        else:
            forward = self._try_again(tracked, event, now)
        if forward is not None:
            return [*commands, forward]
        self._forget_beginning(event.request_id)
        if self.admission is not None:
            self.admission.gave_up(event.request_id)
        return [*commands, requests.give_up(event.request_id)]

    def _try_again(
        self, tracked: Tracked, event: RequestFailed | PrefillFailed, now: float
    ) -> Forward | None:
        attempts_max = self.limits.attempts_max
        if isinstance(event, PrefillFailed) and tracked.attempt == attempts_max:
            # No prefill instance could do it; one that computes for itself perhaps can.
            tracked.is_alone = True
        may_try = tracked.attempt < attempts_max + tracked.is_alone and self._may_repeat(
            tracked, event.kind
        )
        return self._try_forward(tracked, now) if may_try else None

    def _may_repeat(self, tracked: Tracked, kind: FailureKind) -> bool:
        match kind:
            case FailureKind.TIMEOUT:
                return self.limits.retries_timeouts
            case FailureKind.RATE_LIMITED:
                return len(tracked.full) < self.limits.rate_limits_max
            case _:
                return True

    # --- choosing ---------------------------------------------------------------------------------

    def get_policy(self, name: str | None) -> Policy:
        """Return the policy of this name, for None (or an unknown one) the one in force."""
        return self._policies.get(name or "", self.policy)

    def has_policy(self, name: str) -> bool:
        """Tell whether a request may name this policy."""
        return name in self._policies

    def explain(self, request: Request, now: float) -> Decision | None:
        """Return what would be decided now, and change nothing. None: no candidate."""
        # Not the real chance: drawing from it would change what is decided next.
        choice = self._choose(request, now, random_below=lambda n: 0, places=None)
        return choice.decision if choice is not None else None

    def _choose(
        self,
        request: Request,
        now: float,
        random_below: RandomBelow,
        excluded: Collection[InstanceId] = (),
        places: int | None = PLACES,
        duty: Duty = Duty.ALL,
    ) -> Choice | None:
        policy = self.get_policy(request.policy)
        return self._chooser.choose(policy, request, random_below, now, excluded, places, duty)

    def is_settled(self, request: Request, now: float) -> bool:
        """Tell whether all is announced of the turn that the request continues, if it does one."""
        prompt = request.prompt
        if not self.settling.has_pending() or prompt is None or not prompt.is_exact:
            return True
        chains = [chain for space, chain in prompt.chains.items() if space != TEXT_SPACE]
        return all(self._is_tail_settled(chain, now) for chain in chains)

    def _is_tail_settled(self, chain: Sequence[BlockHash], now: float) -> bool:
        depth = self.lineages.find_history(chain)
        return depth == 0 or self.settling.is_settled(chain[depth - 1], now)

    def find_history(self, chain: Sequence[BlockHash]) -> int:
        """Return the leading blocks that a prompt has of the turn that it continues, or 0."""
        return self.lineages.find_history(chain)

    def covers(self, request: Request, now: float) -> bool:
        """Tell whether what a pool holds of the prompt can't change where the request goes.

        That is so where an instance that is about to begin with it has all that the turn before can
        have left in the pool, or all of the prompt, on its device.
        """
        prompt = request.prompt
        if prompt is None or not prompt.is_exact:
            return True
        return self._chooser.is_covered(request, now)

    def spaces(self, model: str) -> frozenset[BlockSpace]:
        """Return the block spaces in which a prompt for this model has to be hashed."""
        return self.candidates.spaces(model)

    # --- the fleet --------------------------------------------------------------------------------

    def _fleet_changed(
        self,
        event: InstanceAdded
        | InstanceChanged
        | InstanceRemoved
        | InstanceDescribed
        | InstanceProbed
        | InstancePooled
        | InstanceDraining,
    ) -> list[Command]:
        if isinstance(event, InstanceAdded):
            self.fleet.add(event.spec)
            self.candidates.reset()  # one of its name may still have requests
            return [Probe(event.spec.id)]
        instance = self.fleet.find(
            event.spec.id if isinstance(event, InstanceChanged) else event.instance_id
        )
        if instance is None:
            return []
        match event:
            case InstanceChanged():
                self.fleet.change(instance, event.spec)
                self.candidates.reset()
            case InstanceRemoved():
                self._remove_instance(instance)
            case InstanceDescribed():
                self._describe(instance, event.facts)
            case InstanceProbed():
                self._probed(instance, event)
            case InstancePooled():
                instance.key_space = event.key_space
            case InstanceDraining():
                instance.is_draining = event.is_draining
                self.candidates.reset()
            case _:
                assert_never(event)
        return []

    def _describe(self, instance: InstanceState, facts: InstanceFacts) -> None:
        if facts != instance.facts:
            self.fleet.describe(instance, facts)
            self.candidates.reset()
        for holder in instance.holders:
            self.index.add_holder(holder, facts.capacity_blocks)
        self.sources.described(instance)

    def _probed(self, instance: InstanceState, event: InstanceProbed) -> None:
        limits = self.limits
        if instance.probed(event.is_healthy, event.is_gone, limits.up_after, limits.down_after):
            self.candidates.reset()
        if event.is_gone:
            self._requests.forget_unconfirmable(instance)

    def _remove_instance(self, instance: InstanceState) -> None:
        self.sources.close_all(instance.spec.id)
        for holder in self.index.holders:
            if holder.instance_id == instance.spec.id:
                self.index.remove_holder(holder)
        self.fleet.remove(instance.spec.id)
        self.candidates.reset()


def _may_admit(event: Event) -> bool:
    """Tell whether what waits may be able to start by the event. At an arrival it is asked before that."""
    return not isinstance(event, SourceEvent | RequestArrived)


def _earliest(*times: float | None) -> float | None:
    earliest: float | None = None
    for at in times:
        if at is not None and (earliest is None or at < earliest):
            earliest = at
    return earliest
