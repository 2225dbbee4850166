"""How much a tenant may ask for in a minute: token buckets, pure; the time is an argument.

A bucket holds what a minute allows (`burst`), fills evenly (`rate` a second), and is full at first: so a minute's
worth may come at once, and after that as much as flows in. A request is let in while there is a whole one in each
of its buckets (of requests, of tokens); what it turns out to cost is taken then from all, though a bucket may come
to owe some; else nothing is taken. So a prompt of more tokens than a minute has is served, and paid off before the
next.

`RateCounters` is what the gateway asks. `LocalRates` answers for one process; where gateways count together
`replicas/shared_rates.py` does.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

MINUTE_S = 60.0

BUCKETS_MAX = 65_536
"""In one process. Past it the one that was used the longest ago is forgotten, and is full again. Names come of the
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

    `rooms`: what is left of each measure that is limited, the request counted. `is_alone`: this process counted it by
    itself, since the place where all count couldn't be reached.
    """

    rooms: Mapping[Measure, Room]
    lacking: Measure | None = None
    retry_after_s: float = 0.0
    is_alone: bool = False


class RateCounters(Protocol):
    """Counts for all who ask under one name. `now` is monotonic seconds of the asking process.

    Neither raises: what can't be counted where it is shared is counted here.
    """

    async def take(self, name: str, limits: RateLimits, tokens: int, now: float) -> Verdict:
        """Let one request of about `tokens` tokens in, and count it; one that is not let in costs nothing.

        If it is cancelled meanwhile the request counts, and its tokens don't.
        """
        ...

    def settle(
        self, name: str, limits: RateLimits, tokens: int, now: float, verdict: Verdict
    ) -> None:
        """Count tokens beyond what was said before, or, negative, give some back, where the verdict was given."""
        ...


class Draw(NamedTuple):
    """What a request wants of one bucket. Amounts in what it counts, `rate` in that a second."""

    measure: Measure
    cost: float
    rate: float
    burst: float

    @property
    def bucket(self) -> str:
        """Return the bucket's name beside that of whose it is. A limit that is changed begins full."""
        return f"{self.measure.value}:{self.burst:.0f}"

    def wait_s(self, level: float) -> float:
        """Return the seconds until a whole one is there if nobody else takes any."""
        return max(0.0, 1.0 - level) / self.rate

    def room(self, level: float) -> Room:
        return Room(int(self.burst), max(0, math.floor(level)), (self.burst - level) / self.rate)


class Drawn(NamedTuple):
    """Whether a request may go on, and what its buckets hold now, in the order of its draws."""

    is_allowed: bool
    levels: tuple[float, ...]


def draws_of(limits: RateLimits, tokens: int) -> list[Draw]:
    """Return what a request of so many tokens draws on."""
    wanted = (
        (Measure.REQUESTS, limits.requests_per_minute, 1),
        (Measure.TOKENS, limits.tokens_per_minute, tokens),
    )
    return [
        Draw(measure, float(cost), limit / MINUTE_S, float(limit))
        for measure, limit, cost in wanted
        if limit is not None
    ]


def settling_of(limits: RateLimits, tokens: int) -> list[Draw]:
    """Return what draws on the tokens only."""
    return [draw for draw in draws_of(limits, tokens) if draw.measure is Measure.TOKENS]


def verdict_of(draws: list[Draw], drawn: Drawn, *, is_alone: bool = False) -> Verdict:
    """Return what is told of a request that has drawn."""
    levels = {draw.measure: level for draw, level in zip(draws, drawn.levels, strict=True)}
    rooms = {draw.measure: draw.room(levels[draw.measure]) for draw in draws}
    if drawn.is_allowed:
        return Verdict(rooms, is_alone=is_alone)
    waits = {draw.measure: draw.wait_s(levels[draw.measure]) for draw in draws}
    lacking = max(waits, key=lambda measure: waits[measure])
    return Verdict(rooms, lacking, waits[lacking], is_alone)


class _Bucket(NamedTuple):
    level: float
    at: float


class Buckets:
    """The buckets of one process, by whose they are and what they count."""

    def __init__(self, buckets_max: int = BUCKETS_MAX) -> None:
        self._buckets_max = buckets_max
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def draw(self, name: str, draws: list[Draw], now: float, *, is_settling: bool = False) -> Drawn:
        """Draw on buckets, all or none. `is_settling`: whatever they hold."""
        found = [self._find(name, draw, now) for draw in draws]
        is_allowed = is_settling or all(bucket.level >= 1.0 for bucket in found)
        levels = [bucket.level for bucket in found]
        if is_allowed:
            levels = [min(d.burst, n - d.cost) for n, d in zip(levels, draws, strict=True)]
        for level, bucket, draw in zip(levels, found, draws, strict=True):
            self._buckets[name, draw.bucket] = _Bucket(level, bucket.at)
            self._buckets.move_to_end((name, draw.bucket))
        while len(self._buckets) > self._buckets_max:
            self._buckets.popitem(last=False)
        return Drawn(is_allowed, tuple(levels))

    def _find(self, name: str, draw: Draw, now: float) -> _Bucket:
        """Return a bucket filled up to now. A clock that went back fills nothing, nor does its return."""
        bucket = self._buckets.get((name, draw.bucket), _Bucket(draw.burst, now))
        level = min(draw.burst, bucket.level + max(0.0, now - bucket.at) * draw.rate)
        return _Bucket(level, max(bucket.at, now))

    def __len__(self) -> int:
        return len(self._buckets)


class LocalRates:
    """Counts in this process."""

    def __init__(self, buckets_max: int = BUCKETS_MAX) -> None:
        self._buckets = Buckets(buckets_max)

    async def take(self, name: str, limits: RateLimits, tokens: int, now: float) -> Verdict:
        return self.take_now(name, limits, tokens, now)

    def take_now(self, name: str, limits: RateLimits, tokens: int, now: float) -> Verdict:
        draws = draws_of(limits, tokens)
        return verdict_of(draws, self._buckets.draw(name, draws, now), is_alone=True)

    def settle(
        self, name: str, limits: RateLimits, tokens: int, now: float, _: Verdict | None = None
    ) -> None:
        self._buckets.draw(name, settling_of(limits, tokens), now, is_settling=True)

    def __len__(self) -> int:
        return len(self._buckets)
