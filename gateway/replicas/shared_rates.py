"""Rates that all gateways keep together: token buckets in Redis, or at the workers' hub.

A bucket holds `burst` at most and gains `rate` a second. A request draws on one or several of one name (requests,
tokens): where each has what is needed its cost is taken from all, which may leave it owing; else nothing is.
One script does that in Redis in one step, by Redis' own clock. While it doesn't answer within the limit of a
call on a request's way each gateway keeps the rates by itself: together they may then let through as many
times as much as there are gateways, and nobody is refused for want of Redis.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from redis.asyncio.client import Pipeline

from moongate.gateway.replicas.shared_state import SharedState, StateUnavailable

BUCKETS_MAX = 65_536
"""Of one gateway's own. Past it the one that was used the longest ago is forgotten, and is full again."""

TAKE_COMMAND = "MOONGATE.TAKE"
"""What the hub has in place of the script."""

TAKE_SCRIPT = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local is_taken, levels = 1, {}
for i, key in ipairs(KEYS) do
  local needed, rate, burst = tonumber(ARGV[4*i-1]), tonumber(ARGV[4*i]), tonumber(ARGV[4*i+1])
  local held = redis.call('HMGET', key, 'level', 'at')
  local level, at = tonumber(held[1]) or burst, tonumber(held[2]) or now
  levels[i] = math.min(burst, level + math.max(0, now - at) * rate)
  if levels[i] < needed then is_taken = 0 end
end
if ARGV[1] == 'settle' then is_taken = 1 end
for i, key in ipairs(KEYS) do
  local cost, rate, burst = tonumber(ARGV[4*i-2]), tonumber(ARGV[4*i]), tonumber(ARGV[4*i+1])
  if is_taken == 1 then levels[i] = math.min(burst, levels[i] - cost) end
  levels[i] = string.format('%.17g', levels[i])
  redis.call('HSET', key, 'level', levels[i], 'at', string.format('%.17g', now))
  redis.call('PEXPIRE', key, math.ceil((burst - levels[i]) / rate * 1000) + 1000)
end
table.insert(levels, 1, is_taken)
return levels
"""


class Draw(NamedTuple):
    """What a request wants of one bucket. Amounts in what the bucket counts, `rate` in that a second.

    `needed`: with so much in it the request is let through, at most `burst`.
    """

    bucket: str  # its name beside that of whose it is: "requests", "tokens"
    cost: float
    needed: float
    rate: float
    burst: float

    def wait_s(self, level: float) -> float:
        """Return after how long what is needed will be there."""
        return max(0.0, self.needed - level) / self.rate


class Drawn(NamedTuple):
    """Whether a request may go on, and what its buckets hold now, in the order of its draws."""

    is_allowed: bool
    levels: tuple[float, ...]


class Taken(NamedTuple):
    """Whether a request may go on; if not, after how long it could."""

    is_allowed: bool
    retry_after_s: float = 0.0


class _Bucket(NamedTuple):
    level: float
    at: float


class LocalRates:
    """This gateway's own buckets."""

    def __init__(self, buckets_max: int = BUCKETS_MAX) -> None:
        self._buckets_max = buckets_max
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def draw(
        self, key: str, draws: Sequence[Draw], now: float, *, is_settling: bool = False
    ) -> Drawn:
        """Draw on buckets, all or none. `is_settling`: whatever they hold."""
        levels = [self._level(key, draw, now) for draw in draws]
        has_enough = all(level >= d.needed for level, d in zip(levels, draws, strict=True))
        is_allowed = has_enough or is_settling
        if is_allowed:
            levels = [min(d.burst, n - d.cost) for n, d in zip(levels, draws, strict=True)]
        for level, draw in zip(levels, draws, strict=True):
            self._buckets[key, draw.bucket] = _Bucket(level, now)
            self._buckets.move_to_end((key, draw.bucket))
        while len(self._buckets) > self._buckets_max:
            self._buckets.popitem(last=False)
        return Drawn(is_allowed, tuple(levels))

    def _level(self, key: str, draw: Draw, now: float) -> float:
        bucket = self._buckets.get((key, draw.bucket), _Bucket(draw.burst, now))
        return min(draw.burst, bucket.level + max(0.0, now - bucket.at) * draw.rate)

    def __len__(self) -> int:
        return len(self._buckets)


class SharedRates:
    """The buckets of all gateways. `state` None: this one is alone."""

    def __init__(self, state: SharedState | None) -> None:
        self._state = state
        self._local = LocalRates()

    async def take(self, key: str, cost: float, rate: float, burst: float, now: float) -> Taken:
        """Take a request's cost from one bucket, if there is enough. `rate` a second, more than 0.

        What costs more than a bucket can hold is let through when it is full.
        """
        cost = min(cost, burst)
        draw = Draw("requests", cost, cost, rate, burst)
        drawn = await self.draw(key, [draw], now)
        return Taken(drawn.is_allowed, 0.0 if drawn.is_allowed else draw.wait_s(drawn.levels[0]))

    async def draw(self, key: str, draws: Sequence[Draw], now: float) -> Drawn:
        """Draw on buckets, all or none. `key`: a name of the configuration, such as a tenant's; no secret."""
        return await self._ask(key, draws, now, is_settling=False)

    async def settle(self, key: str, draws: Sequence[Draw], now: float) -> Drawn:
        """Take a cost that has come about already, or, negative, give some back."""
        return await self._ask(key, draws, now, is_settling=True)

    async def _ask(
        self, key: str, draws: Sequence[Draw], now: float, *, is_settling: bool
    ) -> Drawn:
        if self._state is None:
            return self._local.draw(key, draws, now, is_settling=is_settling)
        # In braces, so that a Redis cluster keeps them together.
        names = [f"moongate:rate:{{{key}}}:{draw.bucket}" for draw in draws]
        numbers = [repr(float(number)) for draw in draws for number in draw[1:]]
        words = [*names, "settle" if is_settling else "take", *numbers]
        is_hub = self._state.is_hub

        def ask(pipeline: Pipeline) -> None:
            if is_hub:
                pipeline.execute_command(TAKE_COMMAND, len(names), *words)
            else:
                pipeline.eval(TAKE_SCRIPT, len(names), *words)

        try:
            ((is_taken, *levels),) = await self._state.ask(ask)
        except StateUnavailable:
            return self._local.draw(key, draws, now, is_settling=is_settling)
        return Drawn(bool(is_taken), tuple(map(float, levels)))
