"""Follows a name in DNS: what it leads to is an instance, and what it leads to no more goes.

What comes is checked like any other instance before it gets work. What is missing in several look-ups in
a row drains, and then goes; DNS servers answer in parts, and a record may be missing once. A look-up that
fails changes nothing: engines that are dead health checks find anyway. The settings may change at any time
(`LiveSettings`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import ValidationError

from moongate.gateway.config.discovery_settings import DiscoverySettings
from moongate.gateway.config.instance_settings import InstanceSettings
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.instances.dns_names import Address, LookupFailed, Resolve
from moongate.gateway.instances.roster import Roster
from moongate.router import InstanceId

logger = logging.getLogger(__name__)

TOLD_AGAIN_S = 60.0
"""A resolver that goes on failing is told of once in so long."""

ID_CHARS_MAX = 64
"""As of all names of instances."""


class DnsDiscovery:
    """Looks the name up, where there is one. `start` it inside the event loop, and `close` it."""

    def __init__(
        self, live: LiveSettings, roster: Roster, resolve: Resolve, clock: Callable[[], float]
    ) -> None:
        self._live = live
        self._roster = roster
        self._resolve = resolve
        self._clock = clock
        self._absences: Counter[InstanceId] = Counter()  # look-ups in a row
        self._told_at: float | None = None  # of look-ups that fail
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.counts = {"ok": 0, "failed": 0}
        self.addresses = 0  # that the last good look-up found

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def renew(self) -> None:
        """Look again now: the settings have changed."""
        self._changed.set()

    async def _keep_looking(self) -> None:
        while True:
            self._changed.clear()
            settings = self._live.current.discovery
            try:
                await self._look(settings)
            except Exception:
                # A bug of ours; a name that is never looked up again would be worse.
                logger.exception("%s could not be looked up", settings.name)
            pause_s = settings.interval_s if settings.kind == "dns" else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    async def _look(self, settings: DiscoverySettings) -> None:
        """Follow what is found now. Nothing is, where nothing is to be looked up any more."""
        if settings.kind != "dns":
            self._absences.clear()
            self.addresses = 0
            self._roster.follow((), [*self._roster.found], 0.0)
            return
        try:
            wanted = await self._find(settings)
        except LookupFailed as error:
            self._note_failure(error)
            return
        self.counts["ok"] += 1
        self.addresses = len(wanted)
        if self._told_at is not None:
            logger.info("%s is found again", settings.name)
            self._told_at = None
        self._roster.follow(
            wanted, self._count_absences({i.id for i in wanted}, settings), settings.absence_s
        )

    async def _find(self, settings: DiscoverySettings) -> list[InstanceSettings]:
        """Return what is found now. Raises: LookupFailed, also for addresses that can't be any."""
        addresses = await self._resolve(settings)
        try:
            return [settings.instance(name_instance(at), *at) for at in sorted(addresses)]
        except ValidationError as error:
            raise LookupFailed(f"{settings.name}: {error.errors()[0]['msg']}") from error

    def _count_absences(self, present: set[str], settings: DiscoverySettings) -> list[InstanceId]:
        """Return the instances that have been missing for long enough."""
        missing = [name for name in self._roster.found if name not in present]
        self._absences = Counter({name: self._absences[name] + 1 for name in missing})
        return [name for name in missing if self._absences[name] >= settings.absent_after]

    def _note_failure(self, error: LookupFailed) -> None:
        self.counts["failed"] += 1
        now = self._clock()
        if self._told_at is None or now - self._told_at >= TOLD_AGAIN_S:
            self._told_at = now
            logger.warning("discovery: %s; the instances stay as they are", error)


def name_instance(address: Address) -> str:
    """Return the id of what is there: always the same for the same address."""
    name = f"{address.host.replace(':', '-').lstrip('-')}-{address.port}"
    if len(name) <= ID_CHARS_MAX:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: ID_CHARS_MAX - 13]}-{digest}"


class DiscoveryMetrics(Collector):
    """What is told of look-ups."""

    def __init__(self, discovery: DnsDiscovery) -> None:
        self._discovery = discovery

    def collect(self) -> Iterable[Metric]:
        lookups = CounterMetricFamily(
            "moongate_discovery_lookups", "Look-ups of the name in DNS, by how they ended",
            labels=["result"],
        )  # fmt: skip
        for result, count in self._discovery.counts.items():
            lookups.add_metric([result], count)
        yield lookups
        yield GaugeMetricFamily(
            "moongate_discovery_addresses", "What the name leads to, as last found",
            float(self._discovery.addresses),
        )  # fmt: skip
