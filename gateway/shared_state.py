"""What replicas share: Redis, which may be slow, frozen, empty or gone at any time.

Every call has a time limit, and none is tried for a while after some that failed, so few requests lose a
moment to a Redis that doesn't answer. Whoever asks goes on with what this replica knows itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

logger = logging.getLogger(__name__)

PROBE_S = 1.0
"""How often it is looked whether Redis answers."""

PROBE_TIMEOUT_S = 1.0
"""No request waits for it, and the first connection may be slow."""

FAILURES_MAX = 2
"""Calls in a row without an answer in time: one alone may be this machine's own delay."""

LOG_INTERVAL_S = 60.0


class StateUnavailable(Exception):
    """Redis doesn't answer now."""


class StateRefused(StateUnavailable):
    """Redis answers, and refuses: it is full, or a key holds what isn't ours."""


class SharedState:
    """A connection to Redis. `timeout_s`: of each call on a request's way. `clock`: monotonic."""

    def __init__(self, url: str, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._redis = Redis.from_url(
            url,
            socket_timeout=PROBE_TIMEOUT_S,
            socket_connect_timeout=PROBE_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._probing: asyncio.Task[None] | None = None
        self._logged_at: float | None = None
        self._failures = 0  # in a row
        self.is_up = False
        self.up_since = 0.0  # as far as it is

    async def start(self) -> None:
        """Connect, if that can be done at once, and go on trying."""
        await self._probe()
        self._probing = asyncio.create_task(self._keep_probing())

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def ask(self, commands: Callable[[Pipeline], object]) -> list[Any]:
        """Send commands together and return their answers, within the limit. Raises: StateUnavailable."""
        return await self._try(commands, self._timeout_s)

    async def tell(self, commands: Callable[[Pipeline], object]) -> list[Any]:
        """Do the same with more time: for what is large, or no request waits for.

        Raises: StateUnavailable.
        """
        return await self._try(commands, PROBE_TIMEOUT_S)

    async def _try(self, commands: Callable[[Pipeline], object], limit_s: float) -> list[Any]:
        if not self.is_up:
            raise StateUnavailable
        try:
            answers = await self._send(commands, limit_s)
            self._failures = 0
            return answers
        except ResponseError as error:
            self._log(f"Redis refuses a call: {error}")
            raise StateRefused from error
        except (TimeoutError, RedisError, OSError) as error:
            self._failures += 1
            if self._failures >= FAILURES_MAX or not isinstance(error, TimeoutError):
                self._note_down(error)
            raise StateUnavailable from error

    async def _send(self, commands: Callable[[Pipeline], object], limit_s: float) -> list[Any]:
        async with asyncio.timeout(limit_s), self._redis.pipeline(transaction=True) as pipeline:
            commands(pipeline)
            return await pipeline.execute()

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            await self._probe()

    async def _probe(self) -> None:
        try:
            await self._send(lambda pipeline: pipeline.ping(), PROBE_TIMEOUT_S)
        except (TimeoutError, RedisError, OSError) as error:
            self._note_down(error)
            return
        if not self.is_up:
            logger.info("Redis answers")
            self.up_since = self._clock()
        self.is_up, self._failures = True, 0

    def _note_down(self, error: BaseException) -> None:
        self.is_up = False
        reason = str(error) or "no answer in time"
        self._log(f"Redis does not answer, so replicas don't know of each other: {reason}")

    def _log(self, message: str) -> None:
        now = self._clock()
        if self._logged_at is None or now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            logger.warning("%s", message)
