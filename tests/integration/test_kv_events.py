"""KV events over real sockets: what an engine announces is what requests are credited with."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, Received, chat_answer
from fake_publisher import (
    FakePublisher,
    announce,
    first_of_free_ports,
    stored_array,
    stored_map,
    tokens_of,
)
from live_gateway import LiveGateway, live_gateway, until

from moongate.router import Holder, InstanceId, SourceId, Tier, Trust

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

A, B = InstanceId("a"), InstanceId("b")

HEALTH_INTERVAL_S = 2.0
"""How often a gateway looks at an engine by default."""


@contextlib.asynccontextmanager
async def engine_with_events(
    *publishers: FakePublisher, first_rank: int = 0
) -> AsyncIterator[FakeEngine]:
    """Run an engine that announces these publishers."""
    async with FakeEngine() as engine:
        announce(engine, *publishers, first_rank=first_rank)
        try:
            yield engine
        finally:
            for publisher in publishers:
                await publisher.close()


def held(gateway: LiveGateway, instance: InstanceId, rank: int | None = None) -> int:
    return gateway.core.index.count(Holder(instance, rank), Tier.DEVICE)


async def overlaps(gateway: LiveGateway, tokens: list[int], **fields: object) -> dict[str, int]:
    """Return the overlap that each candidate is credited with for a prompt of token ids."""
    body = {"model": "m", "prompt": tokens, **fields}
    answer = await gateway.client.post("/admin/explain", json=body)
    assert answer.status_code == 200, answer.text
    return {
        c["instance"] + ("" if c["rank"] is None else f"@{c['rank']}"): c["overlap_tokens"][
            "device"
        ]
        for c in answer.json()["candidates"]
    }


async def test_c55_both_encodings_are_indexed_alike() -> None:
    old, new = FakePublisher(), FakePublisher()
    tokens = tokens_of(48)
    await old.publish(0, [stored_array([1, 2], tokens[:32])], is_lost=True)
    await new.publish(0, [stored_map([b"x" * 32, b"y" * 32], tokens[:32])], is_lost=True)
    async with (
        engine_with_events(old) as a,
        engine_with_events(new) as b,
        live_gateway([a.url, b.url]) as gateway,
    ):
        await until(lambda: held(gateway, A) == held(gateway, B) == 2)
        assert await overlaps(gateway, tokens) == {"a": 32, "b": 32}
        assert await gateway.metric("moongate_index_events_total", kind="malformed") == 0
        assert await gateway.metric("moongate_index_trust", instance="a") == 2


async def test_c51_a_gap_is_replayed_once_and_ends_as_if_nothing_was_lost() -> None:
    publisher = FakePublisher()
    tokens = tokens_of(16 * 16)

    async def publish(n: int, *, is_lost: bool) -> None:
        parent = n - 1 if n else None
        event = stored_map([n], tokens[16 * n : 16 * n + 16], parent)
        await publisher.publish(n, [event], is_lost=is_lost)

    async with engine_with_events(publisher) as engine, live_gateway([engine.url]) as gateway:
        feed = gateway.core.sources.find(SourceId(A))
        assert feed is not None
        await until(lambda: publisher.replay_requests == [0])
        await asyncio.sleep(0.1)  # the subscription needs a moment to reach the publisher
        for n in range(10):
            await publish(n, is_lost=False)
        await until(lambda: held(gateway, A) == 10)
        before = len(publisher.replay_requests)
        for n in range(10, 15):
            await publish(n, is_lost=True)
        await publish(15, is_lost=False)
        await until(lambda: held(gateway, A) == 16)
        assert publisher.replay_requests[before:] == [10]
        assert await gateway.metric("moongate_index_gaps_total", instance="a") == 5
        assert await overlaps(gateway, [*tokens, 1]) == {"a": 256}
        assert await gateway.metric("moongate_index_trust", instance="a") == 2


async def test_c54_a_restarted_engine_holds_only_what_it_said_since() -> None:
    publisher = FakePublisher()
    tokens = tokens_of(16 * 50)
    for n in range(50):
        event = stored_map([n], tokens[16 * n : 16 * n + 16], n - 1 if n else None)
        await publisher.publish(850 + n, [event], is_lost=True)
    publisher.buffer = {seq - 850: payload for seq, payload in publisher.buffer.items()}
    async with engine_with_events(publisher) as engine, live_gateway([engine.url]) as gateway:
        await until(lambda: held(gateway, A) == 50)
        await asyncio.sleep(0.1)
        publisher.buffer = {}
        fresh = tokens_of(48, seed=9)
        for n in range(3):
            event = stored_map([100 + n], fresh[16 * n : 16 * n + 16], 99 + n if n else None)
            await publisher.publish(n, [event])
        await until(lambda: held(gateway, A) == 3, 1.0)
        assert await overlaps(gateway, [*tokens, 1]) == {"a": 0}
        assert await overlaps(gateway, [*fresh, 1]) == {"a": 48}
        requests = len(publisher.replay_requests)
        await asyncio.sleep(0.3)
        assert len(publisher.replay_requests) <= requests + 1  # no loop of replays
        assert gateway.core.sources.trust(Holder(A)) is Trust.EXACT


async def test_c57_a_cleared_cache_is_credited_with_nothing() -> None:
    publisher = FakePublisher()
    tokens = tokens_of(33)
    await publisher.publish(0, [stored_map([1, 2], tokens[:32])], is_lost=True)
    async with engine_with_events(publisher) as engine, live_gateway([engine.url]) as gateway:
        await until(lambda: held(gateway, A) == 2)
        await asyncio.sleep(0.1)
        await publisher.publish(1, [{"type": "AllBlocksCleared"}])
        await until(lambda: held(gateway, A) == 0)
        assert await overlaps(gateway, tokens) == {"a": 0}


async def test_c57_a_cleared_cache_takes_no_more_than_its_share() -> None:
    publishers = FakePublisher(), FakePublisher()
    tokens = tokens_of(33)
    for publisher in publishers:
        await publisher.publish(0, [], is_lost=True)
    async with (
        engine_with_events(publishers[0]) as a,
        engine_with_events(publishers[1]) as b,
        live_gateway([a.url, b.url]) as gateway,
    ):
        await until(lambda: gateway.core.sources.are_synced(A))
        await asyncio.sleep(0.1)
        await publishers[0].publish(1, [stored_map([1, 2], tokens[:32])])
        await until(lambda: held(gateway, A) == 2)
        assert await overlaps(gateway, tokens) == {"a": 32, "b": 0}
        await publishers[0].publish(2, [{"type": "AllBlocksCleared"}])
        await until(lambda: held(gateway, A) == 0)
        for sequence in range(3, 23):
            assert await overlaps(gateway, tokens) == {"a": 0, "b": 0}
            answer = await gateway.client.post(
                "/v1/completions", json={"model": "m", "prompt": tokens}
            )
            # The one that took it has it from now on; let both forget it again.
            assert answer.headers["x-moongate-device-tokens"] == "0"
            for publisher in publishers:
                await publisher.publish(sequence, [{"type": "AllBlocksCleared"}])
            await until(functools.partial(_have_applied, gateway, sequence))
        assert len(a.received) == len(b.received) == 10


def _have_applied(gateway: LiveGateway, sequence: int) -> bool:
    return all(state.feed.expected > sequence for _, state in gateway.core.sources)


async def test_c57_a_lost_clear_is_found_by_the_engines_own_report() -> None:
    publisher = FakePublisher()
    tokens = tokens_of(33)
    await publisher.publish(0, [stored_map([1, 2], tokens[:32])], is_lost=True)

    async def answer(request: Received) -> None:
        await request.answer(200, chat_answer(cached_tokens=0))

    health = {"interval_s": HEALTH_INTERVAL_S, "timeout_s": 1.0}
    async with (
        engine_with_events(publisher) as engine,
        live_gateway([engine.url], health=health) as gateway,
    ):
        await until(lambda: held(gateway, A) == 2)
        engine.handler = answer
        await publisher.publish(1, [{"type": "AllBlocksCleared"}], is_lost=True)
        assert await overlaps(gateway, tokens) == {"a": 32}
        body = {"model": "m", "prompt": tokens}
        assert (await gateway.client.post("/v1/completions", json=body)).status_code == 200
        await until(lambda: held(gateway, A) == 0, HEALTH_INTERVAL_S)
        assert gateway.core.sources.trust(Holder(A)) is Trust.EXACT


async def test_c60_each_rank_has_a_publisher_and_a_cache_of_its_own() -> None:
    ranks = [FakePublisher() for _ in range(4)]
    prompts = [tokens_of(33, seed=n) for n in range(4)]
    for n, publisher in enumerate(ranks):
        await publisher.publish(0, [stored_map([n], prompts[n][:16])], rank=n, is_lost=True)
    async with engine_with_events(*ranks) as engine, live_gateway([engine.url]) as gateway:
        await until(lambda: all(held(gateway, A, n) == 1 for n in range(4)))
        for n in range(4):
            expected = {f"a@{m}": 16 if m == n else 0 for m in range(4)}
            assert await overlaps(gateway, prompts[n]) == expected
            body = {"model": "m", "prompt": prompts[n]}
            answer = await gateway.client.post("/v1/completions", json=body)
            assert answer.headers["x-moongate-instance"] == f"a@{n}"
            assert engine.received[-1].headers["x-data-parallel-rank"] == str(n)


async def test_c60_a_base_address_and_a_count_are_enough_and_a_late_rank_joins() -> None:
    base = first_of_free_ports(4)
    prompts = [tokens_of(33, seed=n) for n in range(4)]
    async with FakeEngine() as engine, contextlib.AsyncExitStack() as stack:

        async def speak(rank: int) -> None:
            publisher = FakePublisher(has_replay=False, port=base + rank)
            stack.push_async_callback(publisher.close)
            await until(lambda: _is_heard(publisher, gateway, A, rank, prompts[rank]))

        endpoint = f"tcp://127.0.0.1:{base}"
        instance = {"id": "a", "url": engine.url, "kv_events": endpoint, "ranks": 4}
        gateway = await stack.enter_async_context(live_gateway([], instances=[instance]))
        opened = dict(gateway.server.gateway.monitor.subscribers)
        assert [s.publisher.endpoint for s in opened.values()] == [
            f"tcp://127.0.0.1:{base + n}" for n in range(4)
        ]
        for rank in (0, 1, 3):
            await speak(rank)
        assert held(gateway, A, 2) == 0
        await speak(2)
        assert gateway.server.gateway.monitor.subscribers == opened, "none was opened anew"
        for n in range(4):
            expected = {f"a@{m}": 16 if m == n else 0 for m in range(4)}
            assert await overlaps(gateway, prompts[n]) == expected


async def _is_heard(
    publisher: FakePublisher,
    gateway: LiveGateway,
    instance: InstanceId,
    rank: int,
    prompt: list[int],
) -> bool:
    """Publish a rank's first batch until it has come: a subscription takes its time."""
    await publisher.publish(0, [stored_map([rank], prompt[:16])], rank=rank)
    return held(gateway, instance, rank) == 1


