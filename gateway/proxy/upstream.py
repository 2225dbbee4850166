"""Connections to engines: one pool an instance; send a request, read its answer, cancel it.

What can come out of `send` and of reading is one of five: `Unreachable`, `NoConnection` and `PoolFull`,
after which the engine has certainly not got the request, and `Disconnected` and `TimedOut`. Closing an
answer before its end closes the connection, which is how an engine learns that it should stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

from moongate.gateway.proxy.http1 import AnswerReader, MalformedAnswer, format_request

KEEP_ALIVE_S = 4.0
"""Idle connections are closed before the engine does it (uvicorn: 5 s), so that no request is sent
into a connection that is just being closed."""


RESENT_WITHIN_S = 0.1
"""A kept connection that ends so soon was closed for being idle; later, the engine had the request."""


class UpstreamError(Exception):
    """An attempt at an engine failed."""


class Unreachable(UpstreamError):
    """Refused, or no route: nothing listens there; or we gave the instance up before anything was sent."""


class NoConnection(UpstreamError):
    """No connection in time."""


class Disconnected(UpstreamError):
    """The connection ended before the answer did, or what came is no answer."""


class TimedOut(UpstreamError):
    """No byte in time; the attempt has been cancelled."""


class PoolFull(UpstreamError):
    """The instance has as many connections as it may have."""


class Answer:
    """An answer whose head has come. Read it to its end, or `close` it."""

    def __init__(self, connection: _Connection, reader: AnswerReader) -> None:
        self._connection = connection
        self._reader = reader
        self.status = reader.status
        self.raw_headers = reader.headers

    @property
    def is_complete(self) -> bool:
        """Tell whether all of the body has come, though perhaps not been read."""
        return self._reader.is_complete

    def header(self, name: bytes) -> str:
        """Return a header's value, "" without one; `name` in lower case."""
        for key, value in self.raw_headers:
            if key == name:
                return value.decode("latin-1")
        return ""

    async def read(self) -> bytes:
        """Return what came of the body since the last call, b"" at its end. Raises: UpstreamError."""
        return await self._connection.read(self._reader)

    async def relay(self, take: Callable[[bytes], None]) -> None:
        """Give what comes of the body to `take`, as it comes, to its end. Raises: UpstreamError."""
        await self._connection.relay(self._reader, take)

    def pause(self) -> None:
        """Take in no more for now: the client can't keep up."""
        self._connection.pause()

    def resume(self) -> None:
        self._connection.resume()

    def close(self) -> None:
        """End the exchange. An answer not read to its end takes its connection with it."""
        self._connection.finish(self._reader)


class Upstream:
    """One instance's connection pool. Use it inside the event loop, and `close` it.

    `connections_max`: None is no limit of our own, since what an instance gets is the policy's
    decision, and a full pool would look like a slow engine.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        read_timeout_s: float,
        connections_max: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls`: whom to trust behind https; None: as the system does."""
        parts = urlsplit(url)
        assert parts.hostname is not None, url
        self._host, self._port = parts.hostname, parts.port or _default_port(parts.scheme)
        self._authority = parts.netloc
        is_https = parts.scheme == "https"
        self._tls = (tls or ssl.create_default_context()) if is_https else None
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._connections_max = connections_max
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._connecting = 0
        self._ended = asyncio.Event()  # an exchange has
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    def set_limits(
        self, *, connect_timeout_s: float, read_timeout_s: float, connections_max: int | None
    ) -> None:
        """Let these hold from now on; connections that are open keep their time-out."""
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._connections_max = connections_max

    async def send(
        self,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: Sequence[bytes],
        *,
        on_sent: Callable[[], object] | None = None,
        may_exceed: bool = False,
    ) -> Answer:
        """Post a body (in pieces) and return the answer once its head is here.

        `on_sent` is called when there is a connection and all is given to it. `may_exceed`: though
        the instance has as many connections as it may have. Raises: UpstreamError.
        """
        self._check_open()
        head = format_request(path, self._authority, headers, sum(map(len, body)))
        kept, began = self._take_idle(), asyncio.get_running_loop().time()
        if kept is not None:
            try:
                return await self._exchange(kept, head, body, on_sent)
            except Disconnected:
                took_s = asyncio.get_running_loop().time() - began
                if kept.has_answered or took_s > RESENT_WITHIN_S:
                    raise
                # It was closed for being idle just as we used it, so nobody has seen the request.
        return await self._exchange(await self._connect(may_exceed), head, body, on_sent)

    async def _exchange(
        self,
        connection: _Connection,
        head: bytes,
        body: Sequence[bytes],
        on_sent: Callable[[], object] | None,
    ) -> Answer:
        self._busy.add(connection)
        if on_sent is not None:
            on_sent()  # writing is the first thing that happens now
        try:
            return await connection.exchange(head, body)
        except BaseException:
            connection.abort()
            raise

    async def until_idle(self) -> None:
        """Return when no exchange is under way."""
        while self._busy or self._connecting:
            self._ended.clear()
            await self._ended.wait()

    async def close(self) -> None:
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in [*self._idle, *self._busy]:
            connection.abort()

    # --- the pool ---------------------------------------------------------------------------------

    def _take_idle(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()  # the one used last
            if now - connection.idle_since < KEEP_ALIVE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, may_exceed: bool) -> _Connection:
        """Raises: UpstreamError."""
        count = len(self._busy) + self._connecting
        limit = None if may_exceed else self._connections_max
        if limit is not None and count >= limit:
            raise PoolFull(f"{count} connections are open")
        self._connecting += 1
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, self._read_timeout_s),
                    self._host, self._port, ssl=self._tls,
                )  # fmt: skip
        except TimeoutError as error:
            raise NoConnection("no connection in time") from error
        except ssl.SSLError as error:
            raise Unreachable(f"TLS: {describe_tls(error)}") from error
        except OSError as error:
            raise Unreachable(str(error)) from error
        finally:
            self._connecting -= 1
        if self._is_closed:
            connection.abort()
        self._check_open()
        return connection

    def _check_open(self) -> None:
        """Raises: Unreachable, since nothing is sent any more."""
        if self._is_closed:
            raise Unreachable("the instance was removed")

    def keep(self, connection: _Connection) -> None:
        """Take a connection back that can carry another exchange."""
        self._busy.discard(connection)
        self._ended.set()
        if self._is_closed:
            connection.abort()
            return
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._sweep_idle)

    def forget(self, connection: _Connection) -> None:
        """Note that a connection is closed."""
        self._busy.discard(connection)
        self._ended.set()
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def _sweep_idle(self) -> None:
        loop = asyncio.get_running_loop()
        limit = loop.time() - KEEP_ALIVE_S
        for connection in [c for c in self._idle if c.idle_since <= limit]:
            connection.abort()
        self._sweep = loop.call_later(KEEP_ALIVE_S, self._sweep_idle) if self._idle else None


