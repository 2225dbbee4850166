"""An instance's circuit breaker: whether requests may be given to it, by what became of earlier ones.

Theory of operation. Closed, it lets everything through. It opens at a failure that is the instance's own:
another instance served the very request; or, of failures that prove nothing by themselves (an answer broken
off), at so many in a row. Open, it lets nothing through until its back-off ends. Then it is half open: one
request at a time is let through as a trial. A trial that is answered closes it; one that fails opens it for
twice as long. One whose stream has begun closes it on trust, since its end may be minutes away: until an answer
has come whole, the first that is broken off opens it again, for twice as long. What a client does (leaving) or is
to blame for (4xx) is neither a failure nor a success; a trial that ends so makes room for another, and so does
one of which nothing has come for long.

Invariants: a trial only where it isn't closed; the back-off within its bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from moongate.router.model import RequestId


class BreakerState(IntEnum):
    """Also the metric's value."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


TRIAL_S = 10.0
"""After so long without a first byte another trial is let through: this one's prompt may be long, or its connection dead."""


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When breakers open, and for how long.

    The back-off is short enough to notice a recovery, and long enough not to feed an instance requests that
    each have to fail over.
    """

    failures_max: int = 5  # in a row, of those that prove nothing by themselves
    open_s: float = 1.0  # the first back-off; it doubles with each trial that fails
    open_s_max: float = 30.0


@dataclass(slots=True)
class Breaker:
    """One instance's."""

    limits: BreakerLimits = field(default_factory=BreakerLimits)
    open_until: float | None = None  # the end of the back-off; None: closed
    back_off_s: float = 0.0  # the last one; 0: it has been closed since
    trial: RequestId | None = None  # the request that is out to find out whether it works again
    trial_until: float = 0.0  # for so long no other is
    failures: int = 0  # in a row, that prove nothing by themselves
    openings: int = 0

    @property
    def is_closed(self) -> bool:
        return self.open_until is None

    def state(self, now: float) -> BreakerState:
        if self.open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.open_until else BreakerState.HALF_OPEN

    def lets_through(self, now: float) -> bool:
        """Tell whether a request may be given to the instance now."""
        if self.open_until is None:
            return True
        return now >= self.open_until and (self.trial is None or now >= self.trial_until)

    # --- what became of requests ------------------------------------------------------------------

    def failed(self, request_id: RequestId, now: float) -> bool:
        """A request failed here that another instance could serve. Return whether it opened.

        Requests that failed together are one reason to back off, not one each.
        """
        if self.open_until is not None and self.trial != request_id:
            return False
        self._open(now)
        return True

    def may_have_failed(self, request_id: RequestId, now: float) -> bool:
        """A request failed here, perhaps by its own fault. Return whether it opened."""
        self.failures += 1
        is_enough = self.failures >= self.limits.failures_max or self.trial == request_id
        return is_enough and self.failed(request_id, now)

    def answered(self) -> bool:
        """It works: a request was answered. Return whether it closed."""
        was_closed = self.open_until is None
        self.open_until, self.back_off_s, self.trial, self.failures = None, 0.0, None, 0
        return not was_closed

    def began(self, request_id: RequestId) -> bool:
        """A stream has begun. Return whether it closed."""
        if self.trial != request_id:
            return False
        self.open_until, self.trial = None, None
        self.failures = self.limits.failures_max - 1
        return True

    # --- trials -----------------------------------------------------------------------------------

    def begin_trial(self, request_id: RequestId, now: float) -> None:
        """Note where this request goes: when not closed, it is the trial, unless one is out that may yet succeed."""
        if self.open_until is not None and (self.trial is None or now >= self.trial_until):
            self.trial, self.trial_until = request_id, now + TRIAL_S

    def end_trial(self, request_id: RequestId) -> None:
        if self.trial == request_id:
            self.trial = None

    def _open(self, now: float) -> None:
        limits = self.limits
        self.back_off_s = min(max(self.back_off_s * 2, limits.open_s), limits.open_s_max)
        self.open_until = now + self.back_off_s
        self.trial = None
        self.failures = 0
        self.openings += 1
