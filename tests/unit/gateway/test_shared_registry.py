"""What holds when two gateways say different things of an instance before they have heard of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.gateway.instances.roster import Announced, By, Origin, Standing
from moongate.gateway.replicas.shared_registry import SharedRegistry
from moongate.router import InstanceId, PeerId

E = InstanceId("e")
RECORD = Announced(id="e", url="http://127.0.0.1:1", lease_s=60.0)


class Redis:
    """A hash that both write, and messages that arrive when the test says so."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.kept: dict[str, bytes] = {}
        self.on_message: list[Callable[[bytes], None]] = []
        self.is_up, self.up_since, self.is_hub = True, 0.0, False
        self.messages: list[bytes] = []

    def listen(self, _: str, on_message: Callable[[bytes], None]) -> None:
        self.on_message.append(on_message)

    async def tell(self, commands: Callable[[Any], object]) -> list[Any]:
        commands(self)
        return [dict(self.kept), True, (self.clock(), 0)]

    async def publish(self, _: str, message: bytes) -> bool:
        self.messages.append(message)
        return True

    def hset(self, _: str, name: str, value: bytes) -> None:
        self.kept[name] = value

    def hgetall(self, _: str) -> None:
        """`tell` answers."""

    def hdel(self, _: str, name: str) -> None:
        self.kept.pop(name, None)

    def expire(self, _: str, __: int) -> None:
        """Nothing expires here."""

    def time(self) -> None:
        """`tell` answers."""


class Replica:
    """A gateway's registry over a roster that keeps what it is told."""

    def __init__(self, name: str, redis: Redis, wall_clock: Callable[[], float]) -> None:
        self.now = Standing(None, Origin.ANNOUNCED, False, True, 0.0)
        self.on_change: Callable[[InstanceId, By], None]
        self.are_leases_known: Callable[[], bool]
        roster: Any = self
        state: Any = redis
        self.registry = SharedRegistry(roster, state, PeerId(name), lambda: 0.0, wall_clock)

    def standing(self, _: InstanceId) -> Standing:
        return self.now

    def follow_peer(self, _: InstanceId, told: Standing) -> None:
        self.now = told

    def renew(self) -> None:
        self.now = Standing(RECORD, Origin.ANNOUNCED, self.now.is_drained, False, 0.0)
        self.on_change(E, By.ENGINE)

    def set_drained(self, is_drained: bool) -> None:
        self.now = Standing(RECORD, Origin.ANNOUNCED, is_drained, False, 0.0)
        self.on_change(E, By.OPERATOR)


async def _play(
    steps: list[tuple[str, int]], seconds_apart: float
) -> tuple[bool | None, set[bool]]:
    """Return what the operator said last, and what the gateways hold once all have heard all.

    A step: what is done ("renew", "drain", "undrain", "hear"), and at which gateway.
    """
    now = 1000.0

    def clock() -> float:
        return now

    redis = Redis(clock)
    replicas = [Replica(name, redis, clock) for name in "ab"]
    said = None
    for replica in replicas:
        replica.registry.start()
    for step, at in steps:
        now += seconds_apart
        if step == "renew":
            replicas[at].renew()
        elif step == "hear":
            await asyncio.sleep(0)
            for message in redis.messages:
                redis.on_message[at](message)
        else:
            said = step == "drain"
            replicas[at].set_drained(said)
    for _ in range(20):  # all is told
        await asyncio.sleep(0)
    for message in redis.messages:
        for on_message in redis.on_message:
            on_message(message)
    for replica in replicas:
        await replica.registry.close()
    return said, {replica.now.is_drained for replica in replicas}


def test_a_renewal_at_a_gateway_that_has_not_heard_undoes_no_drain() -> None:
    steps = [("renew", 0), ("hear", 1), ("drain", 1), ("renew", 0), ("renew", 0)]
    assert asyncio.run(_play(steps, 1.0)) == (True, {True})


def test_a_renewal_at_a_gateway_that_starts_undoes_no_drain() -> None:
    assert asyncio.run(_play([("drain", 1), ("renew", 0)], 1.0)) == (True, {True})


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["renew", "drain", "undrain", "hear"]), st.integers(0, 1)),
        max_size=12,
    )
)
@pytest.mark.parametrize("seconds_apart", [1.0, 0.001])
def test_what_an_operator_said_last_holds_everywhere(
    seconds_apart: float, steps: list[tuple[str, int]]
) -> None:
    said, held = asyncio.run(_play(steps, seconds_apart))
    assert held == ({said} if said is not None else {False})


def test_clocks_may_differ_by_hours() -> None:
    async def told_across(hours: float, *, knows_time: bool) -> tuple[bool, bool]:
        redis = Redis(lambda: 1e9 + 60.0)
        behind = Replica("a", redis, lambda: 1e9)
        ahead = Replica("b", redis, lambda: 1e9 + hours * 3600)
        for replica in (behind, ahead):
            replica.registry.start()
        if knows_time:
            await asyncio.sleep(0.01)
        behind.renew()
        await asyncio.sleep(0.01)
        await ahead.registry._refresh()
        for replica in (behind, ahead):
            await replica.registry.close()
        return ahead.now.record is not None, bool(redis.kept)

    for hours in (2.0, -2.0):
        for knows_time in (True, False):  # of Redis, before it hears of the engine
            assert asyncio.run(told_across(hours, knows_time=knows_time)) == (True, True)
