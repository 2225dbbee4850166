"""Where the workers of one machine meet: messages and shared state, over a unix socket.

It speaks as much of Redis' protocol (RESP 2) as `shared_state.py` needs, so a worker without Redis is a
gateway like any other whose Redis happens to be here, in the process that started it. Only this user's
processes can reach it: the socket lies in a directory of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from moongate.gateway.replicas.hub_store import CommandError, HubStore, Reply

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 5.0

MESSAGE_BYTES_MAX = 268_435_456
"""Of one command. Past it the connection is closed: no worker sends such a one."""

WORDS_MAX = 100_000
"""Of a command."""

WAITING_BYTES_MAX = 67_108_864
"""Written to a worker that doesn't read. Past it its connection is closed; it comes again."""


class Hub:
    """`start` and `close` it inside the event loop. `on_gone`: the last connection of that name closed."""

    def __init__(
        self,
        path: Path,
        *,
        bytes_max: int,
        clock: Callable[[], float],
        on_gone: Callable[[str], None],
    ) -> None:
        self.path = path
        self._clock = clock
        self._on_gone = on_gone
        self.store = HubStore(bytes_max)
        self._channels: dict[bytes, list[_Connection]] = {}
        self._local: dict[bytes, Callable[[bytes], None]] = {}
        self._names: Counter[str] = Counter()
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), str(self.path))
        self._sweeping = asyncio.create_task(self._keep_sweeping())

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    def listen(self, channel: str, on_message: Callable[[bytes], None]) -> None:
        """Have each message on a channel given to this process as well."""
        self._local[channel.encode()] = on_message

    def publish(self, channel: bytes, message: bytes) -> int:
        """Send a message to all who listen. Return how many these are."""
        receivers = self._channels.get(channel, [])
        data = _encode([b"message", channel, message])
        for receiver in [*receivers]:
            receiver.send(data)
        if channel in self._local:
            self._local[channel](message)
        return len(receivers) + (channel in self._local)

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.store.sweep(self._clock())

    # --- connections call these -------------------------------------------------------------------

    def perform(self, connection: _Connection, words: Sequence[bytes]) -> Reply:
        """Return a command's reply. Raises: CommandError."""
        name, arguments = words[0].decode("ascii", "replace").upper(), words[1:]
        if self.store.knows(name):
            return self.store.perform(name, arguments, self._clock())
        match name, arguments:
            case "PING", []:
                return "PONG"
            case "PUBLISH", [channel, message]:
                return self.publish(channel, message)
            case "CLIENT", [what, given] if what.upper() == b"SETNAME":
                if connection.name is None:  # once; clients say it again
                    connection.name = given.decode("utf-8", "replace")
                    self._names[connection.name] += 1
                return "OK"
            case _:
                raise CommandError(f"ERR unknown command '{name[:32]}'")

    def subscribe(self, connection: _Connection, channel: bytes) -> None:
        receivers = self._channels.setdefault(channel, [])
        if connection not in receivers:
            receivers.append(connection)

    def unsubscribe(self, connection: _Connection, channel: bytes) -> None:
        receivers = self._channels.get(channel, [])
        with contextlib.suppress(ValueError):
            receivers.remove(connection)

    def closed(self, connection: _Connection) -> None:
        for channel in [*self._channels]:
            self.unsubscribe(connection, channel)
        name = connection.name
        if name is not None:
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]
                self._on_gone(name)


class _Connection(asyncio.Protocol):
    """One connection of a worker."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._received = bytearray()
        self._queued: list[Sequence[bytes]] | None = None  # since MULTI
        self._transport: asyncio.WriteTransport | None = None
        self._is_subscribed = False
        self.name: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._hub.closed(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            words, used = _parse(self._received)
        except ValueError:
            self._abort("what it sent is not RESP")
            return
        del self._received[:used]
        if words:
            self.send(b"".join(map(self._answer, words)))
        if len(self._received) > MESSAGE_BYTES_MAX:
            self._abort("a command is too large")

    def send(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            self._abort("it doesn't read")

    def _abort(self, reason: str) -> None:
        logger.warning("a worker's connection is closed: %s", reason)
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, words: Sequence[bytes]) -> bytes:
        name = words[0].upper()
        if name == b"MULTI":
            self._queued = []
            return b"+OK\r\n"
        if name == b"EXEC":
            queued, self._queued = self._queued or [], None
            return b"*%d\r\n%b" % (len(queued), b"".join(map(self._perform, queued)))
        if self._queued is not None:
            self._queued.append(words)
            return b"+QUEUED\r\n"
        if name in (b"SUBSCRIBE", b"UNSUBSCRIBE"):
            return self._subscribe(name, words[1:])
        if name == b"PING" and self._is_subscribed:
            return _encode([b"pong", b""])
        return self._perform(words)

    def _perform(self, words: Sequence[bytes]) -> bytes:
        try:
            return _encode(self._hub.perform(self, words))
        except CommandError as error:
            return f"-{error}\r\n".encode()

    def _subscribe(self, name: bytes, channels: Sequence[bytes]) -> bytes:
        self._is_subscribed = True
        change = self._hub.subscribe if name == b"SUBSCRIBE" else self._hub.unsubscribe
        replies = []
        for count, channel in enumerate(channels, 1):
            change(self, channel)
            replies.append(_encode([name.lower(), channel, count]))
        return b"".join(replies)


def _encode(reply: Reply) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, str):
        return f"+{reply}\r\n".encode()
    return b"*%d\r\n%b" % (len(reply), b"".join(map(_encode, reply)))


def _parse(data: bytearray) -> tuple[list[list[bytes]], int]:
    """Return the commands that are complete, and how many bytes they took. Raises: ValueError."""
    commands: list[list[bytes]] = []
    used = 0
    while (end := data.find(b"\r\n", used)) >= 0:
        if data[used] != ord("*"):
            raise ValueError("a command is an array")
        position, words = end + 2, list[bytes]()
        count = int(data[used + 1 : end])
        if not 0 < count <= WORDS_MAX:
            raise ValueError("a command has some words")
        for _ in range(count):
            end = data.find(b"\r\n", position)
            if end < 0:
                return commands, used
            if data[position] != ord("$"):
                raise ValueError("its words are bulk strings")
            begin = end + 2
            size = int(data[position + 1 : end])
            position = begin + size + 2
            if size < 0 or len(data) < position:
                return commands, used
            words.append(bytes(data[begin : begin + size]))
        commands.append(words)
        used = position
    return commands, used
