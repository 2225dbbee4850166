"""A ZMQ proxy between an engine's KV events and the gateway that loses, repeats and swaps batches.

Replays don't pass it: the gateway asks the engine itself.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Self

import zmq
import zmq.asyncio
from processes import free_port

BIND_S = 5.0


@dataclass(slots=True)
class Luck:
    """How likely what happens to a batch is, each from 0 to 1."""

    lost: float = 0.0
    repeated: float = 0.0
    swapped: float = 0.0  # it comes after the one that follows it


class EventProxy:
    """Subscribes to `target` and publishes at `endpoint` what comes, as `luck` wants it."""

    def __init__(self, target: str, chance: random.Random) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.luck = Luck()
        self.passed = self.lost = self.repeated = self.swapped = 0
        self._target = target
        self._chance = chance
        self._context = zmq.asyncio.Context()
        self._passing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        self._context.destroy(linger=0)

    async def start(self) -> None:
        publisher = self._context.socket(zmq.PUB)
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.set_hwm(100_000)
        async with asyncio.timeout(BIND_S):
            while not _is_bound(publisher, self.endpoint):
                await asyncio.sleep(0.05)  # ZMQ gives an address back a moment after closing
        subscriber = self._context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.set_hwm(100_000)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(self._target)
        self._passing = asyncio.create_task(self._pass(subscriber, publisher))

    async def stop(self) -> None:
        """Be gone, as the publisher of a killed engine."""
        assert self._passing is not None
        self._passing.cancel()
        await asyncio.gather(self._passing, return_exceptions=True)

    async def _pass(self, subscriber: zmq.asyncio.Socket, publisher: zmq.asyncio.Socket) -> None:
        kept: list[bytes] | None = None  # until the next has passed
        with subscriber, publisher:
            while True:
                frames = await subscriber.recv_multipart()
                if self._happens(self.luck.lost):
                    self.lost += 1
                    continue
                if kept is None and self._happens(self.luck.swapped):
                    kept = frames
                    self.swapped += 1
                    continue
                await publisher.send_multipart(frames)
                self.passed += 1
                if self._happens(self.luck.repeated):
                    await publisher.send_multipart(frames)
                    self.repeated += 1
                if kept is not None:
                    await publisher.send_multipart(kept)
                    kept = None

    def _happens(self, likelihood: float) -> bool:
        return likelihood > 0 and self._chance.random() < likelihood


def _is_bound(publisher: zmq.asyncio.Socket, endpoint: str) -> bool:
    try:
        publisher.bind(endpoint)
    except zmq.ZMQError:
        return False
    return True
