"""Whether a request may start now, has to wait, or is refused.

Theory of operation. An instance has room as long as it has neither more requests than it may run, nor more
prompts to compute than it may have ahead; how much more a request adds doesn't matter, so that a large one
isn't kept out by small ones that go on coming. A request starts where there is room. Where there is none it
waits in the fair queue (`fair_queue.py`), until it is next, or too late; one that would be too late is refused
at once. What is refused is told when to come back: when what waits now will have started, at the speed at which
requests that waited have started lately.

Invariants: no more wait than may; none waits that could start, after the core's step; none is past its time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from moongate.router.candidates import CandidateTable
from moongate.router.commands import Reject, RejectReason
from moongate.router.fair_queue import CanStart, FairQueue, Waiting
from moongate.router.fleet import Fleet, InstanceState
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
    _count: int = 0
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
        self._count += 1
        self._since = now

    def find_tokens_per_s(self, now: float) -> float | None:
        """Return the speed; what has not happened since the last start counts, too. None: not known."""
        seconds = self._seconds + (now - self._since)
        if self._count < RATE_COUNT_MIN or seconds <= 0:
            return None
        return self._tokens / seconds


@dataclass(slots=True)
class Admission:
    """Who may start, and who waits."""

    limits: AdmissionLimits
    fleet: Fleet
    loads: LoadTable
    candidates: CandidateTable
    queue: FairQueue = field(default_factory=FairQueue)
    rate: StartRate = field(default_factory=StartRate)
    answer_tokens: float = ANSWER_TOKENS_PRIOR
    _full: set[InstanceId] = field(default_factory=set)
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
            self._full = {i.spec.id for i in self.fleet if not self.has_room(i)}
            return self._full
        for instance_id in touched:
            instance = self.fleet.find(instance_id)
            has_room = instance is None or self.has_room(instance)
            (self._full.discard if has_room else self._full.add)(instance_id)
        return self._full

    def starter(self, full: AbstractSet[InstanceId], now: float) -> CanStart:
        """Return what tells of each request whether it could start, with these instances full."""
        if len(full) == len(self.fleet):
            return lambda _: False
        # What a request needs is alike for many.
        known: dict[tuple[str, bool, bool], bool] = {}

        def can_start(waiting: Waiting) -> bool:
            request = waiting.request
            kind = (request.model, request.may_hand_over, request.stays_whole)
            if kind not in known:
                known[kind] = self.can_start(request, full, now)
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

    def can_start(self, request: Request, full: AbstractSet[InstanceId], now: float) -> bool:
        """Tell whether an instance has room for the request, and one to prefill for it, if there are such."""
        fleet, model = self.fleet, request.model
        may_take = fleet.available(model, now, (), _duty_of(request))
        if all(instance.spec.id in full for instance in may_take):
            return False
        if not (request.may_hand_over and fleet.has_prefill(model)):
            return True
        may_prefill = fleet.available(model, now, (), Duty.PREFILL)
        return not may_prefill or any(i.spec.id not in full for i in may_prefill)

    def is_served(self, request: Request, now: float) -> bool:
        """Tell whether there is an instance that could take it, had it room."""
        return bool(self.fleet.available(request.model, now, (), _duty_of(request)))

    # --- waiting ----------------------------------------------------------------------------------

    def expected_tokens(self, request: Request, reused_tokens: float) -> int:
        """Return what has to be computed for a request of whose prompt so much is there."""
        prompt = request.prompt_tokens if request.prompt_tokens is not None else request.size_tokens
        wished = request.answer_tokens_max
        answer = self.answer_tokens if wished is None else min(wished, self.answer_tokens)
        return max(int(max(prompt - reused_tokens, 0) + answer), 1)

    def note_answer(self, tokens: int) -> None:
        """An answer was so long."""
        self.answer_tokens += (tokens - self.answer_tokens) / ANSWER_MEMORY

    def offer(self, request: Request, tokens: int, now: float) -> Reject | None:
        """Let a request wait. Return what is refused for it: it itself, or another. None: nothing."""
        limits = self.limits
        wished_s = request.wait_s_max if request.wait_s_max is not None else limits.wait_s_max
        allowed_s = min(limits.wait_s_max, wished_s)
        waiting = Waiting(request, tokens, now + allowed_s)
        if not self.has_waiting:
            self.rate.began(now)
        expected_s = self._expected_s(self.queue.tokens_before(waiting), now)
        if expected_s is not None and expected_s > allowed_s * LATE_FACTOR:
            return self._reject(request.id, RejectReason.QUEUE_TIMEOUT, now)
        self.queue.add(waiting)
        heapq.heappush(self._deadlines, (waiting.deadline, request.id))
        if len(self.queue) <= limits.queue_requests_max:
            return None
        excess = self.queue.find_excess(waiting).request.id
        self.queue.remove(excess)
        return self._reject(excess, RejectReason.QUEUE_FULL, now)

    def leave(self, request_id: RequestId) -> bool:
        """Its client has left. Return whether it waited."""
        return self.queue.remove(request_id) is not None

    def is_waiting(self, request_id: RequestId) -> bool:
        return self.queue.find(request_id) is not None

    def take(self, can_start: CanStart, now: float) -> Waiting | None:
        """Remove and return what is next of those that can start."""
        waiting = self.queue.take(can_start)
        if waiting is not None:
            self.rate.started(waiting.tokens, now)
        return waiting

    def expire(self, now: float) -> Iterator[Reject]:
        """Refuse what has waited for too long."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if self.queue.remove(request_id) is not None:
                yield self._reject(request_id, RejectReason.QUEUE_TIMEOUT, now)

    def next_expiry(self) -> float | None:
        """Return when the next has waited for too long."""
        while self._deadlines and self.queue.find(self._deadlines[0][1]) is None:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # --- how long ---------------------------------------------------------------------------------

    def _reject(self, request_id: RequestId, reason: RejectReason, now: float) -> Reject:
        seconds = self._expected_s(self.queue.tokens, now)
        if seconds is None:
            seconds = RETRY_AFTER_S_PRIOR
        return Reject(request_id, reason, min(max(seconds, 1.0), RETRY_AFTER_S_MAX))

    def _expected_s(self, tokens: int, now: float) -> float | None:
        """Return how long it takes until so many tokens' worth of requests have started."""
        per_s = self.rate.find_tokens_per_s(now)
        if per_s is None:
            return None
        return tokens / per_s if per_s > 0 else RETRY_AFTER_S_MAX


def _duty_of(request: Request) -> Duty:
    return Duty.WHOLE if request.stays_whole else Duty.ALL
