"""Rates that all gateways keep together: token buckets in Redis, or at the workers' hub.

One script draws on a request's buckets in Redis in one step, by Redis' own clock. While it doesn't answer within the
limit of a call on a request's way each gateway keeps the rates by itself: together they may then let through as
many times as much as there are gateways, and nobody is refused for want of Redis. What is settled is told in the
background, to where the request was counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from redis.asyncio.client import Pipeline

from moongate.gateway.auth.rates import (
    Draw,
    Drawn,
    LocalRates,
    RateLimits,
    Verdict,
    draws_of,
    settling_of,
    verdict_of,
)
from moongate.gateway.replicas.shared_state import SharedState, StateUnavailable

TAKE_COMMAND = "MOONGATE.TAKE"
"""What the hub has in place of the script."""

TAKE_SCRIPT = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local is_taken, levels = 1, {}
for i, key in ipairs(KEYS) do
  local rate, burst = tonumber(ARGV[3*i]), tonumber(ARGV[3*i+1])
  local held = redis.call('HMGET', key, 'level', 'at')
  local level, at = tonumber(held[1]) or burst, tonumber(held[2]) or now
  levels[i] = math.min(burst, level + math.max(0, now - at) * rate)
  if levels[i] < 1 then is_taken = 0 end
end
if ARGV[1] == 'settle' then is_taken = 1 end
for i, key in ipairs(KEYS) do
  local cost, rate, burst = tonumber(ARGV[3*i-1]), tonumber(ARGV[3*i]), tonumber(ARGV[3*i+1])
  if is_taken == 1 then levels[i] = math.min(burst, levels[i] - cost) end
  levels[i] = string.format('%.17g', levels[i])
  redis.call('HSET', key, 'level', levels[i], 'at', string.format('%.17g', now))
  redis.call('PEXPIRE', key, math.ceil((burst - levels[i]) / rate * 1000) + 1000)
end
table.insert(levels, 1, is_taken)
return levels
"""


class SharedRates:
    """Counts where all gateways do: `RateCounters`. `close` it."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._local = LocalRates()
        self._under_way: set[asyncio.Task[object]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def take(self, name: str, limits: RateLimits, tokens: int, now: float) -> Verdict:
        taking = asyncio.create_task(self._take(name, limits, tokens, now))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            # Whether it is counted there nobody knows before the answer is here.
            self._go_on(self._give_back(taking, name, limits, tokens, now))
            raise

    async def _take(self, name: str, limits: RateLimits, tokens: int, now: float) -> Verdict:
        draws = draws_of(limits, tokens)
        try:
            return verdict_of(draws, await self._draw(name, draws))
        except StateUnavailable:
            return self._local.take_now(name, limits, tokens, now)

    async def _give_back(
        self, taking: asyncio.Task[Verdict], name: str, limits: RateLimits, tokens: int, now: float
    ) -> None:
        verdict = await taking
        if verdict.lacking is None:
            await self._settle(name, limits, -tokens, now, verdict)

    def settle(
        self, name: str, limits: RateLimits, tokens: int, now: float, verdict: Verdict
    ) -> None:
        if limits.tokens_per_minute is not None:
            self._go_on(self._settle(name, limits, tokens, now, verdict))

    async def _settle(
        self, name: str, limits: RateLimits, tokens: int, now: float, verdict: Verdict
    ) -> None:
        try:
            if not verdict.is_alone:
                await self._draw(name, settling_of(limits, tokens), is_settling=True)
                return
        except StateUnavailable:
            pass  # better counted here than not at all
        self._local.settle(name, limits, tokens, now)

    def _go_on(self, work: Coroutine[None, None, None]) -> None:
        task: asyncio.Task[object] = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _draw(self, name: str, draws: list[Draw], *, is_settling: bool = False) -> Drawn:
        """Draw on buckets, all or none. Raises: StateUnavailable."""
        if not draws:
            return Drawn(True, ())
        # In braces, so that a Redis cluster keeps them together.
        keys = [f"moongate:rate:{{{name}}}:{draw.bucket}" for draw in draws]
        numbers = [repr(number) for draw in draws for number in (draw.cost, draw.rate, draw.burst)]
        words = [*keys, "settle" if is_settling else "take", *numbers]
        is_hub = self._state.is_hub

        def ask(pipeline: Pipeline) -> None:
            if is_hub:
                pipeline.execute_command(TAKE_COMMAND, len(keys), *words)
            else:
                pipeline.eval(TAKE_SCRIPT, len(keys), *words)

        ((is_taken, *levels),) = await self._state.ask(ask)
        return Drawn(bool(is_taken), tuple(map(float, levels)))
