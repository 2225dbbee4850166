"""Rates that all gateways keep together: token buckets in Redis, or at the workers' hub.

A bucket holds `burst` at most and gains `rate` a second; a request takes its cost, or is told when there will
be enough. One script does that in Redis in one step, by Redis' own clock. While it doesn't answer within the
limit of a call on a request's way each gateway keeps the rate by itself: together they may then let through
as many times as much as there are gateways, and nobody is refused for want of Redis.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from redis.asyncio.client import Pipeline

from moongate.gateway.shared_state import SharedState, StateUnavailable

BUCKETS_MAX = 65_536
"""Of one gateway's own. Past it the one that was used the longest ago is forgotten, and is full again."""

TAKE_COMMAND = "MOONGATE.TAKE"
"""What the hub has in place of the script."""

TAKE_SCRIPT = """
local cost, rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local held = redis.call('HMGET', KEYS[1], 'level', 'at')
local level, at = tonumber(held[1]) or burst, tonumber(held[2]) or now
level = math.min(burst, level + math.max(0, now - at) * rate)
local taken = 0
if level >= cost then
  level = level - cost
  taken = 1
end
redis.call('HSET', KEYS[1], 'level', string.format('%.17g', level), 'at', string.format('%.17g', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(burst / rate * 1000) + 1000)
return {taken, string.format('%.17g', level)}
"""


class Taken(NamedTuple):
    """Whether a request may go on; if not, after how long it could."""

    is_allowed: bool
    retry_after_s: float = 0.0


class Bucket(NamedTuple):
    """How much a bucket held at a time."""

    level: float
    at: float

    def after(self, now: float, rate: float, burst: float) -> Bucket:
        """Return what it holds now."""
        return Bucket(min(burst, self.level + max(0.0, now - self.at) * rate), now)


class LocalRates:
    """This gateway's own buckets."""

    def __init__(self, buckets_max: int = BUCKETS_MAX) -> None:
        self._buckets_max = buckets_max
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, key: str, cost: float, rate: float, burst: float, now: float) -> Taken:
        bucket = self._buckets.get(key, Bucket(burst, now)).after(now, rate, burst)
        taken = _judge(bucket.level >= cost, bucket.level, cost, rate)
        if taken.is_allowed:
            bucket = bucket._replace(level=bucket.level - cost)
        self._buckets[key] = bucket
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._buckets_max:
            self._buckets.popitem(last=False)
        return taken

    def __len__(self) -> int:
        return len(self._buckets)


class SharedRates:
    """The buckets of all gateways. `state` None: this one is alone."""

    def __init__(self, state: SharedState | None) -> None:
        self._state = state
        self._local = LocalRates()

    async def take(self, key: str, cost: float, rate: float, burst: float, now: float) -> Taken:
        """Take a request's cost from a bucket, if there is enough. `rate` a second, more than 0.

        What costs more than a bucket can hold is let through when it is full. `key`: a name of the
        configuration, such as a tenant's; never a secret.
        """
        cost = min(cost, burst)
        if self._state is None:
            return self._local.take(key, cost, rate, burst, now)
        name = f"moongate:rate:{key}"
        numbers = (repr(float(cost)), repr(float(rate)), repr(float(burst)))
        is_hub = self._state.is_hub

        def take(pipeline: Pipeline) -> None:
            if is_hub:
                pipeline.execute_command(TAKE_COMMAND, name, *numbers)
            else:
                pipeline.eval(TAKE_SCRIPT, 1, name, *numbers)

        try:
            ((taken, level),) = await self._state.ask(take)
        except StateUnavailable:
            return self._local.take(key, cost, rate, burst, now)
        return _judge(bool(taken), float(level), cost, rate)


def _judge(is_allowed: bool, level: float, cost: float, rate: float) -> Taken:
    return Taken(is_allowed, 0.0 if is_allowed else (cost - level) / rate)
