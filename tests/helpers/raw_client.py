"""A client of which a test decides every byte, and which sees every byte of the answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
CHAT_BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
STREAM_BODY = CHAT_BODY[:-1] + b',"stream":true}'
WAIT_S = 5.0


def post(
    body: bytes = CHAT_BODY,
    *headers: str,
    path: str = CHAT,
    method: str = "POST",
    version: str = "1.1",
    framing: str | None = None,
) -> bytes:
    """Return a request. `framing`: header lines in place of the right content-length."""
    lines = [f"{method} {path} HTTP/{version}", "host: gateway", *headers]
    lines.append(f"content-length: {len(body)}" if framing is None else framing)
    head = "\r\n".join(line for line in lines if line)
    return f"{head}\r\n\r\n".encode("latin-1") + body


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: gateway", *headers, "", ""]).encode()


def chunked(*pieces: bytes, trailers: bytes = b"") -> bytes:
    """Return a whole body in chunks."""
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    return b"".join([*chunks, b"0\r\n", trailers, b"\r\n"])


@dataclass(slots=True)
class RawAnswer:
    """One answer as it was framed."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Return the word by which programs know the error."""
        code: str = self.json()["error"]["code"]
        return code


class RawClient:
    """One connection to a gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        """Send pieces; with a pause between them each is a packet of its own."""
        for piece in pieces:
            if self.writer.is_closing():
                raise ConnectionResetError  # uvloop would call it a bug
            self.writer.write(piece)
            await self.writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)

    async def head(self, wait_s: float = WAIT_S) -> tuple[int, dict[str, str]]:
        """Read an answer's head."""
        async with asyncio.timeout(wait_s):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        pairs = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
        framing = [name for name, _ in pairs if name in ("content-length", "transfer-encoding")]
        assert len(framing) <= 1, f"framed in two ways: {lines}"
        return int(first.split(" ")[1]), dict(pairs)

    async def answer(self, *, has_body: bool = True) -> RawAnswer:
        """Read a whole answer."""
        status, headers = await self.head()
        async with asyncio.timeout(WAIT_S):
            if not has_body or status in (204, 304):
                body = b""
            elif headers.get("transfer-encoding") == "chunked":
                body = b"".join([piece async for piece in self.chunks()])
            elif "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
        return RawAnswer(status, headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            piece = await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
            if not size:
                return
            yield piece

    async def rest(self) -> bytes:
        """Return what comes until the gateway closes the connection."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""  # reset: bytes of ours had not been read

    def close(self) -> None:
        self.writer.close()


@contextlib.asynccontextmanager
async def raw_client(port: int, *, receive_bytes: int | None = None) -> AsyncIterator[RawClient]:
    """Connect. `receive_bytes`: how much the connection may hold that nobody reads."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes or 1 << 20)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
