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
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from moongate.gateway.telemetry.occasional_log import OccasionalLog

logger = logging.getLogger(__name__)

PROBE_S = 1.0
"""How often it is looked whether Redis answers."""

PROBE_TIMEOUT_S = 1.0
"""No request waits for it, and the first connection may be slow."""

FAILURES_MAX = 2
"""Calls in a row without an answer in time: one alone may be this machine's own delay."""

LISTEN_AGAIN_S = 0.5
"""Between a subscription that has ended and the next try."""

SILENCE_S = 2.0
"""After so long without a message a subscription is asked whether it is still there, and after as long
again made anew: nobody says so when the other end has gone without a word."""


class StateUnavailable(Exception):
    """Redis doesn't answer now."""


class StateRefused(StateUnavailable):
    """Redis answers, and refuses: it is full, or a key holds what isn't ours."""


class SharedState:
    """A connection to Redis, or to the hub of workers (`hub.py`), which is like one.

    `timeout_s`: of each call on a request's way. `clock`: monotonic. `name`: what this process is to it.
    """

    def __init__(
        self, url: str, *, timeout_s: float, clock: Callable[[], float], name: str | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._redis = Redis.from_url(
            url,
            socket_timeout=PROBE_TIMEOUT_S,
            socket_connect_timeout=PROBE_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            client_name=name,
            protocol=2,
        )
        parts = urlsplit(url)
        self.is_hub = parts.scheme == "unix"
        database = "0" if self.is_hub else parts.path.strip("/") or "0"
        self._prefix = f"moongate:{database}"
        self._probing: asyncio.Task[None] | None = None
        self._listening: list[asyncio.Task[None]] = []
        self._occasional_log = OccasionalLog(logger, clock)
        self._failures = 0  # in a row
        self.is_up = False
        self.up_since = 0.0  # as far as it is

    @property
    def _what(self) -> str:
        return "the workers' hub" if self.is_hub else "Redis"

    async def start(self) -> None:
        """Connect, if that can be done at once, and go on trying."""
        await self._probe()
        self._probing = asyncio.create_task(self._keep_probing())

    async def close(self) -> None:
        tasks = [*self._listening, *([self._probing] if self._probing is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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

    # --- messages ---------------------------------------------------------------------------------

    async def publish(self, channel: str, message: bytes) -> bool:
        """Send a message to all who listen now. Return whether Redis took it."""
        name = self.channel(channel)
        try:
            await self.tell(lambda pipeline: pipeline.publish(name, message))
        except StateUnavailable:
            return False
        return True

    def listen(self, channel: str, on_message: Callable[[bytes], None]) -> None:
        """Have each message given to `on_message`, until this is closed. Call inside the event loop."""
        name = self.channel(channel)
        self._listening.append(asyncio.create_task(self._keep_listening(name, on_message)))

    def channel(self, name: str) -> str:
        """Return a channel's name in Redis, where they don't belong to one of its databases."""
        return f"{self._prefix}:{name}"

    async def _keep_listening(self, channel: str, on_message: Callable[[bytes], None]) -> None:
        while True:
            with contextlib.suppress(TimeoutError, RedisError, OSError):
                await self._listen(channel, on_message)
            await asyncio.sleep(LISTEN_AGAIN_S)

    async def _listen(self, channel: str, on_message: Callable[[bytes], None]) -> None:
        """Listen until the connection fails. Raises what tells so."""
        async with self._redis.pubsub(ignore_subscribe_messages=True) as subscription:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await subscription.subscribe(channel)
            is_asked = False  # whether it is still there
            while True:
                message = await subscription.get_message(timeout=SILENCE_S)
                if message is None and is_asked:
                    return
                is_asked = message is None
                if message is None:
                    await subscription.ping()
                elif message["type"] == "message":
                    _hand_over(message["data"], on_message)

    # --- calls ------------------------------------------------------------------------------------

    async def _try(self, commands: Callable[[Pipeline], object], limit_s: float) -> list[Any]:
        if not self.is_up:
            raise StateUnavailable
        try:
            answers = await self._send(commands, limit_s)
            self._failures = 0
            return answers
        except ReadOnlyError as error:
            await self._note_demoted(error)
            raise StateUnavailable from error
        except ResponseError as error:
            self._occasional_log.warn(f"{self._what} refuses a call: {error}")
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
            await self._send(self._probe_commands, PROBE_TIMEOUT_S)
        except ReadOnlyError as error:
            await self._note_demoted(error)
            return
        except (TimeoutError, RedisError, OSError) as error:
            self._note_down(error)
            return
        if not self.is_up:
            logger.info("%s answers", self._what)
            self.up_since = self._clock()
        self.is_up, self._failures = True, 0

    def _probe_commands(self, pipeline: Pipeline) -> None:
        """Ask whether it is there and, of Redis, whether it takes writes: one that was demoted only answers."""
        pipeline.ping()
        if not self.is_hub:
            pipeline.expire(f"{self._prefix}:probe", 1)

    async def _note_demoted(self, error: BaseException) -> None:
        """Another one has taken its place, perhaps behind the same name: so connect anew."""
        self._note_down(error)
        await self._redis.connection_pool.disconnect()

    def _note_down(self, error: BaseException) -> None:
        self.is_up = False
        reason = str(error) or "no answer in time"
        self._occasional_log.warn(
            f"{self._what} does not answer, so replicas don't know of each other: {reason}"
        )


def _hand_over(data: bytes, on_message: Callable[[bytes], None]) -> None:
    """What one message does wrong must not keep the next ones from being heard."""
    try:
        on_message(data)
    except Exception:
        logger.exception("a bug of ours")