class _Connection(asyncio.Protocol):
    """One connection: an exchange after the other. Its states: idle, reading, closed.

    Whoever reads waits on `_waiter`, or has a `_take` that is called with each piece; both are told
    by `_wake` when something changed.
    """

    def __init__(self, pool: Upstream, read_timeout_s: float) -> None:
        self._pool = pool
        self._read_timeout_s = read_timeout_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], None] | None = None
        self._error: UpstreamError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._is_paused = False
        self.has_answered = False  # a byte of the present answer has come
        self.idle_since = 0.0

    # --- used by the pool and by answers ----------------------------------------------------------

    async def exchange(self, head: bytes, body: Sequence[bytes]) -> Answer:
        """Raises: UpstreamError."""
        self.has_answered = False
        if self._transport is None or self._error is not None:
            raise self._error or Disconnected("the connection is closed")
        reader = self._reader = AnswerReader()
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(self._read_timeout_s, self._check_silence)
        self._transport.writelines([head, *body])
        while not reader.has_head:
            await self._wait()
        return Answer(self, reader)

    async def read(self, reader: AnswerReader) -> bytes:
        while True:
            piece = reader.take_body()
            if piece or reader.is_complete:
                return piece
            await self._wait()

    async def relay(self, reader: AnswerReader, take: Callable[[bytes], None]) -> None:
        if piece := reader.take_body():
            take(piece)
        self._take = take
        try:
            while not reader.is_complete:
                await self._wait()
        finally:
            self._take = None

    def pause(self) -> None:
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._is_paused:
            self._is_paused = False
            self._heard_at = self._loop.time()
            self._transport.resume_reading()

    def finish(self, reader: AnswerReader) -> None:
        """Give the connection back if its answer was read to the end, else close it."""
        if reader is not self._reader:
            return  # finished already
        self._reader = None
        self._stop_timer()
        is_sent = self._transport is not None and self._transport.get_write_buffer_size() == 0
        if self._error is None and reader.may_continue and is_sent:
            self.resume()
            self.idle_since = self._loop.time()
            self._pool.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._fail(Disconnected("the connection was closed"))
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # --- asyncio calls these ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by class
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:
            self.abort()  # nobody asked for anything
            return
        self.has_answered = True
        self._heard_at = self._loop.time()
        try:
            reader.feed(data)
        except MalformedAnswer as error:
            # What came before that is still the answer's.
            self._fail(Disconnected(f"no HTTP answer: {error}"))
        if self._take is None:
            self._wake()
            return
        if piece := reader.take_body():
            self._take(piece)
        if reader.is_complete:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        error = Disconnected(str(exc) if exc is not None else "the connection was closed")
        if self._reader is not None and exc is None:
            try:
                self._reader.end()
            except MalformedAnswer:
                self._fail(error)
            else:
                self._error = error  # for whoever comes next
                self._wake()
            return
        self._fail(error)

    # --- waiting ----------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Return when something came. Raises: UpstreamError."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        """Note why the exchange can't go on; the first reason counts."""
        if self._error is None:
            self._error = error
        self._stop_timer()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._error)

    def _check_silence(self) -> None:
        """Give up on an engine that has been silent for too long, unless we would not listen."""
        if self._is_paused:
            self._heard_at = self._loop.time()
        quiet_s = self._loop.time() - self._heard_at
        if quiet_s < self._read_timeout_s:
            left_s = self._read_timeout_s - quiet_s
            self._timer = self._loop.call_later(left_s, self._check_silence)
            return
        self._fail(TimedOut(f"no byte for {self._read_timeout_s:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def describe_tls(error: ssl.SSLError) -> str:
    """Return why two sides did not agree, for an operator's log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the engine's certificate is not trusted: {error.verify_message}"
    return str(error.reason or error).lower().replace("_", " ")


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80
