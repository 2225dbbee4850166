"""Which instances there are, for all gateways together: what is announced, added, drained or removed at one of
them happens at all.

What one gateway says of an instance is a whole standing with a version, and the latest version holds
everywhere, in whichever order they come (a version is the time of the last operator's act that it goes by,
then the time at which it was made, both by Redis' clock, then the gateway's name). So an engine that renews its lease at a gateway
which hasn't heard yet of a drain or a removal undoes neither. A change goes out as a message at once and lies in a hash beside; each gateway reads the hash every
few seconds, so what was lost heals, and one that starts finds what is there. What the hash has lost, or has
too old, is put there again by whoever knows it.

Leases are counted by each gateway from when it heard of the renewal. While nothing can be heard none ends:
health checks go on in any case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated

import msgspec
from pydantic import ValidationError
from redis.asyncio.client import Pipeline

from moongate.gateway.errors import GatewayError
from moongate.gateway.instances.roster import Announced, By, Origin, Roster, Standing
from moongate.gateway.replicas.shared_state import SharedState, StateUnavailable
from moongate.gateway.telemetry.occasional_log import OccasionalLog
from moongate.router import InstanceId, PeerId

logger = logging.getLogger(__name__)

KEY = "moongate:instances"
CHANNEL = "instances"

REFRESH_S = 2.0
"""How often the hash is read."""

KEPT_S = 86_400
"""For how long it lives after the last change or look at it."""

STALE_S = 3600.0
"""After its lease a record is of no use; it is taken out after so long, whatever clocks differ by."""

RECORDS_MAX = 10_000
"""Instances in the hash that are heeded."""

_Time = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
"""Milliseconds of the wall clock."""

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]


class _Told(msgspec.Struct, array_like=True, frozen=True):
    """A standing of an instance, on its way."""

    instance: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    ordered_ms: _Time  # when an operator last said something of it; 0: never
    made_ms: _Time
    peer: _Text
    record: Annotated[bytes, msgspec.Meta(max_length=65_536)]  # JSON; empty: none
    origin: Origin
    is_drained: bool
    is_leaving: bool
    barred_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)]

    @property
    def version(self) -> tuple[int, int, str]:
        return self.ordered_ms, self.made_ms, self.peer


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Told).decode


class SharedRegistry:
    """Create it inside the event loop, `start` and `close` it. `wall_clock`: seconds since the epoch."""

    def __init__(
        self,
        roster: Roster,
        state: SharedState,
        peer: PeerId,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._state = state
        self._peer = peer
        self._clock = clock
        self._wall_clock = wall_clock
        self._known: dict[InstanceId, _Told] = {}
        self._changed: dict[InstanceId, None] = {}
        self._wake = asyncio.Event()
        self._heard_at: float | None = None
        # Redis' clock of ours: all gateways go by that one. None: nothing was read yet.
        self._ahead_s: float | None = None
        self._following: asyncio.Task[None] | None = None
        self._log = OccasionalLog(logger, clock)

    def start(self) -> None:
        self._roster.on_change = self._note_change
        self._roster.are_leases_known = self._are_leases_known
        self._state.listen(CHANNEL, self._heard)
        self._following = asyncio.create_task(self._keep_following())

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    def _shared_time_s(self) -> float:
        return self._wall_clock() + (self._ahead_s or 0.0)

    def _are_leases_known(self) -> bool:
        """Tell whether what others renewed has been heard of lately, and for long enough."""
        now = self._clock()
        is_heard = self._heard_at is not None and now - self._heard_at <= 2 * REFRESH_S
        return is_heard and self._state.is_up and now - self._state.up_since > 2 * REFRESH_S

    # --- telling ----------------------------------------------------------------------------------

    def _note_change(self, instance_id: InstanceId, by: By) -> None:
        """Something happened to an instance here: it is the latest that this gateway knows."""
        standing = self._roster.standing(instance_id)
        known = self._known.get(instance_id)
        made_ms = round(self._shared_time_s() * 1000)
        ordered_ms = made_ms if by is By.OPERATOR else 0
        if known is not None:
            made_ms = max(made_ms, known.made_ms + 1)
            ordered_ms = max(ordered_ms, known.ordered_ms + (by is By.OPERATOR))
        self._known[instance_id] = _Told(
            instance_id,
            ordered_ms,
            made_ms,
            self._peer,
            standing.record.model_dump_json(exclude_none=True).encode() if standing.record else b"",
            standing.origin,
            standing.is_drained,
            standing.is_leaving,
            standing.barred_s,
        )
        self._changed[instance_id] = None
        self._wake.set()

    async def _keep_following(self) -> None:
        refresh_at = self._clock()
        while True:
            try:
                if self._clock() >= refresh_at:
                    refresh_at = self._clock() + REFRESH_S
                    await self._refresh()
                if self._changed and self._ahead_s is not None:
                    await self._tell()
            except StateUnavailable:
                await asyncio.sleep(0.1)
            except Exception:
                logger.exception("a bug of ours")
            try:
                async with asyncio.timeout(max(0.0, refresh_at - self._clock())):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    async def _tell(self) -> None:
        """Raises: StateUnavailable; then what changed is told later."""
        changed = [*self._changed]
        values = {name: _encode(self._known[name]) for name in changed}

        def write(pipeline: Pipeline) -> None:
            for name, value in values.items():
                pipeline.hset(KEY, name, value)
            pipeline.expire(KEY, KEPT_S)

        await self._state.tell(write)
        for name in changed:
            if _encode(self._known[name]) == values[name]:
                self._changed.pop(name, None)
        for value in values.values():
            await self._state.publish(CHANNEL, value)

    # --- hearing ----------------------------------------------------------------------------------

    async def _refresh(self) -> None:
        """Read all, and put back what is missing there. Raises: StateUnavailable."""

        def ask(pipeline: Pipeline) -> None:
            pipeline.hgetall(KEY)
            pipeline.expire(KEY, KEPT_S)
            if not self._state.is_hub:  # else all are on one machine
                pipeline.time()

        found, _, *times = await self._state.tell(ask)
        self._set_clock([seconds + microseconds / 1e6 for seconds, microseconds in times])
        versions: dict[str, tuple[int, int, str]] = {}
        for value in [*found.values()][:RECORDS_MAX]:
            told = self._hear(value)
            if told is not None:
                versions[told.instance] = told.version
        self._heard_at = self._clock()
        stale = [name for name, told in self._known.items() if self._is_stale(told)]
        for name in stale:
            del self._known[name]
            self._changed.pop(name, None)
        if stale:
            await self._state.tell(lambda p: [p.hdel(KEY, name) for name in stale])
        for name, told in self._known.items():
            if versions.get(name, (-1, -1, "")) < told.version:
                self._changed[name] = None
        if self._changed:
            self._wake.set()

    def _set_clock(self, times_s: list[float]) -> None:
        """Go by this time, if there is one, from now on; what happened here before is told by it too."""
        is_first, now = self._ahead_s is None, self._wall_clock()
        self._ahead_s = times_s[0] - now if times_s else 0.0
        if not is_first:
            return
        ahead_ms = round(self._ahead_s * 1000)
        for name, told in self._known.items():
            ordered_ms = told.ordered_ms + ahead_ms if told.ordered_ms else 0
            self._known[name] = msgspec.structs.replace(
                told, made_ms=told.made_ms + ahead_ms, ordered_ms=ordered_ms
            )

    def _heard(self, value: bytes) -> None:
        if self._ahead_s is not None:  # else it is about to read all there is
            self._hear(value)

    def _hear(self, value: bytes) -> _Told | None:
        """Take in what another gateway says. Return it, None if it can't be read."""
        try:
            told = _decode(value)
            record = Announced.model_validate_json(told.record) if told.record else None
        except (msgspec.DecodeError, ValidationError, RecursionError) as error:
            self._log.warn(f"what is said of an instance can't be read: {type(error).__name__}")
            return None
        instance_id = InstanceId(told.instance)
        known = self._known.get(instance_id)
        if known is not None and told.version <= known.version:
            return told
        self._known[instance_id] = told
        if self._is_stale(told):
            return told
        self._changed.pop(instance_id, None)
        standing = Standing(record, told.origin, told.is_drained, told.is_leaving, told.barred_s)
        try:
            self._roster.follow_peer(instance_id, standing)
        except GatewayError as error:
            self._log.warn(f"instance {instance_id} of another gateway is not taken in: {error}")
        return told

    def _is_stale(self, told: _Told) -> bool:
        """Tell whether nobody can need it any more: its lease is long over, or it is long gone."""
        age_s = self._shared_time_s() - told.made_ms / 1000
        if told.is_leaving:
            return age_s > STALE_S + told.barred_s
        if not told.record:
            return False
        lease_s = msgspec.json.decode(told.record, type=_Lease).lease_s
        return lease_s is not None and age_s > STALE_S + lease_s


class _Lease(msgspec.Struct):
    lease_s: float | None = None
