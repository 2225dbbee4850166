"""Answers as vLLM 0.32 gives them, and what is made of wrong ones."""

from typing import Any

import pytest

from moongate.engine_plugins.vllm_facts import (
    CacheFacts,
    FactsError,
    Publisher,
    connectable,
    offset_port,
    read_cache_facts,
    read_models,
    read_publishers,
    takes_token_ids,
)
from moongate.router.model import ModelCard

URL = "http://10.0.0.5:8101"

MODELS = {
    "object": "list",
    "data": [
        {
            "id": "tiny",
            "object": "model",
            "created": 1_790_000_000,
            "owned_by": "vllm",
            "root": "/models/tiny",
            "parent": None,
            "max_model_len": 4096,
            "permission": [{"id": "modelperm-1", "object": "model_permission"}],
        },
        {"id": "ad-1", "object": "model", "root": "/adapters/ad-1", "parent": "tiny"},
    ],
}
SOURCES: dict[str, dict[str, Any]] = {
    "0": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5601",
        "replay_endpoint": "tcp://*:6601",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv@127.0.0.1:8101@tiny",
    }
}
METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True",engine="0",\
num_gpu_blocks="2048",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{block_size="64",engine="1",num_gpu_blocks="7"} 1.0
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
"""


# --- models ---------------------------------------------------------------------------------------


def test_a_card_with_a_parent_is_an_adapter() -> None:
    assert read_models(MODELS) == (
        ModelCard("tiny", is_adapter=False, root="/models/tiny", max_model_len_tokens=4096),
        ModelCard("ad-1", is_adapter=True, root="/adapters/ad-1", max_model_len_tokens=None),
    )


def test_a_name_alone_is_enough() -> None:
    assert read_models({"data": [{"id": "m"}]}) == (ModelCard("m"),)


@pytest.mark.parametrize(
    "answer", [None, [], {}, {"data": {}}, {"data": [1]}, {"data": [{}]}, {"data": [{"id": 1}]}]
)
def test_models_of_another_form_are_refused(answer: object) -> None:
    with pytest.raises(FactsError, match=r"^/v1/models: expected"):
        read_models(answer)


# --- cache sizes ----------------------------------------------------------------------------------


def test_the_first_rank_tells_the_cache_sizes() -> None:
    assert read_cache_facts(METRICS) == CacheFacts(block_size_tokens=32, capacity_blocks=2048)


@pytest.mark.parametrize(
    ("labels", "facts"),
    [
        ('num_gpu_blocks="None",block_size="16"', CacheFacts(16, None)),
        ('block_size="0",num_gpu_blocks="5"', CacheFacts(None, 5)),
        ('block_size="1.5"', CacheFacts()),
        ('block_size="²"', CacheFacts()),
        ('hash_block_size="8",x="a\\"block_size=\\"9",block_size="16"', CacheFacts(16, None)),
    ],
)
def test_sizes_that_are_no_positive_numbers_are_not_told(labels: str, facts: CacheFacts) -> None:
    assert read_cache_facts(f"vllm:cache_config_info{{{labels}}} 1.0\n") == facts


@pytest.mark.parametrize("metrics", ["", "vllm:other 1\n", "# vllm:cache_config_info{} 1\n"])
def test_without_the_metric_nothing_is_told(metrics: str) -> None:
    assert read_cache_facts(metrics) == CacheFacts()


# --- publishers -----------------------------------------------------------------------------------


def test_a_wildcard_becomes_the_instances_own_host() -> None:
    assert read_publishers(SOURCES, URL) == (
        Publisher(0, "tcp://10.0.0.5:5601", "tcp://10.0.0.5:6601", "kv@127.0.0.1:8101@tiny"),
    )


def test_c60_each_rank_has_its_own_publisher_in_order() -> None:
    ranks = {
        str(rank): {**SOURCES["0"], "endpoint": f"tcp://*:{5557 + rank}", "replay_endpoint": None}
        for rank in (10, 2)
    }
    assert read_publishers(ranks, URL) == (
        Publisher(2, "tcp://10.0.0.5:5559", None, "kv@127.0.0.1:8101@tiny"),
        Publisher(10, "tcp://10.0.0.5:5567", None, "kv@127.0.0.1:8101@tiny"),
    )


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"0": {**SOURCES["0"], "enable_kv_cache_events": False}},
        {"0": {**SOURCES["0"], "publisher": "null"}},
    ],
)
def test_where_events_are_off_there_is_no_publisher(answer: object) -> None:
    assert read_publishers(answer, URL) == ()


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"0": None},
        {"x": SOURCES["0"]},
        {"²": SOURCES["0"]},
        {"0": {**SOURCES["0"], "endpoint": None}},
        {"0": {**SOURCES["0"], "endpoint": "inproc://cache"}},
        {"0": {**SOURCES["0"], "replay_endpoint": "tcp://*:0"}},
    ],
)
def test_publishers_of_another_form_are_refused(answer: object) -> None:
    with pytest.raises(FactsError):
        read_publishers(answer, URL)


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "url", "expected"),
    [
        ("tcp://*:5557", "http://engine:8000", "tcp://engine:5557"),
        ("tcp://0.0.0.0:5557", "http://engine:8000", "tcp://engine:5557"),
        ("tcp://[::]:5557", "http://engine:8000", "tcp://engine:5557"),
        ("tcp://:::5557", "http://engine:8000", "tcp://engine:5557"),
        ("tcp://*:5557", "http://[fe80::1]:8000", "tcp://[fe80::1]:5557"),
        ("tcp://[fd00::2]:5557", "http://engine:8000", "tcp://[fd00::2]:5557"),
        ("tcp://10.1.1.1:5557", "http://engine:8000", "tcp://10.1.1.1:5557"),
        ("ipc:///tmp/kv.sock", "http://engine:8000", "ipc:///tmp/kv.sock"),
    ],
)
def test_a_bound_address_becomes_one_to_connect_to(endpoint: str, url: str, expected: str) -> None:
    assert connectable(endpoint, url) == expected


@pytest.mark.parametrize(
    "endpoint",
    [
        *("tcp://*:0", "tcp://*", "tcp://*:x", "tcp://*:65536", "tcp://*:²", "tcp://:5557"),
        *("tcp://a b:5557", "tcp://a/b:5557", "inproc://cache", "udp://*:1", "ipc://", ""),
    ],
)
def test_c60_an_address_without_a_fixed_port_is_refused(endpoint: str) -> None:
    with pytest.raises(FactsError, match=r"^KV events at"):
        connectable(endpoint, URL)


def test_c60_a_ranks_port_is_the_base_port_plus_the_rank() -> None:
    assert [offset_port("tcp://10.0.0.5:5557", rank) for rank in range(4)] == [
        "tcp://10.0.0.5:5557",
        "tcp://10.0.0.5:5558",
        "tcp://10.0.0.5:5559",
        "tcp://10.0.0.5:5560",
    ]


def test_an_ipv6_address_keeps_its_brackets() -> None:
    assert offset_port("tcp://[fd00::2]:5557", 3) == "tcp://[fd00::2]:5560"


def test_one_rank_may_use_a_file() -> None:
    assert offset_port("ipc:///tmp/kv.sock", 0) == "ipc:///tmp/kv.sock"


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/kv.sock", "tcp://10.0.0.5:65535"])
def test_a_rank_without_a_port_is_refused(endpoint: str) -> None:
    with pytest.raises(FactsError):
        offset_port(endpoint, 1)


# --- version --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        ("0.32.0", True),
        ("0.32", True),
        ("0.32.1rc2.dev7+gabc", True),
        ("0.100.0", True),
        ("1.0.0", True),
        ("0.31.9", False),
        ("0.9.0", False),
        ("0.4.32", False),
        ("dev", False),
        ("", False),
        ("v0.32.0", False),
        (None, False),
        (0.32, False),
        (["0.32.0"], False),
    ],
)
def test_token_ids_are_taken_since_a_release(version: object, takes: bool) -> None:
    assert takes_token_ids({"version": version}) is takes


@pytest.mark.parametrize("answer", [None, [], "0.32.0", {}, 7])
def test_an_answer_that_tells_no_version_promises_nothing(answer: object) -> None:
    assert not takes_token_ids(answer)
