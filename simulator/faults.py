"""What goes wrong in a run: engines that crash or are slow, events that are lost or late, partitions.

Responsible for when faults happen and for what gateways hear meanwhile. Not for what follows from them.
Deterministic by its seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from moongate.router.events import KvEvent
from moongate.router.model import InstanceId
from moongate.simulator.virtual_gateway import VirtualGateway
from moongate.simulator.virtual_instance import Agenda, VirtualInstance

DETECTED_S = 2.0
"""How long it takes until a regular check finds an instance well again: a health interval."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong. Shares are of 1; instances are the first so many by name."""

    name: str
    crashed: int = 0  # instances that crash at `at_s` and come back after `for_s`
    slow: int = 0  # instances that are slow from the beginning
    slowness: float = 3.0
    cut_off: int = 0  # instances that gateways don't reach from `at_s` for `for_s`
    at_s: float = 0.0
    for_s: float = 60.0
    lost_share: float = 0.0  # of event batches
    repeated_share: float = 0.0  # of those that came
    late_s: float = 0.0
    has_replay: bool = True  # whether what was lost can be asked for again

    def plan(self, agenda: Agenda, gateways: Sequence[VirtualGateway]) -> None:
        """Put what goes wrong on the agenda."""
        instances = list(gateways[0].instances.values())
        for instance in instances[: self.slow]:
            instance.slow_down(self.slowness)
        for instance in instances[: self.crashed]:
            agenda.at(self.at_s, _crash(instance, gateways))
            agenda.at(self.at_s + self.for_s, _restart(instance, agenda, gateways))
        for instance in instances[: self.cut_off]:
            agenda.at(self.at_s, _cut_off(instance.id, gateways))
            agenda.at(self.at_s + self.for_s, _heal(instance.id, gateways))


class Mishearing:
    """What lies between engines' publishers and gateways' subscribers."""

    def __init__(self, fault: Fault | None, agenda: Agenda, seed: int) -> None:
        self._fault = fault
        self._agenda = agenda
        self._chance = random.Random(f"{seed}/events")  # noqa: S311 - to be repeated

    def pass_on(
        self,
        gateway: VirtualGateway,
        source: InstanceId,
        sequence: int,
        events: tuple[KvEvent, ...],
    ) -> None:
        """Let a gateway hear a batch: now, later, twice or never."""
        fault = self._fault
        if fault is None:
            gateway.hear(source, sequence, events)
            return
        if fault.lost_share and self._chance.random() < fault.lost_share:
            return
        times = 2 if fault.repeated_share and self._chance.random() < fault.repeated_share else 1
        for _ in range(times):
            if fault.late_s:
                later = self._agenda.now + fault.late_s
                self._agenda.at(later, lambda: gateway.hear(source, sequence, events))
            else:
                gateway.hear(source, sequence, events)


def _crash(instance: VirtualInstance, gateways: Sequence[VirtualGateway]):  # type: ignore[no-untyped-def]
    def act() -> None:
        for gateway in gateways:
            gateway.lose_source(instance.id)
        instance.crash()

    return act


def _restart(instance: VirtualInstance, agenda: Agenda, gateways: Sequence[VirtualGateway]):  # type: ignore[no-untyped-def]
    def act() -> None:
        instance.restart()
        for gateway in gateways:
            gateway.find_source(instance.id)
            agenda.at(agenda.now + DETECTED_S, lambda g=gateway: g.probe(instance.id))  # type: ignore[misc]

    return act


def _cut_off(instance_id: InstanceId, gateways: Sequence[VirtualGateway]):  # type: ignore[no-untyped-def]
    def act() -> None:
        for gateway in gateways:
            gateway.unreachable.add(instance_id)
            gateway.lose_source(instance_id)
            gateway.probe(instance_id)

    return act


def _heal(instance_id: InstanceId, gateways: Sequence[VirtualGateway]):  # type: ignore[no-untyped-def]
    def act() -> None:
        for gateway in gateways:
            gateway.unreachable.discard(instance_id)
            gateway.find_source(instance_id)
            gateway.probe(instance_id)

    return act
