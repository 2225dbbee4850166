"""A TCP proxy before an engine that does what networks and dying engines do to connections.

It knows as much of HTTP as it needs to tell which answers had begun when it, or the engine, broke them
off: `broken` counts those. A whole answer ends with its last chunk or with its length.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from dataclasses import dataclass, field
from typing import Self

PIECE_BYTES = 65_536
LAST_CHUNK = b"0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(slots=True)
class Weather:
    """What happens to bytes at present. All off: they pass.

    `garbage`: what comes in place of an answer; the connection then closes. `inserted`: an event that
    is put before the first of a stream. `duplicates`: each piece of an answer's body comes twice.
    """

    delay_s: float = 0.0  # of each piece of an answer
    bytes_per_s: float | None = None  # of answers
    swallows: bool = False  # what comes is taken and never answered
    drops_answers: bool = False  # answers get lost, requests arrive
    duplicates: bool = False
    garbage: bytes | None = None
    inserted: bytes | None = None


@dataclass(eq=False, slots=True)
class _Pair:
    """The two connections of one, and where their exchange stands."""

    client: asyncio.StreamWriter
    engine: asyncio.StreamWriter
    is_open: bool = False  # a request has come whose answer isn't whole
    head: bytes = b""  # of the answer, as far as it has come
    body_bytes: int = 0
    length: int | None = None
    is_stalled: bool = False  # something of its exchange was lost on the way
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def request_came(self, piece: bytes) -> None:
        if not self.is_open and piece.startswith(b"POST /v1/"):
            self.is_open, self.is_stalled = True, False
            self.head, self.body_bytes, self.length = b"", 0, None

    def answer_came(self, piece: bytes) -> None:
        if not self.is_open:
            return
        if b"\r\n\r\n" not in self.head:
            self.head += piece
            head, end, piece = self.head.partition(b"\r\n\r\n")
            if not end:
                return
            found = _LENGTH.search(head)
            self.length = int(found.group(1)) if found else None
        self.body_bytes += len(piece)
        is_last = piece.endswith(LAST_CHUNK)
        if is_last if self.length is None else self.body_bytes >= self.length:
            self.is_open = False

    @property
    def has_begun(self) -> bool:
        """Tell whether a part of an answer has come, and not all."""
        return self.is_open and self.body_bytes > 0


class FaultProxy:
    """Listens on a port of its own and passes on to `target_port` of this machine."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.weather = Weather()
        self.broken = 0
        """Answers of which a part had come when they ended."""
        self.port = 0
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._pairs: set[_Pair] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    def listen(self) -> None:
        """Take connections; after `leave`, on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(self._listener))

    async def leave(self) -> None:
        """Be gone as a killed process is: nothing listens, and all connections are reset."""
        assert self._accepting is not None
        assert self._listener is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        self.end_connections(with_reset=True)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def end_connections(self, *, with_reset: bool) -> None:
        """End all that are open, in the middle of whatever they carry."""
        for pair in self._pairs:
            self._end(pair, with_reset=with_reset)

    def _end(self, pair: _Pair, *, with_reset: bool = False) -> None:
        """End a connection, and count the answer that this breaks off."""
        self.broken += pair.has_begun
        pair.is_open = False
        if with_reset:
            reset(pair.client)
        else:
            pair.client.close()
        pair.engine.transport.abort()
        for task in pair.tasks:
            task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = asyncio.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            from_client, client = await asyncio.open_connection(sock=connection)
        except BaseException:
            connection.close()
            raise
        try:
            from_engine, engine = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            reset(client)
            return
        except BaseException:
            client.transport.abort()
            raise
        pair = _Pair(client, engine)
        self._pairs.add(pair)
        pair.tasks = [
            asyncio.create_task(self._pass_requests(pair, from_client)),
            asyncio.create_task(self._pass_answers(pair, from_engine)),
        ]
        try:
            await asyncio.wait(pair.tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not pair.client.transport.is_closing():
                self._end(pair)
            await asyncio.gather(*pair.tasks, return_exceptions=True)
            engine.transport.abort()
            self._pairs.discard(pair)

    async def _pass_requests(self, pair: _Pair, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(PIECE_BYTES):
                if self.weather.swallows:
                    pair.is_stalled = True
                    continue
                pair.request_came(piece)
                if pair.engine.is_closing():
                    return
                pair.engine.write(piece)
                await pair.engine.drain()
        # The gateway has left: it gave up on what never came, or its own client has left.
        self.broken += pair.has_begun and pair.is_stalled
        pair.is_open = False

    async def _pass_answers(self, pair: _Pair, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(PIECE_BYTES):
                weather = self.weather
                if weather.delay_s:
                    await asyncio.sleep(weather.delay_s)
                if weather.bytes_per_s is not None:
                    await asyncio.sleep(len(piece) / weather.bytes_per_s)
                if weather.swallows or weather.drops_answers:
                    pair.is_stalled = True
                    continue
                is_first = pair.is_open and not pair.head
                has_head = b"\r\n\r\n" in pair.head
                if weather.garbage is not None and is_first:
                    pair.client.write(weather.garbage)
                    await pair.client.drain()
                    return
                pair.answer_came(piece)
                if weather.inserted is not None and is_first:
                    piece = _with_event(piece, weather.inserted)
                if pair.client.is_closing():
                    return
                pair.client.write(piece * 2 if weather.duplicates and has_head else piece)
                await pair.client.drain()


def _with_event(piece: bytes, event: bytes) -> bytes:
    """Return the beginning of a stream in chunks with one more event before its first."""
    head, end, rest = piece.partition(b"\r\n\r\n")
    if not end or b"event-stream" not in head:
        return piece
    return b"%b%b%x\r\n%b\r\n%b" % (head, end, len(event), event, rest)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the other side sees a reset."""
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
