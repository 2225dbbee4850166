"""Tells the other gateways what this one does, and its core what they do.

Nothing of this is on a request's way: what the core wants told waits here for a few milliseconds and goes
out in one message; what others say comes in as events. Every second all loads are told anew, so whatever
was lost heals; a gateway that says nothing for `LEASE_S` counts as gone. While nobody can be reached
nothing waits: once somebody can, all is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from moongate.gateway.driver import Driver
from moongate.gateway.replicas import peer_wire
from moongate.gateway.replicas.peer_wire import PeerMessageError
from moongate.gateway.telemetry.occasional_log import OccasionalLog
from moongate.router import EndPrediction, Holder, PeerId, PeerLoad, ShareLoad, SharePrediction
from moongate.router.commands import PeerCommand

logger = logging.getLogger(__name__)

BATCH_S = 0.004
"""Between two messages. The first after a pause goes at once."""

REFRESH_S = 1.0
"""How often all loads are told."""

LEASE_S = 5.0
"""For how long what was told last holds: some refreshes may be lost."""

STEPS_MAX = 4096
"""Predictions that wait. Past it new ones are not told: they cost others a misjudged request."""

CHANNEL = "peers"


class Channel(Protocol):
    """How messages reach the other gateways: Redis, or workers' hub."""

    @property
    def is_up(self) -> bool:
        """Tell whether it is worth trying."""

    async def publish(self, channel: str, message: bytes) -> bool:
        """Send a message to all who listen. Return whether it was taken."""

    def listen(self, channel: str, on_message: Callable[[bytes], None]) -> None:
        """Have each message given to `on_message`, until this is closed."""


class Peering:
    """Create it inside the event loop, `start` and `close` it."""

    def __init__(self, driver: Driver, channel: Channel, peer: PeerId) -> None:
        self._driver = driver
        self._channel = channel
        self._peer = peer
        self._loads: dict[Holder, PeerLoad] = {}
        self._steps: list[SharePrediction | EndPrediction] = []
        self._sequence = 0
        self._heard: dict[PeerId, tuple[int, float]] = {}  # the last sequence, and when
        self._wake = asyncio.Event()
        self._refresh_at = 0.0
        self._telling: asyncio.Task[None] | None = None
        self._log = OccasionalLog(logger, driver.clock)

    def start(self) -> None:
        self._driver.on_share = self._share
        self._channel.listen(CHANNEL, self._hear)
        self._telling = asyncio.create_task(self._keep_telling())

    async def close(self) -> None:
        """Say that nothing is under way here any more."""
        if self._telling is None:
            return
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)
        if self._channel.is_up:
            await self._publish([], [], has_left=True)

    # --- telling ----------------------------------------------------------------------------------

    def _share(self, command: PeerCommand) -> None:
        if isinstance(command, ShareLoad):
            self._loads[command.holder] = command.load
        elif len(self._steps) < STEPS_MAX:
            self._steps.append(command)
        self._wake.set()

    async def _keep_telling(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_at - self._driver.clock()):
                    await self._wake.wait()
            try:
                await self._tell()
            except Exception:
                logger.exception("a bug of ours")
            await asyncio.sleep(BATCH_S)

    async def _tell(self) -> None:
        now = self._driver.clock()
        is_whole = now >= self._refresh_at
        loads = self._driver.core.outbox.whole() if is_whole else [*self._loads.items()]
        steps = self._steps
        self._loads, self._steps = {}, []
        self._wake.clear()
        if is_whole:
            self._refresh_at = now + REFRESH_S
        # What can't be sent now is told with all loads, at the latest in a second; predictions are not.
        if self._channel.is_up:
            await self._publish(loads, steps, is_whole=is_whole)

    async def _publish(
        self,
        loads: list[tuple[Holder, PeerLoad]],
        steps: list[SharePrediction | EndPrediction],
        *,
        is_whole: bool = False,
        has_left: bool = False,
    ) -> None:
        self._sequence += 1
        message = peer_wire.write(
            self._peer, self._sequence, LEASE_S, loads, steps, is_whole=is_whole, has_left=has_left
        )
        await self._channel.publish(CHANNEL, message)

    # --- hearing ----------------------------------------------------------------------------------

    def _hear(self, data: bytes) -> None:
        try:
            message = peer_wire.read(data)
        except PeerMessageError as error:
            self._log.warn(f"a message of another gateway can't be read: {error}")
            return
        peer, now = PeerId(message.peer), self._driver.clock()
        if peer == self._peer:
            return
        last, heard_at = self._heard.get(peer, (-1, now))
        if message.sequence <= last and now - heard_at <= LEASE_S:
            return  # late, or twice
        if last == -1 and not message.has_left:
            self._refresh_at = now  # it is new, and has heard nothing of this one
            self._wake.set()
        self._heard[peer] = message.sequence, now
        for event in message.events:
            self._driver.handle(event)
        if last == -1:
            self._forget_silent(now)

    def _forget_silent(self, now: float) -> None:
        """Keep the last sequences of those only that may be there."""
        self._heard = {
            peer: (sequence, at)
            for peer, (sequence, at) in self._heard.items()
            if now - at <= 2 * LEASE_S
        }
