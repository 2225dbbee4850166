"""What a real engine says itself, read without our own code: its replay, and its reported reuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import zmq

END_OF_REPLAY = b"\xff" * 8

COPIES = {"BlockStored": 1, "BlockRemoved": -1}
"""By how many an event changes the copies of its blocks: vLLM announces each physical one."""


def replayed_events(endpoint: str) -> Iterator[dict[str, Any]]:
    """Yield all events of an engine's full replay, and see that no batch is missing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart([b"", bytes(8)])
        expected = 0
        while dealer.poll(10_000):
            _, _, sequence, payload = dealer.recv_multipart()
            if sequence == END_OF_REPLAY:
                return
            assert int.from_bytes(sequence, "big") == expected
            expected += 1
            yield from msgspec.msgpack.decode(payload)[1]
    raise AssertionError("the replay did not end")


async def complete(
    client: httpx.AsyncClient, prompt: list[int], max_tokens: int
) -> tuple[int, int]:
    """Send a prompt; return the reuse in tokens, as the gateway predicted and as the engine reports."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return int(answer.headers["x-moongate-device-tokens"]), details.get("cached_tokens") or 0
