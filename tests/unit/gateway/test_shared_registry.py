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

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.on_message: list[Callable[[bytes], None]] = []
        self.is_up, self.up_since = True, 0.0
        self.messages: list[bytes] = []

    def listen(self, _: str, on_message: Callable[[bytes], None]) -> None:
        self.on_message.append(on_message)

    async def tell(self, commands: Callable[[Any], object]) -> list[Any]:
        commands(self)
        return [dict(self.kept), True]

    async def publish(self, _: str, message: bytes) -> bool:
        self.messages.append(message)
        return True

    def hset(self, _: str, name: str, value: bytes) -> None:
        self.kept[name] = value

    def hgetall(self, _: str) -> None:
        """`tell` answers."""

    def expire(self, _: str, __: int) -> None:
        """Nothing expires here."""


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
    times = iter(range(1, 1_000_000))
    redis = Redis()
    replicas = [Replica(name, redis, lambda: next(times) * seconds_apart) for name in "ab"]
    said = None
    for replica in replicas:
        replica.registry.start()
    for step, at in steps:
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
