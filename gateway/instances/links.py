"""What the gateway holds open to each instance: its connections, and its side calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from moongate.gateway.config.instance_settings import InstanceSettings
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.config.settings import Settings
from moongate.gateway.instances.engine_api import EngineApi
from moongate.gateway.proxy.upstream import Unreachable, Upstream
from moongate.router import InstanceId, InstanceSpec, Role

NEEDED_INTERVAL_S = 0.2
"""How often it is looked at whether a removed instance's link is still needed."""


@dataclass(frozen=True, slots=True)
class Link:
    """One instance, as the edge reaches it."""

    id: InstanceId
    settings: InstanceSettings
    upstream: Upstream
    api: EngineApi
    api_key: str | None

    @property
    def spec(self) -> InstanceSpec:
        """Return the instance as the routing core knows it."""
        settings = self.settings
        host = urlsplit(settings.url).hostname or ""
        receives = settings.kv_connector != "auto" or None
        return InstanceSpec(self.id, Role(settings.role), settings.weight, host, receives)

    async def close_when_idle(self, limit_s: float, is_needed: Callable[[], bool]) -> None:
        """Close once no request is under way and none is to come, at the latest after the limit.

        *Why* `is_needed`: a decode instance has no connection while the prompt is computed elsewhere.
        """
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    while is_needed():  # noqa: ASYNC110 - the core tells nobody of it
                        await asyncio.sleep(NEEDED_INTERVAL_S)
                    await self.upstream.until_idle()
        finally:
            await self.close()

    async def close(self) -> None:
        await self.upstream.close()
        await self.api.close()


class Links:
    """All instances' links, by id. Create it inside the event loop."""

    def __init__(self, live: LiveSettings) -> None:
        self._live = live
        links = [self.open(instance) for instance in live.current.instances]
        self._links = {link.id: link for link in links}
        self._without_messages: set[InstanceId] = set()

    def note_messages(self, instance_id: InstanceId, has_messages: bool) -> None:
        """Note whether an instance serves `/v1/messages`."""
        change = self._without_messages.discard if has_messages else self._without_messages.add
        change(instance_id)

    def has_messages(self, instance_id: InstanceId) -> bool:
        """Tell whether an instance serves `/v1/messages`, as far as is known."""
        return instance_id not in self._without_messages

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    def get(self, instance_id: InstanceId) -> Link:
        """Return an instance's link. Raises: Unreachable if it was removed meanwhile."""
        link = self._links.get(instance_id)
        if link is None:
            raise Unreachable(f"instance {instance_id} was removed")
        return link

    def open(self, instance: InstanceSettings) -> Link:
        """Return a link that is to be added."""
        return _open(instance, self._live.current)

    def add(self, link: Link) -> None:
        assert link.id not in self._links, link.id
        self._links[link.id] = link

    def change(self, instance: InstanceSettings) -> Link:
        """Return the link of an instance that is the same engine, by other settings. It stays open."""
        link = self._links[InstanceId(instance.id)]
        assert link.settings.url == instance.url, instance
        changed = replace(link, settings=instance, api_key=read_api_key(instance))
        self._links[link.id] = changed
        self._follow(changed)
        return changed

    def follow_limits(self) -> None:
        """Let the time-outs and limits that are in force now hold for all."""
        for link in self:
            self._follow(link)

    def _follow(self, link: Link) -> None:
        settings = self._live.current
        limits = settings.limits
        link.upstream.set_limits(
            connect_timeout_s=limits.connect_timeout_s,
            read_timeout_s=limits.upstream_timeout_s,
            connections_max=limits.connections_per_instance_max,
        )
        link.api.reconfigure(timeout_s=settings.health.timeout_s, api_key=link.api_key)

    def remove(self, instance_id: InstanceId) -> Link:
        """Return the link of an instance that is here no more, to be closed."""
        self._without_messages.discard(instance_id)
        return self._links.pop(instance_id)

    async def close(self) -> None:
        for link in self:
            await link.close()


def read_api_key(instance: InstanceSettings) -> str | None:
    """Return the engine's own key, None if it has none."""
    return os.environ[instance.api_key_env] if instance.api_key_env is not None else None


def _open(instance: InstanceSettings, settings: Settings) -> Link:
    api_key = read_api_key(instance)
    limits = settings.limits
    tls = instance.tls.context() if instance.tls is not None else None
    return Link(
        id=InstanceId(instance.id),
        settings=instance,
        upstream=Upstream(
            instance.url,
            connect_timeout_s=limits.connect_timeout_s,
            read_timeout_s=limits.upstream_timeout_s,
            connections_max=limits.connections_per_instance_max,
            tls=tls,
        ),
        api=EngineApi(instance.url, timeout_s=settings.health.timeout_s, api_key=api_key, tls=tls),
        api_key=api_key,
    )
