"""A KV-event publisher whose every frame a test decides: PUB, and ROUTER for replay.

Shapes as in vLLM 0.32's `ZmqEventPublisher`; numbering, gaps and restarts are the test's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from fake_engine import FakeEngine, Received

END = (-1).to_bytes(8, "big", signed=True)


def stored_map(
    hashes: Sequence[int | bytes],
    tokens: Sequence[int],
    parent: int | bytes | None = None,
    block_size: int = 16,
    **more: Any,
) -> dict[str, Any]:
    """Return a BlockStored event in the map form."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def stored_array(
    hashes: Sequence[int | bytes],
    tokens: Sequence[int],
    parent: int | bytes | None = None,
    block_size: int = 16,
) -> list[Any]:
    """Return a BlockStored event in the positional form of older engines."""
    return ["BlockStored", list(hashes), parent, list(tokens), block_size, None, "GPU", None]


class FakePublisher:
    """Publishes what it is told; keeps what it published for replay unless told to forget."""

    def __init__(
        self, *, has_replay: bool = True, has_topic_frame: bool = True, port: int | None = None
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for sock in (self._pub, self._router):
            sock.setsockopt(zmq.LINGER, 0)
        if port is None:
            port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        else:
            self._pub.bind(f"tcp://127.0.0.1:{port}")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.replay_endpoint = f"tcp://127.0.0.1:{replay_port}" if has_replay else None
        self._has_topic_frame = has_topic_frame
        self.buffer: dict[int, bytes] = {}
        self.replay_requests: list[int] = []
        self._replaying = asyncio.create_task(self._serve_replays())

    def config(self) -> dict[str, Any]:
        """Return the publisher's entry in `/kv_event_sources`."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": 10_000,
            "topic": "",
        }

    async def publish(
        self,
        sequence: int,
        events: Sequence[Any],
        *,
        rank: int | None = 0,
        is_lost: bool = False,
        topic: bytes = b"",
    ) -> None:
        """Send a batch, or (`is_lost`) only keep it for replay."""
        payload = msgspec.msgpack.encode([1.0 + sequence, list(events), rank])
        self.buffer[sequence] = payload
        if not is_lost:
            await self.send([topic, sequence.to_bytes(8, "big"), payload])

    async def send(self, frames: Sequence[bytes]) -> None:
        await self._pub.send_multipart(list(frames))

    async def _serve_replays(self) -> None:
        while True:
            identity, _, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.replay_requests.append(first)
            topic = [b""] if self._has_topic_frame else []
            for sequence, payload in sorted(self.buffer.items()):
                if sequence >= first:
                    frames = [identity, b"", *topic, sequence.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([identity, b"", *topic, END, b""])

    async def close(self) -> None:
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self._context.destroy(linger=0)


def first_of_free_ports(count: int) -> int:
    """Return the first of so many ports in a row that were free a moment ago."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(_bound(0)).getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    stack.enter_context(_bound(port))
                return int(first)


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    try:
        sock.bind(("127.0.0.1", port))
    except BaseException:
        sock.close()
        raise
    return sock


def announce(engine: FakeEngine, *publishers: FakePublisher, first_rank: int = 0) -> None:
    """Let a fake engine name these publishers, one a rank, in `/kv_event_sources`."""
    sources = {str(first_rank + n): p.config() for n, p in enumerate(publishers)}

    async def answer(request: Received) -> None:
        await request.answer(200, json.dumps(sources).encode())

    engine.side_calls["/kv_event_sources"] = answer


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """Return `count` token ids that differ between seeds from the first on."""
    return [(seed * 7919 + number) % 30_000 + 1 for number in range(count)]
