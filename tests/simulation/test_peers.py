"""Several cores before one fleet that hear of each other late, twice, in another order or not at all."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from moongate.gateway.replicas import peer_wire
from moongate.router import (
    BlockSpace,
    EndPrediction,
    FailureKind,
    Forward,
    Holder,
    InstanceAdded,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstanceProbed,
    InstanceSpec,
    ModelCard,
    Outcome,
    PeerId,
    PeerLoad,
    Prompt,
    ReplayEnded,
    Request,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    RouterCore,
    ShareLoad,
    SharePrediction,
    SourceId,
    SourceOpened,
    WakeUp,
    make_policy,
)
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.commands import Command
from moongate.router.invariants import check
from moongate.router.peers import PeerEvent

pytestmark = pytest.mark.timeout(60)

NAMES = [InstanceId(name) for name in ("a", "b", "c")]
SPACE = BlockSpace(16)
LEASE_S = 5.0


@dataclass
class Gateway:
    """One core, and what it has under way."""

    name: PeerId
    core: RouterCore
    sequence: int = 0
    running: dict[RequestId, bool] = field(default_factory=dict)  # whether its first byte came
    heard: dict[str, int] = field(default_factory=dict)  # as `peering.py` has it
    is_dead: bool = False

    def hear(self, data: bytes, now: float) -> None:
        message = peer_wire.read(data)
        if message.sequence > self.heard.get(message.peer, -1):
            self.heard[message.peer] = message.sequence
            for event in message.events:
                self.handle_peer(event, now)

    def handle_peer(self, event: PeerEvent, now: float) -> None:
        self.core.handle(event, now)

    def write(self, commands: list[Command], *, is_whole: bool = False) -> bytes:
        self.sequence += 1
        loads: list[tuple[Holder, PeerLoad]] = [
            (c.holder, c.load) for c in commands if isinstance(c, ShareLoad)
        ]
        if is_whole:
            loads = self.core.outbox.whole()
        steps = [c for c in commands if isinstance(c, SharePrediction | EndPrediction)]
        return peer_wire.write(self.name, self.sequence, LEASE_S, loads, steps, is_whole=is_whole)


def make_gateway(name: str, chance: random.Random) -> Gateway:
    core = RouterCore(make_policy("kv_cost"), chance.randrange, peer=PeerId(name))
    facts = InstanceFacts((ModelCard("m"),), 16, 1000, ())
    for instance_id in NAMES:
        core.handle(InstanceAdded(InstanceSpec(instance_id)), 0.0)
        core.handle(InstanceDescribed(instance_id, facts), 0.0)
        core.handle(InstanceProbed(instance_id, is_healthy=True), 0.0)
        if chance.random() < 0.7:
            core.handle(SourceOpened(SourceId(instance_id), has_replay=True), 0.0)
            core.handle(ReplayEnded(SourceId(instance_id), 1, is_complete=True), 0.0)
    return Gateway(PeerId(name), core)


class History:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.gateways = [make_gateway(f"g{n}", self.chance) for n in range(3)]
        self.network: list[tuple[Gateway, bytes]] = []
        self.now = 0.0
        self.count = 0
        self.prompts = [self._prompt() for _ in range(6)]

    def _prompt(self) -> Prompt:
        length = self.chance.choice([100, 700, 3000])
        tokens = [self.chance.randrange(50) if n > 300 else n % 7 for n in range(length)]
        return Prompt(length, {SPACE: hash_prompt(SPACE, pack_tokens(tokens))})

    def step(self) -> None:
        self.now += self.chance.random() * 0.1
        gateway = self.chance.choice(self.gateways)
        if gateway.is_dead:
            return
        happening = self.chance.choice(
            ["arrive", "arrive", "go_on", "go_on", "hear", "hear", "tell"]
        )
        commands: list[Command] = []
        if happening == "arrive":
            self.count += 1
            request = Request(RequestId(f"r{self.count}"), "m", self.chance.choice(self.prompts))
            commands = gateway.core.handle(RequestArrived(request), self.now)
            assert any(isinstance(c, Forward) for c in commands)
            gateway.running[request.id] = False
        elif happening == "go_on" and gateway.running:
            commands = self._go_on(gateway)
        elif happening == "hear":
            self._deliver()
        elif happening == "tell":
            commands = gateway.core.handle(WakeUp(), self.now)
            self._send(gateway, gateway.write(commands, is_whole=True))
            return
        self._send(gateway, gateway.write(commands))
        check(gateway.core)

    def _go_on(self, gateway: Gateway) -> list[Command]:
        request_id = self.chance.choice([*gateway.running])
        if not gateway.running[request_id] and self.chance.random() < 0.2:
            event = RequestFailed(request_id, self.chance.choice([*FailureKind]))
            commands = gateway.core.handle(event, self.now)
            for instance_id in NAMES:
                commands += gateway.core.handle(
                    InstanceProbed(instance_id, is_healthy=True), self.now
                )
            if not any(isinstance(c, Forward) for c in commands):
                del gateway.running[request_id]
            return commands
        if not gateway.running[request_id]:
            gateway.running[request_id] = True
            return gateway.core.handle(RequestFirstByte(request_id), self.now)
        del gateway.running[request_id]
        return gateway.core.handle(RequestFinished(request_id, Outcome.ANSWERED), self.now)

    def _send(self, sender: Gateway, data: bytes) -> None:
        for receiver in self.gateways:
            if receiver is not sender and self.chance.random() < 0.8:
                self.network += [(receiver, data)] * self.chance.choice([1, 1, 1, 2])

    def _deliver(self) -> None:
        for _ in range(self.chance.randrange(8)):
            if self.network:
                position = self.chance.randrange(min(len(self.network), 4))
                receiver, data = self.network.pop(position)
                if not receiver.is_dead:
                    receiver.hear(data, self.now)
                    check(receiver.core)

    def settle(self) -> None:
        """Everybody who lives tells all, and everybody hears it; whoever is dead is forgotten."""
        self.network.clear()
        self.now += LEASE_S + 0.1
        living = [g for g in self.gateways if not g.is_dead]
        for gateway in living:
            data = gateway.write([], is_whole=True)
            for receiver in living:
                if receiver is not gateway:
                    receiver.hear(data, self.now)
        for gateway in living:
            gateway.core.handle(WakeUp(), self.now)
            others: Counter[Holder] = Counter()
            for other in living:
                if other is not gateway:
                    for holder, load in other.core.loads.loads.items():
                        others[holder] += load.active_requests
            heard = {h: load.active_requests for h, load in gateway.core.loads.elsewhere.items()}
            assert heard == dict(others)
            check(gateway.core)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_heals_with_the_next_whole_report(seed: int) -> None:
    history = History(seed)
    for step in range(400):
        history.step()
        if step % 100 == 99:
            history.settle()
        if step == 250:
            history.gateways[2].is_dead = True
    for gateway in history.gateways[:2]:
        for request_id in [*gateway.running]:
            gateway.core.handle(RequestFinished(request_id, Outcome.CLIENT_LEFT), history.now)
        gateway.running.clear()
    history.settle()
    for gateway in history.gateways[:2]:
        assert gateway.core.loads.elsewhere == {}
        gateway.core.handle(WakeUp(), history.now + 700.0)
        assert len(gateway.core.index.foreign) == 0
