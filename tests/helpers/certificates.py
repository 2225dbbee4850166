"""Certificates made for a test, and an engine that has one."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import trustme

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Files:
    """One authority's: its root, and a certificate of 127.0.0.1 with its key."""

    ca: str
    cert: str
    key: str

    def trusting(self, *, shows_own: bool = False) -> ssl.SSLContext:
        """Return what a client needs that trusts this authority. `shows_own`: with a certificate of it."""
        context = ssl.create_default_context(cafile=self.ca)
        if shows_own:
            context.load_cert_chain(self.cert, self.key)
        return context


def make_files(folder: Path) -> Files:
    """Write the files of a new authority into a folder."""
    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    certificate = authority.issue_cert(HOST, "localhost")
    names = [str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")]
    authority.cert_pem.write_to_path(names[0])
    for number, pem in enumerate(certificate.cert_chain_pems):
        pem.write_to_path(names[1], append=number > 0)
    certificate.private_key_pem.write_to_path(names[2])
    return Files(*names)


@contextlib.asynccontextmanager
async def behind_tls(
    port: int, files: Files, *, client_ca: str | None = None
) -> AsyncIterator[int]:
    """Yield the port of a TLS front of a plain server. `client_ca`: whose certificates it asks for."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.load_cert_chain(files.cert, files.key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        inner_reader, inner_writer = await asyncio.open_connection(HOST, port)
        try:
            await asyncio.gather(_pass(reader, inner_writer), _pass(inner_reader, writer))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            connections.discard(task)
            for one in (writer, inner_writer):
                one.transport.abort()

    server = await asyncio.start_server(serve, HOST, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65_536):
        writer.write(piece)
        await writer.drain()
    writer.close()
