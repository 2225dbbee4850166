"""A server of which a test scripts every byte: for what may happen between two peers of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from typing import Self

CLOSE_S = 2.0


class Peer:
    """One accepted connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, has_left: asyncio.Event
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.requests: list[bytes] = []
        self._has_left = has_left

    async def request(self) -> bytes:
        """Read a whole request with a length; return its body."""
        head = await self.head()
        lines = head.lower().split(b"\r\n")
        length = next(line for line in lines if line.startswith(b"content-length:"))
        body = await self.reader.readexactly(int(length.partition(b":")[2]))
        self.requests.append(body)
        return body

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes, headers: bytes = b"", status: int = 200) -> None:
        await self.send(
            b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body)
        )

    def close(self) -> None:
        self.writer.close()

    def close_unnoticed(self) -> None:
        """Close at once, before the loop turns."""
        fd: int = self.writer.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Close so that the other side sees a reset."""
        linger = struct.pack("ii", 1, 0)
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    async def drain(self) -> None:
        """Discard what comes until the other side closes."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 20):
                pass

    async def left(self) -> None:
        """Return when the other side has closed; the test fails if it doesn't in time."""
        async with asyncio.timeout(CLOSE_S):
            await self._has_left.wait()


class _Protocol(asyncio.StreamReaderProtocol):
    """Notes when the other side closes, whoever reads."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.has_left = asyncio.Event()

    def eof_received(self) -> bool | None:
        self.has_left.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_left.set()
        super().connection_lost(exc)


Script = Callable[[Peer], Awaitable[None]]


class RawServer:
    """Listens on localhost. Each connection runs the next script, the last one again and again."""

    def __init__(self, *scripts: Script, tls: ssl.SSLContext | None = None) -> None:
        self._scripts = scripts
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.peers: list[Peer] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[list[bytes]]:
        """Return the bodies that each connection brought."""
        return [peer.requests for peer in self.peers]

    async def __aenter__(self) -> Self:
        self._tasks.append(asyncio.create_task(self._accept()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self.peers:
            peer.writer.transport.abort()
        self._listener.close()
        await asyncio.sleep(0)  # for the transports to close
        for result in results:
            if isinstance(result, AssertionError):
                raise result

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            self._tasks.append(asyncio.create_task(self._serve(connection)))

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = _Protocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=self._tls
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        peer = Peer(reader, writer, protocol.has_left)
        self.peers.append(peer)
        script = self._scripts[min(len(self.peers), len(self._scripts)) - 1]
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await script(peer)
