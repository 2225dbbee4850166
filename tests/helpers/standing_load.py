"""Connections and streams that stay: a gateway's process under thousands of both, and what it held.

The engine (every answer of which a clock writes) and the clients are in this process, the gateway is in
one of its own, whose memory is looked at.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml
from fake_engine import stream_event
from processes import MOONGATE, Child, free_port
from raw_client import RawClient, get, post, raw_client
from resident import PAGE_BYTES

AT_A_TIME = 100
"""Connections that are opened, or used, together."""

START_S = 20.0
LATE_S = 30.0
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
ASKS = {"model": "m", "messages": [{"role": "user", "content": "go on"}], "stream": True}


@dataclass(frozen=True, slots=True)
class Standing:
    """How many, and for how long. An answer's pieces come in even distances."""

    duration_s: float
    streams: int
    idle: int
    piece_s: float = 5.0  # of the many streams
    long_piece_s: float = 1.0  # of the one that is looked at closely
    rest_s: float = 50.0  # idle connections carry a request so often; the gateway closes at 75


@dataclass(slots=True)
class Stood:
    """What became of it."""

    pieces_expected: int = 0
    pieces_missing: int = 0  # of all streams, the long one among them
    streams_whole: int = 0
    long_pieces: int = 0
    idle_requests: int = 0
    dropped: list[str] = field(default_factory=list)
    gateway_bytes: list[int] = field(default_factory=list)
    counted: float = 0.0  # by the gateway, of chats
    inflight: float = -1.0

    def __str__(self) -> str:
        sizes = [size / 1e6 for size in self.gateway_bytes]
        return (
            f"{self.streams_whole} whole streams, {self.pieces_missing} of {self.pieces_expected} pieces "
            f"missing, {self.long_pieces} in the long one; {self.idle_requests} requests on idle "
            f"connections; {len(self.dropped)} dropped {self.dropped[:3]}; the gateway's RSS "
            f"{sizes[0]:.0f} MB at first, {max(sizes):.0f} at most, {sizes[-1]:.0f} at last"
        )


def allow_files(count: int) -> None:
    """Raise this process' limit of open files; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= count, f"at most {hard} open files here"
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


# --- the engine -----------------------------------------------------------------------------------


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = head.partition("content-length: ")[2].partition("\r\n")[0]
            body = await reader.readexactly(int(length or 0))
            if head.startswith("post /v1/chat"):
                await _stream(writer, json.loads(body))
            else:
                is_known = " /health " in head or " /v1/models " in head
                answer = MODELS if is_known else b"{}"
                status = 200 if is_known else 404
                writer.write(
                    b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (status, len(answer), answer)
                )
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _stream(writer: asyncio.StreamWriter, asked: dict[str, float]) -> None:
    """Send as many pieces as were asked for, each at its time."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    due_at = loop.time()
    for n in range(int(asked["x_pieces"])):
        _write_chunk(writer, stream_event(f"piece {n}"))
        due_at += asked["x_piece_s"]
        await asyncio.sleep(max(due_at - loop.time(), 0))
        await writer.drain()
    _write_chunk(writer, b"data: [DONE]\n\n")
    _write_chunk(writer, b"")


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    if writer.is_closing():
        raise ConnectionResetError
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@asynccontextmanager
async def _gateway(directory: Path) -> AsyncIterator[Child]:
    """Run an engine here and a gateway before it in a process of its own."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, backlog=2048)
    port = free_port()
    settings = directory / "moongate.yaml"
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings.write_text(yaml.safe_dump({"instances": [{"id": "a", "url": url}]}))
    argv = [*MOONGATE, "serve", "-c", str(settings), "--port", str(port)]
    child = Child.start(argv, f"http://127.0.0.1:{port}", directory / "gateway.log")
    try:
        await asyncio.to_thread(child.wait_until, "/ready", START_S)
        yield child
    finally:
        child.kill()
        server.close()


# --- the load -------------------------------------------------------------------------------------


async def stand(load: Standing, directory: Path) -> Stood:
    """Hold all of it for as long as is asked."""
    allow_files(2 * load.streams + load.idle + 1000)
    stood = Stood()
    async with _gateway(directory) as gateway, AsyncExitStack() as connections:
        port = int(gateway.url.rpartition(":")[2])
        watching = asyncio.create_task(_watch(gateway.process.pid, stood))
        idle = await _open_idle(port, load.idle, connections)
        await asyncio.gather(
            _take_stream(port, load.duration_s, load.long_piece_s, stood, is_long=True),
            *(
                _take_stream(port, load.duration_s, load.piece_s, stood, delay_s=n / 200)
                for n in range(load.streams)
            ),
            _use_now_and_then(idle, load, stood),
        )
        watching.cancel()
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:
            page = (await client.get("/metrics")).text
        stood.counted = _sum(page, "moongate_requests_total")
        stood.inflight = _sum(page, "moongate_inflight_requests")
    return stood


async def _watch(pid: int, stood: Stood) -> None:
    while True:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        stood.gateway_bytes.append(pages * PAGE_BYTES)
        await asyncio.sleep(1.0)


async def _open_idle(port: int, count: int, connections: AsyncExitStack) -> list[RawClient]:
    idle: list[RawClient] = []
    while len(idle) < count:
        wanted = min(AT_A_TIME, count - len(idle))
        opened = [connections.enter_async_context(raw_client(port)) for _ in range(wanted)]
        idle += await asyncio.gather(*opened)
    return idle


async def _take_stream(
    port: int, duration_s: float, piece_s: float, stood: Stood, *, delay_s: float = 0.0,
    is_long: bool = False,
) -> None:  # fmt: skip
    """Ask for a stream of pieces and see that each comes, in order."""
    await asyncio.sleep(delay_s)
    pieces = max(round(duration_s / piece_s), 1)
    body = json.dumps({**ASKS, "x_pieces": pieces, "x_piece_s": piece_s}).encode()
    stood.pieces_expected += pieces
    came = 0
    try:
        async with asyncio.timeout(duration_s + LATE_S), raw_client(port) as client:
            await client.send(post(body, "content-type: application/json"))
            await client.head(LATE_S)
            events = b"".join([chunk async for chunk in client.chunks()]).split(b"\n\n")
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
        stood.dropped.append(f"stream: {error!r}")
        events = []
    while came < len(events) and events[came] + b"\n\n" == stream_event(f"piece {came}"):
        came += 1
    stood.pieces_missing += pieces - came
    stood.streams_whole += events[came : came + 1] == [b"data: [DONE]"]
    if is_long:
        stood.long_pieces = came


async def _use_now_and_then(idle: list[RawClient], load: Standing, stood: Stood) -> None:
    """Let each idle connection carry a request again, after every rest."""
    loop = asyncio.get_running_loop()
    due_at = loop.time()
    ends_at = due_at + load.duration_s
    while True:
        for start in range(0, len(idle), AT_A_TIME):
            asking = (_ask(client, stood) for client in idle[start : start + AT_A_TIME])
            await asyncio.gather(*asking)
        due_at += load.rest_s
        if due_at > ends_at:
            return
        await asyncio.sleep(max(due_at - loop.time(), 0))


async def _ask(client: RawClient, stood: Stood) -> None:
    try:
        async with asyncio.timeout(LATE_S):
            await client.send(get("/health"))
            answer = await client.answer()
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
        stood.dropped.append(f"idle connection: {error!r}")
        return
    assert answer.status == 200
    stood.idle_requests += 1


def _sum(page: str, name: str) -> float:
    lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
