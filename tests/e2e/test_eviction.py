"""A cache too small for its work: what the engine evicts, the index no longer credits."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_truth import COPIES, complete, replayed_events
from live_gateway import live_gateway, until
from processes import BLOCK_TOKENS, EngineProcess, running

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
    with running(engine):
        yield engine


def _replayed_blocks(endpoint: str) -> set[int]:
    """Return the blocks that the engine holds by its full replay, decoded independently."""
    copies: Counter[int] = Counter()
    for event in replayed_events(endpoint):
        for block in event["block_hashes"]:
            copies[block] += COPIES[event["type"]]
    return {block for block, count in copies.items() if count > 0}


def _prompts(seed: int) -> list[list[int]]:
    """Return 60 prompts of 300 to 1,500 tokens, some of which share beginnings."""
    chance = random.Random(seed)
    beginnings = [[chance.choice(VOCABULARY) for _ in range(400)] for _ in range(4)]
    return [
        chance.choice(beginnings)[: chance.randint(0, 400)]
        + [chance.choice(VOCABULARY) for _ in range(chance.randint(300, 1100))]
        for _ in range(60)
    ]


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_evicted_blocks_are_not_credited_and_the_index_equals_the_engine(
    small_engine: EngineProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = _prompts(seed=5)
    holder = Holder(InstanceId("a"))
    async with live_gateway([small_engine.url]) as gateway:
        for prompt in prompts:
            await complete(gateway.client, prompt, max_tokens=8)
        await asyncio.sleep(0.5)
        core = gateway.core
        removed = await gateway.metric("moongate_index_events_total", kind="removed")
        assert removed > BLOCKS  # the cache was turned over

        chance = random.Random(6)
        probes = [chance.choice(prompts) for _ in range(25)] + prompts[-25:]
        outcomes = []
        for probe in probes:
            outcomes.append(await complete(gateway.client, probe, max_tokens=8))
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
