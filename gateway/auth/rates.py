"""How much a tenant may ask for in a minute: token buckets, pure; the time is an argument.

A bucket holds what a minute allows, fills evenly, and is full at first: so a minute's worth may come at once, and
after that as much as flows in. A request is let in while there is a whole request in the one bucket and anything in
the other; what it turns out to cost in tokens is taken then, though the bucket may come to owe some. So a prompt of
more tokens than a minute has is served, and paid off before the next.

`RateCounters` is what the gateway asks; `LocalRates` answers for one process. Replicas that share their counts
answer the same questions from a place that all of them reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

MINUTE_S = 60.0

BUCKETS_MAX = 10_000
"""Of tenants whose configuration has gone; past it those that are full again are dropped. Keys are bounded by the
configuration, so this is reached by many reloads only."""


class Measure(Enum):
    """What is counted; the name of the setting that limits it."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"


@dataclass(frozen=True, slots=True)
class RateLimits:
    """What one minute allows; None: as much as comes."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    @property
    def are_none(self) -> bool:
        return self.requests_per_minute is None and self.tokens_per_minute is None


UNLIMITED = RateLimits()


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of one measure. `reset_s`: until all of it is there again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request may begin. `lacking`: what there is too little of, with the seconds until there is enough.

    `rooms`: what is left of each measure that is limited, the request counted.
    """

    rooms: Mapping[Measure, Room]
    lacking: Measure | None = None
    retry_after_s: float = 0.0


class RateCounters(Protocol):
    """Counts for all who ask under one name. `now` is monotonic seconds of the asking process.

    Neither raises: what can't be counted where it is shared is counted here.
    """

    async def take(self, name: str, limits: RateLimits, tokens: int, now: float) -> Verdict:
        """Let one request of about `tokens` tokens in, and count it; one that is not let in costs nothing."""
        ...

    def settle(self, name: str, limits: RateLimits, tokens: int, now: float) -> None:
        """Count tokens beyond what was said before, or, negative, give some back."""
        ...


class Bucket:
    """One measure. `level`: what may be taken now; below zero it is owed."""

    __slots__ = ("_at", "_level", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at = now

    def level(self, now: float) -> float:
        """Fill up to now. A clock that went back fills nothing."""
        elapsed_s = max(0.0, now - self._at)
        self._at = max(self._at, now)
        self._level = min(float(self.limit), self._level + elapsed_s * self.limit / MINUTE_S)
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take what may be more than there is; nothing fills it beyond its limit."""
        self._level = min(float(self.limit), self.level(now) - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until so much is there if nobody else takes any."""
        return max(0.0, amount - self.level(now)) * MINUTE_S / self.limit

    def room(self, now: float) -> Room:
        level = self.level(now)
        missing_s = (self.limit - level) * MINUTE_S / self.limit
        return Room(self.limit, max(0, math.floor(level)), missing_s)


class TokenBuckets:
    """One name's buckets. A limit that is changed begins full."""

    def __init__(self) -> None:
        self._buckets: dict[Measure, Bucket] = {}

    def take(self, limits: RateLimits, tokens: int, now: float) -> Verdict:
        requests = self._find(Measure.REQUESTS, limits.requests_per_minute, now)
        counted = self._find(Measure.TOKENS, limits.tokens_per_minute, now)
        waits: dict[Measure, float] = {}
        if requests is not None and (wait_s := requests.wait_s(1, now)) > 0:
            waits[Measure.REQUESTS] = wait_s
        if counted is not None and (wait_s := counted.wait_s(1, now)) > 0:
            waits[Measure.TOKENS] = wait_s
        if waits:
            lacking = max(waits, key=lambda measure: waits[measure])
            return Verdict(self._rooms(now), lacking, waits[lacking])
        if requests is not None:
            requests.take(1, now)
        if counted is not None:
            counted.take(tokens, now)
        return Verdict(self._rooms(now))

    def settle(self, limits: RateLimits, tokens: int, now: float) -> None:
        counted = self._find(Measure.TOKENS, limits.tokens_per_minute, now)
        if counted is not None:
            counted.take(tokens, now)

    def is_full(self, now: float) -> bool:
        """Tell whether nothing would be lost by forgetting them."""
        return all(bucket.level(now) >= bucket.limit for bucket in self._buckets.values())

    def _find(self, measure: Measure, limit: int | None, now: float) -> Bucket | None:
        if limit is None:
            self._buckets.pop(measure, None)
            return None
        bucket = self._buckets.get(measure)
        if bucket is None or bucket.limit != limit:
            bucket = self._buckets[measure] = Bucket(limit, now)
        return bucket

    def _rooms(self, now: float) -> dict[Measure, Room]:
        return {measure: bucket.room(now) for measure, bucket in self._buckets.items()}


class LocalRates:
    """Counts in this process."""

    def __init__(self) -> None:
        self._by_name: dict[str, TokenBuckets] = {}

    async def take(self, name: str, limits: RateLimits, tokens: int, now: float) -> Verdict:
        return self._get(name, now).take(limits, tokens, now)

    def settle(self, name: str, limits: RateLimits, tokens: int, now: float) -> None:
        self._get(name, now).settle(limits, tokens, now)

    def __len__(self) -> int:
        return len(self._by_name)

    def _get(self, name: str, now: float) -> TokenBuckets:
        found = self._by_name.get(name)
        if found is None:
            if len(self._by_name) >= BUCKETS_MAX:
                kept = {n: b for n, b in self._by_name.items() if not b.is_full(now)}
                self._by_name = kept
            found = self._by_name[name] = TokenBuckets()
        return found
