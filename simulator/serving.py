"""One ASGI app on one socket, beside others in the same process and on its event loop.

Responsible for binding before serving, for ending in order, and for ending out of order.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

SHUTDOWN_LIMIT_S = 1
"""How long open connections may take to end."""


class SocketServer:
    """Listens from the start: connections wait in the backlog until `serve`."""

    def __init__(self, host: str, port: int) -> None:
        """`port` 0: any free one. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's algorithm off only where the protocol is named; with it an answer that
        # is written in two pieces takes 40 ms.
        self._listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((host, port))
        except OSError:
            self._listener.close()
            raise
        self._listener.listen(2048)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def serve(self, app: Starlette) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            lifespan="off",
            log_config=None,  # logging belongs to the host process
            access_log=False,
            timeout_graceful_shutdown=SHUTDOWN_LIMIT_S,
        )
        self._server = _EmbeddedServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        if self._server is None or self._serving is None:
            self._listener.close()
            return
        self._server.should_exit = True
        await self._serving

    async def cut(self) -> None:
        """Break off all connections, and take no new ones."""
        if self._server is None:
            self._listener.close()
            return
        while not self._server.started:  # noqa: ASYNC110 -- it has no event for it
            await asyncio.sleep(0)
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        self._server.force_exit = True


class _EmbeddedServer(uvicorn.Server):
    """A server that leaves signals to its host: there may be several in one process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