@pytest.mark.parametrize("has_topic_frame", [False, True])
async def test_c61_replays_are_read_with_and_without_a_topic_frame(has_topic_frame: bool) -> None:
    publisher = FakePublisher(has_topic_frame=has_topic_frame)
    tokens = tokens_of(33)
    await publisher.publish(0, [stored_map([1, 2], tokens[:32])], is_lost=True)
    async with engine_with_events(publisher) as engine, live_gateway([engine.url]) as gateway:
        await until(lambda: held(gateway, A) == 2)
        await until(lambda: gateway.core.sources.are_synced(A))
        assert gateway.core.sources.trust(Holder(A)) is Trust.EXACT
        await asyncio.sleep(0.1)
        await publisher.publish(1, [stored_map([3], tokens_of(16, seed=1))])
        await until(lambda: held(gateway, A) == 3)
        # The end mark was neither a batch of its own nor a gap up to its number.
        (source,) = (await gateway.client.get("/admin/index")).json()["sources"]
        told = ("next_sequence", "batches", "gaps", "lost", "restarts", "unreadable_messages")
        assert [source[name] for name in told] == [2, 2, 0, 0, 0, {}]
        assert await gateway.metric("moongate_index_events_total", kind="malformed") == 0


async def test_c62_odd_frames_are_counted_and_a_good_one_still_counts() -> None:
    publisher = FakePublisher()
    tokens = tokens_of(33)
    async with engine_with_events(publisher) as engine, live_gateway([engine.url]) as gateway:
        await until(lambda: publisher.replay_requests == [0])
        await asyncio.sleep(0.1)
        await publisher.send([b"payload"])
        await publisher.send([b"topic", b"\0" * 4, b"payload"])
        good = stored_map([1, 2], tokens[:32])
        await publisher.publish(0, [good], topic=b"kv@10.0.0.1@m")
        await until(lambda: held(gateway, A) == 2)
        index = (await gateway.client.get("/admin/index")).json()
        assert index["sources"][0]["unreadable_messages"] == {"frame_count": 1, "sequence_size": 1}
        await publisher.send([b"", (1).to_bytes(8, "big"), b"\xc1 no msgpack"])
        metric = "moongate_index_events_total"
        await until(lambda: _is(gateway.metric(metric, instance="a", kind="malformed"), 1))
        assert gateway.core.sources.trust(Holder(A)) is Trust.DEGRADED


