"""An engine whose every byte a test decides: raw HTTP/1.1 on a socket, and what it was sent.

Unlike the simulated engine it computes nothing; it is for what engines do wrong (cut connections,
odd headers, single bytes, silence).
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Received:
    """One request as it came, and the connection that it came on."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    client_left: asyncio.Event = field(default_factory=asyncio.Event)

    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, data: bytes) -> None:
        if self.writer.is_closing():
            raise ConnectionResetError  # uvloop would call it a bug
        self.writer.write(data)
        await self.writer.drain()

    async def answer(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole answer with a length."""
        lines = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **(headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        await self.send(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body)

    async def start_stream(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        await self.send(
            f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )

    async def send_chunk(self, data: bytes) -> None:
        """Send one chunk in HTTP's framing; an empty one ends the body."""
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def cut(self) -> None:
        """End the connection without any ceremony."""
        self.writer.transport.abort()


Handler = Callable[[Received], Awaitable[None]]


def streaming_until(may_end: asyncio.Event) -> Handler:
    """Return what begins a stream at once, and ends it when it may."""

    async def stream(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(b'data: {"choices":[]}\n\n')
        await may_end.wait()
        await request.send_chunk(b"data: [DONE]\n\n")
        await request.send_chunk(b"")

    return stream


def chat_answer(text: str = "ok", cached_tokens: int | None = None) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
    ).encode()


def stream_event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


async def answer_ok(request: Received) -> None:
    await request.answer(200, chat_answer())


class FakeEngine:
    """Listens on localhost; `handler` decides what every proxied request gets."""

    def __init__(self, handler: Handler = answer_ok, model: str = "m") -> None:
        self.handler = handler
        self.received: list[Received] = []
        self.connections = 0  # accepted so far
        self.is_healthy = True
        self.has_messages = True
        self.models: list[dict[str, Any]] = [{"id": model, "object": "model", "parent": None}]
        self.side_calls: dict[str, Handler] = {}
        self.port = 0
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[Any]:
        return [request.json() for request in self.received]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._is_stopping = False
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """Be gone: no listener, and every connection reset."""
        assert self._listener is not None
        assert self._accepting is not None
        # Woken rather than cancelled: a connection accepted at that moment would be left open.
        self._is_stopping = True
        with socket.create_connection(("127.0.0.1", self.port)):
            await self._accepting
        self._listener.close()
        connections, self._connections = self._connections, {}
        for writer, task in connections.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*connections.values(), return_exceptions=True)

    async def _accept(self) -> None:
        """Accept until told to stop (asyncio's own server leaks what it accepts while it closes)."""
        assert self._listener is not None
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            if self._is_stopping:
                connection.close()
                return
            self.connections += 1
            reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 27)
            self._connections[writer] = asyncio.create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                request = await _read_request(reader, writer)
                await self._handle(request)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.pop(writer, None)
            writer.close()

    async def _handle(self, request: Received) -> None:
        path = request.path.partition("?")[0]
        if path in self.side_calls:
            await self.side_calls[path](request)
        elif path == "/health":
            await request.answer(200 if self.is_healthy else 503, b"")
        elif path == "/v1/models":
            await request.answer(200, json.dumps({"data": self.models}).encode())
        elif request.method == "GET" and path == "/v1/messages" and self.has_messages:
            await request.answer(405, b'{"detail":"Method Not Allowed"}')
        elif request.method == "GET" or path == "/tokenize":
            await request.answer(404, b'{"detail":"Not Found"}')
        else:
            self.received.append(request)
            watch = asyncio.create_task(_watch(request))
            try:
                await self.handler(request)
            except ConnectionError:
                request.client_left.set()
                raise
            finally:
                watch.cancel()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, path, headers, body, writer, reader)


async def _watch(request: Received) -> None:
    """Note when the peer closes while its answer is being made (it sends nothing meanwhile)."""
    while not request.reader.at_eof() and request.reader.exception() is None:
        await asyncio.sleep(0.01)
    request.client_left.set()
