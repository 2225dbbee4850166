"""One rank in real time: steps the model by the clock, publishes its events, hands out its tokens.

Responsible for waiting until a step is over, for the order "events first, then outputs", and for
aborting what nobody waits for any more; and for the two ends of a hand-off: a decoder's request waits
for its prompt's KV, a prefill's blocks for their decoder. Not for scheduling (`engine.py`) or sockets
(`http_api.py`, `handoff.py`).

Everything runs on one event loop: `submit` and `cancel` are plain calls between two steps or during
one, so the model needs no lock.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from moongate.simulator.engine import EngineModel, EngineRequest, TokenOutput
from moongate.simulator.handoff import Inbox
from moongate.simulator.publisher import EventPublisher
from moongate.simulator.transfer import NixlSource, Outbox, Receive, Send, Source

logger = logging.getLogger(__name__)


class EngineDeadError(Exception):
    """The rank's loop ended by an error of ours: no request will get another token."""


class AbortedError(Exception):
    """The client left, or the engine is being stopped."""


class GenerationFailedError(Exception):
    """The request ended with an error: its prompt's KV did not come."""


Outputs = asyncio.Queue[TokenOutput | Exception]


class Generation:
    """The sequences that one HTTP request asked for, on one rank.

    Its queue needs no limit of its own: it holds at most the tokens that were asked for, as in the
    engine, which doesn't slow down for a slow client either.
    """

    def __init__(self, runner: "RankRunner", requests: Sequence[EngineRequest]) -> None:
        self._runner = runner
        self._unfinished = {request.request_id for request in requests}
        self._outputs: Outputs = asyncio.Queue()
        for request in requests:
            runner.submit(request, self._outputs)

    async def outputs(self) -> AsyncIterator[TokenOutput]:
        """Yield tokens until every sequence has ended.

        Raises: AbortedError, EngineDeadError, GenerationFailedError.
        """
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


@dataclass(slots=True)
class _Open:
    """A request whose last token was not handed out yet."""

    request: EngineRequest
    outputs: Outputs