async def test_c62_what_is_no_batch_is_counted_by_reason_and_topics_name_nobody() -> None:
    publisher = FakePublisher()
    tokens = tokens_of(49)
    async with engine_with_events(publisher) as engine, live_gateway([engine.url]) as gateway:
        await until(lambda: publisher.replay_requests == [0])
        await asyncio.sleep(0.1)
        payload = msgspec.msgpack.encode([1.0, [stored_map([1], tokens[:16])], 0])
        await publisher.send([payload])
        await publisher.send([b"kv@10.0.0.1@m", b"\0" * 4, payload])
        await publisher.send([b"other", (0).to_bytes(8, "big"), payload])
        await publisher.send([b"kv@10.0.0.1@m", (1).to_bytes(8, "big"), b"\xc1"])
        good = stored_map([2, 3], tokens[16:48], parent=1)
        await publisher.publish(2, [good], topic=b"kv@10.0.0.1@m")
        await until(lambda: held(gateway, A) == 3)
        (source,) = (await gateway.client.get("/admin/index")).json()["sources"]
        assert source["unreadable_messages"] == {"frame_count": 1, "sequence_size": 1}
        assert (source["malformed_events"], source["batches"], source["gaps"]) == (1, 3, 0)
        assert await overlaps(gateway, tokens) == {"a": 48}


