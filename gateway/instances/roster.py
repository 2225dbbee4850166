"""Which instances there are: those of the configuration, and those that came since.

An engine announces itself with a lease and renews it; when the lease ends, it is gone. An operator adds
instances that stay, those of the file go when a reload finds that they aren't in it any more, and so do those that a
name leads to. Whoever is removed gets no more work at once; what it has under way may end first.

What happens here is told to whoever listens (`on_change`), and what happened at another gateway is done here
as well (`follow_peer`); see `shared_registry.py`.

What an operator says of an announced engine holds against its renewals: drained, it stays so whatever it
announces, and removed, it is kept out (barred) until it has announced nothing for a lease.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError, field_validator

from moongate.gateway.config.instance_settings import InstanceSettings
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.config.reloadable import INSTANCE_REPLACED
from moongate.gateway.config.setting_kinds import Seconds
from moongate.gateway.config.settings import Settings
from moongate.gateway.driver import Driver
from moongate.gateway.errors import GatewayError
from moongate.gateway.instances.links import Link, Links, read_api_key
from moongate.gateway.instances.monitor import Monitor
from moongate.router import InstanceDraining, InstanceId

logger = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 0.5
"""How often leases are looked at, and whether a drained instance is idle."""

TAKEOVER_S = 10.0
"""For so long at most an instance that a reload removes goes on working until those that come with the same
reload are up: else nobody would serve in between."""


class Announced(InstanceSettings):
    """An instance as it announces itself: what the file could say of it, and facts of its engine."""

    lease_s: Seconds | None = None  # None: it stays until it is removed
    tensor_parallel: Annotated[int, Field(ge=1)] | None = None
    pipeline_parallel: Annotated[int, Field(ge=1)] | None = None
    hash_algorithm: str | None = None
    hash_seed: str | None = None
    pool_master: str | None = None
    pool_prefix: str | None = None

    @field_validator("api_key_env", "tls", mode="before")
    @classmethod
    def _check_secret(cls, given: Any) -> Any:
        # Before the field's own checks, which would tell whether such a variable or file exists.
        if given is not None:
            raise ValueError("only the gateway's own configuration may have one")
        return given

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _check_socket(cls, address: str | None) -> str | None:
        if address is not None and not address.startswith("tcp://"):
            raise ValueError("expected tcp://host:port, not a socket of this machine")
        return address

    @property
    def settings(self) -> InstanceSettings:
        """Return the part that a configuration file could have."""
        names = InstanceSettings.model_fields.keys()
        return InstanceSettings.model_validate(self.model_dump(include=set(names)))


class Change(Enum):
    """What an announcement did."""

    ADDED = "added"
    RENEWED = "renewed"
    CHANGED = "changed"  # it goes on by other settings
    REPLACED = "replaced"


class Origin(Enum):
    """Where an instance came from."""

    FILE = "file"
    ANNOUNCED = "announced"  # by its engine
    ADDED = "added"  # by an operator
    FOUND = "found"  # by the name that leads to it


class By(Enum):
    """Who changed something. What an operator says holds against what an engine says."""

    OPERATOR = "operator"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Standing:
    """All that one gateway tells others of an instance. `record` None: of the configuration, or gone."""

    record: Announced | None
    origin: Origin
    is_drained: bool
    is_leaving: bool
    barred_s: float  # it is kept out for so long; 0: it is not


@dataclass(frozen=True, slots=True)
class Listing:
    """What is told of an instance's place here."""

    url: str
    origin: Origin
    lease_s_left: float | None  # None: it stays until it is removed


@dataclass(slots=True)
class _Entry:
    """An instance that is here, perhaps leaving."""

    settings: InstanceSettings = field(repr=False)
    origin: Origin
    record: Announced | None = None  # None: nobody told of it by the API
    expires_at: float | None = None
    is_drained: bool = False  # by an operator
    leaves_by: float | None = None  # it is draining, and is removed once idle, or then
    takeover: _Takeover | None = None  # it drains once others are up

    @property
    def is_going(self) -> bool:
        return self.leaves_by is not None or self.takeover is not None


class _Takeover(NamedTuple):
    """Who is to be up before an instance drains, and until when that is waited for."""

    by: Sequence[InstanceId]
    until: float


