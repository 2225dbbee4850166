"""Unfinished requests: where each was sent, what was reserved for it, and what comes after a failure.

A request has one leg, or two: a prefill leg on one instance, then a decode leg on another. Each leg
reserves its holder, and once it is sent lets the index assume that the holder will have the prompt.

After a failure, before the client has got a byte: another instance is tried. If a prefill leg failed,
nothing is kept of it, so another pair is tried, and at last an instance that does both. If a decode leg
certainly did not reach its instance, the same hand-off is delivered to another one, which is no attempt
of its own: somebody has to fetch the blocks. If it did, or may have, the prompt is computed anew.

Invariants: a request's reservations are those of its legs under way; each request ends once; an
instance is charged with a failure only if another one served the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from moongate.router.candidates import CandidateTable
from moongate.router.choosing import Choice, Place
from moongate.router.commands import Command, Decision, Forward, Probe, RelayFailure
from moongate.router.cost import span_tokens
from moongate.router.events import (
    FailureKind,
    Outcome,
    PrefillEnded,
    PrefillFailed,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
)
from moongate.router.fleet import Fleet, InstanceState
from moongate.router.foreign_predictions import told_blocks
from moongate.router.index import OwnershipIndex
from moongate.router.lineage import Lineages, RecentSessions
from moongate.router.load import LoadTable
from moongate.router.model import (
    BlockHash,
    Holder,
    InstanceId,
    Request,
    RequestId,
    Trust,
)
from moongate.router.peers import Outbox
from moongate.router.policy import Candidate
from moongate.router.settling import Settling

CONFIRMATION_GRACE_S = 1.0
"""After a leg ended, the engine's events for it are under way for at most this long; what they have not
confirmed by then is no longer assumed."""


@dataclass(slots=True)
class Leg:
    """What a request has on one holder."""

    place: Place
    holder: Holder  # that of the place
    reservation: RequestId  # names it in the table of loads
    began_at: float
    lacking_tokens: int  # of the prompt, beyond what it has or fetches
    prefill_tokens: int  # of these, what it computes itself: all or none
    work_tokens: int  # those, and what was ahead of them, in tokens of a prompt's beginning
    had_prefill_alone: bool  # nobody's prompt was ahead
    confirmed_tokens: int = 0  # that the holder was known to have, if it computes the rest
    fetching: Candidate | None = None  # what was chosen, if it gets tokens from the pool
    predicted: Sequence[BlockHash] = ()  # the chain, where events will confirm it
    predicted_part: range = range(0)  # of it, what was not confirmed already

    @property
    def assumed_blocks(self) -> Sequence[BlockHash]:
        """Return what the holder is assumed to have on account of this leg only."""
        chosen, known = self.place
        begin = chosen.overlap_tokens // known.block_tokens
        return known.chain[begin : known.usable_blocks]


@dataclass(slots=True)
class Tracked:
    """An unfinished request."""

    request: Request
    attempt: int = 0
    leg: Leg | None = None  # that answers the client
    prefill: Leg | None = None  # under way, before that
    tried: list[InstanceId] = field(default_factory=list)  # something was sent there
    failed: list[InstanceId] = field(default_factory=list)  # of these
    full: list[InstanceId] = field(default_factory=list)  # chosen, but they had no room
    decision: Decision | None = None  # of the attempt under way
    handed_over_tokens: int | None = (
        None  # that a prefill instance keeps for the leg; None: none does
    )
    is_alone: bool = False  # it is not handed over any more
    has_first_byte: bool = False

    @property
    def is_exact(self) -> bool:
        prompt = self.request.prompt
        return prompt is not None and prompt.is_exact

    @property
    def legs(self) -> list[Leg]:
        return [leg for leg in (self.prefill, self.leg) if leg is not None]

    @property
    def answering(self) -> Leg:
        """Return the leg whose answer the client gets: if it is refused, that of the prefill."""
        leg = self.prefill or self.leg
        assert leg is not None
        return leg

    def note_tried(self, instance_id: InstanceId) -> None:
        if instance_id not in self.tried:
            self.tried.append(instance_id)


@dataclass(frozen=True, slots=True)
class TrackingLimits:
    """For how long what was sent is assumed to be held."""

    prediction_s: float
    approximate_prediction_s: float


@dataclass(slots=True)
class Requests:
    """All unfinished requests, and what follows from them for the parts of the core."""

    fleet: Fleet
    index: OwnershipIndex
    loads: LoadTable
    lineages: Lineages
    sessions: RecentSessions
    settling: Settling
    candidates: CandidateTable
    outbox: Outbox
    limits: TrackingLimits
    tracked: dict[RequestId, Tracked] = field(default_factory=dict)
    predicting: dict[Holder, dict[RequestId, Leg]] = field(default_factory=dict)
    _forwards: int = 0

    # --- sending ----------------------------------------------------------------------------------

    def begin(self, tracked: Tracked, choice: Choice, now: float) -> Forward:
        """Reserve what was chosen for a request, and say where it goes."""
        if not (tracked.failed or tracked.full):
            self._note_lineage(choice, ends_session=tracked.request.ends_session)
        tracked.attempt += 1
        tracked.decision = choice.decision
        tracked.handed_over_tokens = None
        prefill = choice.prefill
        if prefill is not None:
            tracked.prefill = self._open(tracked, prefill, now, name="/prefill")
        place = Place(choice.chosen, choice.known)
        tracked.leg = self._open(tracked, place, now, computes=prefill is None)
        self._send(tracked, tracked.answering, now)
        self._watch_answer(tracked, place)
        return Forward(
            tracked.request.id,
            choice.chosen.holder,
            choice.decision,
            tracked.attempt,
            prefill.chosen.holder if prefill is not None else None,
        )

    def _note_lineage(self, choice: Choice, *, ends_session: bool) -> None:
        chain, shared_blocks, lineage = choice.departure
        session = self.lineages.note(chain, lineage, shared_blocks, is_last=ends_session)
        if session is None:
            return
        changed: tuple[Holder, ...] = ()
        if ends_session:
            changed = self.sessions.end(session)
        elif lineage.history_blocks == 0:
            changed = self.sessions.note(session, choice.chosen.holder)
        for holder in changed:
            self.candidates.touch(holder)
            self.loads.changed[holder] = None

    def _open(
        self, tracked: Tracked, place: Place, now: float, name: str = "", *, computes: bool = True
    ) -> Leg:
        """Reserve a holder for a leg. `computes`: it has the prompt to compute."""
        request, chosen, known = tracked.request, place.chosen, place.known
        holder = chosen.holder
        instance = self.get_instance(holder.instance_id)
        self._forwards += 1
        instance.last_chosen[holder] = self._forwards
        instance.breaker.begin_trial(request.id, now)
        reused_tokens = chosen.overlap_tokens + (chosen.pool_tokens if computes else 0)
        lacking_tokens = max((request.prompt_tokens or 0) - reused_tokens, 0)
        prefill_tokens = lacking_tokens if computes else 0
        work_tokens = self._work_tokens(prefill_tokens, reused_tokens)
        ahead_tokens = self.loads.get(holder).queued_prefill_tokens
        leg = Leg(
            place,
            holder,
            RequestId(f"{request.id}{name}") if name else request.id,
            now,
            lacking_tokens,
            prefill_tokens,
            work_tokens=ahead_tokens + work_tokens,
            had_prefill_alone=ahead_tokens == 0,
            confirmed_tokens=chosen.confirmed_tokens if computes else 0,
            fetching=chosen if chosen.pool_tokens and computes else None,
        )
        self.loads.reserve(leg.reservation, holder, work_tokens, known.usable_blocks)
        self.candidates.touch(holder)
        return leg

    def _work_tokens(self, tokens: int, reused_tokens: int) -> int:
        """Return what computing these tokens costs, in tokens of a prompt's beginning."""
        context_tokens = self.fleet.prefill.context_tokens
        return int(span_tokens(reused_tokens, reused_tokens + tokens, context_tokens))

    def _send(self, tracked: Tracked, leg: Leg, now: float) -> None:
        """Note that a leg is sent now: its holder will have what it has not confirmed of the prompt."""
        tracked.note_tried(leg.holder.instance_id)
        chosen, known = leg.place
        if not known.usable_blocks or not self.index.has_holder(leg.holder):
            return
        part = range(chosen.confirmed_tokens // known.block_tokens, known.usable_blocks)
        # Of a source that has lost events the confirmation may be lost as well, or can't be named.
        will_confirm = chosen.trust is Trust.EXACT and not known.is_text
        limits = self.limits
        lifetime_s = limits.prediction_s if will_confirm else limits.approximate_prediction_s
        self.index.predict(leg.holder, known.chain[part.start : part.stop], now + lifetime_s)
        if will_confirm:
            leg.predicted, leg.predicted_part = known.chain, part
            self.predicting.setdefault(leg.holder, {})[leg.reservation] = leg
        self.outbox.note_sent(leg.reservation, leg.holder, known, part, lifetime_s)

    def _watch_answer(self, tracked: Tracked, place: Place) -> None:
        """Count what the engine announces of the answer."""
        if not tracked.is_exact or place.chosen.trust is not Trust.EXACT:
            return
        prompt = tracked.request.prompt
        assert prompt is not None
        chain, block_tokens, _, _ = place.known
        holder = place.chosen.holder
        self.settling.forwarded(tracked.request.id, holder, chain, prompt.token_count, block_tokens)

    # --- on the way -------------------------------------------------------------------------------

    def prefill_ended(self, event: PrefillEnded, now: float) -> None:
        """The prefill leg is over; the decode leg begins now."""
        tracked = self.tracked[event.request_id]
        prefill, leg = tracked.prefill, tracked.leg
        assert prefill is not None
        assert leg is not None
        instance = self.fleet.find(prefill.holder.instance_id)
        if instance is not None:
            if instance.breaker.answered():
                self.candidates.reset()
            if prefill.had_prefill_alone and tracked.is_exact:
                self._learn_rate(prefill, instance, (now - prefill.began_at) * 1000)
        self._close(prefill, now)
        tracked.prefill = None
        tracked.handed_over_tokens = leg.lacking_tokens if event.is_held else None
        leg.began_at = now
        self._send(tracked, leg, now)

    def first_byte(self, event: RequestFirstByte, now: float) -> None:
        """The answer began, so its prompt is computed."""
        tracked = self.tracked[event.request_id]
        leg = tracked.answering
        if tracked.has_first_byte:
            return
        tracked.has_first_byte = True
        elapsed_ms = (now - leg.began_at) * 1000
        instance = self.fleet.find(leg.holder.instance_id)
        if event.shows_prefill and tracked.is_exact and instance is not None:
            if tracked.handed_over_tokens is not None:
                self.fleet.observe_handoff(tracked.handed_over_tokens, elapsed_ms)
            elif leg.had_prefill_alone:
                self._learn_rate(leg, instance, elapsed_ms)
        is_own = tracked.handed_over_tokens is None and leg.fetching is None
        # Of a prompt that should have been read and wasn't nobody knows what its time should be.
        is_own = is_own and not tracked.request.is_prompt_missing
        if event.shows_prefill and is_own and instance is not None:
            self.fleet.observe_first_byte(instance, leg.work_tokens, elapsed_ms)
        if (
            event.shows_prefill
            and instance is not None
            and instance.breaker.began(tracked.request.id)
        ):
            self.candidates.reset()
        self.loads.end_prefill(leg.reservation)
        self.candidates.touch(leg.holder)

    def yield_prefill(self, holder: Holder, blocks: Sequence[BlockHash]) -> None:
        """Another gateway has sent what ends in these blocks to the same holder at the same time.

        The engine computes what they have in common once, so it is reserved once: by one of the two.
        """
        told = set(blocks)
        for leg in self.predicting.get(holder, {}).values():
            own = told_blocks(leg.predicted, leg.predicted_part, leg.place.known.block_tokens)
            if leg.prefill_tokens and own and own[-1] in told:
                self.loads.end_prefill(leg.reservation)
                leg.prefill_tokens = 0
                leg.had_prefill_alone = False
                self.candidates.touch(holder)

    def _learn_rate(self, leg: Leg, instance: InstanceState, elapsed_ms: float) -> None:
        """Learn from the time to the first token: how fast it prefills, or how fast it fetched."""
        fetching, tokens = leg.fetching, leg.prefill_tokens
        if fetching is None or fetching.pool is None:
            chosen = leg.place.chosen
            is_certain = (
                chosen.trust is Trust.EXACT
            )  # else it may have had to compute more, or less
            self.fleet.observe_prefill(
                instance, tokens, chosen.overlap_tokens, elapsed_ms, is_certain=is_certain
            )
            for holder in instance.holders:
                self.candidates.touch(holder)
            return
        if fetching.pool.weight < 1.0:
            return  # it may not have been there
        reused_tokens = fetching.overlap_tokens + fetching.pool_tokens
        prefill_ms = self.fleet.prefill.expected_ms(tokens, reused_tokens) / instance.weight
        fetch_ms = elapsed_ms - prefill_ms
        self.fleet.observe_fetch(instance, fetching.pool, fetching.pool_tokens, fetch_ms)

    # --- failing ----------------------------------------------------------------------------------

    def failed(self, event: RequestFailed | PrefillFailed, now: float) -> list[Command]:
        """End an attempt that failed before its first byte. Return what follows for the instance."""
        tracked = self.tracked[event.request_id]
        leg = tracked.answering
        assert isinstance(event, PrefillFailed) == (leg is tracked.prefill), event
        unsent = [other for other in tracked.legs if other is not leg]
        if not event.kind.was_sent and self.index.has_holder(leg.holder):
            self.index.take_predictions_back(leg.holder, leg.assumed_blocks)
            self.outbox.note_ended(leg.reservation, is_void=True)
        self._close_all(tracked, now)
        self.settling.drop(event.request_id)
        for other in unsent:
            self._end_trial(tracked, other.holder.instance_id)
        instance_id = leg.holder.instance_id
        if event.kind.is_refusal:
            self._note_full(tracked, instance_id)
            return []
        tracked.failed.append(instance_id)
        return self._note_failure(instance_id, event.kind)

    def can_redeliver(self, event: RequestFailed | PrefillFailed) -> bool:
        """Tell whether a decode leg certainly didn't reach its instance, while its blocks are kept."""
        is_kept = self.tracked[event.request_id].handed_over_tokens is not None
        return is_kept and not event.kind.was_sent

    def redeliver(self, tracked: Tracked, choice: Choice, now: float) -> Forward:
        """Send the decode leg of a hand-off to another instance."""
        assert tracked.decision is not None
        place = Place(choice.chosen, choice.known)
        leg = tracked.leg = self._open(tracked, place, now, computes=False)
        tracked.handed_over_tokens = leg.lacking_tokens
        self._send(tracked, leg, now)
        self._watch_answer(tracked, place)
        # Its prompt was computed where it was, and reused there what it did.
        decision = tracked.decision._replace(ranking=choice.decision.ranking)
        return Forward(
            tracked.request.id, leg.holder, decision, tracked.attempt, is_redelivery=True
        )

    def give_up(self, request_id: RequestId) -> RelayFailure:
        """Nobody could serve it, so it may be the request's own fault: no instance is charged."""
        self._end_trials(self.tracked.pop(request_id))
        return RelayFailure(request_id)

    def _note_full(self, tracked: Tracked, instance_id: InstanceId) -> None:
        """Nothing is done there, so it says nothing about the instance, nor was it an attempt.

        Unless a prefill was sent, and answered, before.
        """
        tracked.tried.remove(instance_id)
        tracked.full.append(instance_id)
        if tracked.handed_over_tokens is None:
            tracked.attempt -= 1
        self._end_trial(tracked, instance_id)

    def _end_trial(self, tracked: Tracked, instance_id: InstanceId) -> None:
        instance = self.fleet.find(instance_id)
        if instance is not None:
            instance.breaker.end_trial(tracked.request.id)

    def _note_failure(self, instance_id: InstanceId, kind: FailureKind) -> list[Command]:
        instance = self.fleet.find(instance_id)
        if instance is None:
            return []
        match kind:
            case FailureKind.UNREACHABLE:
                instance.probed(is_healthy=False, is_gone=True, up_after=1, down_after=1)
                self.candidates.reset()
                self.forget_unconfirmable(instance)
                return [Probe(instance_id)]
            case FailureKind.DISCONNECTED:
                return [Probe(instance_id)]
            case (
                FailureKind.NO_CONNECTION
                | FailureKind.TIMEOUT
                | FailureKind.STATUS
                | FailureKind.FULL
                | FailureKind.RATE_LIMITED
            ):
                return []
            case _:
                assert_never(kind)

    def forget_unconfirmable(self, instance: InstanceState) -> None:
        """Nothing listens there: its process ended, and its cache with it.

        What events confirmed is left to the feed, which finds out exactly once the source is back.
        """
        for holder in instance.holders:
            if self.index.has_holder(holder):
                self.index.forget_predictions(holder)

    # --- ending -----------------------------------------------------------------------------------

    def finished(self, event: RequestFinished, now: float) -> list[Command]:
        """End a request that was answered, left or broken off."""
        tracked = self.tracked.pop(event.request_id)
        leg = tracked.answering
        self._close_all(tracked, now)
        is_answered = event.outcome is Outcome.ANSWERED
        length = event.completion_tokens if is_answered else None
        self.settling.finished(event.request_id, length, now)
        if is_answered:
            self._charge_failures(tracked, leg, now)
        is_broken_off = event.outcome is Outcome.BROKEN_OFF
        if is_broken_off:
            self._suspect(tracked, leg.holder.instance_id, now)
        self._end_trials(tracked)
        return [Probe(leg.holder.instance_id)] if is_broken_off else []

    def _suspect(self, tracked: Tracked, instance_id: InstanceId, now: float) -> None:
        instance = self.fleet.find(instance_id)
        if instance is not None and instance.breaker.may_have_failed(tracked.request.id, now):
            self.candidates.reset()

    def _charge_failures(self, tracked: Tracked, leg: Leg, now: float) -> None:
        """The last instance that was tried has served what the others could not."""
        served_by = self.fleet.find(leg.holder.instance_id)
        if served_by is not None and served_by.breaker.answered():
            self.candidates.reset()
        for instance_id in tracked.failed:
            failed = self.fleet.find(instance_id)
            if failed is None or not failed.is_healthy:
                continue
            if failed.breaker.failed(tracked.request.id, now):
                self.candidates.reset()

    def _end_trials(self, tracked: Tracked) -> None:
        for instance_id in {*tracked.tried, *(leg.holder.instance_id for leg in tracked.legs)}:
            self._end_trial(tracked, instance_id)

    def _close_all(self, tracked: Tracked, now: float) -> None:
        for leg in tracked.legs:
            self._close(leg, now)
        tracked.prefill = None

    def _close(self, leg: Leg, now: float) -> None:
        """End a leg: its load is free, and what it should have cached is soon known."""
        holder, predicted = leg.holder, leg.predicted
        self.loads.release(leg.reservation)
        self.candidates.touch(holder)
        if not predicted:
            return
        leg.predicted = ()
        self.outbox.note_ended(leg.reservation)
        part = leg.predicted_part
        begin = max(part.start, self._predicted_by_others(leg, predicted))
        if self.index.has_holder(holder):
            own = predicted[begin : part.stop]
            self.index.shorten_predictions(holder, own, now + CONFIRMATION_GRACE_S)

    def _predicted_by_others(self, leg: Leg, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks other unfinished requests will fill on its holder."""
        others = self.predicting[leg.holder]
        del others[leg.reservation]
        if not others:
            del self.predicting[leg.holder]
        return max((_common_blocks(chain, other.predicted) for other in others.values()), default=0)

    def get_instance(self, instance_id: InstanceId) -> InstanceState:
        instance = self.fleet.find(instance_id)
        assert instance is not None, instance_id
        return instance


def alone(request: Request) -> Request:
    """Return the request as one that is not handed over: the last resort."""
    return replace(request, may_hand_over=False)


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
