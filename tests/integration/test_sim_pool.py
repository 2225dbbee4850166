"""Simulated engines that share a pool, over sockets, and the master's HTTP over such a pool."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from moongate.kvpool.memory import MemoryPool
from moongate.simulator.engine import EngineProfile
from moongate.simulator.event_wire import DigestForm
from moongate.simulator.master import PoolMaster
from moongate.simulator.server import PoolSegment, SimConfigError, SimEngine, SimEngineConfig
from moongate.simulator.transfer import Connector, Role

PROFILE = EngineProfile(
    blocks=65,
    block_size_tokens=4,
    prefill_tokens_per_s=1e6,
    decode_tokens_per_s=1e4,
    max_model_len_tokens=256,
    step_overhead_ms=0.1,
    kv_bytes_per_token=100,
)
CONFIG = SimEngineConfig(
    profile=PROFILE, kv_events_port=0, kv_replay_port=0, digest_form=DigestForm.BYTES
)
PROMPT = list(range(10, 31))  # 21 tokens: 5 full blocks and one more
WAIT_LIMIT_S = 5.0


@asynccontextmanager
async def engines(
    count: int, pool: MemoryPool, config: SimEngineConfig = CONFIG
) -> AsyncIterator[list[SimEngine]]:
    started = [SimEngine(config, pool) for _ in range(count)]
    await asyncio.gather(*(engine.start() for engine in started))
    try:
        yield started
    finally:
        await asyncio.gather(*(engine.stop() for engine in started))


async def ask(engine: SimEngine, prompt: list[int] = PROMPT, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_LIMIT_S) as client:
        return await client.post(f"{engine.url}/v1/completions", json=body)


async def fetch(url: str, **parameters: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_LIMIT_S) as client:
        return await client.get(url, params=parameters)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not condition():
            await asyncio.sleep(0.002)


def cached_tokens(answer: httpx.Response) -> int:
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def events_of(engine: SimEngine) -> list[dict[str, Any]]:
    """Return everything that an engine has told."""
    assert engine.kv_replay_endpoint is not None
    events: list[dict[str, Any]] = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(engine.kv_replay_endpoint)
        await dealer.send_multipart((b"", bytes(8)))
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                *_, sequence, payload = await dealer.recv_multipart()
                if sequence == b"\xff" * 8:
                    return events
                events += msgspec.msgpack.decode(payload)[1]


# -- engines ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_one_engine_computed_another_fetches_and_counts() -> None:
    pool = MemoryPool(1 << 20)
    async with engines(2, pool) as (one, other):
        assert cached_tokens(await ask(one)) == 0
        assert (len(pool), pool.allocated_bytes) == (5, 5 * 400)
        assert cached_tokens(await ask(other)) == 20
        lines = (await fetch(f"{other.url}/metrics")).text.splitlines()
    labels = 'engine="0",model_name="sim"'
    by_source = 'engine="0",source="{}",model_name="sim"'
    for line in (
        f"vllm:prefix_cache_hits_total{{{labels}}} 0.0",
        f"vllm:external_prefix_cache_queries_total{{{labels}}} 21.0",
        f"vllm:external_prefix_cache_hits_total{{{labels}}} 20.0",
        f"vllm:prompt_tokens_cached_total{{{labels}}} 20.0",
        f"vllm:prompt_tokens_cached_by_source_total{{{by_source.format('device')}}} 0.0",
        f"vllm:prompt_tokens_cached_by_source_total{{{by_source.format('external_unspecified')}}} 20.0",
        f"vllm:prompt_tokens_by_source_total{{{by_source.format('local_compute')}}} 1.0",
        f"vllm:prompt_tokens_by_source_total{{{by_source.format('external_kv_transfer')}}} 20.0",
    ):
        assert line in lines


@pytest.mark.asyncio
async def test_engines_tell_what_they_stored_and_its_keys_follow_from_the_events() -> None:
    pool = MemoryPool(1 << 20)
    async with engines(2, pool) as (one, other):
        (card,) = (await fetch(f"{one.url}/v1/models")).json()["data"]
        await ask(one)
        await ask(other)
        device, *pooled = await events_of(one)
        (fetched,) = await events_of(other)
    model = card["root"].rpartition("/")[2]
    digests = device["block_hashes"]
    assert device["medium"] == "GPU"
    assert list(pool) == []  # the engines are gone, and their segments with them
    assert [event["block_hashes"] for event in pooled] == [[digest] for digest in digests]
    assert pooled[1] == {
        "type": "BlockStored",
        "block_hashes": [digests[1]],
        "parent_block_hash": digests[0],
        "token_ids": PROMPT[4:8],
        "block_size": 4,
        "lora_id": None,
        "medium": "cpu",
        "lora_name": None,
        "group_idx": 0,
    }
    assert (fetched["medium"], fetched["block_hashes"]) == ("GPU", digests)
    assert model == "model"


@pytest.mark.asyncio
async def test_a_slow_fetch_holds_up_nobody_else() -> None:
    slow = dataclasses.replace(PROFILE, kv_link_bytes_per_s=2000 / 0.6)
    pool = MemoryPool(1 << 20)
    async with engines(2, pool, dataclasses.replace(CONFIG, profile=slow)) as (one, other):
        await ask(one)
        fetching = asyncio.create_task(ask(other))
        model = other.runners[0].model
        await until(lambda: model.statistics().waiting_requests == 1)
        await ask(other, [7] * 9)
        assert not fetching.done()
        assert cached_tokens(await fetching) == 20


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", [SimEngine.stop, SimEngine.crash])
@pytest.mark.parametrize(
    ("segment", "kept"), [(PoolSegment.EMBEDDED, 0), (PoolSegment.STANDALONE, 5)]
)
async def test_an_embedded_segment_dies_with_its_engine(
    ending: Callable[[SimEngine], Awaitable[None]], segment: PoolSegment, kept: int
) -> None:
    pool = MemoryPool(1 << 20)
    config = dataclasses.replace(CONFIG, pool_segment=segment)
    async with engines(1, pool, config) as (engine,):
        await ask(engine)
        assert len(pool) == 5
        await ending(engine)
        assert len(pool) == kept


@pytest.mark.asyncio
async def test_multi_hands_over_and_shares_a_pool_but_tells_no_stores() -> None:
    pool = MemoryPool(1 << 20)
    prefill = dataclasses.replace(CONFIG, connector=Connector.MULTI, role=Role.PREFILL)
    decode = dataclasses.replace(prefill, role=Role.DECODE)
    async with engines(1, pool, prefill) as (one,), engines(1, pool, decode) as (other,):
        await ask(one, kv_transfer_params={"do_remote_decode": True, "transfer_id": "t1"})
        ranks = (await fetch(f"{one.bootstrap_url}/query")).json()
        params = {
            "do_remote_prefill": True,
            "remote_bootstrap_addr": one.bootstrap_url,
            "remote_engine_id": ranks["0"]["engine_id"],
            "transfer_id": "t1",
        }
        assert cached_tokens(await ask(other, kv_transfer_params=params)) == 21
        await ask(other, [7] * 9)
        assert len(pool) == 5  # a decode engine stores nothing
        await ask(one, [8] * 9)
        assert cached_tokens(await ask(other, [8] * 9)) == 8  # but it looks
        assert {event["medium"] for event in await events_of(one)} == {"GPU"}
        sources = other.runners[0].model.statistics().cached_tokens_by_source
    assert (sources["p2p"], sources["external_unspecified"]) == (21, 8)


@pytest.mark.parametrize(
    ("connector", "has_pool"),
    [(Connector.MULTI, False), (Connector.MOONCAKE, True), (Connector.NIXL, True)],
)
def test_a_pool_is_for_connectors_that_use_one(*, connector: Connector, has_pool: bool) -> None:
    config = dataclasses.replace(CONFIG, connector=connector)
    with pytest.raises(SimConfigError, match="pool"):
        SimEngine(config, MemoryPool(1) if has_pool else None)


# -- the master ---------------------------------------------------------------------------------


@asynccontextmanager
async def master(pool: MemoryPool) -> AsyncIterator[PoolMaster]:
    one = PoolMaster(pool)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


def metrics(text: str) -> dict[str, float]:
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


@pytest.mark.asyncio
async def test_many_keys_are_asked_for_at_once() -> None:
    pool = MemoryPool(1 << 20)
    pool.put("m@a", 32768, "127.0.0.1:15973")
    pool.put("m@b", 10, "127.0.0.1:15973")
    nothing = {"disk_values": None, "local_disk_values": None, "nof_values": None}
    async with master(pool) as one:
        one.disk_keys.add("m@b")
        answer = (await fetch(f"{one.url}/batch_query_keys", keys="m@a,m@c,m@b")).json()
        assert one.queries == [("m@a", "m@c", "m@b")]
    (buffer,) = answer["data"]["m@a"].pop("values")
    assert buffer.pop("buffer_address_") > 0
    assert buffer == {
        "size_": 32768,
        "protocol_": "tcp",
        "transport_endpoint_": "127.0.0.1:15973",
    }
    assert answer == {
        "success": True,
        "data": {
            "m@a": {"ok": True, "error": None, **nothing},
            "m@c": {"ok": False, "error": "OBJECT_NOT_FOUND", "values": None, **nothing},
            "m@b": {
                "ok": True,
                "error": None,
                "values": None,
                **nothing,
                "disk_values": [{"file_path": "/pool/m@b", "object_size": 10}],
            },
        },
    }


@pytest.mark.asyncio
async def test_looking_up_is_no_use() -> None:
    pool = MemoryPool(20)
    pool.put("old", 10)
    pool.put("new", 10)
    async with master(pool) as one:
        await fetch(f"{one.url}/batch_query_keys", keys="old")
    pool.put("newest", 10)
    assert list(pool) == ["new", "newest"]


@pytest.mark.asyncio
async def test_one_key_all_keys_health_and_numbers() -> None:
    pool = MemoryPool(20)
    for key in ("a", "b", "c"):
        pool.put(key, 10, "h:1")
    async with master(pool) as one:
        found = await fetch(f"{one.url}/query_key", key="b")
        missing = await fetch(f"{one.url}/query_key", key="a")
        assert (found.status_code, missing.status_code) == (200, 404)
        assert json.loads(found.text)["size_"] == 10
        assert (await fetch(f"{one.url}/get_all_keys")).text == "b\nc\n"
        assert (await fetch(f"{one.url}/health")).status_code == 200
        assert metrics((await fetch(f"{one.url}/metrics")).text) == {
            "master_key_count": 2,
            "master_allocated_bytes": 20,
            "master_total_capacity_bytes": 20,
            "master_evicted_key_count": 1,
            "master_successful_evictions_total": 1,
            "master_batch_put_end_items_total": 3,
            "master_batch_put_end_requests_total": 3,
            "master_ping_requests_total": 0,
        }


@pytest.mark.asyncio
async def test_two_hundred_keys_fit_a_question() -> None:
    pool = MemoryPool(1 << 20)
    keys = [f"m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{number:064x}" for number in range(200)]
    for key in keys[:150]:
        pool.put(key, 10)
    async with master(pool) as one:
        answer = await fetch(f"{one.url}/batch_query_keys", keys=",".join(keys))
        assert one.queries == [tuple(keys)]
    assert [entry["ok"] for entry in answer.json()["data"].values()] == [True] * 150 + [False] * 50


@pytest.mark.asyncio
async def test_a_restarted_master_has_its_port_and_nothing_else() -> None:
    pool = MemoryPool(100)
    pool.put("a", 10)
    async with master(pool) as one:
        port = one.port
        await one.stop()
        with pytest.raises(httpx.ConnectError):
            await fetch(f"{one.url}/health")
        await one.restart()
        assert one.port == port
        numbers = metrics((await fetch(f"{one.url}/metrics")).text)
    assert (numbers["master_key_count"], numbers["master_batch_put_end_items_total"]) == (0, 0)


@pytest.mark.asyncio
async def test_a_silent_master_takes_requests_and_does_not_answer() -> None:
    async with master(MemoryPool(100)) as one:
        one.is_silent = True
        asking = asyncio.create_task(fetch(f"{one.url}/batch_query_keys", keys="a"))
        await until(lambda: bool(one.queries))
        await asyncio.sleep(0.05)
        assert not asking.done()
        asking.cancel()
        one.is_silent = False
        assert (await fetch(f"{one.url}/health")).status_code == 200