Swap = Callable[[], None]
"""Does what has been prepared, and can't fail."""


class Clash(ValueError):
    """An instance of the file can't be, since one that was not in the file has its id or url."""


class Roster:
    """Adds and removes instances. `start` it inside the event loop, and `close` it."""

    def __init__(
        self,
        driver: Driver,
        links: Links,
        monitor: Monitor,
        clock: Callable[[], float],
        live: LiveSettings,
    ) -> None:
        self._driver = driver
        self._links = links
        self._monitor = monitor
        self._clock = clock
        self._live = live
        self._entries = {link.id: _Entry(link.settings, Origin.FILE) for link in links}
        self._barred: dict[InstanceId, float] = {}  # removed by an operator; until when
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.on_change: Callable[[InstanceId, By], None] = _ignore
        self.are_leases_known: Callable[[], bool] = _always
        """Whether renewals at other gateways would be known here; if not, no lease ends."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        tasks = [*self._closing, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what is asked of it ----------------------------------------------------------------------

    def announce(self, record: Announced) -> Change:
        """Take an engine in, or note that it is still there. Raises: GatewayError (409)."""
        try:
            return self._announce(record)
        finally:
            self.on_change(InstanceId(record.id), By.ENGINE)

    def _announce(self, record: Announced) -> Change:
        instance_id, now = InstanceId(record.id), self._clock()
        if self._barred.get(instance_id, now) > now:
            # For as long as it is there; whoever starts anew was absent, or had withdrawn.
            self._barred[instance_id] = now + (record.lease_s or 0.0)
            if (entry := self._entries.get(instance_id)) is not None:
                entry.expires_at = self._expiry(record)  # it is there, and ends what it has
            raise _conflict(
                f"an operator removed instance {record.id}; undrain lets it in again", "id"
            )
        return self._take_in(record, Origin.ANNOUNCED)

    def add(self, record: Announced) -> Change:
        """Take an operator's instance in, whatever was said of this id. Raises: GatewayError (409)."""
        change = self._take_in(record, Origin.ADDED)
        self._barred.pop(InstanceId(record.id), None)
        self._undrain(record.id)
        self.on_change(InstanceId(record.id), By.OPERATOR)
        return change

    def drain(self, instance_id: str) -> None:
        """Give an instance no more work, also if it is announced again. Raises: GatewayError (404)."""
        self._drain(instance_id)
        self.on_change(InstanceId(instance_id), By.OPERATOR)

    def _drain(self, instance_id: str) -> None:
        found = self._find(instance_id)
        self._entries[found].is_drained = True
        self._set_draining(found, is_draining=True)

    def undrain(self, instance_id: str) -> None:
        """Give an instance work again; one that was removed, once it is announced again.

        Raises: GatewayError (404).
        """
        self._undrain(instance_id)
        self.on_change(InstanceId(instance_id), By.OPERATOR)

    def _undrain(self, instance_id: str) -> None:
        was_barred = self._barred.pop(InstanceId(instance_id), None) is not None
        if was_barred and InstanceId(instance_id) not in self._entries:
            return
        found = self._find(instance_id)
        entry = self._entries[found]
        entry.leaves_by = entry.takeover = None
        entry.is_drained = False
        self._set_draining(found, is_draining=False)

    def leave(self, instance_id: str) -> None:
        """Remove an instance once it is idle, at the latest after the drain limit, and keep it out.

        Raises: GatewayError (404).
        """
        found = self._find(instance_id)
        entry = self._entries[found]
        if entry.record is not None and entry.record.lease_s is not None:
            self._barred[found] = self._clock() + entry.record.lease_s
        elif entry.origin is Origin.FOUND:
            discovery = self._live.current.discovery
            self._barred[found] = self._clock() + discovery.absence_s
        self._begin_leaving(found)
        self.on_change(found, By.OPERATOR)
        self._look()

    def withdraw(self, instance_id: str) -> None:
        """Remove an instance whose engine ends; another may come. Raises: GatewayError (404)."""
        was_barred = self._barred.pop(InstanceId(instance_id), None) is not None
        if not was_barred or InstanceId(instance_id) in self._entries:
            found = self._find(instance_id)
            self._begin_leaving(found)
            self.on_change(found, By.ENGINE)
            self._look()

    # --- together with other gateways -------------------------------------------------------------

    def standing(self, instance_id: InstanceId) -> Standing:
        """Return what other gateways are to know of an instance, here or not."""
        entry = self._entries.get(instance_id)
        barred_s = max(0.0, self._barred.get(instance_id, 0.0) - self._clock())
        if entry is None:
            return Standing(None, Origin.ANNOUNCED, False, is_leaving=True, barred_s=barred_s)
        is_leaving = entry.leaves_by is not None
        return Standing(entry.record, entry.origin, entry.is_drained, is_leaving, barred_s)

    def follow_peer(self, instance_id: InstanceId, told: Standing) -> None:
        """Do here what was done at another gateway. Raises: GatewayError (409), if it can't be."""
        if told.barred_s:
            self._barred[instance_id] = self._clock() + told.barred_s
        else:
            self._barred.pop(instance_id, None)
        if told.record is not None and not told.is_leaving:
            self._take_in(told.record, told.origin)
        entry = self._entries.get(instance_id)
        if entry is None:
            return
        comes_without = told.origin in (Origin.FILE, Origin.FOUND)
        if comes_without != (entry.record is None):
            return  # its configuration has another of this name, or it has none
        if told.is_leaving and entry.leaves_by is None:
            self._begin_leaving(instance_id)
            self._look()
        elif not told.is_leaving:
            entry.leaves_by = None
            entry.is_drained = told.is_drained
            self._set_draining(instance_id, is_draining=told.is_drained)

    def describe(self, instance_id: InstanceId) -> Listing:
        """Return what is told of an instance that is here."""
        entry = self._entries[instance_id]
        expires_at = entry.expires_at
        left_s = max(0.0, expires_at - self._clock()) if expires_at is not None else None
        return Listing(entry.settings.url, entry.origin, left_s)

    # --- the file ---------------------------------------------------------------------------------

    def prepare(self, settings: Settings) -> Swap:
        """Return what lets the instances be those of another file. Nothing changes before.

        Only what differs from the file in force is done: what operators said of the others holds. Those
        that came by the API stay, whatever the file says; one that it names is the file's from then on.
        Raises: Clash.
        """
        before = {instance.id: instance for instance in self._live.current.instances}
        wanted = {instance.id: instance for instance in settings.instances}
        differing = [i for i in settings.instances if self._differs(before.get(i.id), i)]
        for instance in differing:
            self._check_clash(instance)
        links = [self._links.open(i) for i in differing if not self._is_same_engine(i)]
        gone = [InstanceId(name) for name in before if name not in wanted]
        changed = [i for i in differing if self._is_same_engine(i)]
        return functools.partial(self._follow, Origin.FILE, changed, links, gone)

    def _differs(self, old: InstanceSettings | None, new: InstanceSettings) -> bool:
        if old != new:
            return True
        entry = self._entries.get(InstanceId(new.id))
        if entry is None or entry.origin is not Origin.FILE:
            return False
        return self._links.get(InstanceId(new.id)).api_key != read_api_key(new)

    def _is_same_engine(self, instance: InstanceSettings) -> bool:
        """Tell whether an instance is here and differs only in what may change under it."""
        entry = self._entries.get(InstanceId(instance.id))
        return entry is not None and all(
            getattr(entry.settings, key) == getattr(instance, key) for key in INSTANCE_REPLACED
        )

    def _check_clash(self, instance: InstanceSettings) -> None:
        """Raises: Clash."""
        for other_id, other in self._entries.items():
            if other.is_going:
                continue
            is_same_id, is_same_url = other_id == instance.id, other.settings.url == instance.url
            if other.origin is not Origin.FILE and is_same_id != is_same_url:
                what = f"the id {instance.id}" if is_same_id else f"the url {instance.url}"
                raise Clash(
                    f"{what} is that of an instance that is {other.origin.value}: {other_id}"
                )

    def _follow(
        self,
        origin: Origin,
        changed: Sequence[InstanceSettings],
        links: Sequence[Link],
        gone: Sequence[InstanceId],
    ) -> None:
        for instance in changed:
            self._change(instance, origin)
        for link in links:
            old = self._entries.get(link.id)
            if old is not None:
                self._remove(link.id)
            self._add(link, None, origin)
            if old is not None and old.is_drained:
                self.drain(link.id)
        if origin is Origin.FILE:
            # Else a worker that starts later would go by what was said of one of this name before.
            for instance in changed:
                self.on_change(InstanceId(instance.id), By.OPERATOR)
            for link in links:
                self.on_change(link.id, By.OPERATOR)
        takeover = _Takeover([link.id for link in links], self._clock() + TAKEOVER_S)
        for instance_id in gone:
            entry = self._entries.get(instance_id)
            if entry is not None and entry.origin is origin and not entry.is_going:
                where = "the configuration" if origin is Origin.FILE else "DNS"
                logger.info("instance %s is not in %s any more", instance_id, where)
                entry.takeover = takeover
        self._look()

    def _change(
        self, instance: InstanceSettings, origin: Origin, record: Announced | None = None
    ) -> None:
        """Let an instance go on by other settings, and of this origin; it stays if it was to go."""
        link = self._links.change(instance)
        is_drained = self._entries[link.id].is_drained
        expires_at = self._expiry(record) if record is not None else None
        self._entries[link.id] = _Entry(instance, origin, record, expires_at, is_drained)
        self._set_draining(link.id, is_draining=is_drained)
        self._monitor.change(link, _facts_of(record))
        logger.info("instance %s goes on by other settings", link.id)

    # --- discovery --------------------------------------------------------------------------------

    @property
    def found(self) -> Collection[InstanceId]:
        """Return the instances that discovery has found, but for those that are to go."""
        return [
            instance_id
            for instance_id, entry in self._entries.items()
            if entry.origin is Origin.FOUND and not entry.is_going
        ]

    def follow(
        self, wanted: Sequence[InstanceSettings], gone: Sequence[InstanceId], absence_s: float
    ) -> None:
        """Let instances be those that discovery finds now, and let these go.

        One whose id or url another has already is left to that one. One that an operator removed is kept
        out until it was not found for `absence_s`.
        """
        differing = [i for i in wanted if self._is_news(i, absence_s)]
        links = [self._links.open(i) for i in differing if not self._is_same_engine(i)]
        changed = [i for i in differing if self._is_same_engine(i)]
        self._follow(Origin.FOUND, changed, links, gone)

    def _is_news(self, instance: InstanceSettings, absence_s: float) -> bool:
        instance_id, now = InstanceId(instance.id), self._clock()
        if self._barred.get(instance_id, now) > now:
            self._barred[instance_id] = now + absence_s
            return False
        others = (entry for key, entry in self._entries.items() if key != instance_id)
        if any(other.settings.url == instance.url and not other.is_going for other in others):
            return False
        entry = self._entries.get(instance_id)
        if entry is None:
            return True
        has_key = self._links.get(instance_id).api_key == read_api_key(instance)
        is_same = entry.settings == instance and has_key and not entry.is_going
        return entry.origin is Origin.FOUND and not is_same

    # --- parts ------------------------------------------------------------------------------------

    def _take_in(self, record: Announced, origin: Origin) -> Change:
        """Raises: GatewayError (409)."""
        instance_id = InstanceId(record.id)
        self._check_free(instance_id, record)
        entry = self._entries.get(instance_id)
        if entry is not None and entry.record == record and entry.leaves_by is None:
            entry.origin, entry.expires_at = origin, self._expiry(record)
            return Change.RENEWED
        if entry is not None and not entry.is_going and self._is_same_engine(record):
            self._change(record.settings, origin, record)
            return Change.CHANGED
        # Opened first: if that fails, nothing has changed.
        link = self._links.open(record.settings)
        if entry is not None:
            self._remove(instance_id)
        self._add(link, record, origin)
        if entry is not None and entry.is_drained:
            self._drain(record.id)
        return Change.ADDED if entry is None else Change.REPLACED

    def _check_free(self, instance_id: InstanceId, record: Announced) -> None:
        """Raises: GatewayError (409) if another has the id or the url."""
        entry, now = self._entries.get(instance_id), self._clock()
        if entry is not None and entry.origin is Origin.FILE:
            raise _conflict(f"instance {record.id} is in the gateway's configuration", "id")
        if entry is not None and entry.settings.url != record.url:
            is_over = entry.expires_at is not None and entry.expires_at <= now
            if entry.leaves_by is None and not is_over:
                # Two engines of one id would replace each other for ever.
                raise _conflict(f"id: {entry.settings.url} has this one already", "id")
        for other_id, other in self._entries.items():
            if other_id != instance_id and other.settings.url == record.url:
                raise _conflict(f"url: instance {other_id} has this one already", "url")

    def _find(self, instance_id: str) -> InstanceId:
        found = InstanceId(instance_id)
        if found not in self._entries:
            raise GatewayError(404, f"there is no instance {instance_id[:64]}", "not_found", "id")
        return found

    def _begin_leaving(self, instance_id: InstanceId) -> None:
        self._set_draining(instance_id, is_draining=True)
        entry = self._entries[instance_id]
        entry.leaves_by = self._clock() + self._live.current.drain.limit_s
        entry.takeover = None
        logger.info("instance %s drains, and then goes", instance_id)

    def _set_draining(self, instance_id: InstanceId, *, is_draining: bool) -> None:
        self._driver.handle(InstanceDraining(instance_id, is_draining))

    def _expiry(self, record: Announced) -> float | None:
        return self._clock() + record.lease_s if record.lease_s is not None else None

    def _add(self, link: Link, record: Announced | None, origin: Origin) -> None:
        self._links.add(link)
        expires_at = self._expiry(record) if record is not None else None
        self._entries[link.id] = _Entry(link.settings, origin, record, expires_at)
        self._monitor.watch(link, _facts_of(record))
        logger.info("instance %s came: %s", link.id, link.settings.url)

    def _remove(self, instance_id: InstanceId) -> None:
        """Forget an instance now; what it has under way may still end, within one drain limit in all."""
        entry, limit_s = self._entries.pop(instance_id), self._live.current.drain.limit_s
        if entry.leaves_by is not None:
            limit_s = max(0.0, entry.leaves_by - self._clock())
        reservations = self._driver.core.loads.reservations
        given = [key for key, r in reservations.items() if r.holder.instance_id == instance_id]
        self._monitor.unwatch(instance_id)
        link = self._links.remove(instance_id)
        closing = asyncio.create_task(
            link.close_when_idle(limit_s, lambda: any(key in reservations for key in given))
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
        self._barred = {key: until for key, until in self._barred.items() if until > now}
        for instance_id, entry in list(self._entries.items()):
            has_ended = entry.expires_at is not None and entry.expires_at <= now
            if has_ended and not self.are_leases_known():
                entry.expires_at = now + (entry.record.lease_s or 0.0 if entry.record else 0.0)
                has_ended = False
            if has_ended:
                logger.warning("instance %s has not renewed its lease", instance_id)
            if entry.takeover is not None and self._is_taken_over(entry.takeover, now):
                self._begin_leaving(instance_id)
            is_leaving = entry.leaves_by is not None
            has_left = is_leaving and (self._is_idle(instance_id) or (entry.leaves_by or 0) <= now)
            if has_ended or has_left:
                self._remove(instance_id)

    def _is_taken_over(self, takeover: _Takeover, now: float) -> bool:
        fleet = self._driver.core.fleet
        coming = [state for name in takeover.by if (state := fleet.find(name)) is not None]
        return takeover.until <= now or all(s.is_healthy and s.facts is not None for s in coming)

    def _is_idle(self, instance_id: InstanceId) -> bool:
        core = self._driver.core
        instance = core.fleet.find(instance_id)
        holders = instance.holders if instance is not None else ()
        return not any(core.loads.get_own(holder).active_requests for holder in holders)


def _facts_of(record: Announced | None) -> Mapping[str, Any]:
    return record.model_dump(exclude_none=True) if record is not None else {}


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


def _ignore(_: InstanceId, __: By) -> None:
    """For a gateway alone."""


def _always() -> bool:
    return True


def _conflict(message: str, param: str) -> GatewayError:
    return GatewayError(409, message, "conflict", param)
