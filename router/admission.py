"""Whether a request may start now, has to wait, or is refused.

Theory of operation. An instance has room as long as it has neither more requests than it may run, nor more
prompts to compute than it may have ahead; how much more a request adds doesn't matter, so that a large one
isn't kept out by small ones that go on coming. A request starts where there is room. Where there is none it
waits in the fair queue (`fair_queue.py`), until it is next, or too late; one that would be too late is refused
at once. What is refused is told when to come back: when what waits now will have started, at the speed at which
requests that waited have started lately. Of both only what competes for the same instances counts: a long queue
for one model is nothing to another that has its own.

What a request costs is estimated for the queue, from its prompt and from what it says of its answers. When it is
over it has cost what the engine reports, and its tenant's share is corrected by that (`ended`).

Invariants: no more wait than may; none waits that could start, nor one that nobody is there to serve, after the
core's step; none is past its time.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from moongate.router.candidates import CandidateTable
from moongate.router.commands import Reject, RejectReason
from moongate.router.events import Outcome, RequestFinished
from moongate.router.fair_queue import CanStart, FairQueue, Kind, Taken, Waiting, kind_of
from moongate.router.fleet import ROLES, Fleet, InstanceState
from moongate.router.load import LoadTable
from moongate.router.model import Duty, InstanceId, Request, RequestId

ANSWER_TOKENS_PRIOR = 256
"""What an answer is expected to be before any has come; agents' calls are about as long."""

ANSWER_MEMORY = 32
"""Answers whose lengths count, about."""

RATE_MEMORY_S = 10.0
"""What is known of the speed counts half after so long."""

RATE_COUNT_MIN = 4
"""Starts from which on the speed is believed."""

RATES_MAX = 256
"""Kinds of requests whose speeds are kept, beside those that wait."""

RETRY_AFTER_S_PRIOR = 1.0
RETRY_AFTER_S_MAX = 300.0

LATE_FACTOR = 1.25
"""A request is refused at once if it would wait for so many times what it may: what is expected is no more
than an estimate, and once refused it can't be better."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What bounds instances and the queue before them. None: no bound."""

    instance_requests_max: int | None = None
    instance_prefill_tokens_max: int | None = None  # that wait to be computed
    queue_requests_max: int = 1024
    wait_s_max: float = 30.0

    @property
    def are_on(self) -> bool:
        return (
            self.instance_requests_max is not None or self.instance_prefill_tokens_max is not None
        )


