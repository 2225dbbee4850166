"""A cache too small for its work: what the engine evicts, the index no longer credits."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq
from live_gateway import live_gateway, until
from processes import BLOCK_TOKENS, EngineProcess

from moongate.router import Holder, InstanceId, Tier, Trust

BLOCKS = 160
VOCABULARY = range(10, 4000)


@pytest.fixture(scope="module")
def small_engine(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """Return an engine that holds about 5,000 tokens."""
    engine = EngineProcess.make(
        tiny_model,
        tmp_path_factory.mktemp("small"),
        "small",
        gpu_blocks_override=BLOCKS,
        max_model_len_tokens=4096,
    )
    engine.start()
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


def _replayed_blocks(endpoint: str) -> set[int]:
    """Return the blocks that the engine holds by its full replay, decoded independently.

    vLLM announces each physical copy of a block as stored and as removed, so copies are counted.
    """
    copies: Counter[int] = Counter()
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.connect(endpoint)
    sock.send_multipart([b"", (0).to_bytes(8, "big")])
    expected = 0
    while sock.poll(10_000):
        _, _, sequence, payload = sock.recv_multipart()
        if sequence == b"\xff" * 8:
            context.destroy(linger=0)
            return {block for block, count in copies.items() if count > 0}
        assert int.from_bytes(sequence, "big") == expected
        expected += 1
        for event in msgspec.msgpack.decode(payload)[1]:
            step = {"BlockStored": 1, "BlockRemoved": -1}[event["type"]]
            for block in event["block_hashes"]:
                copies[block] += step
    raise AssertionError("the replay did not end")


def _prompts(seed: int) -> list[list[int]]:
    """Return 60 prompts of 300 to 1,500 tokens, some of which share beginnings."""
    chance = random.Random(seed)
    beginnings = [[chance.choice(VOCABULARY) for _ in range(400)] for _ in range(4)]
    return [
        chance.choice(beginnings)[: chance.randint(0, 400)]
        + [chance.choice(VOCABULARY) for _ in range(chance.randint(300, 1100))]
        for _ in range(60)
    ]


async def _complete(client: httpx.AsyncClient, prompt: list[int]) -> tuple[int, int]:
    """Send a prompt; return the predicted and the reported reuse, in tokens."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return int(answer.headers["x-moongate-device-tokens"]), details.get("cached_tokens") or 0


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_evicted_blocks_are_not_credited_and_the_index_equals_the_engine(
    small_engine: EngineProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = _prompts(seed=5)
    holder = Holder(InstanceId("a"))
    async with live_gateway([small_engine.url]) as gateway:
        for prompt in prompts:
            await _complete(gateway.client, prompt)
        await asyncio.sleep(0.5)
        core = gateway.core
        removed = await gateway.metric("moongate_index_events_total", kind="removed")
        assert removed > BLOCKS  # the cache was turned over

        chance = random.Random(6)
        probes = [chance.choice(prompts) for _ in range(25)] + prompts[-25:]
        outcomes = []
        for probe in probes:
            outcomes.append(await _complete(gateway.client, probe))
            await asyncio.sleep(0.05)
        assert [predicted for predicted, _ in outcomes] == [cached for _, cached in outcomes]
        assert sum(cached > 0 for _, cached in outcomes) >= 5
        assert sum(cached == 0 for _, cached in outcomes) >= 5

        await asyncio.sleep(0.5)
        endpoint = f"tcp://127.0.0.1:{small_engine.launch.kv_replay_port}"
        engine_blocks = await asyncio.to_thread(_replayed_blocks, endpoint)
        ((_, state),) = list(core.sources)
        assert state.ledger.engine_hashes(Tier.DEVICE) == engine_blocks
        assert core.index.count(holder, Tier.DEVICE) == len(engine_blocks) <= BLOCKS - 1
        assert core.sources.trust(holder) is Trust.EXACT
    with capsys.disabled():
        print(
            f"\n{len(engine_blocks)} blocks held after {int(removed)} were evicted, all as in the "
            f"engine's replay; {len(outcomes)} probes of {BLOCK_TOKENS}-token blocks as predicted"
        )


@pytest.mark.asyncio
async def test_a_gateway_started_late_knows_what_the_engine_holds(
    small_engine: EngineProcess,
) -> None:
    async with live_gateway([small_engine.url]) as gateway:
        await until(lambda: gateway.core.index.total > 0)
        await asyncio.sleep(0.5)
        endpoint = f"tcp://127.0.0.1:{small_engine.launch.kv_replay_port}"
        engine_blocks = await asyncio.to_thread(_replayed_blocks, endpoint)
        ((_, state),) = list(gateway.core.sources)
        assert state.ledger.engine_hashes(Tier.DEVICE) == engine_blocks
