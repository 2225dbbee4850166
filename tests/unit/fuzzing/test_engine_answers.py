"""What engines and a pool's master say of themselves: understood, or an error of ours that says why not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import httpx
from hypothesis import given
from hypothesis import strategies as st
from odd_values import damaged, objects, quick, tried, values

from moongate.engine_plugins.vllm_facts import (
    FactsError,
    connectable,
    offset_port,
    read_cache_facts,
    read_cached_by_source,
    read_models,
    read_publishers,
    shows_pool,
    takes_token_ids,
)
from moongate.engine_plugins.vllm_rendered import (
    Rendered,
    RenderedError,
    hash_rendered,
    read_rendered,
)
from moongate.gateway.instances.engine_api import EngineApi, EngineCallFailed
from moongate.kvpool.mooncake import _read_answer, _whole
from moongate.kvpool.store import PoolUnavailable
from moongate.router import BlockSpace
from moongate.router.blocks import pack_tokens

ANSWERS = objects(
    "data", "id", "root", "parent", "object", "max_model_len", "tokens", "0", "1", "endpoint",
    "replay_endpoint", "publisher", "enable_kv_cache_events", "topic", "paths", "components",
    "schemas", "properties", "kv_transfer_params", "ec_transfer_params", "prompt_token_ids", "token_ids", "features",
    "mm_hashes", "mm_placeholders", "image", "offset", "length",
)  # fmt: skip
KEYS = st.sampled_from(["data", "id", "root", "endpoint", "0", "tokens"]) | st.text(max_size=3)
ANYTHING = ANSWERS | values(KEYS)
METRICS = b"""\
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",enable_prefix_caching="True"} 1.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="local_cache_hit"} 12.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 1e3
"""
ENDPOINTS = st.text(alphabet="tcp:/[]*.0123456789ah-%@", max_size=24) | st.sampled_from(
    ["tcp://*:5557", "tcp://[::]:1", "tcp://h:99999", "ipc:///x", "tcp://0.0.0.0:0", "tcp://h"]
)


@quick
@given(answer=ANYTHING)
def test_any_answer_is_facts_or_an_error_that_says_why(answer: object) -> None:
    for read in (read_models, lambda a: read_publishers(a, "http://h:8000"), takes_token_ids):
        tried(partial(read, answer), FactsError)


@quick
@given(page=damaged(METRICS) | st.binary(max_size=80))
def test_any_page_of_metrics_is_read(page: bytes) -> None:
    text = page.decode("utf-8", "replace")
    for read in (read_cache_facts, read_cached_by_source, shows_pool):
        tried(partial(read, text), FactsError)


@quick
@given(endpoint=ENDPOINTS, rank=st.integers(0, 70_000))
def test_any_endpoint_is_one_or_refused(endpoint: str, rank: int) -> None:
    with suppress(FactsError):
        found = offset_port(connectable(endpoint, "http://h:8000"), rank)
        assert found.startswith(("tcp://", "ipc:///"))


@quick
@given(answer=ANYTHING)
def test_any_rendered_prompt_is_read_or_refused(answer: object) -> None:
    rendered = tried(lambda: read_rendered(answer), RenderedError)
    if isinstance(rendered, Rendered):
        with suppress(OverflowError):  # as EngineRendering does: ids that are none
            tokens = pack_tokens(rendered.token_ids)
            chain = hash_rendered(BlockSpace(16), tokens, rendered.media, None)
            assert len(chain) == len(rendered.token_ids) // 16


@quick
@given(
    content=ANYTHING.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40),
    status=st.sampled_from([200, 204, 301, 404, 500]),
)
def test_any_answer_to_a_call_is_one_or_its_failure(content: bytes, status: int) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=content)

    async def ask() -> None:
        api = EngineApi("http://e", timeout_s=1.0, transport=httpx.MockTransport(answer))
        calls: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: api.tokenize({"prompt": "x"}),
            lambda: api.get_json("/v1/models"),
            lambda: api.get_text("/metrics"),
            api.check_health,
        )
        for call in calls:
            with suppress(EngineCallFailed):
                await call()
        await api.close()

    asyncio.run(ask())


MASTERS = objects(
    "data", "ok", "values", "nof_values", "disk_values", "local_disk_values", "k@0", "k@1",
    "transport_endpoint_", "transport_endpoint", "size_", "object_size",
)  # fmt: skip


@quick
@given(
    body=MASTERS.map(lambda value: json.dumps(value).encode())
    | MASTERS.map(lambda value: json.dumps({"data": value}).encode())
    | st.binary(max_size=60)
)
def test_any_answer_of_a_master_is_replicas_or_no_pool(body: bytes) -> None:
    found = tried(lambda: _read_answer(body), PoolUnavailable)
    if isinstance(found, dict):
        assert all(isinstance(key, str) for key in found)
        assert all(replica.size_bytes >= 0 for replica in found.values())


@quick
@given(text=st.text(alphabet="0123456789.eE+-naif", max_size=12))
def test_any_number_of_a_master_is_a_whole_one(text: str) -> None:
    assert isinstance(_whole(text), int)
