"""A small HTTP/1.1 client for load: one keep-alive connection, one request at a time.

Why not a library: the client shares its cores with the router under test, so it has to be cheap.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

import httptools

REQUEST_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes
    first_byte_s: float
    """From sending the request to the first byte of the answer's body."""
    total_s: float


class Client:
    """Posts JSON to one path of one server; connects when it has to."""

    def __init__(self, host: str, port: int, path: str) -> None:
        self._address = (host, port)
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\n"
            "accept: */*\r\ncontent-type: application/json\r\n"
        ).encode()
        self._connection: _Connection | None = None

    async def post(self, body: bytes) -> Answer:
        """Return the answer.

        Raises: OSError where the connection fails, TimeoutError.
        """
        if self._connection is None or self._connection.is_closed:
            self._connection = await self._connect()
        request = b"%bcontent-length: %d\r\n\r\n%b" % (self._head, len(body), body)
        try:
            return await asyncio.wait_for(self._connection.exchange(request), REQUEST_TIMEOUT_S)
        except (OSError, TimeoutError):
            self.close()  # what comes later on this connection would answer another request
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(_Connection, *self._address)
        _, connection = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        return connection


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_closed = False
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._answered: asyncio.Future[Answer] | None = None
        self._parts: list[bytes] = []
        self._sent_at = 0.0
        self._first_byte_at: float | None = None

    def exchange(self, request: bytes) -> asyncio.Future[Answer]:
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self._parts = []
        self._first_byte_at = None
        self._sent_at = time.perf_counter()
        self._transport.write(request)
        return self._answered

    def close(self) -> None:
        self.is_closed = True
        self._transport.abort()

    # --- asyncio's and the parser's call-backs ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have all the methods, but no base class in common with asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._fail(ConnectionResetError("closed before the answer was whole"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        if self._first_byte_at is None:
            self._first_byte_at = time.perf_counter()
        self._parts.append(body)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        if not self._parser.should_keep_alive():
            self.close()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(
                Answer(
                    status=self._parser.get_status_code(),
                    body=b"".join(self._parts),
                    first_byte_s=(self._first_byte_at or now) - self._sent_at,
                    total_s=now - self._sent_at,
                )
            )

    def _fail(self, error: ConnectionError) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)
