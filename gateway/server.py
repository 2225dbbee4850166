"""Runs the gateway on a socket until it is told to stop.

SIGTERM and SIGINT drain: the listener and idle connections close at once, running answers may end
within `drain.limit_s`. A second signal breaks them off; what is open is closed even then. SIGHUP reads the
configuration again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import math
import os
import signal
import socket
from collections.abc import Generator

import uvicorn
import uvloop

from moongate.gateway.app import Gateway
from moongate.gateway.client_protocol import ClientProtocol
from moongate.gateway.config.config_file import Loaded

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Idle client connections live longer than the pools of common clients keep them, so that no client
sends a request into a connection that is just being closed."""

CLOSING_S = 2.0
"""For ending and closing, when the server is to stop at once."""

ORPHAN_CHECK_S = 1.0

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's `mallopt` (malloc.h)."""


class ListenError(OSError):
    """The address can't be listened on; the text says which and why."""


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a bound socket. Port 0 takes any free one. `is_shared`: with this user's other workers.

    Raises: ListenError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio, unlike uvloop, sends small pieces at once only where the protocol is named.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ListenError(f"can't listen on {host}:{port}: {error.strerror or error}") from error
    return sock


class _Server(uvicorn.Server):
    """A server whose signals are handled here: uvicorn would raise them again after a clean stop.

    Told to stop at once, it ends the running answers and closes what is open; uvicorn leaves both. What runs in the
    background drains like answers that a client waits for.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # It begins before uvicorn does, which sleeps a tenth of a second first: whoever follows a response that
        # is cut is told so before being cut off too.
        background = asyncio.create_task(self._gateway.drain())
        self.server_state.tasks.add(background)  # for which uvicorn waits
        background.add_done_callback(self.server_state.tasks.discard)
        await super().shutdown(sockets)
        if not self.force_exit:
            return
        background.cancel()
        await asyncio.wait([background], timeout=CLOSING_S)
        running = list(self.server_state.tasks)
        for task in running:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                await asyncio.gather(*running, return_exceptions=True)
                await self.lifespan.shutdown()


class GatewayServer:
    """One gateway on one socket."""

    def __init__(self, gateway: Gateway, sock: socket.socket) -> None:
        self.gateway = gateway
        self._socket = sock
        tls = gateway.settings.listen.tls
        self._server = _Server(
            uvicorn.Config(
                gateway,
                ssl_context_factory=(lambda *_: tls.context()) if tls is not None else None,
                http=ClientProtocol,
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            ),
            gateway,
        )

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def has_started(self) -> bool:
        return self._server.started

    def request_stop(self) -> None:
        """Drain; asked again, stop at once."""
        limit_s = self.gateway.settings.drain.limit_s
        if self._server.should_exit:
            logger.warning("told to stop again: what still runs is broken off")
        else:
            logger.info("told to stop: nothing new is taken, what runs may take %g s", limit_s)
        self._server.config.timeout_graceful_shutdown = math.ceil(limit_s)
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True
        self.gateway.readiness.is_draining = True

    async def serve(self) -> None:
        """Serve until asked to stop. Raises: SystemExit, where the gateway can't start."""
        with self._socket:
            await self._server.serve(sockets=[self._socket])
        logger.info("the gateway has stopped")


def handle_signals(server: GatewayServer) -> None:
    """Let SIGTERM and SIGINT ask the server to stop, and SIGHUP to reload. Call inside the event loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.request_stop)
    loop.add_signal_handler(signal.SIGHUP, server.gateway.reload_soon)


def spare_collector() -> None:
    """Let the garbage collector look at less, and less often.

    What was imported stays for good, and requests leave few cycles behind: with Python's own
    thresholds a twentieth of a request's time went into looking for garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def keep_memory() -> None:
    """Let the C library keep what requests free, instead of giving it back and asking for it again.

    Bodies of some 100 KB would else be fresh pages each time, which the kernel clears one by one: a
    tenth of what relaying them costs. Elsewhere than on glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option, size in (
            (M_TRIM_THRESHOLD, 64 << 20),
            (M_TOP_PAD, 4 << 20),
            (M_MMAP_THRESHOLD, 8 << 20),
        ):
            libc.mallopt(option, size)


async def _stop_as_orphan(server: GatewayServer, parent: int) -> None:
    """Stop a worker whose parent has ended without a word."""
    while True:
        await asyncio.sleep(ORPHAN_CHECK_S)
        if os.getppid() != parent:  # nobody tells
            break
    logger.error("the process that started this worker is gone, so it stops")
    server.request_stop()


def run(loaded: Loaded, hub: str | None = None) -> None:
    """Serve as a file says until a signal asks to stop. `hub`: where this process meets other workers.

    Raises: ListenError.
    """
    settings = loaded.settings
    host, parent = settings.listen.host, os.getppid()
    sock = listen(host, settings.listen.port, is_shared=hub is not None)

    async def main() -> None:
        server = GatewayServer(Gateway(settings, loaded=loaded, hub=hub), sock)
        handle_signals(server)
        spare_collector()
        keep_memory()
        if hub is None:
            scheme = "https" if settings.listen.tls is not None else "http"
            logger.info("moongate listens on %s://%s:%d", scheme, host, server.port)
            await server.serve()
            return
        watching = asyncio.create_task(_stop_as_orphan(server, parent))
        await server.serve()
        watching.cancel()

    uvloop.run(main())
