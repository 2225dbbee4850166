"""A turn that follows at once waits, briefly, for the events of the answer before it."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine, Received
from fake_publisher import FakePublisher, announce, stored_map, tokens_of
from live_gateway import live_gateway, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

ANSWER = b'{"choices":[],"usage":{"prompt_tokens":24,"completion_tokens":9,"total_tokens":33}}'


async def answer(request: Received) -> None:
    await request.answer(200, ANSWER)


@pytest.mark.parametrize(("late_s", "expected"), [(0.1, "32"), (None, "16")])
async def test_the_last_block_counts_if_it_comes_in_time(
    late_s: float | None, expected: str
) -> None:
    publisher = FakePublisher()
    tokens = tokens_of(40)
    async with FakeEngine(answer) as engine, FakeEngine() as other:
        announce(engine, publisher)
        async with live_gateway([engine.url, other.url]) as gateway:
            await until(lambda: publisher.replay_requests == [0])
            await asyncio.sleep(0.1)
            await publisher.publish(0, [stored_map([1], tokens[:16])])
            await until(lambda: gateway.core.index.total == 1)
            post = gateway.client.post
            first = await post("/v1/completions", json={"model": "m", "prompt": tokens[:24]})
            assert first.headers["x-moongate-instance"] == "a"
            began = asyncio.get_running_loop().time()
            follows = asyncio.create_task(
                post("/v1/completions", json={"model": "m", "prompt": tokens})
            )
            if late_s is not None:
                await asyncio.sleep(late_s)
                await publisher.publish(1, [stored_map([2], tokens[16:32], parent=1)])
            second = await follows
            waited_s = asyncio.get_running_loop().time() - began
        await publisher.close()
    assert second.headers["x-moongate-device-tokens"] == expected
    assert waited_s < 1.0
