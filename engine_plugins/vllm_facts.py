"""What an instance says about itself, read from its HTTP answers: pure.

`/v1/models`, `/metrics` and `/kv_event_sources` in, models, cache sizes and publishers out. An
answer that hasn't the expected form raises `FactsError` with what was expected.

Source: vLLM 0.32 `entrypoints/serve/instrumentator/basic.py`, `config/kv_events.py`, and the
`vllm:cache_config_info` metric.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from moongate.router.model import ModelCard


class FactsError(ValueError):
    """An instance's answer can't be used; the text says which and why."""


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The engine's KV cache, of one rank. None: not told."""

    block_size_tokens: int | None = None
    capacity_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where one data-parallel rank's events come from; addresses to connect to."""

    rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str = ""


def read_models(answer: object) -> tuple[ModelCard, ...]:
    """Return the models of a `/v1/models` answer. A card with a parent is a LoRA adapter.

    Raises: FactsError.
    """
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list):
        raise FactsError('/v1/models: expected an object with a list "data"')
    cards: list[ModelCard] = []
    for entry in data:
        name = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise FactsError('/v1/models: expected a string "id" in each entry')
        root, length = entry.get("root"), entry.get("max_model_len")
        cards.append(
            ModelCard(
                name=name,
                is_adapter=entry.get("parent") is not None,
                root=root if isinstance(root, str) else None,
                max_model_len_tokens=length if isinstance(length, int) else None,
            )
        )
    return tuple(cards)


_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\}\s", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_cache_facts(metrics: str) -> CacheFacts:
    """Return the cache sizes from a `/metrics` text; of several ranks, the first one's.

    One line of a text of thousands is wanted, so it is found by pattern: parsing it all with the
    Prometheus library takes a hundred times as long.
    """
    found = _CACHE_INFO.search(metrics)
    if found is None:
        return CacheFacts()
    labels = dict(_LABEL.findall(found["labels"]))
    return CacheFacts(
        block_size_tokens=_positive(labels.get("block_size")),
        capacity_blocks=_positive(labels.get("num_gpu_blocks")),
    )


_PREFIX_QUERIES = re.compile(r"^vllm:prefix_cache_queries_total\{[^}]*\}\s+(\S+)", re.MULTILINE)
_POOL_QUERIES = re.compile(
    r"^vllm:external_prefix_cache_queries_total\{[^}]*\}\s+(\S+)", re.MULTILINE
)
_CACHED_BY_SOURCE = re.compile(
    r"^vllm:prompt_tokens_cached_by_source_total\{(?P<labels>[^}]*)\}\s+(?P<tokens>\S+)",
    re.MULTILINE,
)


def shows_pool(metrics: str) -> bool | None:
    """Tell from a `/metrics` text whether the engine uses a store that is shared. None: can't be told.

    An engine that has looked for prompts in its own cache and nowhere else has no such connector.
    """
    if "vllm:mooncake_store_" in metrics:
        return True
    own, other = _sum_of(_PREFIX_QUERIES, metrics), _sum_of(_POOL_QUERIES, metrics)
    return False if own > 0 and other == 0 else None


def read_cached_by_source(metrics: str) -> dict[str, float]:
    """Return the prompt tokens that an engine didn't compute, by where it had them from."""
    tokens: dict[str, float] = {}
    for found in _CACHED_BY_SOURCE.finditer(metrics):
        source = dict(_LABEL.findall(found["labels"])).get("source", "")
        tokens[source] = tokens.get(source, 0.0) + _number(found["tokens"])
    return tokens


def _sum_of(pattern: re.Pattern[str], metrics: str) -> float:
    return sum(map(_number, pattern.findall(metrics)))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _positive(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def read_publishers(answer: object, instance_url: str) -> tuple[Publisher, ...]:
    """Return the publishers of a `/kv_event_sources` answer, by rank; none if events are off.

    The answer has the addresses in the form that the engine bound, so a wildcard host is replaced
    by the instance's own. Raises: FactsError.
    """
    if not isinstance(answer, dict):
        raise FactsError("/kv_event_sources: expected an object by rank")
    publishers: list[Publisher] = []
    for rank, config in answer.items():
        if not isinstance(config, dict) or not str(rank).isdecimal():
            raise FactsError("/kv_event_sources: expected a publisher's configuration by rank")
        publisher = _read_publisher(int(rank), config, instance_url)
        if publisher is not None:
            publishers.append(publisher)
    return tuple(sorted(publishers, key=lambda p: p.rank))


def _read_publisher(rank: int, config: Mapping[str, Any], instance_url: str) -> Publisher | None:
    endpoint = config.get("endpoint")
    if not config.get("enable_kv_cache_events") or config.get("publisher") != "zmq":
        return None
    if not isinstance(endpoint, str):
        raise FactsError("/kv_event_sources: expected an endpoint")
    replay, topic = config.get("replay_endpoint"), config.get("topic")
    return Publisher(
        rank=rank,
        endpoint=connectable(endpoint, instance_url),
        replay_endpoint=connectable(replay, instance_url) if isinstance(replay, str) else None,
        topic=topic if isinstance(topic, str) else "",
    )


_HOST = re.compile(r"[\w.*:%\[\]-]+")


def connectable(endpoint: str, instance_url: str) -> str:
    """Return a bound address as one to connect to: wildcard hosts become the instance's.

    Raises: FactsError for what can't be reached from another process, or names no port.
    """
    if endpoint.startswith("ipc:///"):
        return endpoint
    if not endpoint.startswith("tcp://"):
        raise FactsError(f"KV events at {endpoint}: only tcp:// and ipc:// can be subscribed to")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_port = port.isdecimal() and 0 < int(port) < 65536
    if not is_port or not _HOST.fullmatch(host):
        raise FactsError(f"KV events at {endpoint}: expected tcp://host:port with a fixed port")
    if host in ("*", "0.0.0.0", "::", "[::]"):
        host = urlsplit(instance_url).hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
    return f"tcp://{host}:{port}"


def offset_port(endpoint: str, rank: int) -> str:
    """Return the address of a rank's publisher, given the address that all were configured with.

    Raises: FactsError where the engine itself would refuse data parallelism.
    Source: vLLM 0.32 `ZmqEventPublisher.offset_endpoint_port` (the port plus the rank).
    """
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        raise FactsError(f"KV events at {endpoint}: several ranks need tcp:// addresses")
    host, _, port = endpoint.rpartition(":")
    if int(port) + rank > 65_535:
        raise FactsError(f"KV events at {endpoint}: rank {rank} would have no port")
    return f"{host}:{int(port) + rank}"


# --- version --------------------------------------------------------------------------------------

TAKES_IDS_SINCE = (0, 32)
"""The first release tried in which `kv_transfer_params.prompt_token_ids` stands for a chat's text
(vllm#48145); older ones would tokenise all the same."""


def takes_token_ids(answer: object) -> bool:
    """Tell from a `/version` answer whether the engine is known to take ids in place of text."""
    version = answer.get("version") if isinstance(answer, dict) else None
    numbers = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= TAKES_IDS_SINCE
