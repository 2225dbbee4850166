"""A real Mooncake pool behind two real engines: what one computed, the other fetches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import Conversation
from engine_metrics import counter
from pool_processes import MooncakePool
from processes import BLOCK_TOKENS, EngineProcess, Serve, states_of

TURNS = 10
ENGINE: dict[str, Any] = {"gpu_blocks_override": 4096, "max_model_len_tokens": 16_384}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[MooncakePool]:
    pool = MooncakePool(tmp_path)
    pool.start()
    yield pool
    pool.stop()


@pytest.fixture
def pair(pool: MooncakePool, tiny_model: Path) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Return two engines that store into the pool."""
    engines = (pool.engine(tiny_model, "a", **ENGINE), pool.engine(tiny_model, "b", **ENGINE))
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def test_a_session_goes_on_from_the_pool_when_its_home_dies(
    pair: tuple[EngineProcess, EngineProcess],
    pool: MooncakePool,
    tiny_model: Path,
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gateway = serve(pair, pool=pool.settings)
    session = Conversation(gateway.url, tiny_model, seed=1)
    replies = session.grow(TURNS, tokens=1200)
    home = replies[0].instance
    assert {reply.instance for reply in replies} == {home}, "the session has one home"
    assert replies[-1].prompt_tokens >= 12_000
    survivor = pair[1] if home == "a" else pair[0]
    (pair[0] if home == "a" else pair[1]).kill()
    while "down" not in states_of(gateway.url):
        time.sleep(0.05)

    before = counter(survivor.url, "vllm:external_prefix_cache_hits_total")
    (turn,) = session.grow(1, tokens=100)
    fetched = counter(survivor.url, "vllm:external_prefix_cache_hits_total") - before
    assert turn.headers["x-moongate-reason"] == "pool_prefix"
    full_blocks = turn.prompt_tokens // BLOCK_TOKENS
    assert fetched >= 0.95 * full_blocks * BLOCK_TOKENS
    predicted = int(turn.headers["x-moongate-pool-tokens"])
    assert predicted == fetched, "what the receipt says is what the engine got"

    cold = Conversation(gateway.url, tiny_model, seed=2).grow(1, tokens=turn.prompt_tokens - 100)[0]
    assert cold.cached_tokens == 0
    with capsys.disabled():
        print(
            f"\nfrom the pool: {fetched:.0f} of {turn.prompt_tokens} tokens, first token after"
            f" {turn.first_token_s:.2f} s; computed: {cold.prompt_tokens} tokens in"
            f" {cold.first_token_s:.2f} s"
        )
    assert turn.first_token_s * 5 <= cold.first_token_s