class RankRunner:
    """Drives one model. Call `start` once, on the loop that will run it."""

    def __init__(
        self,
        rank: int,
        model: EngineModel,
        publisher: EventPublisher | None,
        *,
        engine_id: str = "",
        outbox: Outbox | None = None,
        inbox: Inbox | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engine_id`: how decoders know this rank. `outbox`, `inbox`: for hand-offs."""
        self.rank = rank
        self.model = model
        self.publisher = publisher
        self.engine_id = engine_id
        self.outbox = outbox
        self.stale_reads = 0
        """Decoders that read blocks whose lease was over."""
        self._inbox = inbox
        self._clock = clock
        self._latest = clock()
        self._open: dict[str, _Open] = {}
        self._unasked: dict[str, Source] = {}
        self._transfers: set[asyncio.Task[None]] = set()
        self._fatal: Exception | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done() and self._fatal is None

    async def start(self) -> None:
        """Bind the publisher and begin to step. Raises zmq.ZMQError if an address is taken."""
        if self.publisher is not None:
            await self.publisher.start()
        self._task = asyncio.create_task(self._run(), name=f"rank-{self.rank}")
        self._task.add_done_callback(self._report_end)

    async def stop(self) -> None:
        tasks = [*self._transfers, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.publisher is not None:
            await self.publisher.stop()

    def die(self, error: Exception) -> None:
        """End by an error, as an engine does whose scheduler fails."""
        self._fatal = error
        self._wake.set()

    def submit(self, request: EngineRequest, outputs: Outputs) -> None:
        """Queue `request`; its tokens go to `outputs`. Raises EngineDeadError."""
        if not self.is_alive:
            raise EngineDeadError
        self.model.submit(request, self._now())
        self._open[request.request_id] = _Open(request, outputs)
        match request.handoff:
            case Send(transfer_id=str(transfer_id)) if self.outbox is not None:
                self.outbox.expect(transfer_id, request.request_id)
            case Receive(source=source) if source is not None:
                self._unasked[request.request_id] = source
                if isinstance(source, NixlSource):
                    self._start(self._keep_lease(request.request_id, source))
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        now = self._now()
        if not self.model.cancel(request_id, now) and self.model.held_block_ids(request_id):
            self.model.release(request_id, now)  # it would have ended with this step
        if isinstance(opened.request.handoff, Send):
            self._forget(opened.request.handoff)
        source = self._unasked.pop(request_id, None)
        if source is not None:
            self.decline(source)
        self._wake.set()

    def _now(self) -> float:
        """The clock, but never before the end of a step that was already delivered.

        A timer may fire early by the clock's resolution.
        """
        self._latest = max(self._latest, self._clock())
        return self._latest

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._fatal is not None:
                raise self._fatal
            self._expire()
            result = self.model.step(self._now())
            if result is None:
                await self._rest()
                continue
            self._ask(result.receives)
            await asyncio.sleep(result.ends_at - self._clock())
            self._latest = max(self._latest, result.ends_at)
            if result.events and self.publisher is not None:
                await self.publisher.publish(result.events)
            self._deliver(result.outputs)

    async def _rest(self) -> None:
        """Wait until something was asked, has arrived or has expired."""
        expires_at = None if self.outbox is None else self.outbox.next_expiry_at()
        times = [time for time in (self.model.wakes_at(), expires_at) if time is not None]
        delay_s = max(min(times) - self._clock(), 0.0) if times else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._wake.wait()

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            opened = self._open.get(output.request_id)
            if opened is None:
                continue  # cancelled during the step
            if output.finish_reason is not None:
                del self._open[output.request_id]
                self._hold(opened.request)
            opened.outputs.put_nowait(output)

    def _report_end(self, task: asyncio.Task[None]) -> None:
        error: Exception = AbortedError()
        if not task.cancelled() and (cause := task.exception()) is not None:
            logger.critical("rank %d died", self.rank, exc_info=cause)
            error = EngineDeadError()
        for outputs in {opened.outputs for opened in self._open.values()}:
            outputs.put_nowait(error)
        self._open.clear()

    # -- a decoder's request ------------------------------------------------------------------

    def decline(self, source: Source) -> None:
        """Tell the prefill engine that nobody wants what it holds: take it and drop it."""
        if self._inbox is not None:
            self._start(self._drop(self._inbox, source))

    async def _drop(self, inbox: Inbox, source: Source) -> None:
        await inbox.receive(source)

    def _ask(self, requests: Sequence[EngineRequest]) -> None:
        """Ask for the KV of these requests; those that share a prefill share an answer."""
        by_source: dict[Source, list[str]] = {}
        for request in requests:
            source = self._unasked.pop(request.request_id, None)
            if source is not None:
                by_source.setdefault(source, []).append(request.request_id)
        for source, request_ids in by_source.items():
            assert self._inbox is not None, "whoever reads a hand-off can ask"
            self._start(self._receive(self._inbox, source, request_ids))

    async def _receive(self, inbox: Inbox, source: Source, request_ids: Sequence[str]) -> None:
        is_coming = await inbox.receive(source)
        now = self._now()
        for request_id in request_ids:
            if is_coming:
                self.model.kv_arriving(request_id, now)
            elif self.model.kv_failed(request_id, now):
                self._open.pop(request_id).outputs.put_nowait(GenerationFailedError())
        self._wake.set()

    async def _keep_lease(self, request_id: str, source: NixlSource) -> None:
        """Prolong the prefill's lease while the request waits for its KV."""
        assert self._inbox is not None, "whoever reads a hand-off can ask"
        while request_id in self._unasked or self.model.is_loading(request_id):
            await self._inbox.prolong(source)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._transfers.add(task)
        task.add_done_callback(self._transfers.discard)

    # -- a prefill for a decoder --------------------------------------------------------------

    async def hand_over(self, transfer_id: str, wait_s: float) -> bool:
        """Wait for a transfer and free its blocks: the decoder has them. False if it did not come."""
        assert self.outbox is not None, "only who holds is asked"
        ready = asyncio.Event()
        self.outbox.wait(transfer_id, ready.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await ready.wait()
        return self.release(transfer_id)

    def release(self, transfer_id: str) -> bool:
        """Free the blocks of a ready transfer; False if there is none (any more)."""
        assert self.outbox is not None, "only who holds is asked"
        request_id = self.outbox.take(transfer_id)
        if request_id is None:
            return False
        self.model.release(request_id, self._now())
        self._wake.set()
        return True

    def prolong(self, transfer_id: str, lease_s: float) -> None:
        assert self.outbox is not None, "only who holds is asked"
        self.outbox.prolong(transfer_id, self._now() + lease_s)

    def _hold(self, request: EngineRequest) -> None:
        """Offer the blocks of a prefill that has ended to its decoder."""
        if not isinstance(request.handoff, Send) or self.outbox is None:
            return
        if self.model.held_block_ids(request.request_id) is None:
            self._forget(request.handoff)
            return
        transfer_id = request.handoff.transfer_id
        if transfer_id is None:
            transfer_id = request.request_id
            self.outbox.expect(transfer_id, transfer_id)
        self.outbox.hold(transfer_id, request.request_id, self._now())

    def _forget(self, send: Send) -> None:
        if self.outbox is not None and send.transfer_id is not None:
            self.outbox.forget(send.transfer_id)

    def _expire(self) -> None:
        if self.outbox is None:
            return
        for request_id in self.outbox.take_expired(self._now()):
            logger.warning("request %s: nobody came for its blocks", request_id)
            self.model.release(request_id, self._now())
