"""One rank in real time: steps the model by the clock, publishes its events, hands out its tokens.

Responsible for waiting until a step is over, for the order "events first, then outputs", and for
aborting what nobody waits for any more. Not for scheduling (`engine.py`) or HTTP (`http_api.py`).

Everything runs on one event loop: `submit` and `cancel` are plain calls between two steps or during
one, so the model needs no lock.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from moongate.simulator.engine import EngineModel, EngineRequest, TokenOutput
from moongate.simulator.publisher import EventPublisher

logger = logging.getLogger(__name__)


class EngineDeadError(Exception):
    """The rank's loop ended by an error of ours: no request will get another token."""


class AbortedError(Exception):
    """The client left, or the engine is being stopped."""


class Generation:
    """The sequences that one HTTP request asked for, on one rank.

    Its queue needs no limit of its own: it holds at most the tokens that were asked for, as in the
    engine, which doesn't slow down for a slow client either.
    """

    def __init__(self, runner: "RankRunner", requests: Sequence[EngineRequest]) -> None:
        self._runner = runner
        self._unfinished = {request.request_id for request in requests}
        self._outputs: asyncio.Queue[TokenOutput | Exception] = asyncio.Queue()
        for request in requests:
            runner.submit(request, self._outputs)

    async def outputs(self) -> AsyncIterator[TokenOutput]:
        """Yield tokens until every sequence has ended. Raises AbortedError or EngineDeadError."""
        while self._unfinished:
            output = await self._outputs.get()
            if isinstance(output, Exception):
                raise output
            if output.finish_reason is not None:
                self._unfinished.discard(output.request_id)
            yield output

    def abort(self) -> None:
        """Stop computing what is unfinished, and end `outputs`. Harmless when all has ended."""
        if not self._unfinished:
            return
        for request_id in self._unfinished:
            self._runner.cancel(request_id)
        self._outputs.put_nowait(AbortedError())


class RankRunner:
    """Drives one model. Call `start` once, on the loop that will run it."""

    def __init__(
        self,
        rank: int,
        model: EngineModel,
        publisher: EventPublisher | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.model = model
        self.publisher = publisher
        self._clock = clock
        self._latest = clock()
        self._queues: dict[str, asyncio.Queue[TokenOutput | Exception]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Bind the publisher and begin to step. Raises zmq.ZMQError if an address is taken."""
        if self.publisher is not None:
            await self.publisher.start()
        self._task = asyncio.create_task(self._run(), name=f"rank-{self.rank}")
        self._task.add_done_callback(self._report_end)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.publisher is not None:
            await self.publisher.stop()

    def submit(
        self, request: EngineRequest, outputs: asyncio.Queue[TokenOutput | Exception]
    ) -> None:
        """Queue `request`; its tokens go to `outputs`. Raises EngineDeadError."""
        if not self.is_alive:
            raise EngineDeadError
        self.model.submit(request, self._now())
        self._queues[request.request_id] = outputs
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        self._queues.pop(request_id, None)
        self.model.cancel(request_id, self._now())

    def _now(self) -> float:
        """The clock, but never before the end of a step that was already delivered.

        A timer may fire early by the clock's resolution.
        """
        self._latest = max(self._latest, self._clock())
        return self._latest

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            result = self.model.step(self._now())
            if result is None:
                await self._wake.wait()
                continue
            await asyncio.sleep(result.ends_at - self._clock())
            self._latest = max(self._latest, result.ends_at)
            if result.events and self.publisher is not None:
                await self.publisher.publish(result.events)
            self._deliver(result.outputs)

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is None:
                continue  # cancelled during the step
            if output.finish_reason is not None:
                del self._queues[output.request_id]
            queue.put_nowait(output)

    def _report_end(self, task: asyncio.Task[None]) -> None:
        error: Exception = AbortedError()
        if not task.cancelled() and (cause := task.exception()) is not None:
            logger.critical("rank %d died", self.rank, exc_info=cause)
            error = EngineDeadError()
        for queue in set(self._queues.values()):
            queue.put_nowait(error)
        self._queues.clear()
