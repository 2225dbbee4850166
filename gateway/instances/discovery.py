"""What an instance is, asked of itself: models, cache sizes, ranks, and where its events come from.

What the operator wrote in the configuration counts more than what the engine says. An engine that
lacks an endpoint (an older release) is described by what it has.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import urlsplit

from moongate.engine_plugins.vllm_facts import (
    FactsError,
    Publisher,
    connectable,
    offset_port,
    read_cache_facts,
    read_cached_by_source,
    read_models,
    read_publishers,
    shows_pool,
    takes_token_ids,
)
from moongate.gateway.instances.engine_api import EngineCallFailed
from moongate.gateway.instances.links import Link
from moongate.router import InstanceFacts, ModelCard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Description:
    """One instance, described. `publishers` is empty where no events are to be had."""

    facts: InstanceFacts
    publishers: tuple[Publisher, ...]
    takes_ids: bool  # a version of vLLM that takes token ids in place of a chat's text
    has_messages: bool  # serves `/v1/messages`
    renders: bool  # tells prompts (`/v1/…/render`)
    uses_pool: bool | None = None  # a shared store, as far as it shows
    cached_by_source: Mapping[str, float] = field(
        default_factory=dict
    )  # prompt tokens since its start


async def describe(link: Link) -> Description:
    """Ask an instance what it is.

    Raises: EngineCallFailed when it doesn't answer, FactsError when it makes no sense.
    """
    models = await _find_models(link)
    metrics = await _find_metrics(link)
    cache = read_cache_facts(metrics)
    publishers = await _find_publishers(link)
    configured = link.settings.rank_numbers
    ranks = configured if configured is not None else tuple(p.rank for p in publishers)
    return Description(
        InstanceFacts(
            models=models,
            block_size_tokens=link.settings.block_size or cache.block_size_tokens,
            capacity_blocks=cache.capacity_blocks,
            # One rank numbered 0 is an engine without data parallelism: it takes no rank header.
            ranks=() if ranks in ((), (0,)) else ranks,
            address=await _find_address(link),
        ),
        publishers,
        await _find_takes_ids(link),
        await _find_has_messages(link),
        await _has_route(link, "/v1/chat/completions/render"),
        shows_pool(metrics) if link.settings.pool is None else link.settings.pool,
        read_cached_by_source(metrics),
    )


async def _find_address(link: Link) -> str:
    """Return the address behind the instance's URL, as a pool names hosts; "" if there is none."""
    host = urlsplit(link.settings.url).hostname
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    return str(found[0][4][0]) if found else ""


async def _find_takes_ids(link: Link) -> bool:
    try:
        return takes_token_ids(await link.api.get_json("/version"))
    except EngineCallFailed as error:
        if error.status is None:
            raise
        return False


async def _find_has_messages(link: Link) -> bool:
    if link.settings.messages != "auto":
        return link.settings.messages == "native"
    return await _has_route(link, "/v1/messages")


async def _has_route(link: Link, path: str) -> bool:
    """A route that takes POST only refuses a GET otherwise than one that isn't there."""
    try:
        await link.api.get_text(path)
    except EngineCallFailed as error:
        if error.status is None:
            raise
        return error.status != HTTPStatus.NOT_FOUND
    return True


async def _find_models(link: Link) -> tuple[ModelCard, ...]:
    cards = read_models(await link.api.get_json("/v1/models"))
    wanted = link.settings.models
    if wanted is None:
        return cards
    served = {card.name: card for card in cards}
    for name in wanted:
        if name not in served:
            logger.warning("instance %s does not serve the configured model %s", link.id, name)
    return tuple(served[name] for name in wanted if name in served)


async def _find_metrics(link: Link) -> str:
    try:
        return await link.api.get_text("/metrics")
    except EngineCallFailed as error:
        if error.status is None:
            raise
        return ""  # has no such endpoint


async def _find_publishers(link: Link) -> tuple[Publisher, ...]:
    settings = link.settings
    if settings.kv_events is not None:
        return tuple(
            Publisher(
                rank=rank,
                endpoint=offset_port(connectable(settings.kv_events, settings.url), rank),
                replay_endpoint=(
                    offset_port(connectable(settings.kv_replay, settings.url), rank)
                    if settings.kv_replay is not None
                    else None
                ),
            )
            for rank in settings.rank_numbers or (0,)
        )
    try:
        answer = await link.api.get_json("/kv_event_sources")
    except EngineCallFailed as error:
        if error.status is None:
            raise
        return ()
    try:
        return read_publishers(answer, settings.url)
    except FactsError as error:
        logger.warning("instance %s: no KV events: %s", link.id, error)
        return ()
