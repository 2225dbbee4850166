"""What the core is told of one request, and that what it holds for it is given back once."""

from __future__ import annotations

import pytest

from moongate.gateway.driver import Driver
from moongate.gateway.proxy.reservation import Reservation
from moongate.router import (
    Event,
    FailureKind,
    Forward,
    InstanceAdded,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstanceProbed,
    InstanceSpec,
    ModelCard,
    Outcome,
    Request,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestId,
    Role,
    RouterCore,
)
from moongate.router.policy import make_policy

R = RequestId("1")


class World:
    """A core with instances that serve m, and what it is told of the request."""

    def __init__(self, *names: str) -> None:
        self.core = RouterCore(make_policy("round_robin"), lambda n: n - 1)
        self.told: list[Event] = []
        self.driver = Driver(self.core, lambda: 100.0, lambda _, event: self.told.append(event))
        self.driver.on_probe = lambda _: None
        for name in map(InstanceId, names):
            self.driver.handle(InstanceAdded(InstanceSpec(name, Role.BOTH)))
            self.driver.handle(InstanceDescribed(name, InstanceFacts((ModelCard("m"),))))
            self.driver.handle(InstanceProbed(name, is_healthy=True))

    def reserve(self) -> Reservation:
        reservation = Reservation(self.driver, R)
        assert isinstance(self.driver.handle(RequestArrived(Request(R, "m"))), Forward)
        reservation.begin()
        self.told.clear()
        return reservation


def test_it_is_given_back_once() -> None:
    world = World("a")
    reservation = world.reserve()
    reservation.finish(Outcome.ANSWERED, 7, 3)
    reservation.finish(Outcome.BROKEN_OFF)
    assert world.told == [RequestFinished(R, Outcome.ANSWERED, 7, 3)]
    assert world.core.requests == {}


def test_what_was_never_reserved_is_not_given_back() -> None:
    world = World("a")
    Reservation(world.driver, R).finish(Outcome.CLIENT_LEFT)
    assert RequestFinished(R, Outcome.CLIENT_LEFT) not in world.told


def test_a_hand_off_that_goes_on_keeps_it() -> None:
    world = World("a")
    reservation = world.reserve()
    reservation.is_adopted = True
    reservation.finish(Outcome.CLIENT_LEFT)
    assert (world.told, set(world.core.requests)) == ([], {R})
    reservation.is_adopted = False
    reservation.finish(Outcome.CLIENT_LEFT)
    assert world.told == [RequestFinished(R, Outcome.CLIENT_LEFT)]


@pytest.mark.parametrize(("names", "is_held"), [(("a", "b"), True), (("a",), False)])
def test_after_a_failure_it_is_held_only_for_another_attempt(
    names: tuple[str, ...], is_held: bool
) -> None:
    world = World(*names)
    reservation = world.reserve()
    command = reservation.failed(FailureKind.UNREACHABLE)
    assert world.told == [RequestFailed(R, FailureKind.UNREACHABLE, None)]
    assert (isinstance(command, Forward), reservation.is_held) == (is_held, is_held)
    reservation.finish(Outcome.BROKEN_OFF)
    assert world.core.requests == {}