async def _is(value: Awaitable[float], expected: float) -> bool:
    return await value == expected


async def test_c44_an_adapters_blocks_match_the_adapter_only() -> None:
    with_adapter, base = FakePublisher(), FakePublisher()
    tokens = tokens_of(33)
    adapter: dict[str, Any] = {"lora_name": "ad-1", "extra_keys": [["ad-1"], ["ad-1"]]}
    salted: dict[str, Any] = {"lora_name": "ad-1", "extra_keys": [["ad-1", "salt"], ["ad-1"]]}
    await with_adapter.publish(
        0,
        [stored_map([1, 2], tokens[:32], **adapter), stored_map([3, 4], tokens[:32], **salted)],
        is_lost=True,
    )
    await base.publish(0, [stored_map([1, 2], tokens[:32])], is_lost=True)
    cards: list[dict[str, Any]] = [{"id": "m", "parent": None}, {"id": "ad-1", "parent": "m"}]
    async with engine_with_events(with_adapter) as a, engine_with_events(base) as b:
        a.models = b.models = cards
        async with live_gateway([a.url, b.url]) as gateway:
            await until(lambda: held(gateway, A) == 4 and held(gateway, B) == 2)
            assert await overlaps(gateway, tokens, model="ad-1") == {"a": 32, "b": 0}
            assert await overlaps(gateway, tokens) == {"a": 0, "b": 32}
            with_salt = await overlaps(gateway, tokens, model="ad-1", cache_salt="salt")
            assert with_salt == {"a": 32, "b": 0}
            assert await overlaps(gateway, tokens, cache_salt="salt") == {"a": 0, "b": 0}


