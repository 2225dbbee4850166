"""The pool in this process: what was used least recently goes first, and sizes add up."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moongate.kvpool.memory import MemoryPool

CAPACITY = 100
KEYS = st.sampled_from("abcdefgh")
ENDPOINTS = st.sampled_from(["one:1", "two:1"])


class Machine(RuleBasedStateMachine):
    """The pool beside the simplest model of it: keys with size and segment, in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = MemoryPool(CAPACITY)
        self.model: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self.evicted = 0

    @rule(key=KEYS, size=st.integers(1, 120), endpoint=ENDPOINTS)
    def put(self, key: str, size: int, endpoint: str) -> None:
        fits = key in self.model or size <= CAPACITY
        assert self.pool.put(key, size, endpoint) is fits
        if key in self.model:
            self.model.move_to_end(key)
        elif fits:
            while sum(s for s, _ in self.model.values()) + size > CAPACITY:
                self.model.popitem(last=False)
                self.evicted += 1
            self.model[key] = size, endpoint

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        replica = self.pool.get(key)
        assert (replica is not None) == (key in self.model)
        if replica is not None:
            assert (replica.size_bytes, replica.endpoint) == self.model[key]
            self.model.move_to_end(key)

    @rule(keys=st.lists(KEYS, unique=True))
    def look_up(self, keys: list[str]) -> None:
        found = asyncio.run(self.pool.look_up(keys))
        assert set(found) == set(keys) & set(self.model)

    @rule(endpoint=ENDPOINTS)
    def remove_endpoint(self, endpoint: str) -> None:
        self.pool.remove_endpoint(endpoint)
        for key in [k for k, (_, e) in self.model.items() if e == endpoint]:
            del self.model[key]

    @rule()
    def clear(self) -> None:
        before = asyncio.run(self.pool.check()).epoch
        self.pool.clear()
        self.model.clear()
        assert asyncio.run(self.pool.check()).epoch != before

    @invariant()
    def sizes_add_up(self) -> None:
        size = sum(size for size, _ in self.model.values())
        assert list(self.pool) == list(self.model)
        assert self.pool.allocated_bytes == size <= CAPACITY
        assert (len(self.pool), self.pool.evicted_keys) == (len(self.model), self.evicted)


TestMemoryPool = Machine.TestCase
TestMemoryPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