@dataclass(slots=True)
class StartRate:
    """How many tokens' worth of requests start in a second, while some wait."""

    _tokens: float = 0.0
    _seconds: float = 0.0
    count: int = 0
    _since: float = 0.0  # of the last start, or when the first began to wait

    def began(self, now: float) -> None:
        """Requests begin to wait, where none did."""
        self._since = now

    def started(self, tokens: int, now: float) -> None:
        """A request that waited starts."""
        elapsed_s = now - self._since
        kept = 0.5 ** (elapsed_s / RATE_MEMORY_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + elapsed_s
        self.count += 1
        self._since = now

    def tokens_per_s(self, now: float) -> float:
        """Return the speed, however little is known of it; what has not happened since the last start counts, too."""
        seconds = self._seconds + (now - self._since)
        return self._tokens / seconds if seconds > 0 else 0.0


def find_speed(rates: Collection[StartRate], now: float) -> float | None:
    """Return the tokens that start in a second of several kinds that wait. None: not known."""
    if sum(rate.count for rate in rates) < RATE_COUNT_MIN:
        return None
    return sum(rate.tokens_per_s(now) for rate in rates)


@dataclass(frozen=True, slots=True)
class Started:
    """A request that has waited and runs, and what it was charged for."""

    taken: Taken
    reused_tokens: int  # of its prompt, as expected

    def find_cost(self, event: RequestFinished) -> int | None:
        """Return what it has cost. None: not known better than expected."""
        if event.outcome is Outcome.REFUSED:
            return 0
        request = self.taken.waiting.request
        generated = event.generated_tokens
        if generated is None:
            if request.answers:
                return None
            generated = 0
        is_known = request.prompt is not None and request.prompt.is_exact
        told = request.prompt_tokens if is_known else event.prompt_tokens
        prompt = _prompt_tokens(request) if told is None else told
        cached = self.reused_tokens if event.cached_tokens is None else event.cached_tokens
        return max(prompt - cached, 0) + generated


@dataclass(slots=True)
class Admission:
    """Who may start, and who waits."""

    limits: AdmissionLimits
    fleet: Fleet
    loads: LoadTable
    candidates: CandidateTable
    queue: FairQueue = field(default_factory=FairQueue)
    answer_tokens: float = ANSWER_TOKENS_PRIOR
    started: dict[RequestId, Started] = field(default_factory=dict)
    _rates: dict[Kind, StartRate] = field(default_factory=dict)
    _full: set[InstanceId] = field(default_factory=set)
    _reaches: dict[Kind, frozenset[InstanceId]] = field(default_factory=dict)  # see `_reach`
    _is_served_checked: bool = True  # since the fleet has changed
    _deadlines: list[tuple[float, RequestId]] = field(
        default_factory=list
    )  # of some that don't wait

    @property
    def has_waiting(self) -> bool:
        return len(self.queue) > 0

    # --- room -------------------------------------------------------------------------------------

    def full_instances(self) -> set[InstanceId]:
        """Return those that have no room. Cost: O(instances whose loads have changed)."""
        touched = self.candidates.take_touched()
        if touched is None:
            self._reaches.clear()
            self._is_served_checked = False
            self._full = {i.spec.id for i in self.fleet if not self.has_room(i)}
            return self._full
        for instance_id in touched:
            instance = self.fleet.find(instance_id)
            has_room = instance is None or self.has_room(instance)
            (self._full.discard if has_room else self._full.add)(instance_id)
        return self._full

    def starter(self, full: AbstractSet[InstanceId], now: float) -> CanStart:
        """Return what tells of each kind of request whether it could start, with these instances full."""
        if len(full) == len(self.fleet):
            return lambda _: False
        known: dict[Kind, bool] = {}

        def can_start(kind: Kind) -> bool:
            if kind not in known:
                known[kind] = self.can_start(kind, full, now)
            return known[kind]

        return can_start

    def has_room(self, instance: InstanceState) -> bool:
        """Tell whether one more request may be given to the instance now."""
        requests = tokens = 0
        for holder in instance.holders:
            load = self.loads.get(holder)
            requests += load.active_requests
            tokens += load.queued_prefill_tokens
        requests_max = self.limits.instance_requests_max
        tokens_max = self.limits.instance_prefill_tokens_max
        has_request = requests_max is None or requests < requests_max
        return has_request and (tokens_max is None or tokens < tokens_max)

    def can_start(self, kind: Kind, full: AbstractSet[InstanceId], now: float) -> bool:
        """Tell whether an instance has room for such a request, and one to prefill for it, if there are such."""
        fleet, model = self.fleet, kind.model
        may_take = fleet.available(model, now, (), _duty_of(kind))
        if all(instance.spec.id in full for instance in may_take):
            return False
        if not (kind.may_hand_over and fleet.has_prefill(model)):
            return True
        may_prefill = fleet.available(model, now, (), Duty.PREFILL)
        return not may_prefill or any(i.spec.id not in full for i in may_prefill)

    def is_served(self, kind: Kind, now: float) -> bool:
        """Tell whether there is an instance that could take such a request, had it room."""
        return bool(self.fleet.available(kind.model, now, (), _duty_of(kind)))

    def _reach(self, kind: Kind) -> frozenset[InstanceId]:
        """Return the instances that such requests may go to, whatever their state."""
        if kind not in self._reaches:
            roles = ROLES[_duty_of(kind)] | (ROLES[Duty.PREFILL] if kind.may_hand_over else set())
            self._reaches[kind] = frozenset(
                i.spec.id for i in self.fleet.serving(kind.model) if i.spec.role in roles
            )
        return self._reaches[kind]

    def _competing(self, kind: Kind) -> set[Kind]:
        """Return the kinds that wait and may go where such requests may go. Cost: O(kinds that wait)."""
        reach = self._reach(kind)
        return {k for k in self.queue.kinds if k == kind or not reach.isdisjoint(self._reach(k))}

    # --- waiting ----------------------------------------------------------------------------------

    def expected_tokens(self, request: Request, reused_tokens: float) -> int:
        """Return what has to be computed for a request of whose prompt so much is there."""
        wished = request.answer_tokens_max
        answer = self.answer_tokens if wished is None else min(wished, self.answer_tokens)
        prompt = max(_prompt_tokens(request) - reused_tokens, 0)
        return max(int(prompt + answer * request.answers), 1)

    def note_answer(self, tokens: int) -> None:
        """An answer was so long."""
        self.answer_tokens += (tokens - self.answer_tokens) / ANSWER_MEMORY

    def offer(self, request: Request, tokens: int, now: float) -> Reject | None:
        """Let a request wait. Return what is refused for it: it itself, or another. None: nothing."""
        limits = self.limits
        wished_s = request.wait_s_max if request.wait_s_max is not None else limits.wait_s_max
        allowed_s = min(limits.wait_s_max, wished_s)
        waiting = Waiting(request, tokens, now + allowed_s)
        if allowed_s <= 0 or self._is_late(waiting, allowed_s, now):
            # It must not take the place of one that can still wait.
            return self._reject(request, RejectReason.QUEUE_TIMEOUT, now)
        if waiting.kind not in self.queue.kinds:
            self._rate(waiting.kind).began(now)
        self.queue.add(waiting)
        heapq.heappush(self._deadlines, (waiting.deadline, request.id))
        if len(self.queue) <= limits.queue_requests_max:
            return None
        excess = self.queue.find_excess(waiting).request
        self.queue.remove(excess.id)
        return self._reject(excess, RejectReason.QUEUE_FULL, now)

    def _is_late(self, waiting: Waiting, allowed_s: float, now: float) -> bool:
        kinds = self._competing(waiting.kind)
        expected_s = self._expected_s(self.queue.tokens_before(waiting, kinds), kinds, now)
        return expected_s is not None and expected_s > allowed_s * LATE_FACTOR

    def leave(self, request_id: RequestId) -> bool:
        """Its client has left. Return whether it waited."""
        return self.queue.remove(request_id) is not None

    def take(self, can_start: CanStart, now: float) -> Taken | None:
        """Remove and return what is next of those that can start."""
        taken = self.queue.take(can_start)
        if taken is not None:
            self._rate(taken.waiting.kind).started(taken.waiting.tokens, now)
        return taken

    def expire(self, now: float) -> Iterator[Reject]:
        """Refuse what has waited for too long."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            waiting = self.queue.remove(request_id)
            if waiting is not None:
                yield self._reject(waiting.request, RejectReason.QUEUE_TIMEOUT, now)

    def take_unserved(self, now: float) -> list[Request]:
        """Remove and return what waits, and nobody is there any more who could take it.

        Cost: O(1) unless the fleet has changed since the last call.
        """
        self.full_instances()
        if self._is_served_checked:
            return []
        self._is_served_checked = True
        gone = {kind for kind in self.queue.kinds if not self.is_served(kind, now)}
        unserved = [each.request for each in self.queue if gone and each.kind in gone]
        for request in unserved:
            self.queue.remove(request.id)
        return unserved

    def next_expiry(self) -> float | None:
        """Return when the next has waited for too long."""
        while self._deadlines and self.queue.find(self._deadlines[0][1]) is None:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # --- what it has cost -------------------------------------------------------------------------

    def begin(self, taken: Taken, reused_tokens: int) -> None:
        """What was taken starts, with so much of its prompt that is there."""
        self.started[taken.waiting.request.id] = Started(taken, reused_tokens)

    def ended(self, request: Request, event: RequestFinished) -> None:
        """A request that has run is over: learn from it, and correct what it was charged for."""
        tokens = event.generated_tokens
        if event.outcome is Outcome.ANSWERED and tokens is not None and request.answers == 1:
            self.note_answer(tokens)
        started = self.started.pop(request.id, None)
        if started is not None:
            cost = started.find_cost(event)
            if cost is not None:
                self.queue.correct(started.taken, cost)

    def gave_up(self, request_id: RequestId) -> None:
        """Nobody could serve a request that was started: it has cost nothing."""
        started = self.started.pop(request_id, None)
        if started is not None:
            self.queue.correct(started.taken, 0)

    # --- how long ---------------------------------------------------------------------------------

    def _rate(self, kind: Kind) -> StartRate:
        """Return the speed of a kind; those of the oldest that don't wait are forgotten."""
        rate = self._rates.get(kind)
        if rate is None:
            while len(self._rates) >= RATES_MAX + len(self.queue.kinds):
                del self._rates[next(k for k in self._rates if k not in self.queue.kinds)]
            rate = self._rates[kind] = StartRate()
        return rate

    def _reject(self, request: Request, reason: RejectReason, now: float) -> Reject:
        kinds = self._competing(kind_of(request))
        seconds = self._expected_s(self.queue.tokens(kinds), kinds, now)
        if seconds is None:
            seconds = RETRY_AFTER_S_PRIOR
        return Reject(request.id, reason, min(max(seconds, 1.0), RETRY_AFTER_S_MAX))

    def _expected_s(self, tokens: int, kinds: Collection[Kind], now: float) -> float | None:
        """Return how long it takes until so many tokens' worth of these kinds have started."""
        per_s = find_speed([self._rate(kind) for kind in kinds], now)
        if per_s is None:
            return None
        return tokens / per_s if per_s > 0 else RETRY_AFTER_S_MAX


def _duty_of(kind: Kind) -> Duty:
    return Duty.WHOLE if kind.stays_whole else Duty.ALL


def _prompt_tokens(request: Request) -> int:
    return request.prompt_tokens if request.prompt_tokens is not None else request.size_tokens
