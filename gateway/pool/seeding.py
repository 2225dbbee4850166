"""Seedings performed: a hot prefix is sent to an instance as a prompt, for one token.

What is seeded, where and when, the core decides (`router/seeding.py`); here it is sent, and its end told.
A seeding that fails says nothing about its instance: nobody waits for it, and health is checked elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from enum import Enum

import orjson

from moongate.gateway.driver import Driver
from moongate.gateway.headers import make_request_id, request_headers
from moongate.gateway.instances.links import Links
from moongate.gateway.pool.pooling import PromptTokens
from moongate.gateway.proxy.upstream import UpstreamError
from moongate.gateway.telemetry.tallies import Tally
from moongate.router import RequestId, Seed, SeedingEnded
from moongate.router.blocks import TOKEN_BYTES

logger = logging.getLogger(__name__)

PATH = "/v1/completions"

SEEDING_S = 60.0
"""For one seeding: 16 GB at 4 GB/s take 4 s, and who has waited for longer than a minute is too late."""


class SeedingResult(Enum):
    """How a seeding ended, as the metric says it."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"  # the gateway stops


class Seeding:
    """Performs what the core asks for. Create it inside the event loop, and `close` it."""

    def __init__(self, driver: Driver, links: Links, ended: Tally) -> None:
        self._driver = driver
        self._links = links
        self._ended = ended
        self._prompts: dict[RequestId, PromptTokens] = {}
        self._tasks: set[asyncio.Task[SeedingResult]] = set()
        driver.on_seed = self._begin

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def note(self, request_id: RequestId, known: PromptTokens) -> None:
        """Have a request's prompt at hand until it is forgotten: a seeding may be made of it."""
        self._prompts[request_id] = known

    def forget(self, request_id: RequestId) -> None:
        self._prompts.pop(request_id, None)

    def _begin(self, seed: Seed) -> None:
        # The tokens are taken now: the request may end before the task has begun.
        body = _make_body(seed, self._prompts[seed.request_id])
        task = asyncio.create_task(self._perform(seed, body))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._end(seed, task))

    def _end(self, seed: Seed, task: asyncio.Task[SeedingResult]) -> None:
        """Tell the end of a seeding, also of one that was cancelled before it began."""
        self._tasks.discard(task)
        result = _result_of(seed, task)
        self._ended.add(1, result.value)
        self._driver.handle(SeedingEnded(seed.seeding_id, result is SeedingResult.DONE))

    async def _perform(self, seed: Seed, body: bytes) -> SeedingResult:
        try:
            async with asyncio.timeout(SEEDING_S):
                status = await self._send(seed, body)
        except (UpstreamError, TimeoutError) as error:
            logger.info("%s at %s failed: %s", seed.seeding_id, seed.holder, error)
            return SeedingResult.FAILED
        if status == 200:
            return SeedingResult.DONE
        logger.info("%s at %s: status %s", seed.seeding_id, seed.holder, status)
        return SeedingResult.FAILED

    async def _send(self, seed: Seed, body: bytes) -> int:
        """Return the status of the engine's answer, read to its end. Raises: UpstreamError."""
        holder = seed.holder
        link = self._links.get(holder.instance_id)
        headers = request_headers(
            ((b"content-type", b"application/json"),),
            request_id=make_request_id(),
            forward_credentials=False,
            api_key=link.api_key,
            rank=holder.rank,
        )
        answer = await link.upstream.send(PATH, headers, (body,))
        try:
            while await answer.read():
                pass
        finally:
            answer.close()
        return answer.status


def _result_of(seed: Seed, task: asyncio.Task[SeedingResult]) -> SeedingResult:
    if task.cancelled():
        return SeedingResult.CANCELLED
    error = task.exception()
    if error is None:
        return task.result()
    # A bug of ours; a seeding that never ends would keep its instance from others.
    logger.error("%s at %s failed", seed.seeding_id, seed.holder, exc_info=error)
    return SeedingResult.FAILED


def _make_body(seed: Seed, known: PromptTokens) -> bytes:
    ids = array("I")
    ids.frombytes(known.tokens()[: seed.tokens * TOKEN_BYTES])
    salt = {"cache_salt": known.salt} if known.salt else {}
    fields = {"model": seed.model, "prompt": ids.tolist(), "max_tokens": 1, "stream": False, **salt}
    return orjson.dumps(fields)
