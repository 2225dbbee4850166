"""RouterCore: events in, commands out; the only place where routing state changes.

A plain function of its state, the event, the time and the chance it was given: deciding and
reserving are one step, so nobody can decide on stale load, and a recording of `(now, event)` replays
to the same commands. The parts do the work; here is only which part an event concerns.

What it guarantees after each step is written down as checks in `invariants.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from moongate.router.candidates import CandidateTable
from moongate.router.choosing import PLACES, Choice, Chooser
from moongate.router.commands import (
    Command,
    Decision,
    Forward,
    Probe,
    Reject,
    RejectReason,
    RelayFailure,
    WakeAt,
)
from moongate.router.cost import PREFILL_TOKENS_PER_MS_PRIOR
from moongate.router.events import (
    BatchReceived,
    Event,
    FailureKind,
    InstanceAdded,
    InstanceDescribed,
    InstanceProbed,
    InstanceRemoved,
    Outcome,
    ReplayEnded,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    SourceClosed,
    SourceLost,
    SourceOpened,
    SourceReconnected,
    WakeUp,
)
from moongate.router.fleet import Fleet, InstanceState
from moongate.router.index import OwnershipIndex
from moongate.router.lineage import Lineages, RecentSessions
from moongate.router.load import LoadTable
from moongate.router.model import (
    TEXT_SPACE,
    BlockHash,
    BlockSpace,
    Holder,
    InstanceFacts,
    InstanceId,
    KnownPart,
    Request,
    RequestId,
    Trust,
)
from moongate.router.policy import Candidate, Policy, RandomBelow
from moongate.router.settling import Settling
from moongate.router.sources import SourceEvent, Sources

CONFIRMATION_GRACE_S = 1.0
"""After a request ended, the engine's events for it are under way for at most this long; what they
have not confirmed by then is no longer assumed."""


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """What bounds the core, and the health thresholds."""

    index_blocks_max: int = 4_000_000  # about 190 bytes each
    attempts_max: int = 2  # one try, one retry elsewhere
    prediction_s: float = 60.0  # where events will confirm: how long a prefill may take
    approximate_prediction_s: float = 600.0  # without events: how long an idle prefix may last
    up_after: int = 1  # successful checks in a row
    down_after: int = 2  # failed ones
    prefill_tokens_per_ms: float = PREFILL_TOKENS_PER_MS_PRIOR
    retry_after_s: float = 2.0  # told to clients when no instance is up: a health interval


@dataclass(slots=True)
class _Tracked:
    """An unfinished request."""

    request: Request
    attempt: int = 0
    holder: Holder | None = None
    tried: list[InstanceId] = field(default_factory=list)
    full: list[InstanceId] = field(default_factory=list)  # chosen, but it was not sent there
    predicted: Sequence[BlockHash] = ()  # the chain, where events will confirm it
    predicted_part: range = range(0)  # of it, what was not confirmed already
    confirmed_tokens: int = 0  # of its prompt, that the holder was known to have
    prefill_tokens: int = 0
    forwarded_at: float = 0.0
    had_prefill_alone: bool = False
    has_first_byte: bool = False

    @property
    def is_exact(self) -> bool:
        prompt = self.request.prompt
        return prompt is not None and prompt.is_exact


class RouterCore:
    """The routing state of one gateway. `policies` by name; `policy` is the one in force."""

    def __init__(
        self,
        policy: Policy,
        random_below: RandomBelow,
        limits: RouterLimits | None = None,
        others: Sequence[Policy] = (),
    ) -> None:
        self.limits = limits or RouterLimits()
        self.policy = policy
        self._policies = {p.name: p for p in (*others, policy)}
        self._random_below = random_below
        self.fleet = Fleet(self.limits.prefill_tokens_per_ms)
        self.index = OwnershipIndex(self.limits.index_blocks_max)
        self.loads = LoadTable()
        self.lineages = Lineages()
        self.sessions = RecentSessions()
        self.settling = Settling()
        self.sources = Sources(self.index, self.settling)
        self.candidates = CandidateTable(
            self.fleet, self.index, self.sources, self.loads, self.sessions
        )
        self._chooser = Chooser(self.fleet, self.index, self.candidates, self.lineages)
        self.requests: dict[RequestId, _Tracked] = {}
        self.predicting: dict[Holder, dict[RequestId, _Tracked]] = {}  # those with `predicted`
        self._forwards = 0
        self._wake_at: float | None = None

    # --- the one entry ----------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in what happened and return what to do. `now`: monotonic seconds, never falling."""
        self.index.expire(now)
        commands = self._dispatch(event, now)
        return commands + self._schedule(event, now)

    def _dispatch(self, event: Event, now: float) -> list[Command]:
        match event:
            case RequestArrived():
                return self._request_arrived(event.request, now)
            case RequestFirstByte():
                return self._request_first_byte(event, now)
            case RequestFailed():
                return self._request_failed(event, now)
            case RequestFinished():
                return self._request_finished(event, now)
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
            case InstanceAdded() | InstanceRemoved() | InstanceDescribed() | InstanceProbed():
                return self._fleet_changed(event)
            case WakeUp():
                return self._woke(now)
            case _:
                assert_never(event)

    def _woke(self, now: float) -> list[Command]:
        self._wake_at = None
        commands: list[Command] = []
        for source, _ in list(self.sources):
            commands += self.sources.woke(source, self._get_instance(source.instance_id), now)
        return commands

    def _schedule(self, event: Event, now: float) -> list[Command]:
        """Ask for a wake-up if something is due before the one already asked for."""
        at = self.index.next_expiry()
        if isinstance(event, WakeUp):
            at = _earliest(at, *(state.feed.next_wake() for _, state in self.sources))
        elif isinstance(event, SourceEvent):
            state = self.sources.find(event.source)
            at = _earliest(at, state.feed.next_wake() if state is not None else None)
        if at is None or (self._wake_at is not None and self._wake_at <= at):
            return []
        self._wake_at = max(at, now)
        return [WakeAt(self._wake_at)]

    # --- requests ---------------------------------------------------------------------------------

    def _request_arrived(self, request: Request, now: float) -> list[Command]:
        assert request.id not in self.requests, request.id
        tracked = _Tracked(request)
        forward = self._try_forward(tracked, now)
        if forward is None:
            return [self._refuse(request)]
        self.requests[request.id] = tracked
        return [forward]

    def _refuse(self, request: Request) -> Reject:
        """Its model is unknown to the whole fleet, or no instance that has it (or may) is up."""
        is_described = [instance.facts is not None for instance in self.fleet]
        is_known = request.model in self.fleet.model_cards()
        if not is_known and is_described and all(is_described):
            return Reject(request.id, RejectReason.UNKNOWN_MODEL)
        return self._reject(request.id, RejectReason.NO_INSTANCE)

    def _reject(self, request_id: RequestId, reason: RejectReason) -> Reject:
        return Reject(request_id, reason, retry_after_s=self.limits.retry_after_s)

    def _try_forward(self, tracked: _Tracked, now: float) -> Forward | None:
        """Choose a holder and reserve it, in one step. None: no instance is left to choose."""
        request = tracked.request
        excluded = [*tracked.tried, *tracked.full]
        choice = self._choose(request, now, self._random_below, excluded)
        if choice is None:
            return None
        if not excluded:
            departure = choice.departure
            self.lineages.note(departure.chain, departure.lineage, departure.shared_blocks)
            if departure.chain and departure.lineage.history_blocks == 0:
                for holder in self.sessions.note(choice.chosen.holder):
                    self.candidates.touch(holder)
        self._reserve(tracked, choice, now)
        return Forward(request.id, choice.chosen.holder, choice.decision, tracked.attempt)

    def _reserve(self, tracked: _Tracked, choice: Choice, now: float) -> None:
        request, chosen, known = tracked.request, choice.chosen, choice.known
        prompt_tokens = request.prompt.token_count if request.prompt is not None else 0
        holder = chosen.holder
        instance = self._get_instance(holder.instance_id)
        self._forwards += 1
        instance.last_chosen[holder] = self._forwards
        instance.begin_trial(request.id)
        tracked.attempt += 1
        tracked.tried.append(holder.instance_id)
        tracked.holder = holder
        tracked.forwarded_at = now
        tracked.confirmed_tokens = chosen.confirmed_tokens
        tracked.prefill_tokens = max(prompt_tokens - chosen.overlap_tokens, 0)
        tracked.had_prefill_alone = self.loads.get(holder).queued_prefill_tokens == 0
        self.loads.reserve(request.id, holder, tracked.prefill_tokens, known.usable_blocks)
        self.candidates.touch(holder)
        if known.usable_blocks:
            self._predict(tracked, chosen, known, now)
        if tracked.is_exact and chosen.trust is Trust.EXACT:
            # Count what the engine announces of the answer.
            chain, block_tokens, _, _ = known
            self.settling.forwarded(request.id, holder, chain, prompt_tokens, block_tokens)

    def _predict(self, tracked: _Tracked, chosen: Candidate, known: KnownPart, now: float) -> None:
        """Assume that the holder will have what it has not confirmed of the prompt."""
        holder, limits = chosen.holder, self.limits
        part = range(chosen.confirmed_tokens // known.block_tokens, known.usable_blocks)
        will_confirm = chosen.trust is not Trust.APPROXIMATE and not known.is_text
        lifetime_s = limits.prediction_s if will_confirm else limits.approximate_prediction_s
        self.index.predict(holder, known.chain[part.start : part.stop], now + lifetime_s)
        if will_confirm:
            tracked.predicted, tracked.predicted_part = known.chain, part
            self.predicting.setdefault(holder, {})[tracked.request.id] = tracked

    def _request_first_byte(self, event: RequestFirstByte, now: float) -> list[Command]:
        tracked = self.requests[event.request_id]
        assert tracked.holder is not None
        if tracked.has_first_byte:
            return []
        tracked.has_first_byte = True
        instance = self.fleet.find(tracked.holder.instance_id)
        tells_rate = event.shows_prefill and tracked.had_prefill_alone and tracked.is_exact
        if instance is not None and tells_rate:
            elapsed_ms = (now - tracked.forwarded_at) * 1000
            self.fleet.observe_prefill(instance, tracked.prefill_tokens, elapsed_ms)
        self.loads.end_prefill(event.request_id)
        self.candidates.touch(tracked.holder)
        return []

    def _request_failed(self, event: RequestFailed, now: float) -> list[Command]:
        """An attempt failed before its first byte: try once more elsewhere, or let it be told."""
        tracked = self.requests[event.request_id]
        assert tracked.holder is not None
        self._release(tracked, now)
        self.settling.drop(event.request_id)
        commands = self._note_failure(tracked.holder.instance_id, event.kind)
        if event.kind is FailureKind.FULL:
            self._take_back_attempt(tracked)
        if tracked.attempt < self.limits.attempts_max:
            forward = self._try_forward(tracked, now)
            if forward is not None:
                return [*commands, forward]
        # Nobody could serve it, so it may be the request's own fault: no instance is charged.
        del self.requests[event.request_id]
        self._end_trials(tracked)
        return [*commands, RelayFailure(event.request_id)]

    def _take_back_attempt(self, tracked: _Tracked) -> None:
        """Nothing was sent, so it was no attempt, and says nothing about the instance."""
        instance_id = tracked.tried.pop()
        tracked.full.append(instance_id)
        tracked.attempt -= 1
        instance = self.fleet.find(instance_id)
        if instance is not None:
            instance.end_trial(tracked.request.id)

    def _note_failure(self, instance_id: InstanceId, kind: FailureKind) -> list[Command]:
        instance = self.fleet.find(instance_id)
        if instance is None:
            return []
        match kind:
            case FailureKind.UNREACHABLE:
                instance.probed(is_healthy=False, is_gone=True, up_after=1, down_after=1)
                self.candidates.reset()
                self._forget_unconfirmable(instance)
                return [Probe(instance_id)]
            case FailureKind.DISCONNECTED:
                return [Probe(instance_id)]
            case FailureKind.TIMEOUT | FailureKind.STATUS | FailureKind.FULL:
                return []
            case _:
                assert_never(kind)

    def _request_finished(self, event: RequestFinished, now: float) -> list[Command]:
        tracked = self.requests.pop(event.request_id)
        assert tracked.holder is not None
        self._release(tracked, now)
        is_answered = event.outcome is Outcome.ANSWERED
        length = event.completion_tokens if is_answered else None
        self.settling.finished(event.request_id, length, now)
        if is_answered:
            self._charge_failures(tracked, now)
        self._end_trials(tracked)
        if event.outcome is Outcome.BROKEN_OFF:
            return [Probe(tracked.holder.instance_id)]
        if is_answered and event.cached_tokens == 0 and tracked.confirmed_tokens:
            return self._doubt(tracked.holder, now)
        return []

    def _doubt(self, holder: Holder, now: float) -> list[Command]:
        """The engine had nothing of what it was known to have: perhaps the news was lost."""
        instance = self.fleet.find(holder.instance_id)
        return self.sources.doubt(holder, instance, now) if instance is not None else []

    def _charge_failures(self, tracked: _Tracked, now: float) -> None:
        """The last instance that was tried has served what the others could not."""
        *failed_on, served_by = (self.fleet.find(instance_id) for instance_id in tracked.tried)
        if served_by is not None:
            served_by.resume()
        for failed in failed_on:
            if failed is None or not failed.is_healthy:
                continue
            # Requests that failed together are one reason to back off, not one each.
            if failed.suspended_until is None or failed.trial == tracked.request.id:
                failed.suspend(now)
                self.candidates.reset()

    def _end_trials(self, tracked: _Tracked) -> None:
        for instance_id in tracked.tried:
            instance = self.fleet.find(instance_id)
            if instance is not None:
                instance.end_trial(tracked.request.id)

    def _release(self, tracked: _Tracked, now: float) -> None:
        """End an attempt: its load is free, and what it should have cached is soon known."""
        holder, predicted = tracked.holder, tracked.predicted
        assert holder is not None
        self.loads.release(tracked.request.id)
        self.candidates.touch(holder)
        if not predicted:
            return
        tracked.predicted = ()
        part = tracked.predicted_part
        begin = max(part.start, self._predicted_by_others(tracked, predicted))
        if self.index.has_holder(holder):
            own = predicted[begin : part.stop]
            self.index.shorten_predictions(holder, own, now + CONFIRMATION_GRACE_S)

    def _predicted_by_others(self, tracked: _Tracked, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks other unfinished requests will fill on its holder."""
        assert tracked.holder is not None
        others = self.predicting[tracked.holder]
        del others[tracked.request.id]
        if not others:
            del self.predicting[tracked.holder]
        return max((_common_blocks(chain, other.predicted) for other in others.values()), default=0)

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
        excluded: Sequence[InstanceId] = (),
        places: int | None = PLACES,
    ) -> Choice | None:
        policy = self.get_policy(request.policy)
        return self._chooser.choose(policy, request, random_below, now, excluded, places)

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

    def spaces(self, model: str) -> frozenset[BlockSpace]:
        """Return the block spaces in which a prompt for this model has to be hashed."""
        return self.candidates.spaces(model)

    # --- the fleet --------------------------------------------------------------------------------

    def _fleet_changed(
        self, event: InstanceAdded | InstanceRemoved | InstanceDescribed | InstanceProbed
    ) -> list[Command]:
        if isinstance(event, InstanceAdded):
            self.fleet.add(event.spec)
            return [Probe(event.spec.id)]
        instance = self.fleet.find(event.instance_id)
        if instance is None:
            return []
        match event:
            case InstanceRemoved():
                self._remove_instance(instance)
            case InstanceDescribed():
                self._describe(instance, event.facts)
            case InstanceProbed():
                self._probed(instance, event)
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
            self._forget_unconfirmable(instance)

    def _forget_unconfirmable(self, instance: InstanceState) -> None:
        """Nothing listens there: its process ended, and its cache with it.

        What events confirmed is left to the feed, which finds out exactly once the source is back.
        """
        for holder in instance.holders:
            if self.index.has_holder(holder):
                self.index.forget_predictions(holder)

    def _remove_instance(self, instance: InstanceState) -> None:
        self.sources.close_all(instance.spec.id)
        for holder in self.index.holders:
            if holder.instance_id == instance.spec.id:
                self.index.remove_holder(holder)
        self.fleet.remove(instance.spec.id)
        self.candidates.reset()

    def _get_instance(self, instance_id: InstanceId) -> InstanceState:
        instance = self.fleet.find(instance_id)
        assert instance is not None, instance_id
        return instance


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _common_blocks(chain: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Return how many leading blocks two chains share. Equal hashes have equal prefixes: bisect."""
    low, high = 0, min(len(chain), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
