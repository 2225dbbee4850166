"""A real Mooncake pool behind two real engines: what one computed, the other fetches.

The engines are shared by the tests here, in their order: the last one kills one of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from conversation import Conversation, Reply, ask
from engine_metrics import counter
from pool_processes import MIB, MooncakePool
from processes import BLOCK_TOKENS, EngineProcess, Serve, running, states_of

Pair = tuple[EngineProcess, EngineProcess]

# A device cache of 19,000 tokens each, so that sessions push each other out.
ENGINE: dict[str, Any] = {"gpu_blocks_override": 600, "max_model_len_tokens": 16_384}
CREDIT_S_MAX = 10.0
"""How long a token may be expected of a pool that has lost it (docs/decisions/0010)."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakePool]:
    with MooncakePool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture(scope="module")
def pair(pool: MooncakePool, tiny_model: Path) -> Iterator[Pair]:
    """Return two engines that store into the pool."""
    engines = (pool.engine(tiny_model, "a", **ENGINE), pool.engine(tiny_model, "b", **ENGINE))
    with running(*engines):
        yield engines


def pool_state(url: str) -> dict[str, Any]:
    """Return what a gateway says of its pool."""
    state: dict[str, Any] = httpx.get(f"{url}/admin/index", trust_env=False).json()["pool"]
    return state


def wait_for(condition: Any, limit_s: float) -> float:
    """Wait until the condition holds. Return how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "it never came"
        time.sleep(0.05)
    return time.monotonic() - began


def is_wrong(reply: Reply) -> bool:
    """Tell whether the receipt promised another reuse than the engine reports."""
    return abs(reply.predicted_tokens - reply.cached_tokens) >= BLOCK_TOKENS


def credits_pool(reply: Reply) -> bool:
    """Tell whether the receipt promised something of the pool.

    Four sessions at once push each other out of these small devices as well, now and then between a decision
    and its computation; that is no credit for what a master has lost.
    """
    return int(reply.headers["x-moongate-pool-tokens"]) > 0


def test_a_master_that_is_restarted_fails_no_request_and_its_lost_keys_earn_no_credit(
    pair: Pair, pool: MooncakePool, tiny_model: Path, serve: Serve,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    gateway = serve(pair, pool=pool.settings)
    sessions = [Conversation(gateway.url, tiny_model, seed=10 + n) for n in range(4)]
    stop = threading.Event()
    replies: list[tuple[float, Reply]] = []

    def run(session: Conversation) -> None:
        while not stop.is_set():
            (reply,) = session.grow(1, tokens=200)
            replies.append((time.monotonic(), reply))

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(run, session) for session in sessions]
        time.sleep(4.0)
        assert pool.master is not None
        pool.master.kill()
        killed_at = time.monotonic()
        down_s = wait_for(lambda: not pool_state(gateway.url)["up"], 10.0)
        pool.start_master()
        up_s = wait_for(lambda: pool_state(gateway.url)["up"], 30.0)
        time.sleep(CREDIT_S_MAX)
        stop.set()
        for outcome in running:
            outcome.result()
    expected_late = [
        reply
        for at, reply in replies
        if at > killed_at + CREDIT_S_MAX and is_wrong(reply) and credits_pool(reply)
    ]  # fmt: skip
    with capsys.disabled():
        print(
            f"\n{len(replies)} turns, none failed; noticed to be down after {down_s:.1f} s, up again"
            f" after {up_s:.1f} s; wrong after {CREDIT_S_MAX:.0f} s: {len(expected_late)}"
        )
    assert len(replies) >= 12
    assert expected_late == []


def test_a_pool_that_is_too_small_is_not_counted_on(
    pair: Pair, pool: MooncakePool, tiny_model: Path, serve: Serve,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pool.stop()
    pool.segment_bytes = 32 * MIB
    pool.start()
    gateway = serve(pair, pool=pool.settings)
    sessions = [Conversation(gateway.url, tiny_model, seed=30 + n) for n in range(12)]
    rounds = [[session.grow(1, tokens=700)[0] for session in sessions] for _ in range(8)]
    evicted = pool.evicted_keys()
    replies = [reply for turns in rounds[3:] for reply in turns]  # full since the third round
    wrong = [reply for reply in replies if is_wrong(reply)]
    pooled = [r for r in replies if int(r.headers["x-moongate-pool-tokens"])]
    with capsys.disabled():
        print(
            f"\n{evicted} keys evicted; of {len(replies)} turns {len(pooled)} were to fetch from the"
            f" pool, {len(wrong)} got another reuse than was said"
        )
    with capsys.disabled():
        for reply in wrong:
            names = ("instance", "device-tokens", "pool-tokens", "prompt-tokens")
            said = {name: reply.headers[f"x-moongate-{name}"] for name in names}
            print(f"  {said}, reused {reply.cached_tokens}")
    assert evicted > 0
    assert pooled, "nothing was fetched, so nothing was tried"
    assert len(wrong) <= 0.05 * len(replies)


def fetch_once(pair: Pair, model: Path) -> None:
    """Let each engine store something, and fetch what the other one stored.

    An engine's first call to a new master fails, and with it a look-up; its first fetch from a new store
    process takes up to some seconds, for the connection.
    """
    for engine in pair:
        Conversation(engine.url, model, seed=3).grow(1, tokens=100)
    for seed, (one, other) in enumerate((pair, pair[::-1]), start=4):
        stored = Conversation(one.url, model, seed=seed)
        stored.grow(1, tokens=600)
        wait_for(lambda: ask(other.url, stored.messages[:1]).cached_tokens > 0, 20.0)  # noqa: B023


def test_a_session_goes_on_from_the_pool_when_its_home_dies(
    pair: Pair, pool: MooncakePool, tiny_model: Path, serve: Serve,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pool.stop()
    pool.segment_bytes = 1024 * MIB
    pool.start()
    fetch_once(pair, tiny_model)
    gateway = serve(pair, pool=pool.settings)
    session = Conversation(gateway.url, tiny_model, seed=1)
    replies = session.grow(10, tokens=1400)
    home = replies[0].instance
    assert {reply.instance for reply in replies} == {home}, "the session has one home"
    assert replies[-1].prompt_tokens >= 12_000
    survivor = pair[1] if home == "a" else pair[0]
    (pair[0] if home == "a" else pair[1]).kill()
    wait_for(lambda: "down" in states_of(gateway.url), 10.0)

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
