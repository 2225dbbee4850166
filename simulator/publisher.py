"""The ZMQ sockets of one rank: PUB for its event batches, ROUTER for replays.

Responsible for binding, numbering and sending. Not for what a batch says (see `event_wire.py`).
Invariants: sequences start at 0 and have no holes; a batch is in the replay buffer before a
subscriber can have seen its number.

Errors: `start` raises `zmq.ZMQError` when an address cannot be bound.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio

from moongate.simulator.blocks import KvEvent
from moongate.simulator.event_wire import (
    BUFFER_BATCHES_MAX,
    BatchEncoder,
    ReplayBuffer,
    encode_sequence,
)

logger = logging.getLogger(__name__)

PUB_QUEUE_BATCHES_MAX = 100_000
"""The engine's own default (`hwm`): a subscriber that is further behind loses batches."""

REPLAY_QUEUE_MAX = BUFFER_BATCHES_MAX + 1
"""One whole replay with its end mark. ZMQ's own 1,000 would silently drop the rest of it."""


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Where one rank publishes."""

    host: str
    port: int
    """0: any free one."""
    replay_port: int | None
    """None: no replay socket; 0: any free one."""
    topic: str
    has_replay_topic_frame: bool = True


class EventPublisher:
    """Publishes the event batches of one rank and answers replay requests."""

    def __init__(self, settings: PublisherSettings, encoder: BatchEncoder) -> None:
        self._settings = settings
        self._encoder = encoder
        self._topic = settings.topic.encode()
        self._buffer = ReplayBuffer()
        self._next_sequence = 0
        self._context = zmq.asyncio.Context()
        self._pub: zmq.asyncio.Socket | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._replay_task: asyncio.Task[None] | None = None
        self.port: int | None = None
        self.replay_port: int | None = None

    async def start(self) -> None:
        """Bind both sockets; then `port` and `replay_port` are known."""
        settings = self._settings
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(PUB_QUEUE_BATCHES_MAX)
            self.port = _bind(self._pub, settings.host, settings.port)
            if settings.replay_port is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.set_hwm(REPLAY_QUEUE_MAX)
                self.replay_port = _bind(self._router, settings.host, settings.replay_port)
                self._replay_task = asyncio.create_task(self._answer_replays(self._router))
        except zmq.ZMQError:
            await self.stop()
            raise

    async def publish(self, events: Sequence[KvEvent]) -> None:
        """Send one batch; a PUB socket never waits for its subscribers."""
        assert self._pub is not None, "started"
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        payload = self._encoder.encode(events, time.time())
        self._buffer.append(sequence, payload)
        await self._pub.send_multipart((self._topic, encode_sequence(sequence), payload))

    async def stop(self) -> None:
        if self._replay_task is not None:
            self._replay_task.cancel()
            await asyncio.gather(self._replay_task, return_exceptions=True)
        # Nothing is held back for slow subscribers: an engine that ends loses what is unsent.
        self._context.destroy(linger=0)

    async def _answer_replays(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3:
                logger.warning("replay request with %d frames ignored", len(frames))
                continue
            identity, _, start = frames
            replies = self._buffer.replies(
                int.from_bytes(start, "big"),
                topic=self._topic,
                has_topic_frame=self._settings.has_replay_topic_frame,
            )
            for reply in replies:
                await router.send_multipart((identity, *reply))


def _bind(socket: zmq.asyncio.Socket, host: str, port: int) -> int:
    """Bind and return the port, the chosen one if `port` is 0."""
    address = "*" if host == "0.0.0.0" else host
    socket.bind(f"tcp://{address}:{port or '*'}")
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])
