"""The I/O shell of the core: events go in with the time, and commands are performed.

One thread, the event loop's: `handle` runs to its end before anything else can happen, so the core
needs no lock. What a request is to do comes back to its caller; everything else is performed by
whoever registered for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import assert_never

from moongate.router import (
    BatchReceived,
    EndPrediction,
    Event,
    Forward,
    Hold,
    InstanceId,
    NotePooled,
    Outcome,
    Probe,
    Reject,
    RelayFailure,
    ReplayEnded,
    Request,
    RequestFinished,
    RequestId,
    RequestReplay,
    RouterCore,
    Seed,
    ShareLoad,
    SharePrediction,
    WakeAt,
    WakeUp,
)
from moongate.router.commands import PeerCommand

SETTLE_S = 0.25
"""How long a turn waits for the last events of the turn before it, once that has ended. Nearly all
come within it, even from an engine that shares its cores."""

SYNC_S = 5.0
"""How long an instance that comes up may be kept from work until its events have caught up; a full
replay of 10,000 batches takes less, and serving does not depend on it."""

RequestCommand = Forward | Hold | Reject | RelayFailure
Recorder = Callable[[float, Event], None]


class Driver:
    """Feeds the core. `on_replay` and `on_probe` perform what they are named for; set them first."""

    def __init__(
        self, core: RouterCore, clock: Callable[[], float], recorder: Recorder | None = None
    ) -> None:
        self.core = core
        self.clock = clock
        self._recorder = recorder
        self.on_replay: Callable[[RequestReplay], None] = _nobody
        self.on_probe: Callable[[InstanceId], None] = _nobody
        self.on_pooled: Callable[[NotePooled], None] = _ignore
        self.on_seed: Callable[[Seed], None] = _nobody
        self.on_share: Callable[[PeerCommand], None] = _ignore
        self.on_batch: Callable[[BatchReceived], None] = _ignore  # what the core has taken in
        self._timer: asyncio.TimerHandle | None = None
        self._source_spoke: asyncio.Future[None] | None = None
        self._held: dict[RequestId, asyncio.Future[Forward | Reject]] = {}

    def handle(self, event: Event) -> RequestCommand | None:
        """Give the core an event. Return what the event's request is to do, if it is of one."""
        now = self.clock()
        if self._recorder is not None:
            self._recorder(now, event)
        outcome: RequestCommand | None = None
        for command in self.core.handle(event, now):
            match command:
                case Forward() | Reject() if command.request_id in self._held:
                    self._held.pop(command.request_id).set_result(command)
                case Forward() | Reject() | RelayFailure() | Hold():
                    outcome = command
                case RequestReplay():
                    self.on_replay(command)
                case NotePooled():
                    self.on_pooled(command)
                case Seed():
                    self.on_seed(command)
                case ShareLoad() | SharePrediction() | EndPrediction():
                    self.on_share(command)
                case Probe():
                    self.on_probe(command.instance_id)
                case WakeAt():
                    self._wake_at(command.at, now)
                case _:
                    assert_never(command)
        if isinstance(outcome, Hold):
            self._held[outcome.request_id] = asyncio.get_running_loop().create_future()
        if isinstance(event, BatchReceived | ReplayEnded):
            if isinstance(event, BatchReceived):
                self.on_batch(event)
            if self._source_spoke is not None:
                self._source_spoke.set_result(None)
                self._source_spoke = None
        return outcome

    async def until_admitted(self, request_id: RequestId) -> Forward | Reject:
        """Return what becomes of a request that is on hold. Cancelled, it is no more in the core."""
        held = self._held[request_id]
        try:
            return await asyncio.shield(held)  # of which the core may be told at any moment
        except asyncio.CancelledError:
            self._held.pop(request_id, None)
            # It may have been told just before, and then be running or refused already.
            if not held.done() or isinstance(held.result(), Forward):
                self.handle(RequestFinished(request_id, Outcome.CLIENT_LEFT))
            raise

    def is_settled(self, request: Request) -> bool:
        """Tell whether no events are known to be under way of the turn that this one continues."""
        return self.core.is_settled(request, self.clock())

    async def until_settled(self, request: Request) -> None:
        """Wait for events that are under way of the turn that this request continues, but not long.

        Agents pause between turns, so this concerns the few that follow at once; they would be
        credited with less than the engine has.
        """
        await self._until(lambda: self.is_settled(request), SETTLE_S)

    async def until_synced(self, instance_id: InstanceId) -> None:
        """Wait until the instance's event sources have caught up, but not long.

        A gateway that routed before would send every session away from its home.
        """
        await self._until(lambda: self.core.sources.are_synced(instance_id), SYNC_S)

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait until events of sources have made the condition true."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not condition():
                    await self._next_source_event()

    async def _next_source_event(self) -> None:
        if self._source_spoke is None:
            self._source_spoke = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._source_spoke)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wake_at(self, at: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(at - now, 0.0), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.handle(WakeUp())


def _ignore(_: object) -> None:
    """For what is of use to the pool, or to other gateways, where there are none."""


def _nobody(_: object) -> None:
    raise AssertionError("a command without anybody to perform it")
