"""Connections to engines: one pool an instance; send a request, read its answer, cancel it.

What can come out of `send` and of reading is one of three: `Unreachable`, `Disconnected`,
`TimedOut`. Closing an answer before its end closes the connection, which is how an engine learns
that it should stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
from yarl import URL

KEEP_ALIVE_S = 4.0
"""Idle connections are closed before the engine does it (uvicorn: 5 s), so that no request is sent
into a connection that is just being closed."""


class UpstreamError(Exception):
    """An attempt at an engine failed."""


class Unreachable(UpstreamError):
    """Refused, or no route: nothing listens there."""


class Disconnected(UpstreamError):
    """The connection ended before the answer did."""


class TimedOut(UpstreamError):
    """No connection, or no byte, in time; the attempt has been cancelled."""


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """An answer whose headers have come. Read `chunks` to its end, or `close` it."""

    status: int
    raw_headers: Sequence[tuple[bytes, bytes]]
    _response: aiohttp.ClientResponse

    def header(self, name: str) -> str:
        return self._response.headers.get(name, "")

    async def chunks(self) -> AsyncIterator[bytes]:
        """Iterate over the body as it comes, not decoded. Raises: UpstreamError."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError) as error:
            raise _translate(error) from error

    def close(self) -> None:
        """End the exchange. An answer not read to its end takes its connection with it."""
        self._response.close()


class Upstream:
    """One instance's connection pool. Create it inside the event loop, and `close` it."""

    def __init__(self, url: str, *, connect_timeout_s: float, read_timeout_s: float) -> None:
        self._url = url
        # No limit of our own on connections: what an instance gets is the policy's decision, and
        # a full pool would look like a slow engine.
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s
            ),
            trust_env=False,
        )

    async def send(
        self, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> UpstreamAnswer:
        """Post a body and return the answer once its headers are here. Raises: UpstreamError."""
        try:
            response = await self._session.post(
                URL(self._url + path, encoded=True),
                data=body,
                headers=list(headers),
                allow_redirects=False,
            )
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _translate(error) from error
        return UpstreamAnswer(response.status, response.raw_headers, response)

    async def close(self) -> None:
        await self._session.close()


def _translate(error: Exception) -> UpstreamError:
    if isinstance(error, asyncio.TimeoutError):
        return TimedOut(str(error) or type(error).__name__)
    if isinstance(error, aiohttp.ClientConnectorError):
        return Unreachable(str(error))
    return Disconnected(str(error) or type(error).__name__)
