"""Tenants' rates where several gateways count together: `RateCounters` by `shared_rates.py`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from moongate.gateway.auth.rates import MINUTE_S, Measure, RateLimits, Room, Verdict
from moongate.gateway.replicas.shared_rates import Draw, SharedRates


class RateSharing:
    """Counts at the place where all gateways count. What is settled is told there in the background."""

    def __init__(self, rates: SharedRates) -> None:
        self._rates = rates
        self._settling: set[asyncio.Task[object]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._settling, return_exceptions=True)

    async def take(self, name: str, limits: RateLimits, tokens: int, now: float) -> Verdict:
        draws = _draws(limits, tokens)
        drawn = await self._rates.draw(name, [*draws.values()], now)
        levels = dict(zip(draws, drawn.levels, strict=True))
        rooms = {measure: _room(draws[measure], level) for measure, level in levels.items()}
        if drawn.is_allowed:
            return Verdict(rooms)
        waits = {measure: draws[measure].wait_s(level) for measure, level in levels.items()}
        lacking = max(waits, key=lambda measure: waits[measure])
        return Verdict(rooms, lacking, waits[lacking])

    def settle(self, name: str, limits: RateLimits, tokens: int, now: float) -> None:
        limit = limits.tokens_per_minute
        if limit is None:
            return
        draw = _draw(Measure.TOKENS, limit, cost=tokens)
        task = asyncio.create_task(self._rates.settle(name, [draw], now))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)


def _draws(limits: RateLimits, tokens: int) -> Mapping[Measure, Draw]:
    draws: dict[Measure, Draw] = {}
    if limits.requests_per_minute is not None:
        draws[Measure.REQUESTS] = _draw(Measure.REQUESTS, limits.requests_per_minute, cost=1)
    if limits.tokens_per_minute is not None:
        draws[Measure.TOKENS] = _draw(Measure.TOKENS, limits.tokens_per_minute, cost=tokens)
    return draws


def _draw(measure: Measure, limit: int, *, cost: float) -> Draw:
    # The limit is in the name: one that is changed begins full, as in one process (`rates.py`).
    return Draw(f"{measure.value}:{limit}", cost, 1.0, limit / MINUTE_S, float(limit))


def _room(draw: Draw, level: float) -> Room:
    return Room(int(draw.burst), max(0, math.floor(level)), (draw.burst - level) / draw.rate)
