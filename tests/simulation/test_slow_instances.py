"""An instance that is five times slower than the others gets less, in proportion, and its share again later."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from moongate.router import (
    BlockSpace,
    Event,
    Forward,
    InstanceAdded,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstanceProbed,
    InstanceSpec,
    ModelCard,
    Outcome,
    Prompt,
    Request,
    RequestArrived,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    RouterCore,
    make_policy,
)
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.invariants import check

A, B, C = (InstanceId(name) for name in "abc")
SPACE = BlockSpace(16)
SLOWER = 5.0
PREFILL_TOKENS_PER_S = 8000.0
PROMPT_TOKENS = 800
DECODE_S = 0.2


@dataclass
class Phase:
    """A time in which the fleet is as it is, and where requests went."""

    seconds: float
    slower: float  # instance A
    shares: Counter[InstanceId]

    @property
    def share(self) -> float:
        return self.shares[A] / self.shares.total()


class Fleet:
    """Three instances that each compute one prompt at a time, then decode; requests at random times."""

    def __init__(self, policy: str, per_s: float) -> None:
        self.policy = make_policy(policy)
        self.core = RouterCore(self.policy, random.Random(1).randrange)
        self.chance = random.Random(2)
        self.per_s = per_s
        self.now = 0.0
        self.slower = 1.0
        self.free_at = dict.fromkeys((A, B, C), 0.0)
        self.agenda: list[tuple[float, int, Callable[[], object]]] = []
        self.numbers: Iterator[int] = itertools.count()
        for name in (A, B, C):
            facts = InstanceFacts((ModelCard("m"),), SPACE.block_size_tokens)
            for event in (
                InstanceAdded(InstanceSpec(name)),
                InstanceDescribed(name, facts),
                InstanceProbed(name, is_healthy=True),
            ):
                self.core.handle(event, self.now)

    def run(self, phase: Phase) -> None:
        self.slower = phase.slower
        ends_at, arrives_at = self.now + phase.seconds, self.now
        while True:
            arrives_at += self.chance.expovariate(self.per_s)
            if arrives_at >= ends_at:
                break
            self._run_until(arrives_at)
            self._arrive(phase)
        self._run_until(ends_at)
        check(self.core)

    def _run_until(self, until: float) -> None:
        while self.agenda and self.agenda[0][0] <= until:
            self.now, _, act = heapq.heappop(self.agenda)
            act()
        self.now = until

    def _at(self, time: float, event: Event) -> None:
        act = lambda: self.core.handle(event, self.now)  # noqa: E731
        heapq.heappush(self.agenda, (time, next(self.numbers), act))

    def _arrive(self, phase: Phase) -> None:
        number = next(self.numbers)
        request_id = RequestId(f"r{number}")
        prompt = None
        if self.policy.reads_prompts:
            chain = hash_prompt(SPACE, pack_tokens([number] * PROMPT_TOKENS))
            prompt = Prompt(PROMPT_TOKENS, {SPACE: chain})
        commands = self.core.handle(RequestArrived(Request(request_id, "m", prompt)), self.now)
        (forward,) = (command for command in commands if isinstance(command, Forward))
        instance = forward.holder.instance_id
        phase.shares[instance] += 1
        slower = self.slower if instance == A else 1.0
        began = max(self.now, self.free_at[instance])
        first_byte = self.free_at[instance] = began + PROMPT_TOKENS / PREFILL_TOKENS_PER_S * slower
        self._at(first_byte, RequestFirstByte(request_id, shows_prefill=True))
        finished = RequestFinished(request_id, Outcome.ANSWERED)
        self._at(first_byte + DECODE_S * slower, finished)


@pytest.mark.parametrize(
    ("policy", "per_s", "share_max"),
    [
        ("round_robin", 3.0, 0.16),
        ("least_loaded", 1.0, 0.2),  # too little is seen to be as sure
        ("least_loaded", 9.0, 0.16),
        ("power_of_two", 9.0, 0.16),
        ("kv_cost", 3.0, 0.16),
        ("kv_cost", 9.0, 0.16),
    ],
)
def test_a_slow_instance_sheds_load_in_proportion_and_gets_it_back(
    policy: str, per_s: float, share_max: float
) -> None:
    fleet = Fleet(policy, per_s)
    phases = {
        name: Phase(seconds, slower, Counter())
        for name, seconds, slower in (
            ("warm", 60, 1.0),
            ("before", 60, 1.0),
            ("noticing", 30, SLOWER),
            ("slow", 180, SLOWER),
            ("recovering", 150, 1.0),
            ("after", 120, 1.0),
        )
    }
    for phase in phases.values():
        fleet.run(phase)
    shares = {name: round(phase.share, 3) for name, phase in phases.items()}
    assert shares["before"] == pytest.approx(1 / 3, abs=0.1), shares
    # A fifth of what each of the others gets is a share of 9 %.
    assert 0.04 <= shares["slow"] <= share_max, shares
    assert shares["after"] == pytest.approx(1 / 3, abs=0.1), shares