async def test_c46_the_block_size_of_the_events_counts_and_sizes_may_differ() -> None:
    small, large = FakePublisher(), FakePublisher()
    tokens = tokens_of(257)
    await small.publish(0, [stored_map([1], tokens[:64], block_size=64)], is_lost=True)
    await large.publish(0, [stored_map([1], tokens[:256], block_size=256)], is_lost=True)
    async with engine_with_events(small) as a, engine_with_events(large) as b:
        instances = [
            {"id": "a", "url": a.url, "block_size": 16},
            {"id": "b", "url": b.url, "block_size": 16},
        ]
        async with live_gateway([], instances=instances) as gateway:
            await until(lambda: held(gateway, A) == 1 and held(gateway, B) == 1)
            assert await overlaps(gateway, tokens) == {"a": 64, "b": 256}
            await asyncio.sleep(0.1)
            other_group = stored_map([5], tokens[:4], block_size=4, group_idx=1)
            await large.publish(1, [other_group])
            metric = "moongate_index_events_total"
            await until(lambda: _is(gateway.metric(metric, instance="b", kind="ignored"), 1))
            assert await overlaps(gateway, tokens) == {"a": 64, "b": 256}


async def test_c48_the_rank_header_names_the_global_rank() -> None:
    nodes = [[FakePublisher() for _ in range(4)] for _ in range(2)]
    async with (
        engine_with_events(*nodes[0]) as a,
        engine_with_events(*nodes[1], first_rank=4) as b,
        live_gateway([a.url, b.url]) as gateway,
    ):
        for n in range(200):
            body = {"model": "m", "prompt": tokens_of(40, seed=n)}
            headers = {"x-data-parallel-rank": "99"}  # a client's own is dropped
            answer = await gateway.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
    used = {name: {r.headers["x-data-parallel-rank"] for r in e.received} for name, e in
            (("a", a), ("b", b))}  # fmt: skip
    assert used == {"a": {"0", "1", "2", "3"}, "b": {"4", "5", "6", "7"}}


async def test_c48_without_known_ranks_there_is_no_rank_header() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        await gateway.chat(headers={"x-data-parallel-rank": "3"})
    assert "x-data-parallel-rank" not in engine.received[0].headers


async def test_a_configured_base_address_is_offset_by_rank() -> None:
    async with FakeEngine() as engine:
        first = FakePublisher()
        base = int(first.endpoint.rpartition(":")[2])
        instance = {
            "id": "a",
            "url": engine.url,
            "kv_events": first.endpoint,
            "ranks": [0, 2],
        }
        async with live_gateway([], instances=[instance]) as gateway:
            endpoints = {
                s.publisher.endpoint for s in gateway.server.gateway.monitor.subscribers.values()
            }
            assert endpoints == {f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + 2}"}
        await first.close()
