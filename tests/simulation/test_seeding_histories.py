"""Random histories of a fleet with a pool that fills up, fails and lies: seedings keep their bounds."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

from moongate.router import (
    Event,
    Holder,
    InstanceDescribed,
    InstancePooled,
    KeySpace,
    PoolChecked,
    PoolPart,
    Request,
    RequestArrived,
    RequestId,
    RouterCore,
    Seed,
    SeedingEnded,
    SeedingLimits,
    make_policy,
)

from .histories import History

SEQUENCES, STEPS = 400, 80
LIMITS = SeedingLimits(
    at_once_max=2,
    per_minute_max=3,
    demand_per_s_min=0.1,
    busy_requests=1,
    prefix_tokens_min=2,
    pool_use_max=0.5,
    kv_use_max=0.9,
)
KEY_SPACES = (*[KeySpace("k")] * 6, KeySpace("l"), None)


class SeedingHistory(History):
    """A history with a pool: what it holds, and how it is, is chance."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        others = [make_policy("least_loaded"), make_policy("session_hash")]
        draw = random.Random(self.seed).randrange
        self.core = RouterCore(make_policy(self.policy), draw, self.limits, others, LIMITS)
        self.requests: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Seed] = {}
        self.begun: deque[float] = deque()
        self.pool = PoolChecked(is_up=False)
        self.seeds = 0
        self.kinds += [self._check_pool, self._end_seeding, self._use_pool, *[self._repeat] * 6]

    def run(self, steps: int) -> None:
        self._join()
        self._join()
        self.pool = PoolChecked(is_up=True, use=0.3)
        self.handle(self.pool)
        for _ in range(3):
            self._use_pool()
        super().run(steps)

    def handle(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            event = RequestArrived(self._with_pool(event.request))
            self.requests[event.request.id] = self.asked[event.request.id] = event.request
        elif isinstance(event, InstanceDescribed) and self.chance.random() < 0.8:
            event = replace(event, facts=replace(event.facts, capacity_blocks=50))
        seen = len(self.commands)
        super().handle(event)
        for command in self.commands[seen:]:
            if isinstance(command, Seed):
                self._seeded(command)

    def heal(self) -> None:
        super().heal()
        while self.running:
            self._end_seeding()

    def _with_pool(self, request: Request) -> Request:
        if request.prompt is None or request.prompt.token_count < 2 or self.chance.random() < 0.2:
            return replace(request, pool={})
        tokens = max(request.prompt.token_count - self.chance.choice([1, 1, 2, 9]), 1)
        weight = self.chance.choice([1.0, 1.0, 1.0, 0.8])
        parts = {space: PoolPart(tokens, 1.0, weight=weight) for space in KEY_SPACES if space}
        return replace(request, pool=parts)

    def _seeded(self, seed: Seed) -> None:
        self.seeds += 1
        request, instance = self.requests[seed.request_id], self.instances[seed.holder.instance_id]
        assert request.prompt is not None
        assert request.prompt.is_exact
        assert LIMITS.prefix_tokens_min <= seed.tokens <= request.prompt.token_count
        assert seed.model == request.model
        assert instance.is_healthy
        assert self.pool.is_up
        assert self.pool.use is not None
        assert self.pool.use <= LIMITS.pool_use_max
        assert seed.holder not in {running.holder for running in self.running.values()}
        self.running[seed.seeding_id] = seed
        assert len(self.running) <= LIMITS.at_once_max
        self.begun.append(self.now)
        assert sum(self.now - at < 60 for at in self.begun) <= LIMITS.per_minute_max
        self._check_lacks(seed.holder, request, seed.tokens)

    def _check_lacks(self, holder: Holder, request: Request, tokens: int) -> None:
        """Check that the holder lacks so much of what it is seeded with that it is worth it."""
        assert request.prompt is not None
        space = self.core.candidates.group(request.model, self.now).spaces[holder]
        blocks, index = request.prompt.chains[space], self.core.index
        found = index.find_overlaps(blocks, len(blocks), index.mask([holder])).get(holder)
        held = found.blocks * space.block_size_tokens if found is not None else 0
        assert tokens - held >= LIMITS.prefix_tokens_min

    def _check_pool(self) -> None:
        use = self.chance.choice([None, 0.1, 0.5, 0.6])
        self.pool = PoolChecked(is_up=self.chance.random() < 0.8, use=use)
        self.handle(self.pool)

    def _use_pool(self) -> None:
        instance = self._instance()
        if instance is not None:
            instance.key_space = self.chance.choice(KEY_SPACES)
            self.handle(InstancePooled(instance.id, instance.key_space))

    def _end_seeding(self) -> None:
        if self.running:
            seeding_id = self.chance.choice(list(self.running))
            del self.running[seeding_id]
            self.handle(SeedingEnded(seeding_id, self.chance.random() < 0.7))

    def _repeat(self) -> None:
        """Let the same be asked for again and again in one place, and answers begin."""
        known = [r for r in self.requests.values() if r.prompt is not None and r.prompt.is_exact]
        if not known:
            return
        original = replace(self.chance.choice(known), policy="session_hash", session_key="s")
        for _ in range(4):
            self.arrived += 1
            self.handle(RequestArrived(replace(original, id=RequestId(f"r{self.arrived}"))))
        self._first_byte()
        self._finish()


def test_seedings_keep_their_bounds_whatever_happens() -> None:
    seeds = failed = 0
    for seed in range(SEQUENCES):
        history = SeedingHistory(random.Random(seed))
        try:
            history.run(STEPS)
        except Exception as error:
            error.add_note(f"seed {seed}, step {len(history.recording)}: {history.recording[-1]}")
            raise
        seeds += history.seeds
        failed += any(isinstance(e, SeedingEnded) and not e.is_done for _, e in history.recording)
    assert seeds > SEQUENCES // 20, f"hardly anything is seeded any more: {seeds}"
    assert failed > 5


def test_a_recording_with_seedings_replays_to_the_same_commands() -> None:
    for seed in range(20):
        history = SeedingHistory(random.Random(seed))
        history.run(STEPS)
        again = SeedingHistory(random.Random(seed)).core
        replayed = [c for now, event in history.recording for c in again.handle(event, now)]
        assert replayed == history.commands
