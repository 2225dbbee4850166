"""Engines that share a pool, as pure models: what they find there, what they put, what it takes."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.kvpool.keys import KeyLayout, Shard
from moongate.kvpool.memory import MemoryPool
from moongate.simulator.blocks import BlockStored, CacheNamespace, PoolBlockStored
from moongate.simulator.engine import EngineModel, EngineRequest, StepResult
from moongate.simulator.pooling import SharedPool

from .builders import PROFILE, request, step

BLOCK_BYTES = 40
LAYOUT = KeyLayout("m")


def make_pool(blocks: int = 100) -> MemoryPool:
    return MemoryPool(blocks * BLOCK_BYTES)


def make_engine(
    pool: MemoryPool,
    *,
    layout: KeyLayout = LAYOUT,
    endpoint: str = "",
    stores: bool = True,
    publishes: bool = True,
    **changes: float,
) -> EngineModel:
    profile = dataclasses.replace(PROFILE, **changes)  # type: ignore[arg-type]
    shared = SharedPool(
        pool,
        layout,
        block_bytes=profile.block_bytes,
        endpoint=endpoint,
        stores=stores,
        publishes=publishes,
    )
    return EngineModel(profile, shared_pool=shared)


def run(engine: EngineModel, now: float = 0.0) -> tuple[list[StepResult], float]:
    """Step until there is nothing left to do, waiting for what is on its way."""
    results: list[StepResult] = []
    while True:
        result = engine.step(now)
        if result is not None:
            results.append(result)
            now = result.ends_at
        elif (wakes_at := engine.wakes_at()) is not None:
            now = wakes_at
        else:
            return results, now


def serve(engine: EngineModel, one: EngineRequest, now: float) -> tuple[int, float]:
    """Run one request to its end; return its cached tokens and when all was over."""
    engine.submit(one, now)
    results, ended = run(engine, now)
    outputs = [output for result in results for output in result.outputs]
    assert outputs[-1].finish_reason is not None
    return outputs[0].cached_tokens, ended


# -- finding ------------------------------------------------------------------------------------


def test_what_one_engine_computed_another_fetches() -> None:
    pool = make_pool()
    one, other = make_engine(pool), make_engine(pool)
    assert serve(one, request("a", 10), 0.0)[0] == 0
    assert serve(other, request("b", 10), 1.0)[0] == 8


def test_at_most_all_tokens_but_one_are_fetched() -> None:
    pool = make_pool()
    _, now = serve(make_engine(pool), request("a", 8), 0.0)
    assert len(pool) == 2
    assert serve(make_engine(pool), request("b", 8), now)[0] == 4


def test_only_what_the_device_lacks_is_fetched() -> None:
    pool = make_pool()
    _, now = serve(make_engine(pool), request("a", 13), 0.0)
    other = make_engine(pool)
    serve(other, request("short", 5), now)
    other.submit(request("long", 13), now + 1)
    assert other.step(now + 1) is None
    assert other.wakes_at() == pytest.approx(now + 1 + 0.08)  # 8 tokens at 10 ms
    run(other, now + 1.08)
    statistics = other.statistics()
    assert (statistics.prefix_hits_tokens, statistics.external_hits_tokens) == (4, 4 + 8)


def test_a_hole_ends_what_is_found() -> None:
    pool = make_pool()
    one = make_engine(pool)
    one.submit(request("a", 13), 0.0)
    result = step(one, 0.0)
    (stored,) = result.events
    assert isinstance(stored, BlockStored)
    run(one, result.ends_at)
    lost = make_pool()
    for digest in (stored.digests[0], stored.digests[2]):
        lost.put(LAYOUT.keys(digest)[0], BLOCK_BYTES)
    assert serve(make_engine(lost), request("b", 13), 5.0)[0] == 4


def test_a_block_counts_only_with_all_its_parts() -> None:
    layout = KeyLayout("m", shards=(Shard(tp=0), Shard(tp=1)))
    pool = make_pool()
    _, now = serve(make_engine(pool, layout=layout), request("a", 9), 0.0)
    assert len(pool) == 4
    assert pool.allocated_bytes == 2 * BLOCK_BYTES
    second = next(key for key in reversed(list(pool._replicas)) if "tp_rank:1" in key)
    pool.remove_endpoint("nowhere")
    pool._replicas.pop(second)
    assert serve(make_engine(pool, layout=layout), request("b", 9), now)[0] == 4


def test_another_salt_finds_nothing() -> None:
    pool = make_pool()
    _, now = serve(make_engine(pool), request("a", 9), 0.0)
    salted = dataclasses.replace(request("b", 9), namespace=CacheNamespace(cache_salt="s"))
    assert serve(make_engine(pool), salted, now)[0] == 0


# -- fetching -----------------------------------------------------------------------------------


def test_a_fetch_takes_its_time_and_the_steps_of_others_go_on() -> None:
    pool = make_pool()
    _, now = serve(make_engine(pool), request("a", 9), 0.0)
    other = make_engine(pool)
    other.submit(request("fetches", 9), now)
    other.submit(request("computes", 8, first=50), now)
    first = step(other, now)
    assert [output.request_id for output in first.outputs] == ["computes"]
    assert (first.prefill_tokens, other.statistics().waiting_requests) == (8, 1)
    stored = step(other, first.ends_at)
    assert (stored.ends_at, stored.outputs) == (first.ends_at, ())
    assert other.step(first.ends_at) is None
    assert other.wakes_at() == pytest.approx(now + 0.08)
    last = step(other, now + 0.09)
    assert (last.prefill_tokens, last.outputs[0].request_id) == (1, "fetches")


def test_fetches_share_the_link() -> None:
    pool = make_pool()
    one = make_engine(pool)
    _, now = serve(one, request("a", 9), 0.0)
    _, now = serve(one, request("b", 9, first=50), now)
    other = make_engine(pool)
    other.submit(request("c", 9), now)
    other.submit(request("d", 9, first=50), now)
    assert other.step(now) is None
    assert step(other, now + 0.1).outputs[0].request_id == "c"
    results, _ = run(other, now + 0.2)
    assert results[0].outputs[0].request_id == "d"


def test_fetched_blocks_become_device_blocks_when_they_are_here() -> None:
    pool = make_pool()
    _, now = serve(make_engine(pool), request("a", 10), 0.0)
    other = make_engine(pool)
    other.submit(request("b", 10), now)
    assert other.step(now) is None
    assert other.pool.cached_copies() == {}
    events = step(other, now + 1).events
    assert [event.token_ids for event in events if isinstance(event, BlockStored)] == [
        tuple(range(8))
    ]
    assert not [event for event in events if isinstance(event, PoolBlockStored)]


def test_a_cancelled_fetch_keeps_its_blocks_until_it_is_over() -> None:
    pool = make_pool()
    _, now = serve(make_engine(pool), request("a", 9), 0.0)
    other = make_engine(pool)
    other.submit(request("b", 9), now)
    assert other.step(now) is None
    assert other.cancel("b", now)
    assert other.statistics().waiting_requests == 0
    assert other.pool.usage > 0
    assert other.step(now + 1) is None
    assert other.pool.usage == 0
    assert other.statistics().finished_requests["abort"] == 1


# -- storing ------------------------------------------------------------------------------------


def test_a_block_is_in_the_pool_when_its_step_is_over_and_then_it_is_told() -> None:
    pool = make_pool()
    engine = make_engine(pool)
    engine.submit(request("a", 9), 0.0)
    first = step(engine, 0.0)
    assert len(pool) == 0
    second = step(engine, first.ends_at)
    assert len(pool) == 2
    (device,) = first.events
    assert isinstance(device, BlockStored)
    assert second == StepResult(
        ends_at=first.ends_at,
        outputs=(),
        events=(
            PoolBlockStored(device.digests[0], None, (0, 1, 2, 3)),
            PoolBlockStored(device.digests[1], device.digests[0], (4, 5, 6, 7)),
        ),
        prefill_tokens=0,
        decode_tokens=0,
    )


def test_the_keys_are_the_layouts_of_the_engines_digests() -> None:
    pool = make_pool()
    engine = make_engine(pool)
    engine.submit(request("a", 5), 0.0)
    (device,) = step(engine, 0.0).events
    assert isinstance(device, BlockStored)
    run(engine, 1.0)
    (key,) = pool._replicas
    assert key == f"m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{device.digests[0].hex()}"


def test_generated_tokens_are_stored_when_they_come_back_as_a_prompt() -> None:
    pool = make_pool()
    engine = make_engine(pool)
    engine.submit(request("a", 7, max_tokens=6), 0.0)
    results, now = run(engine)
    answer = [output.token_id for result in results for output in result.outputs]
    assert len(pool) == 1
    serve(engine, EngineRequest("b", (*range(7), *answer), 1), now)
    assert len(pool) == 3


def test_blocks_that_are_there_are_not_told_again() -> None:
    pool = make_pool()
    _, now = serve(make_engine(pool), request("a", 9), 0.0)
    other = make_engine(pool)
    other.submit(request("b", 13), now)
    results, _ = run(other, now)
    pooled = [e for r in results for e in r.events if isinstance(e, PoolBlockStored)]
    assert [event.token_ids for event in pooled] == [(8, 9, 10, 11)]


def test_what_the_pool_lost_is_stored_again_by_who_has_it() -> None:
    pool = make_pool()
    engine = make_engine(pool)
    _, now = serve(engine, request("a", 9), 0.0)
    pool.clear()
    assert serve(engine, request("b", 9), now)[0] == 8
    assert len(pool) == 2


def test_a_decode_engine_stores_nothing() -> None:
    pool = make_pool()
    serve(make_engine(pool, stores=False), request("a", 9), 0.0)
    assert len(pool) == 0


def test_beside_a_hand_off_what_is_stored_is_not_told() -> None:
    pool = make_pool()
    engine = make_engine(pool, publishes=False)
    engine.submit(request("a", 9), 0.0)
    results, _ = run(engine)
    assert len(results) == 1
    assert len(pool) == 2


# -- counting -----------------------------------------------------------------------------------


def test_statistics_tell_where_prompts_came_from() -> None:
    pool = make_pool()
    _, now = serve(make_engine(pool), request("a", 13), 0.0)
    other = make_engine(pool)
    _, now = serve(other, request("b", 9), now)
    serve(other, request("c", 14), now)
    statistics = other.statistics()
    assert (statistics.prefix_queries_tokens, statistics.prefix_hits_tokens) == (23, 8)
    assert (statistics.external_queries_tokens, statistics.external_hits_tokens) == (15, 12)
    assert statistics.cached_tokens_by_source == {
        "device": 8,
        "host": 0,
        "p2p": 0,
        "disk": 0,
        "external_unspecified": 12,
    }
    assert (statistics.local_prompt_tokens, statistics.external_prompt_tokens) == (8, 12)
    assert statistics.computed_prompt_tokens == 3


# -- invariants ---------------------------------------------------------------------------------

# Few distinct tokens, so that prompts share prefixes; little room, so that both levels evict.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
TURNS = st.lists(st.tuples(st.integers(0, 1), PROMPTS, st.integers(1, 6)), max_size=12)


@settings(deadline=None, max_examples=80)
@given(TURNS, st.integers(1, 12))
def test_cached_tokens_are_the_prefix_on_the_device_and_then_in_the_pool(
    turns: list[tuple[int, list[int], int]], pool_blocks: int
) -> None:
    pool = make_pool(pool_blocks)
    engines = [make_engine(pool, blocks=8, max_model_len_tokens=28) for _ in range(2)]
    now = 0.0
    for number, (which, prompt, max_tokens) in enumerate(turns):
        engine = engines[which]
        one = EngineRequest(f"{number}", prompt, max_tokens)
        engine.submit(one, now)
        digests = engine._generations[one.request_id].tokens.digests
        reusable = digests[: (len(prompt) - 1) // 4]
        on_device = engine.pool.cached_copies()
        device = next((i for i, d in enumerate(reusable) if d not in on_device), len(reusable))
        # The pool is asked from the first block on, so that a hole there ends what it gives.
        pooled = next(
            (i for i, d in enumerate(reusable) if LAYOUT.keys(d)[0] not in pool), len(reusable)
        )
        total = max(device, pooled)
        results, now = run(engine, now)
        outputs = [output for result in results for output in result.outputs]
        assert outputs[0].cached_tokens == 4 * total
        assert engine.pool.usage == 0.0
        assert pool.allocated_bytes == len(pool) * BLOCK_BYTES <= pool.capacity_bytes
    for engine in engines:
        s = engine.statistics()
        assert sum(s.cached_tokens_by_source.values()) == (
            s.prefix_hits_tokens + s.external_hits_tokens
        )
        assert s.prompt_tokens == (
            s.computed_prompt_tokens + s.local_prompt_tokens + s.external_prompt_tokens
        )
        assert (s.running_requests, s.waiting_requests) == (0, 0)
