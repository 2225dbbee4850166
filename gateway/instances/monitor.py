"""Watching the instances: health checks, descriptions, and the event sources that follow from them.

One task an instance. It checks health at the configured interval and at once when the core asks; an
instance that comes up is described before it is reported healthy, so that it never gets work that
it can't do. Descriptions are renewed from time to time, since adapters come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import zmq.asyncio

from moongate.engine_plugins.vllm_facts import FactsError, Publisher
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.driver import Driver
from moongate.gateway.instances.discovery import Description, describe
from moongate.gateway.instances.engine_api import EngineCallFailed
from moongate.gateway.instances.links import Link, Links
from moongate.gateway.instances.subscriber import Subscriber
from moongate.gateway.pool.pooling import Pooling
from moongate.gateway.prompts.prompt import PromptPipeline
from moongate.router import (
    InstanceAdded,
    InstanceChanged,
    InstanceDescribed,
    InstanceId,
    InstanceProbed,
    InstanceRemoved,
    RequestReplay,
    SourceId,
)

logger = logging.getLogger(__name__)

NOTHING_ANNOUNCED: Mapping[str, Any] = {}

DESCRIBE_AGAIN_S = 30.0
"""How soon a LoRA adapter that was loaded at run time can be routed to."""


class Monitor:
    """Watches all instances. `start` it inside the event loop."""

    def __init__(
        self,
        driver: Driver,
        links: Links,
        live: LiveSettings,
        prompts: PromptPipeline,
        clock: Callable[[], float],
        pooling: Pooling | None = None,
    ) -> None:
        self._driver = driver
        self._links = links
        self._live = live
        self._prompts = prompts
        self._clock = clock
        self._pooling = pooling
        self._context = zmq.asyncio.Context()
        self._watches: dict[InstanceId, _Watch] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.subscribers: dict[SourceId, Subscriber] = {}
        self.cached_by_source: dict[InstanceId, Mapping[str, float]] = {}  # as engines report it

    def start(self) -> None:
        self._driver.on_replay = self._start_replay
        self._driver.on_probe = self._probe_now
        for link in self._links:
            self.watch(link)

    def watch(self, link: Link, announced: Mapping[str, Any] = NOTHING_ANNOUNCED) -> None:
        """Begin to watch one more instance. `announced`: what it said of its engine."""
        watch = _Watch(link, announced)
        self._watches[link.id] = watch
        self._driver.handle(InstanceAdded(link.spec))
        watch.task = asyncio.create_task(self._watch(watch))

    def change(self, link: Link, announced: Mapping[str, Any] = NOTHING_ANNOUNCED) -> None:
        """Go on with an instance by other settings: it keeps its work, and is described again now."""
        watch = self._watches[link.id]
        watch.link, watch.announced = link, announced
        self._driver.handle(InstanceChanged(link.spec))
        watch.describe_anew()

    def describe_all(self) -> None:
        """Describe all instances anew: which of their events are wanted may have changed."""
        for watch in self._watches.values():
            watch.describe_anew()

    @property
    def _opens_sources(self) -> bool:
        return self._driver.core.policy.name != "prefix_affinity"

    def unwatch(self, instance_id: InstanceId) -> None:
        """Forget an instance: it gets no more work, and nothing that it announced counts."""
        watch = self._watches.pop(instance_id)
        assert watch.task is not None
        watch.task.cancel()
        for source in [s for s in self.subscribers if s.instance_id == instance_id]:
            self._end(self.subscribers.pop(source).close())
        self.cached_by_source.pop(instance_id, None)
        self._prompts.forget(watch.link.api)
        if self._pooling is not None:
            self._pooling.forget(instance_id)
        self._driver.handle(InstanceRemoved(instance_id))

    def _end(self, closing: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(closing)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        await asyncio.gather(*self._ending, return_exceptions=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for subscriber in list(self.subscribers.values()):
            await subscriber.close()
        self.subscribers.clear()
        # Closes what is left, the sockets' monitors among it, and waits for nothing to be sent.
        self._context.destroy(linger=0)

    def _probe_now(self, instance_id: InstanceId) -> None:
        watch = self._watches.get(instance_id)
        if watch is not None:
            watch.wake.set()

    def _start_replay(self, command: RequestReplay) -> None:
        subscriber = self.subscribers.get(command.source)
        if subscriber is not None:
            subscriber.start_replay(command)

    # --- one instance -----------------------------------------------------------------------------

    async def _watch(self, watch: _Watch) -> None:
        while True:
            watch.wake.clear()
            try:
                await self._check(watch)
            except Exception:
                # A bug of ours; an instance that is never checked again would be worse.
                logger.exception("instance %s could not be checked", watch.link.id)
            # Not `wait_for`, which until Python 3.12 can lose a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._live.current.health.interval_s):
                    await watch.wake.wait()

    async def _check(self, watch: _Watch) -> None:
        """Check an instance once and report what was found."""
        link = watch.link
        try:
            await link.api.check_health()
            if watch.described_at is None:
                await self._describe(watch)
            elif watch.is_outdated or self._clock() - watch.described_at >= DESCRIBE_AGAIN_S:
                await self._describe_again(watch)
        except (EngineCallFailed, FactsError) as error:
            is_gone = isinstance(error, EngineCallFailed) and error.is_gone
            watch.was_gone = watch.was_gone or is_gone
            if watch.is_well is not False:
                logger.warning("instance %s is not well: %s", link.id, error)
            watch.is_well = False
            watch.described_at = None  # whatever comes back may be something else
            self._driver.handle(InstanceProbed(link.id, is_healthy=False, is_gone=is_gone))
            return
        if watch.is_well is not True:
            logger.info("instance %s is well", link.id)
        watch.is_well = True
        self._driver.handle(InstanceProbed(link.id, is_healthy=True))

    async def _describe_again(self, watch: _Watch) -> None:
        """Renew the description; if that fails the old one stands, since the engine is well."""
        try:
            await self._describe(watch)
        except (EngineCallFailed, FactsError) as error:
            logger.warning("instance %s keeps its old description: %s", watch.link.id, error)
            watch.described_at = self._clock()

    async def _describe(self, watch: _Watch) -> None:
        watch.is_outdated = False
        description = await describe(watch.link)
        await self._learn_models(watch, description)
        watch.described_at = self._clock()
        self._links.note_messages(watch.link.id, description.has_messages)
        self._driver.handle(InstanceDescribed(watch.link.id, description.facts))
        self.cached_by_source[watch.link.id] = description.cached_by_source
        self._describe_to_pool(watch, description)
        publishers = description.publishers if self._opens_sources else ()
        await self._open_sources(watch.link, publishers)
        if publishers and not watch.is_well:
            await self._driver.until_synced(watch.link.id)

    def _describe_to_pool(self, watch: _Watch, description: Description) -> None:
        if self._pooling is None:
            return
        if watch.was_gone:
            # Silence is no proof of another process; if it is one nevertheless, its feed shows it.
            self._pooling.restarted(watch.link.id)
            watch.was_gone = False
        roots = [card.root for card in description.facts.models if not card.is_adapter]
        self._pooling.describe(
            watch.link.id,
            roots[0] if roots else None,
            description.facts.block_size_tokens,
            description.uses_pool,
            watch.announced,
        )

    async def _learn_models(self, watch: _Watch, description: Description) -> None:
        roots = {card.root for card in description.facts.models if not card.is_adapter}
        for card in description.facts.models:
            if card.name in watch.tokenized_as and watch.described_at is not None:
                continue
            # An adapter's root is its own directory; its prompts are made with the base model's.
            root = next(iter(roots), None) if card.is_adapter else card.root
            way = await self._prompts.learn(
                card.name,
                root,
                watch.link.api,
                takes_ids=description.takes_ids,
                renders=description.renders,
            )
            if watch.tokenized_as.get(card.name) != way:
                logger.info("instance %s, model %s: tokenised %s", watch.link.id, card.name, way)
            watch.tokenized_as[card.name] = way

    async def _open_sources(self, link: Link, publishers: tuple[Publisher, ...]) -> None:
        """Subscribe to these publishers, and to no others of this instance."""
        wanted = {SourceId(link.id, p.rank): p for p in publishers}
        for source, subscriber in list(self.subscribers.items()):
            is_ours = source.instance_id == link.id
            if is_ours and wanted.get(source) != subscriber.publisher:
                await self.subscribers.pop(source).close()
        for source, publisher in wanted.items():
            if source not in self.subscribers:
                subscriber = Subscriber(self._context, source, publisher, self._driver.handle)
                self.subscribers[source] = subscriber
                subscriber.open()


class _Watch:
    """What the monitor remembers of an instance."""

    def __init__(self, link: Link, announced: Mapping[str, Any]) -> None:
        self.link = link
        self.announced = announced
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.is_well: bool | None = None
        self.was_gone = False  # nothing listened there since it was last described
        self.described_at: float | None = None
        self.is_outdated = False  # the description: what it was made by has changed
        self.tokenized_as: dict[str, str] = {}

    def describe_anew(self) -> None:
        self.is_outdated = True
        self.wake.set()
