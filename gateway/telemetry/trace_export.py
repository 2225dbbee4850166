"""Traces on their way to a collector, over OTLP/HTTP, beside all requests.

What waits is bounded; when there is no room, traces are left out and counted. A collector that can't be
reached, refuses or is slow costs traces, never a request, and one line in the log until it is well again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum

import aiohttp

from moongate.gateway.telemetry.otlp import export_request

logger = logging.getLogger(__name__)

QUEUE_REQUESTS_MAX = 4096
"""About 2 KB each until they are encoded."""

BATCH_REQUESTS_MAX = 512
AT_ONCE = 32
"""Requests that are encoded in a row: some 0.4 ms, before everything else has its turn again."""

INTERVAL_S = 2.0
TIMEOUT_S = 10.0
PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Before a batch is sent again that could not be delivered; then it is given up."""

LAST_S = 2.0
"""When the gateway stops, for what is left."""

AGAIN = frozenset({429, 502, 503, 504})
"""Statuses after which OTLP/HTTP asks clients to try again."""

SCOPE = "moongate"


MakeSpans = Callable[[], bytes]
"""Makes the spans of one request that has ended."""


class TraceResult(Enum):
    """What became of a trace; for metrics."""

    SENT = "sent"
    FAILED = "failed"  # the collector could not be reached, or did not take it
    DROPPED = "dropped"  # there was no room


class TraceExporter:
    """Sends spans. `count(n, result)` is told what became of traces. Create it inside the event loop."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        resource: bytes,
        count: Callable[[int, TraceResult], None],
        *,
        interval_s: float = INTERVAL_S,
        pauses_s: tuple[float, ...] = PAUSES_S,
    ) -> None:
        """`url`: where traces are posted to. `headers`: such as the collector's key."""
        self._url = url
        self._headers = {"content-type": "application/x-protobuf", **headers}
        self._resource = resource
        self._count = count
        self._interval_s = interval_s
        self._pauses_s = pauses_s
        self._queue: deque[MakeSpans] = deque()
        self._wake = asyncio.Event()
        self._session = aiohttp.ClientSession(
            trust_env=False, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
        )
        self._task: asyncio.Task[None] | None = None
        self._is_well = True

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send what is left, if that is quick, and close."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                while self._queue:
                    await self._deliver(*await self._take_batch(), ())
        if self._queue:
            self._count(len(self._queue), TraceResult.FAILED)
        await self._session.close()

    def offer(self, make_spans: MakeSpans) -> None:
        """Take what makes the spans of one request, if there is room; else count it."""
        if len(self._queue) >= QUEUE_REQUESTS_MAX:
            self._count(1, TraceResult.DROPPED)
            return
        self._queue.append(make_spans)
        if len(self._queue) == BATCH_REQUESTS_MAX:
            self._wake.set()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            self._wake.clear()
            while self._queue:
                count, body = await self._take_batch()
                if count:
                    await self._deliver(count, body, self._pauses_s)

    async def _take_batch(self) -> tuple[int, bytes]:
        """Return how many requests' spans a body has, and the body."""
        batch: list[bytes] = []
        while self._queue and len(batch) < BATCH_REQUESTS_MAX:
            count = min(AT_ONCE, len(self._queue))
            made = [self._make(self._queue.popleft()) for _ in range(count)]
            batch += [spans for spans in made if spans is not None]
            await asyncio.sleep(0)
        return len(batch), export_request(self._resource, SCOPE, batch)

    def _make(self, make_spans: MakeSpans) -> bytes | None:
        """Return one request's spans, None if they can't be made: the others' go all the same."""
        try:
            return make_spans()
        except Exception:
            logger.exception("a bug of ours: a request's spans could not be made")
            self._count(1, TraceResult.FAILED)
            return None

    async def _deliver(self, count: int, body: bytes, pauses_s: tuple[float, ...]) -> None:
        """Send one batch, again after each pause where that may help."""
        result = TraceResult.FAILED  # also if it is ended in between
        try:
            for pause_s in (*pauses_s, None):
                problem, may_help = await self._post(body)
                if problem is None:
                    self._note_well()
                    result = TraceResult.SENT
                    return
                self._note_ill(problem)
                if pause_s is None or not may_help:
                    return
                await asyncio.sleep(pause_s)
        finally:
            self._count(count, result)

    async def _post(self, body: bytes) -> tuple[str | None, bool]:
        """Return what went wrong, None if nothing did, and whether sending it again may help."""
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as answer:
                status = answer.status
        except TimeoutError:
            return "no answer in time", True
        except aiohttp.ClientError as error:
            return f"{type(error).__name__}", True
        if status == 200:
            return None, False
        return f"status {status}", status in AGAIN

    def _note_ill(self, problem: str) -> None:
        if self._is_well:
            logger.warning("traces can't be sent to %s: %s", self._url, problem)
        self._is_well = False

    def _note_well(self) -> None:
        if not self._is_well:
            logger.info("traces are sent to %s again", self._url)
        self._is_well = True
