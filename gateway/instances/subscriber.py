"""KV-event sockets: one SUB socket a publisher, and a socket of its own for each replay.

Bytes in, router events out; what order, gaps and restarts mean is the core's business. A lost
connection that stands again is reported, since the publisher may be a new process by then.

Source: vLLM 0.32 `ZmqEventPublisher` (PUB of topic, sequence, payload; ROUTER for replay).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from moongate.engine_plugins.vllm_facts import Publisher
from moongate.engine_plugins.vllm_wire import (
    WireError,
    decode_batch,
    format_replay_request,
    parse_live_frames,
    parse_replay_frames,
)
from moongate.router import (
    BatchReceived,
    ReplayEnded,
    RequestReplay,
    SourceClosed,
    SourceId,
    SourceLost,
    SourceOpened,
    SourceReconnected,
)

logger = logging.getLogger(__name__)

RECEIVE_HIGH_WATER_MARK = 100_000
"""Batches that wait in the socket; the publisher keeps as many. Past it some are dropped, which
shows as a gap and is replayed."""

REPLAY_SILENCE_S = 3.0
"""A replay without a message for so long has no answer. vLLM looks for requests ten times a second,
but not while it publishes without pause."""

CONNECT_S = 5
"""A publisher that is not reached by then is worth a warning; the socket goes on trying."""

BATCHES_PER_TURN = 64
"""Batches taken in before other work gets the event loop."""

SourceEventHandler = Callable[
    [BatchReceived | ReplayEnded | SourceOpened | SourceLost | SourceReconnected | SourceClosed],
    object,
]


class Subscriber:
    """One publisher's subscription. `unreadable` counts, by reason, messages that fit no form."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: SourceId,
        publisher: Publisher,
        handle: SourceEventHandler,
    ) -> None:
        self.source = source
        self.publisher = publisher
        self.unreadable: Counter[str] = Counter()
        self._context = context
        self._handle = handle
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        if publisher.endpoint.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._warned: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._replay: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Connect and subscribe to every topic: who speaks is known from the connection."""
        events = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        monitor = self._socket.get_monitor_socket(events)
        self._socket.connect(self.publisher.endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        has_replay = self.publisher.replay_endpoint is not None
        self._handle(SourceOpened(self.source, has_replay, self.publisher.rank))
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch(monitor)),
        ]

    async def close(self) -> None:
        """Disconnect; the source says no more, and what it said is void."""
        tasks = [*self._tasks, *([self._replay] if self._replay is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._socket.close()
        self._handle(SourceClosed(self.source))

    def start_replay(self, command: RequestReplay) -> None:
        """Fetch batches again; an earlier replay is void."""
        if self._replay is not None:
            self._replay.cancel()
        self._replay = asyncio.create_task(self._fetch(command))

    # --- tasks ------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._take(frames)
            # What has come already is taken without going back to the loop for each message.
            for _ in range(BATCHES_PER_TURN):
                try:
                    frames = await self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(frames)
            await asyncio.sleep(0)

    def _take(self, frames: list[bytes]) -> None:
        try:
            frame = parse_live_frames(frames)
        except WireError as error:
            self._count_unreadable(error)
            return
        self._handle(decode_batch(self.source, frame))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Report a connection that ended, before anything comes over the next, and its return."""
        was_connected = False
        if not await monitor.poll(CONNECT_S * 1000):
            self._warn_once(
                f"no connection to {self.publisher.endpoint} (is the port open?); until there is "
                "one, routing goes by what was forwarded where"
            )
        while True:
            message = await recv_monitor_message(monitor)
            if message["event"] == zmq.EVENT_DISCONNECTED:
                self._handle(SourceLost(self.source))
            elif was_connected:
                self._handle(SourceReconnected(self.source))
            else:
                was_connected = True

    async def _fetch(self, command: RequestReplay) -> None:
        is_complete = False
        try:
            is_complete = await self._fetch_batches(command)
        finally:
            if not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                self._handle(ReplayEnded(self.source, command.replay_id, is_complete))

    async def _fetch_batches(self, command: RequestReplay) -> bool:
        """Return whether the publisher said that it has sent all."""
        assert self.publisher.replay_endpoint is not None
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            # Unlimited: the publisher's ROUTER drops what its peer does not take in quickly.
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self.publisher.replay_endpoint)
            await socket.send_multipart(format_replay_request(command.from_sequence))
            while await socket.poll(int(REPLAY_SILENCE_S * 1000)):
                try:
                    frame = parse_replay_frames(await socket.recv_multipart())
                except WireError as error:
                    self._count_unreadable(error)
                    continue
                if frame.is_end_of_replay:
                    return True
                self._handle(decode_batch(self.source, frame, command.replay_id))
                await asyncio.sleep(0)  # thousands may come at once, and others want the loop too
        self._warn_once(
            f"no answer from {self.publisher.replay_endpoint}, so what was published before or "
            "lost on the way is not known"
        )
        return False

    def _warn_once(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("KV events of %s: %s", self.source.instance_id, problem)

    def _count_unreadable(self, error: WireError) -> None:
        if self.unreadable[error.reason] == 0:
            logger.warning("%s: message left out: %s", self.source, error)
        self.unreadable[error.reason] += 1
