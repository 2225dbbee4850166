"""What the routing core costs at scale: hashing, the overlap query, a decision, ingest, memory.

    .venv/bin/python -m benchmarks.router_scale [--json FILE] [--memory]

Everything runs in this process on one core, without sockets: the core is pure. Inputs are made from
a fixed seed and before the clock runs; each measurement also checks that what it measured is right.
Times are medians. `--memory` fills an index with 10 million blocks in a process of its own (about a
minute, and 2 GiB).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.instances import add_instance
from moongate.engine_plugins.vllm_wire import Frame, decode_batch
from moongate.router import (
    BatchReceived,
    BlockSpace,
    Forward,
    Holder,
    InstanceFacts,
    InstanceId,
    ModelCard,
    Outcome,
    Prompt,
    Request,
    RequestArrived,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    RouterCore,
    RouterLimits,
    SourceId,
    Tier,
    make_policy,
)
from moongate.router.blocks import extend_chain, hash_prompt, pack_tokens
from moongate.router.events import BlocksStored
from moongate.router.index import Overlap, OwnershipIndex
from moongate.router.model import BlockHash

SEED = 1
MODEL = "model"
BLOCK_TOKENS = 16
SPACE = BlockSpace(BLOCK_TOKENS)
VOCABULARY = 130_000
CHAIN_BLOCKS = 5_600  # of a prompt of 89,600 tokens
TURN_BLOCKS = 20  # that a turn adds
SHARED_BLOCKS = 52  # of a system prompt
FLEET = 64

SESSIONS = 10
ACTIVE_REQUESTS = 30

EVENT_BLOCKS = (1, 2, 4, 8, 16, 64, 256)
INGEST_BATCHES = 2_000

MEMORY_BLOCKS = 10_000_000
MEMORY_EVENT_BLOCKS = 500


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the numbers where they are wanted."""
    parser = argparse.ArgumentParser(prog="router_scale", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--memory", action="store_true", help="also fill an index (2 GiB)")
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.fill:
        print(json.dumps({"resident_gib": fill_index()}))
        return
    numbers = measure(with_memory=options.memory)
    print_table(numbers)
    if options.json is not None:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")


def measure(with_memory: bool) -> dict[str, float]:
    numbers = {
        "hash_5600_ms": measure_hashing() * 1e3,
        "query_grown_us": measure_grown_query() * 1e6,
        "query_cold_ms": measure_cold_query() * 1e3,
        "decide_64_us": measure_decision(instances=FLEET, turns=600) * 1e6,
        "decide_1000_us": measure_decision(instances=1000, turns=200) * 1e6,
        "decide_1000_shared_us": measure_decision(1000, turns=200, shared_blocks=SHARED_BLOCKS)
        * 1e6,
        "ingest_blocks_per_s": measure_ingest(),
    }
    if with_memory:
        numbers["memory_10m_gib"] = measure_memory()
    return numbers


ROWS = (
    ("hash_5600_ms", "hash 89,600 tokens", "-", "ms"),
    ("query_grown_us", "overlap of 5,600 blocks, 64 instances", "<= 60 us", "us"),
    ("query_cold_ms", "the same from nothing, with hashing", "<= 2.5 ms", "ms"),
    ("decide_64_us", "decision on 5,600 blocks, 64 instances", "<= 150 us", "us"),
    ("decide_1000_us", "the same, 1,000 instances", "<= 1,500 us", "us"),
    ("decide_1000_shared_us", "and all have the system prompt", "<= 1,500 us", "us"),
    ("ingest_blocks_per_s", "events, decoding included", ">= 300,000 blocks/s", "blocks/s"),
    ("memory_10m_gib", "10 million blocks, names included", "<= 2.5 GiB", "GiB"),
)
"""Name of the number, what it is, what is asked of it on the machine of docs/results.md, unit."""


def print_table(numbers: dict[str, float]) -> None:
    print(f"{'what':40} | {'asked':20} | measured")
    for name, what, asked, unit in ROWS:
        if name in numbers:
            value = numbers[name]
            shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            print(f"{what:40} | {asked:20} | {shown} {unit}")


# --- inputs ---------------------------------------------------------------------------------------


def random_tokens(chance: random.Random, count: int) -> bytes:
    return pack_tokens(chance.choices(range(VOCABULARY), k=count))


def median_s(act: Callable[[], object], repetitions: int) -> float:
    """Return the median time of an act, garbage collection as it comes."""
    times: list[float] = []
    for _ in range(repetitions):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# --- the index ------------------------------------------------------------------------------------


def measure_hashing() -> float:
    tokens = random_tokens(random.Random(SEED), CHAIN_BLOCKS * BLOCK_TOKENS)
    return median_s(lambda: hash_prompt(SPACE, tokens), repetitions=200)


@dataclass(frozen=True, slots=True)
class Held:
    """A prompt, and an index of a fleet that holds its beginning in parts of different lengths."""

    tokens: bytes
    chain: list[BlockHash]
    index: OwnershipIndex
    everyone: int
    overlaps: dict[Holder, Overlap]


def make_held() -> Held:
    tokens = random_tokens(random.Random(SEED), CHAIN_BLOCKS * BLOCK_TOKENS)
    chain = hash_prompt(SPACE, tokens)
    index = OwnershipIndex(blocks_max=1_000_000)
    holders = [Holder(InstanceId(f"i{number}")) for number in range(FLEET)]
    for holder in holders:
        index.add_holder(holder)
    # One has the turn before, others an earlier one or the system prompt.
    lengths = [CHAIN_BLOCKS - TURN_BLOCKS, 2000, 500, *[100] * 20]
    for holder, length in zip(holders, lengths, strict=False):
        index.store(holder, Tier.DEVICE, chain[:length])
    overlaps = {h: Overlap(n, n) for h, n in zip(holders, lengths, strict=False)}
    return Held(tokens, chain, index, index.mask(holders), overlaps)


def measure_grown_query() -> float:
    """The chain is known, but its new end: what is left to do is to ask the index."""
    held = make_held()

    def query() -> dict[Holder, Overlap]:
        known = CHAIN_BLOCKS - TURN_BLOCKS
        return held.index.find_overlaps(held.chain, CHAIN_BLOCKS - 1, held.everyone, known)

    assert query() == held.overlaps
    return median_s(query, repetitions=2000)


def measure_cold_query() -> float:
    held = make_held()

    def hash_and_query() -> dict[Holder, Overlap]:
        chain = hash_prompt(SPACE, held.tokens)
        return held.index.find_overlaps(chain, CHAIN_BLOCKS - 1, held.everyone)

    assert hash_and_query() == held.overlaps
    return median_s(hash_and_query, repetitions=200)


# --- decisions ------------------------------------------------------------------------------------


def make_core(instances: int, blocks_max: int) -> RouterCore:
    """Return a core with healthy instances whose event sources are live."""
    core = RouterCore(
        make_policy("kv_cost"), lambda n: n - 1, RouterLimits(index_blocks_max=blocks_max)
    )
    facts = InstanceFacts((ModelCard(MODEL),), BLOCK_TOKENS)
    for number in range(instances):
        instance_id = InstanceId(f"i{number}")
        add_instance(core, instance_id, facts)
        core.handle(BatchReceived(SourceId(instance_id), 0, (), b"first"), 0.0)
    return core


@dataclass(slots=True)
class Session:
    """A conversation that grows turn by turn; as in the gateway only what is new is hashed."""

    number: int
    system: bytes = b""  # tokens that it begins with, as others do
    chain: list[BlockHash] = field(default_factory=list)
    fresh: bytes = b""  # tokens of the turn to come
    home: Holder | None = None
    named: int = 0  # blocks that its home announced

    def grow(self, chance: random.Random, blocks: int) -> None:
        self.fresh = random_tokens(chance, blocks * BLOCK_TOKENS)
        if not self.chain:
            self.fresh = self.system + self.fresh
            self.chain = hash_prompt(SPACE, self.fresh)
        else:
            self.chain = self.chain + extend_chain(self.chain[-1], self.fresh, BLOCK_TOKENS)

    def stored(self) -> BlocksStored:
        """Return what its home publishes once it has computed the new turn."""
        begin, self.named = self.named, len(self.chain)
        names = [self.number << 32 | position for position in range(begin, self.named)]
        parent = names[0] - 1 if begin else None
        return BlocksStored(tuple(names), parent, self.fresh, BLOCK_TOKENS, Tier.DEVICE)


@dataclass(slots=True)
class Traffic:
    """Sessions on a fleet, one turn after the other; some requests are always unfinished."""

    core: RouterCore
    now: float = 0.0
    active: deque[RequestId] = field(default_factory=deque)
    sequences: Counter[InstanceId] = field(default_factory=Counter)

    def turn(self, session: Session, request_id: RequestId) -> float:
        """Send a session's turn and return the time of the decision."""
        self.now += 0.05
        token_count = len(session.chain) * BLOCK_TOKENS + 1
        prompt = Prompt(token_count, {SPACE: session.chain})
        arrived = RequestArrived(Request(request_id, MODEL, prompt))
        began = time.perf_counter()
        commands = self.core.handle(arrived, self.now)
        took_s = time.perf_counter() - began
        self._note(session, next(c for c in commands if isinstance(c, Forward)))
        return took_s

    def have_everywhere(self, tokens: bytes) -> None:
        names = tuple(-1 - n for n in range(len(hash_prompt(SPACE, tokens))))
        for instance in self.core.fleet:
            self.sequences[instance.spec.id] += 1
            stored = BlocksStored(names, None, tokens, BLOCK_TOKENS, Tier.DEVICE)
            batch = BatchReceived(SourceId(instance.spec.id), 1, (stored,), b"later")
            self.core.handle(batch, self.now)

    def _note(self, session: Session, forward: Forward) -> None:
        if session.home is not None:
            assert forward.holder == session.home, "the session left its home"
            assert forward.decision.device_tokens == session.named * BLOCK_TOKENS
        session.home = forward.holder
        self._announce(session)
        self.core.handle(RequestFirstByte(forward.request_id), self.now)
        self.active.append(forward.request_id)
        if len(self.active) > ACTIVE_REQUESTS:
            self.core.handle(RequestFinished(self.active.popleft(), Outcome.ANSWERED), self.now)

    def _announce(self, session: Session) -> None:
        assert session.home is not None
        instance_id = session.home.instance_id
        self.sequences[instance_id] += 1
        sequence = self.sequences[instance_id]
        batch = BatchReceived(SourceId(instance_id), sequence, (session.stored(),), b"later")
        self.core.handle(batch, self.now)


def measure_decision(instances: int, turns: int, shared_blocks: int = 0) -> float:
    """Time requests of long sessions, each held by one instance but for its new end.

    `shared_blocks`: that all sessions begin with, and all instances have.
    """
    chance = random.Random(SEED)
    traffic = Traffic(make_core(instances, blocks_max=10_000_000))
    system = random_tokens(chance, shared_blocks * BLOCK_TOKENS)
    if system:
        traffic.have_everywhere(system)
    sessions = [Session(number, system) for number in range(SESSIONS)]
    for session in sessions:
        session.grow(chance, CHAIN_BLOCKS - TURN_BLOCKS * turns // SESSIONS // 2)
    times: list[float] = []
    for number in range(turns):
        session = sessions[number % SESSIONS]
        took_s = traffic.turn(session, RequestId(f"r{number}"))
        if number >= SESSIONS:
            times.append(took_s)
        session.grow(chance, TURN_BLOCKS)
    if not system:
        assert traffic.core.index.total == sum(session.named for session in sessions)
    return statistics.median(times)


# --- ingest ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Publisher:
    """What an engine publishes: blocks are stored in chains, and removed from the oldest on."""

    chance: random.Random
    names: deque[int] = field(default_factory=deque)
    blocks: int = 0  # in all events so far

    def payload(self) -> bytes:
        events = [self._event() for _ in range(self.chance.randrange(1, 5))]
        return msgspec.msgpack.encode([1.0, events, 0])

    def _event(self) -> dict[str, object]:
        count = self.chance.choice(EVENT_BLOCKS)
        self.blocks += count
        if len(self.names) > 20_000 and self.chance.random() < 0.5:
            gone = [self.names.popleft() for _ in range(count)]
            return {"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 0}
        names = [self.chance.getrandbits(64) for _ in range(count)]
        parent = self.names[-1] if self.names and self.chance.random() < 0.8 else None
        self.names += names
        return {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": parent,
            "token_ids": self.chance.choices(range(VOCABULARY), k=count * BLOCK_TOKENS),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


def measure_ingest() -> float:
    """Return blocks a second, stored and removed, from a message's bytes to the index."""
    core, source = make_core(1, blocks_max=1_000_000), SourceId(InstanceId("i0"))
    publisher = Publisher(random.Random(SEED))
    payloads = [publisher.payload() for _ in range(INGEST_BATCHES)]
    began = time.perf_counter()
    for sequence, payload in enumerate(payloads, start=1):
        core.handle(decode_batch(source, Frame(b"kv", sequence, payload)), now=0.0)
    took_s = time.perf_counter() - began
    assert core.index.total == len(publisher.names)
    return publisher.blocks / took_s


# --- memory ---------------------------------------------------------------------------------------


def measure_memory() -> float:
    """Return what a process holds that has taken in 10 million blocks, in GiB."""
    command = [sys.executable, "-m", "benchmarks.router_scale", "--fill"]
    filled = subprocess.run(command, capture_output=True, text=True, check=True)
    resident: float = json.loads(filled.stdout)["resident_gib"]
    return resident


def fill_index() -> float:
    """Ingest distinct blocks, one holder each, and return the resident memory at its highest."""
    core = make_core(FLEET, blocks_max=2 * MEMORY_BLOCKS)
    for number, payload in enumerate(distinct_payloads()):
        source = SourceId(InstanceId(f"i{number % FLEET}"))
        frame = Frame(b"kv", 1 + number // FLEET, payload)
        core.handle(decode_batch(source, frame), now=0.0)
    assert core.index.total == MEMORY_BLOCKS
    held = [core.index.count(holder, Tier.DEVICE) for holder in core.index.holders]
    assert sum(held) == MEMORY_BLOCKS
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) / 2**20


def distinct_payloads() -> Iterator[bytes]:
    """Yield batches of blocks that are all different, under names as engines give them."""
    chance = random.Random(SEED)
    step = MEMORY_EVENT_BLOCKS * BLOCK_TOKENS
    for begin in range(0, MEMORY_BLOCKS * BLOCK_TOKENS, step):
        event = {
            "type": "BlockStored",
            "block_hashes": [chance.getrandbits(64) for _ in range(MEMORY_EVENT_BLOCKS)],
            "parent_block_hash": None,
            "token_ids": list(range(begin, begin + step)),
            "block_size": BLOCK_TOKENS,
            "medium": "GPU",
        }
        yield msgspec.msgpack.encode([1.0, [event], 0])


if __name__ == "__main__":
    main()
