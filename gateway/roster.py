"""Which instances there are: those of the configuration, and those that came since.

An engine announces itself with a lease and renews it; when the lease ends, it is gone. An operator adds
instances that stay. Whoever is removed gets no more work at once; what it has under way may end first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from moongate.gateway.driver import Driver
from moongate.gateway.errors import GatewayError
from moongate.gateway.links import Links
from moongate.gateway.monitor import Monitor
from moongate.gateway.settings import InstanceSettings, Seconds
from moongate.router import InstanceDraining, InstanceId

logger = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 0.5
"""How often leases are looked at, and whether a drained instance is idle."""


class Announced(InstanceSettings):
    """An instance as it announces itself: what the file could say of it, and facts of its engine."""

    lease_s: Seconds | None = None  # None: it stays until it is removed
    tensor_parallel: Annotated[int, Field(ge=1)] | None = None
    pipeline_parallel: Annotated[int, Field(ge=1)] | None = None
    hash_algorithm: str | None = None
    hash_seed: str | None = None
    pool_master: str | None = None
    pool_prefix: str | None = None

    @model_validator(mode="after")
    def _check_key(self) -> Announced:
        if self.api_key_env is not None:
            raise ValueError("api_key_env: only the gateway's own configuration may name one")
        return self

    @property
    def settings(self) -> InstanceSettings:
        """Return the part that a configuration file could have."""
        names = InstanceSettings.model_fields.keys()
        return InstanceSettings.model_validate(self.model_dump(include=set(names)))


class Change(Enum):
    """What an announcement did."""

    ADDED = "added"
    RENEWED = "renewed"
    REPLACED = "replaced"


@dataclass(slots=True)
class _Entry:
    """An instance that came at run time, or one that is leaving."""

    record: Announced | None = None  # None: of the configuration
    expires_at: float | None = None
    leaves_by: float | None = None  # it is draining, and is removed once idle, or then
    settings: InstanceSettings | None = field(default=None, repr=False)


class Roster:
    """Adds and removes instances. `start` it inside the event loop, and `close` it."""

    def __init__(
        self,
        driver: Driver,
        links: Links,
        monitor: Monitor,
        clock: Callable[[], float],
        *,
        drain_limit_s: float,
    ) -> None:
        self._driver = driver
        self._links = links
        self._monitor = monitor
        self._clock = clock
        self._drain_limit_s = drain_limit_s
        self._entries = {link.id: _Entry(settings=link.settings) for link in links}
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        tasks = [*self._closing, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what is asked of it ----------------------------------------------------------------------

    def announce(self, record: Announced) -> Change:
        """Take an instance in, or note that it is still there. Raises: GatewayError (409)."""
        instance_id = InstanceId(record.id)
        entry = self._entries.get(instance_id)
        if entry is not None and entry.record is None:
            raise _conflict(f"instance {record.id} is in the gateway's configuration", "id")
        for other_id, other in self._entries.items():
            is_same_url = other.settings is not None and other.settings.url == record.url
            if other_id != instance_id and is_same_url:
                raise _conflict(f"url: instance {other_id} has this one already", "url")
        change = Change.ADDED
        if entry is not None:
            if entry.record == record and entry.leaves_by is None:
                entry.expires_at = self._expiry(record)
                return Change.RENEWED
            self._remove(instance_id)
            change = Change.REPLACED
        self._add(record)
        return change

    def drain(self, instance_id: str) -> None:
        """Give an instance no more work. Raises: GatewayError (404)."""
        self._set_draining(self._find(instance_id), is_draining=True)

    def undrain(self, instance_id: str) -> None:
        """Give an instance work again. Raises: GatewayError (404)."""
        found = self._find(instance_id)
        self._entries[found].leaves_by = None
        self._set_draining(found, is_draining=False)

    def leave(self, instance_id: str) -> None:
        """Remove an instance once it is idle, at the latest after the drain limit.

        Raises: GatewayError (404).
        """
        found = self._find(instance_id)
        self._set_draining(found, is_draining=True)
        self._entries[found].leaves_by = self._clock() + self._drain_limit_s
        self._look()

    # --- parts ------------------------------------------------------------------------------------

    def _find(self, instance_id: str) -> InstanceId:
        found = InstanceId(instance_id)
        if found not in self._entries:
            raise GatewayError(404, f"there is no instance {instance_id[:64]}", "not_found", "id")
        return found

    def _set_draining(self, instance_id: InstanceId, *, is_draining: bool) -> None:
        self._driver.handle(InstanceDraining(instance_id, is_draining))

    def _expiry(self, record: Announced) -> float | None:
        return self._clock() + record.lease_s if record.lease_s is not None else None

    def _add(self, record: Announced) -> None:
        settings = record.settings
        link = self._links.add(settings)
        self._entries[link.id] = _Entry(record, self._expiry(record), settings=settings)
        self._monitor.watch(link, record.model_dump(exclude_none=True))
        logger.info("instance %s came: %s", link.id, settings.url)

    def _remove(self, instance_id: InstanceId) -> None:
        """Forget an instance now; what it has under way may still end."""
        del self._entries[instance_id]
        reservations = self._driver.core.loads.reservations
        given = [key for key, r in reservations.items() if r.holder.instance_id == instance_id]
        self._monitor.unwatch(instance_id)
        link = self._links.remove(instance_id)
        closing = asyncio.create_task(
            link.close_when_idle(
                self._drain_limit_s, lambda: any(key in reservations for key in given)
            )
        )
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        logger.info("instance %s is gone", instance_id)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self._look()

    def _look(self) -> None:
        """Remove those whose lease has ended, and those that leave and are idle."""
        now = self._clock()
        for instance_id, entry in list(self._entries.items()):
            has_ended = entry.expires_at is not None and entry.expires_at <= now
            if has_ended:
                logger.warning("instance %s has not renewed its lease", instance_id)
            is_leaving = entry.leaves_by is not None
            has_left = is_leaving and (self._is_idle(instance_id) or (entry.leaves_by or 0) <= now)
            if has_ended or has_left:
                self._remove(instance_id)

    def _is_idle(self, instance_id: InstanceId) -> bool:
        core = self._driver.core
        instance = core.fleet.find(instance_id)
        holders = instance.holders if instance is not None else ()
        return not any(core.loads.get(holder).active_requests for holder in holders)


def read_record(body: Any, instance_id: str | None = None) -> Announced:
    """Return the instance that a JSON body describes. Raises: GatewayError (400)."""
    if not isinstance(body, dict):
        raise GatewayError(400, "expected an object with the instance's url", "invalid_request")
    given = body.get("id", instance_id)
    if instance_id is not None and given != instance_id:
        raise GatewayError(400, f"id: the path says {instance_id[:64]}", "invalid_request", "id")
    try:
        return Announced.model_validate({**body, "id": given})
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(map(str, detail["loc"]))
        message = detail["msg"].removeprefix("Value error, ")
        text = f"{where}: {message}" if where else message
        raise GatewayError(400, text[:500], "invalid_request", where or None) from error


def _conflict(message: str, param: str) -> GatewayError:
    return GatewayError(409, message, "conflict", param)
